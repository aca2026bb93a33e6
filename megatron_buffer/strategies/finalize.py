"""``finalize``: what happens to gradients between the last backward and the optimizer step.

Stands for the order of calls in ``finalize_model_grads``
(``megatron/core/distributed/finalize_model_grads.py``). The code of the built-in steps is in
``megatron_buffer/finalize_steps.py``; a step that the installed version does not have does nothing there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from megatron_buffer.config import load_config
from megatron_buffer.config_catalog import (
    FINALIZE_STEP,
    origin,
    third_party_step,
    third_party_strategies,
)
from megatron_buffer.config_finalize import left_out, step_options, step_order
from megatron_buffer.config_runtime import FinalizeSteps as FinalizeStepsParams
from megatron_buffer.config_runtime import UpstreamFinalize as UpstreamFinalizeParams
from megatron_buffer.config_steps import STEPS, UPSTREAM_ORDER
from megatron_buffer.strategies.registry import strategy

logger = logging.getLogger(__name__)


class ThirdPartyStep(Protocol):
    """A step of another distribution: an instance of the class that its entry point names.

    The class has an attribute ``Params``, a frozen dataclass of the step's options, and is called with
    an instance of it. It may have ``timer``, the name of a Megatron timer to run under, and
    ``before_grad_sync = True`` if it does not need reduced gradients and may run ahead of
    ``finish_grad_sync``.
    """

    def run(self, ctx: Any) -> None:
        """Does the step's work; ``ctx`` is a :class:`megatron_buffer.finalize.FinalizeContext`."""
        ...


class ChosenStep(NamedTuple):
    """One step of an iteration.

    Attributes:
        name: Name in the config.
        options: Options of a built-in step, by keyword.
        third_party: The step itself, if another distribution brought it.
        origin: The distribution that it comes from; '' for a built-in one.
    """

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012  (never written to)
    third_party: ThirdPartyStep | None = None
    origin: str = ''


class Finalize(Protocol):
    """An ordered list of steps."""

    def steps(self) -> Sequence[ChosenStep]:
        """The steps, in the order in which they run; the same in every iteration and on every rank."""
        ...


@strategy('finalize', UpstreamFinalizeParams)
class UpstreamFinalize:
    """Upstream's steps in upstream's order."""

    def __init__(self, params: UpstreamFinalizeParams) -> None:
        self.params = params

    def steps(self) -> Sequence[ChosenStep]:
        """All steps that any supported version has."""
        return [ChosenStep(name) for name in UPSTREAM_ORDER]


@strategy('finalize', FinalizeStepsParams)
class NamedSteps:
    """The steps that the config names, with their options; third parties' among them.

    Raises:
        ConfigError: If the order or an option is wrong, where ``params`` were made in Python.
        RegistryError: If a third party's step cannot be used.
    """

    def __init__(self, params: FinalizeStepsParams) -> None:
        load_config({'finalize': params})
        self.params = params
        self._steps = tuple(_choose(params, name) for name in step_order(params))
        if left_out(params):
            _warn_of_left_out(left_out(params))

    def steps(self) -> Sequence[ChosenStep]:
        """See the class."""
        return self._steps


def _choose(params: FinalizeStepsParams, name: str) -> ChosenStep:
    options = step_options(params, name)
    if name in STEPS:
        return ChosenStep(name, vars(options))
    found = third_party_strategies()
    step = third_party_step(name, found)(options)
    return ChosenStep(name, third_party=step, origin=origin(found[FINALIZE_STEP, name]))


@functools.cache
def _warn_of_left_out(names: tuple[str, ...]) -> None:
    """Once per process: every model chunk may make the strategy anew."""
    steps = '; '.join(f'{name} ({STEPS[name].meaning})' for name in names)
    logger.warning(
        'finalize.order leaves out steps of Megatron-Core, which then never run: %s. Where the model '
        'needs one of them, its gradients will be wrong without an error.',
        steps,
    )

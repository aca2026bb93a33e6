"""``unused_params``: what a parameter without a gradient means.

Stands for the assertions in ``_ParamAndGradBucketGroup.finish_grad_sync`` and ``reset``
(``megatron/core/distributed/param_and_grad_buffer.py``), which fire bare, and in the first iteration
only at the next ``zero_grad_buffer``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megatron_buffer.config_runtime import UpstreamUnused as UpstreamUnusedParams
from megatron_buffer.errors import ReadinessError
from megatron_buffer.strategies.registry import strategy

logger = logging.getLogger(__name__)


class WindowState(NamedTuple):
    """A bucket group when its window is being finished, with overlap_grad_reduce on.

    Attributes:
        missing: Names of parameters that got no gradient, or fewer than in the learned window.
        surplus: Names of parameters that got more than in the learned window.
        num_registered: Parameters that got at least one.
        num_params: Parameters of the group.
        is_first_batch: True while the golden counts are not known.
        dispatched: True when the reduction was started in this window.
        has_handle: False with several optimizer instances, whose reductions are ordered by streams.
    """

    missing: Sequence[str]
    surplus: Sequence[str]
    num_registered: int
    num_params: int
    is_first_batch: bool
    dispatched: bool
    has_handle: bool


class UnusedParams(Protocol):
    """Judges a window before its reductions are waited for."""

    def check(self, window: WindowState) -> None:
        """Raises, warns or accepts.

        Raises:
            ReadinessError: If the group cannot be reduced as it is.
        """
        ...


@strategy('unused_params', UpstreamUnusedParams)
class UpstreamUnused:
    """An error only where stock would assert, but at once and by name; a warning where it is silent.

    Stock asserts when some but not all parameters of a group got a gradient in the first iteration, or
    when a later one falls short of the first one's counts. It says nothing, and trains on with wrong
    gradients, when some arrive after the reduction was started, and when several optimizer instances
    leave no handle to miss. A group that never gets any gradient is reduced as zeros for ever, which
    is right; DDP names its parameters in one warning.
    """

    def __init__(self, params: UpstreamUnusedParams) -> None:
        self.params = params
        self._warned = False

    def check(self, window: WindowState) -> None:
        """See the class."""
        if window.is_first_batch:
            self._check_first(window)
        elif not window.dispatched:
            message = f'a bucket group was not reduced: {_found(window)}'
            if window.has_handle:
                raise ReadinessError(message)
            self._warn_once(message)
        elif window.surplus:
            self._warn_once(
                f'gradients arrived after their bucket group was reduced: {_found(window)}'
            )

    def _check_first(self, window: WindowState) -> None:
        if 0 < window.num_registered < window.num_params:
            raise ReadinessError(
                f'{len(window.missing)} of {window.num_params} parameters of a bucket group got '
                f'no gradient in this iteration: {_listed(window.missing)}. With '
                'overlap_grad_reduce every parameter of a bucket must take part in the loss. '
                'Freeze the unused ones (requires_grad=False) before wrapping the model, or turn '
                'overlap_grad_reduce off.'
            )

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning('%s Gradients are wrong from this iteration on.', message)


def _found(window: WindowState) -> str:
    parts: list[str] = []
    if window.num_registered == 0:
        parts.append('no gradient arrived')
    elif window.missing:
        parts.append(f'too few for {_listed(window.missing)}')
    if window.surplus:
        parts.append(f'too many for {_listed(window.surplus)}')
    return (
        f'gradients did not come as often as in the first iteration ({window.num_registered} of '
        f'{window.num_params} parameters got any): {"; ".join(parts)}. The number of backward passes '
        'without no_sync(), and the parameters that take part in each, must be the same in every '
        'iteration.'
    )


def _listed(names: Sequence[str], limit: int = 8) -> str:
    shown = ', '.join(names[:limit])
    return shown if len(names) <= limit else f'{shown} and {len(names) - limit} more'

"""Checks ``finalize: {name: steps, ...}``: the order of the steps, and the options of each.

The built-in steps are in ``config_steps``; a third party's is an entry point ``finalize_step.<name>``
(see ``config_catalog``), whose code is imported only when a config names it. Used by
:mod:`megatron_buffer.config_check` and by the strategy itself. Imports neither torch nor megatron.
"""

import json
import reprlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_buffer.config_catalog import (
    FINALIZE_STEP,
    EntryPoints,
    adapter,
    third_party_step,
    third_party_strategies,
)
from megatron_buffer.config_runtime import FinalizeSteps
from megatron_buffer.config_steps import GRAD_SYNC, PRECEDENCE, STEPS, UPSTREAM_ORDER
from megatron_buffer.config_yaml import YamlPath, did_you_mean

_ORDER, _OPTIONS = ('finalize', 'order'), ('finalize', 'options')


class OptionsOfStep(NamedTuple):
    """What a config says of one step, and the dataclass that it has to fit."""

    path: YamlPath
    options: type[Any]
    said: dict[str, Any]


def step_order(params: FinalizeSteps) -> tuple[str, ...]:
    """The names of the steps that run, in order."""
    return UPSTREAM_ORDER if params.order is None else params.order


def left_out(params: FinalizeSteps) -> tuple[str, ...]:
    """Upstream's steps that do not run."""
    return tuple(name for name in UPSTREAM_ORDER if name not in step_order(params))


def check_finalize(
    params: FinalizeSteps, third_party: EntryPoints | None = None
) -> list[tuple[YamlPath, str]]:
    """What is wrong with the steps' names and order: YAML path and sentence of each problem.

    Args:
        params: The steps of a config.
        third_party: What :func:`third_party_strategies` returned, if it is at hand.

    Raises:
        RegistryError: If a third party's step that is named cannot be used.
    """
    third_party = third_party_strategies() if third_party is None else third_party
    order = step_order(params)
    problems: list[tuple[YamlPath, str]] = []
    first: dict[str, int] = {}
    for index, name in enumerate(order):
        if not _is_known(name, third_party):
            problems.append(((*_ORDER, index), _unknown(name, third_party)))
        elif name in first:
            problems.append(
                (
                    (*_ORDER, index),
                    f'{name} is in the list twice, first at position {first[name] + 1}; a step runs '
                    'once per iteration',
                )
            )
        first.setdefault(name, index)
    if GRAD_SYNC not in first:
        problems.append(
            (
                _ORDER,
                f'{GRAD_SYNC} is missing, so no gradient would be reduced over the data-parallel '
                'ranks and every rank would train on its own; put it before all steps that work on '
                'gradients',
            )
        )
    problems += _misplaced(first, third_party)
    for name in params.options:
        if name in first:
            continue
        if _is_known(name, third_party):
            text = (
                f'{name} is not in finalize.order, so its options would have no effect; add it to the '
                'order, or remove them'
            )
        else:
            text = _unknown(name, third_party)
        problems.append(((*_OPTIONS, name), text))
    return problems


def options_of_steps(
    params: FinalizeSteps, third_party: EntryPoints | None = None
) -> list[OptionsOfStep]:
    """Every step that has to be given options, or is, with the dataclass for them.

    Steps that :func:`check_finalize` complains of are left out.

    Raises:
        RegistryError: If a third party's step that is named cannot be used.
    """
    third_party = third_party_strategies() if third_party is None else third_party
    return [
        OptionsOfStep((*_OPTIONS, name), _options_class(name, third_party), said)
        for name in dict.fromkeys(step_order(params))
        if _is_known(name, third_party)
        for said in [params.options.get(name, {})]
    ]


def step_options(params: FinalizeSteps, name: str) -> Any:
    """The options of one step as an instance of its dataclass; ``params`` have been checked."""
    cls = _options_class(name, None)
    return adapter(cls).validate_json(json.dumps(params.options.get(name, {})), strict=True)


def _misplaced(first: dict[str, int], third_party: EntryPoints) -> Iterator[tuple[YamlPath, str]]:
    """Steps that come too early, each once."""
    for name, index in first.items():
        if index < first.get(GRAD_SYNC, -1) and _needs_grad_sync(name, third_party):
            yield (
                (*_ORDER, index),
                f'{name} comes before {GRAD_SYNC}, but works on gradients that are reduced over the '
                f'data-parallel ranks by then; move it behind {GRAD_SYNC}',
            )
    for before, after, why in PRECEDENCE:
        if before in first and first.get(after, len(first)) < first[before]:
            yield (*_ORDER, first[before]), f'{before} must come before {after}, {why}'


def _is_known(name: str, third_party: EntryPoints) -> bool:
    return name in STEPS or (FINALIZE_STEP, name) in third_party


def _unknown(name: str, third_party: EntryPoints) -> str:
    foreign = [other for axis, other in third_party if axis == FINALIZE_STEP]
    names = [*STEPS, *sorted(foreign)]
    return (
        f'unknown finalize step {reprlib.repr(name)}.{did_you_mean(name, names)} '
        f'Valid steps: {", ".join(names)}'
    )


def _needs_grad_sync(name: str, third_party: EntryPoints) -> bool:
    if name in STEPS:
        return STEPS[name].needs_grad_sync
    if not _is_known(name, third_party):
        return False
    return not getattr(third_party_step(name, third_party), 'before_grad_sync', False)


def _options_class(name: str, third_party: EntryPoints | None) -> type[Any]:
    return STEPS[name].options if name in STEPS else third_party_step(name, third_party).Params

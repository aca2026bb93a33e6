"""Finalize as a list of named steps.

Stands for ``finalize_model_grads`` (``megatron/core/distributed/finalize_model_grads.py``). Which steps
run, and in which order, is the config's; what a built-in step does is upstream's (``finalize_steps``).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from megatron_buffer.finalize_context import FinalizeContext
from megatron_buffer.finalize_steps import STEPS
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.finalize import ChosenStep

__all__ = ['FinalizeContext', 'finalize_model_grads']

_upstream_finalize = importlib.import_module(
    'megatron.core.distributed.finalize_model_grads'
).finalize_model_grads


def finalize_model_grads(
    model: Sequence[Any],
    num_tokens: torch.Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Runs the config's finalize steps on a model that we wrapped; others get upstream's function.

    Upstream: ``finalize_model_grads.py: finalize_model_grads``.

    Args:
        model: Model chunks of this rank.
        num_tokens: See :class:`FinalizeContext`; changed in place to the global number.
        pg_collection: Process groups, or None for parallel_state's.
        force_all_reduce: Reduce whole buckets in this iteration.

    Raises:
        ValueError: If ``pg_collection`` lacks a group that a step needs.
    """
    runtime = getattr(model[0], 'runtime', None)
    if not isinstance(runtime, Runtime):
        _upstream_finalize(model, num_tokens, pg_collection, force_all_reduce)
        return
    ctx = FinalizeContext(model, num_tokens, pg_collection, bool(force_all_reduce))
    for timer, timed in groupby(runtime.finalize.steps(), key=_timer):
        with _timed(ctx.config, timer):
            for step in timed:
                _run(step, ctx)


def _run(step: ChosenStep, ctx: FinalizeContext) -> None:
    if step.third_party is None:
        STEPS[step.name].run(ctx, **step.options)
        return
    try:
        step.third_party.run(ctx)
    except Exception as error:
        error.add_note(f'raised by the finalize step {step.name!r} of {step.origin}')
        raise


def _timer(step: ChosenStep) -> str | None:
    if step.third_party is None:
        return STEPS[step.name].timer
    return getattr(step.third_party, 'timer', None)


@contextlib.contextmanager
def _timed(config: Any, name: str | None) -> Iterator[None]:
    """Upstream's timers, where Megatron has set them."""
    timers = config.timers
    if timers is None or name is None:
        yield
        return
    timers(name, log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    timers(name).stop()

"""What this process observes: one session, from the first wrapped model chunk to the end.

Upstream has no counterpart.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_buffer.observe import request, seams
from megatron_buffer.observe.marks import Clock, Mark
from megatron_buffer.observe.metrics import MetricsWriter
from megatron_buffer.observe.stats import StatsWriter
from megatron_buffer.observe.trace import TraceWriter
from megatron_buffer.observe.watch import ChunkWatch, Observer, StepEnd, key_of

_session: Session | None = None


class Session:
    """Counts iterations, and tells the observers.

    An iteration ends with the outermost step of one of Megatron's optimizers, or of a plain torch
    optimizer after a ``finish_grad_sync``.

    Args:
        wanted: What is to be observed.
        clock: Makes marks.

    Attributes:
        steps: Iterations that have ended.
    """

    def __init__(self, wanted: request.Request, clock: Clock) -> None:
        self.clock = clock
        self.steps = 0
        self.observers: list[Observer] = [_Boundaries(self)]
        if wanted.stats is not None:
            request.make_folder(wanted.stats, '--custom-buffer-stats')
            self.observers.append(StatsWriter(wanted.stats, clock))
        if wanted.trace is not None:
            request.make_folder(wanted.trace, '--custom-buffer-trace')
            self.observers.append(TraceWriter(wanted.trace, wanted.trace_steps, clock))
        if wanted.metrics:
            self.observers.append(MetricsWriter(clock))
        self.reduced = False
        self.between = False
        self._keys: dict[str, int] = {}
        self._depth = 0
        self._begin: Mark = None
        self._steps_before = 0

    def watch(self, ddp: Any) -> None:
        """Watches a model chunk that has just been wrapped."""
        key = key_of(ddp)
        number = self._keys[key] = self._keys.get(key, 0) + 1
        ChunkWatch(
            ddp, key if number == 1 else f'{key}#{number}', self.clock, tuple(self.observers)
        )
        seams.wrap_train_step(_tell(Session.train_step_begins), _tell(Session.train_step_returned))

    def step_begins(self) -> None:
        """Megatron's optimizer: a chained one calls others."""
        self._depth += 1
        if self._depth == 1:
            self._begin = self.clock.mark()
            for observer in self.observers:
                observer.step_begins(self.steps + 1)

    def step_returned(self, result: Any) -> None:
        """Megatron's optimizer, with (update_successful, grad_norm, num_zeros)."""
        self._depth -= 1
        if self._depth == 0 and isinstance(result, tuple) and len(result) >= 2:
            self._step_ended(None if result[0] is None else bool(result[0]), result[1])

    def torch_stepped(self) -> None:
        """A torch optimizer; those inside of Megatron's do not count, nor those that touch no gradients."""
        if self._depth == 0 and self.reduced:
            self._begin = self.clock.mark()
            self._step_ended(None, None)

    def _step_ended(self, update_successful: bool | None, grad_norm: Any) -> None:
        self.steps += 1
        self.reduced, self.between = False, True
        end = StepEnd(self.steps, self._begin, self.clock.mark(), update_successful, grad_norm)
        for observer in self.observers:
            observer.step_ended(end)

    def train_step_begins(self) -> None:
        """Of megatron.training."""
        self._steps_before = self.steps

    def train_step_returned(self, losses: Any) -> None:
        """Of megatron.training, with the losses on the last pipeline stage."""
        if self.steps > self._steps_before and losses:
            self.report(dict(losses))

    def report(self, losses: dict[str, Any]) -> None:
        """Losses: of the iteration that has ended, until the next one begins."""
        for observer in self.observers:
            observer.loss(losses, of_ended_step=self.between)

    def close(self, *, complete: bool) -> None:
        """Writes what is left."""
        for observer in self.observers:
            observer.close(complete=complete)


class _Boundaries(Observer):
    """Tells the session where iterations begin."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def zeroed(self, chunk: ChunkWatch, begin: Mark, end: Mark) -> None:
        self._session.between = False

    def finished(self, chunk: ChunkWatch, begin: Mark, end: Mark, window: Any) -> None:
        self._session.reduced = True


def _tell(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method of whichever session there is then."""

    def call(*args: Any) -> None:
        if _session is not None:
            method(_session, *args)

    return call


def observe_if_wanted(ddp: Any) -> None:
    """Watches a model chunk that has just been wrapped, if a flag or the environment asks for it.

    Args:
        ddp: Stock's wrapper or ours.

    Raises:
        ConfigError: If what is observed could not be written.
    """
    global _session
    wanted = request.requested()
    if wanted is None:
        return
    if _session is None:
        on_cuda = next((p.is_cuda for p in ddp.module.parameters()), False)
        _session = Session(wanted, Clock(on_cuda))
        seams.wrap_steps(
            _tell(Session.step_begins), _tell(Session.step_returned), _tell(Session.torch_stepped)
        )
        atexit.register(finish)
    _session.watch(ddp)


def observe_stock() -> None:
    """Watches what stock Megatron's ``DistributedDataParallel`` wraps from now on; for the launcher."""
    if request.requested() is not None:
        seams.wrap_stock_constructor(observe_if_wanted)


def report_loss(loss: Any, name: str = 'loss') -> None:
    """Notes the loss of an iteration, for a training loop of one's own; nothing while nothing is observed.

    Call it before the optimizer's step, or right after it. Of several calls in one iteration
    (micro-batches) the mean is taken. Under ``megatron.training`` losses come by themselves.

    Args:
        loss: A number, or a tensor with one element; a GPU is not waited for.
        name: Of the loss.
    """
    if _session is not None:
        _session.report({name: loss})


def finish() -> None:
    """Writes what is left, and that the run has ended as it should if it has; the process's end calls it."""
    global _session
    session, _session = _session, None
    if session is None:
        return
    failed = request.has_failed() or getattr(sys, 'last_exc', None) is not None
    if session.clock.on_cuda and not failed:
        torch.cuda.synchronize()
    session.close(complete=not failed)

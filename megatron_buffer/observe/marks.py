"""Points in time that cost the training nothing: host clock on the CPU, events on a GPU.

Events are resolved once the GPU has passed them, so nothing waits for the GPU. Upstream has no
counterpart.
"""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any
"""Nanoseconds of the host's monotonic clock, or a CUDA event; None while a CUDA graph is captured."""


class Clock:
    """Makes marks, and tells what they mean.

    Args:
        on_cuda: The model is on a GPU.
    """

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self._base: Any = None
        self._base_ns = 0

    def mark(self) -> Mark:
        """Now: of the host, or of the current stream."""
        if not self.on_cuda:
            return time.perf_counter_ns()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Mark) -> bool:
        """Whether the GPU has passed the mark, so that it can be read without waiting."""
        return mark is None or isinstance(mark, int) or bool(mark.query())

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one mark to another, both of them past; 0 where one was made in a capture."""
        if begin is None or end is None:
            return 0.0
        if isinstance(begin, int):
            return (end - begin) / 1e9
        return begin.elapsed_time(end) / 1e3  # events count milliseconds

    def synchronize(self) -> None:
        """Waits until all marks are past."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def anchor(self) -> None:
        """Ties the GPU's events to the host's clock; the GPU is waited for, once."""
        if not self.on_cuda:
            return
        torch.cuda.synchronize()
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._base_ns = time.perf_counter_ns()

    def at_ns(self, mark: Mark) -> int:
        """A past mark on the host's monotonic clock; events need an :meth:`anchor` before them."""
        if isinstance(mark, int):
            return mark
        return self._base_ns + round(self._base.elapsed_time(mark) * 1e6)


class Fetched:
    """A number that is on its way from the GPU.

    Args:
        value: A tensor with one element, or a number.
        clock: Tells whether it has arrived.
    """

    def __init__(self, value: Any, clock: Clock) -> None:
        self.arrived: Mark = 0
        self._value: Any = value
        if isinstance(value, torch.Tensor):
            self._value = value.detach().double().reshape(())
            if value.is_cuda:
                host = torch.empty((), dtype=torch.float64, pin_memory=True)
                self._value = host.copy_(self._value, non_blocking=True)
                self.arrived = clock.mark()

    def value(self) -> float:
        """The number, which must have arrived."""
        return float(self._value)

"""``accumulation``: how a window's gradients come together in the buffer.

Stands for ``_ParamAndGradBuffer.reset`` (``megatron/core/distributed/param_and_grad_buffer.py``); the
adding itself is upstream's backward hook, ``DistributedDataParallel._make_backward_post_hook``.
"""

from __future__ import annotations

from typing import Protocol

from megatron_buffer.config_runtime import ZeroThenAdd as ZeroThenAddParams
from megatron_buffer.strategies.registry import strategy


class ZeroableBuffer(Protocol):
    """What an accumulation strategy may do with a buffer."""

    def zero_grads(self) -> None:
        """Zeroes all gradients of the buffer, extra main_grads included."""
        ...


class Accumulation(Protocol):
    """Prepares a buffer for a new window of gradient accumulation."""

    def begin_window(self, buffer: ZeroableBuffer) -> None:
        """Called by ``zero_grad_buffer`` for each buffer."""
        ...


@strategy('accumulation', ZeroThenAddParams)
class ZeroThenAdd:
    """The whole buffer is zeroed; every micro-batch adds to it."""

    def __init__(self, params: ZeroThenAddParams) -> None:
        self.params = params

    def begin_window(self, buffer: ZeroableBuffer) -> None:
        """Zeroes everything."""
        buffer.zero_grads()

"""``accumulation``: how a window's gradients come together in the buffer.

Stands for ``_ParamAndGradBuffer.reset`` (``megatron/core/distributed/param_and_grad_buffer.py``); the
adding itself is upstream's backward hook, ``DistributedDataParallel._make_backward_post_hook``.
"""

from __future__ import annotations

from typing import Protocol

from megatron_buffer.config_runtime import FirstWrite as FirstWriteParams
from megatron_buffer.config_runtime import ZeroThenAdd as ZeroThenAddParams
from megatron_buffer.strategies.registry import strategy


class ZeroableBuffer(Protocol):
    """What an accumulation strategy may do with a buffer."""

    def zero_grads(self) -> None:
        """Zeroes all gradients of the buffer, extra main_grads included."""
        ...

    def forget_grads(self) -> None:
        """Zeroes what can only be added to; the rest is overwritten by its first gradient, or zeroed later.

        Everything is zeroed where nobody watches the writes: without ``overwrites``, or without a wrapped
        model around the buffer.
        """
        ...


class Accumulation(Protocol):
    """Prepares a buffer for a new window of gradient accumulation.

    A strategy may have an attribute ``overwrites``: True asks for backward hooks that overwrite a view
    with the first gradient of a window, unless it was zeroed.
    """

    def begin_window(self, buffer: ZeroableBuffer) -> None:
        """Called by ``zero_grad_buffer`` for each buffer."""
        ...


@strategy('accumulation', ZeroThenAddParams)
class ZeroThenAdd:
    """The whole buffer is zeroed; every micro-batch adds to it."""

    overwrites = False

    def __init__(self, params: ZeroThenAddParams) -> None:
        self.params = params

    def begin_window(self, buffer: ZeroableBuffer) -> None:
        """Zeroes everything."""
        buffer.zero_grads()


@strategy('accumulation', FirstWriteParams)
class FirstWrite:
    """The first gradient of a window overwrites what the last window has left; the others add to it."""

    overwrites = True

    def __init__(self, params: FirstWriteParams) -> None:
        self.params = params

    def begin_window(self, buffer: ZeroableBuffer) -> None:
        """Zeroes only what its writers can only add to."""
        buffer.forget_grads()

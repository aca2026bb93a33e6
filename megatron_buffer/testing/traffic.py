"""Which collectives really ran, and over which buckets: seen below ``torch.distributed``, nothing replaced.

Upstream has no counterpart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_REDUCTIONS = ('allreduce', 'reduce_scatter', 'alltoall', '_reduce_scatter_base', 'reduce_')


class Call(NamedTuple):
    """One reduction.

    Attributes:
        op: Name of the c10d operator.
        spans: Storage, first and last element of every tensor handed to it.
        numels: Their sizes in elements.
    """

    op: str
    spans: list[tuple[int, int, int]]
    numels: list[int]


class Traffic(TorchDispatchMode):
    """Notes every reduction that this thread starts while it is active, backward's hooks included."""

    def __init__(self) -> None:
        super().__init__()
        self.reductions: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes and passes on."""
        if func.namespace == 'c10d' and func.__name__.startswith(_REDUCTIONS):
            flat, _ = tree_flatten((args, kwargs))
            tensors = [item for item in flat if isinstance(item, torch.Tensor)]
            self.reductions.append(
                Call(func.__name__, [_span(t) for t in tensors], [t.numel() for t in tensors])
            )
        return func(*args, **(kwargs or {}))


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    start = int(tensor.storage_offset())
    return tensor.untyped_storage().data_ptr(), start, start + int(tensor.numel())


def reductions_of(bucket: torch.Tensor, traffic: Traffic) -> int:
    """How often the gradients of a bucket were reduced.

    Args:
        bucket: Its ``grad_data``.
        traffic: What was noted during the window.

    Returns:
        The number of reductions that were given some of its storage.
    """
    storage, start, end = _span(bucket)
    return sum(
        any(s == storage and a < end and b > start for s, a, b in call.spans)
        for call in traffic.reductions
    )


def sent_copies_of(bucket: torch.Tensor, traffic: Traffic) -> int:
    """How many all-to-alls sent a tensor of the bucket's size: a copy of it in the dtype of the wire."""
    return sum(
        call.op.startswith('alltoall') and bucket.numel() in call.numels
        for call in traffic.reductions
    )

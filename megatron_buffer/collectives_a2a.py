"""Reduction by an all-to-all: shards travel in a narrow dtype, and their owner sums them in fp32.

Stands for ``reduce_scatter_with_fp32_accumulation``
(``megatron/core/distributed/reduce_scatter_with_fp32_accumulation.py``), which sends the buffer's own
dtype and only sums. Here gradients of a wider buffer are rounded for the wire, this rank's own
contribution is not rounded at all, and contributions are added in rank order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_buffer.strategies.reduce import ReduceChoice, WireDtype
from megatron_buffer.strategies.scaling import ScalingPlan

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup

_DTYPES: dict[WireDtype, torch.dtype] = {
    'bf16': torch.bfloat16,
    'fp16': torch.float16,
    'fp32': torch.float32,
}
_live: weakref.WeakSet[Exchange] = weakref.WeakSet()


def live_exchanges() -> int:
    """How many all-to-alls of this process hold their temporaries now."""
    return len(_live)


def wire_dtype_of(configured: WireDtype | None, grad_dtype: torch.dtype) -> torch.dtype:
    """The dtype that gradients are sent in: another one than theirs only where that is smaller."""
    if configured is None or _DTYPES[configured].itemsize >= grad_dtype.itemsize:
        return grad_dtype
    return _DTYPES[configured]


class Exchange:
    """One bucket's shards on their way to their owners, and their sum there.

    Temporaries: the received shards, as large as the bucket in the wire dtype; as much again for what is
    sent, if it had to be rounded; one shard in fp32 for the sum. ``wait`` frees them.

    Args:
        grads: The bucket's gradients, ``[size * shard_elems]``; not to be changed before ``wait``.
        own: The shard of ``grads`` that this rank owns, a view; ``wait`` writes the sum there.
        dtype: The dtype on the wire.
        weight: What the sum is multiplied by, in fp32.
        group: Process group of ``size`` ranks.
        async_op: False waits here.
    """

    def __init__(
        self,
        grads: torch.Tensor,
        own: torch.Tensor,
        *,
        dtype: torch.dtype,
        weight: float,
        group: Any,
        async_op: bool,
    ) -> None:
        self._own = own
        self._weight = weight
        self._rank = group.rank()
        sent = grads.to(dtype)  # grads itself, if that is its dtype
        received = torch.empty_like(sent)
        self._temporaries: tuple[torch.Tensor, ...] = (
            (received,) if sent is grads else (received, sent)
        )
        self._shards = received.view(group.size(), -1)
        _live.add(self)
        self._work = dist.all_to_all_single(received, sent, group=group, async_op=async_op)
        if not async_op:
            self.wait()

    def wait(self) -> None:
        """Waits for the shards, sums them and frees the temporaries; the second time does nothing."""
        if not self._temporaries:
            return
        if self._work is not None:
            self._work.wait()
        contributions = list(self._shards)
        contributions[self._rank] = self._own
        _sum_in_order(contributions, self._weight, out=self._own)
        for tensor in self._temporaries:
            if (
                tensor.is_cuda
            ):  # waited for and read on this stream, maybe not the one it belongs to
                tensor.record_stream(torch.cuda.current_stream())
        del self._work, self._shards, self._own, contributions
        self._temporaries = ()
        _live.discard(self)


def _sum_in_order(
    contributions: Sequence[torch.Tensor], weight: float, *, out: torch.Tensor
) -> None:
    """Writes ``weight`` times the fp32 sum into ``out``, which may be one of the contributions."""
    total = contributions[0].float()  # no copy of an fp32 one: it is not read again
    for contribution in contributions[1:]:
        total.add_(contribution)
    if weight != 1.0:
        total.mul_(weight)
    out.copy_(total)


class AllToAllFp32Sum:
    """An :class:`Exchange` per bucket.

    A handle sums when it is waited for, so a group's predecessor has to be waited for before it is
    launched, or the temporaries of all groups are alive together.
    """

    def launch(
        self,
        group: ParamAndGradBucketGroup,
        choice: ReduceChoice,
        plan: ScalingPlan,
        async_op: bool,
    ) -> list[Exchange]:
        """Starts the all-to-alls; without ``async_op`` one after the other, each with its sum."""
        pg = group.communication_group
        weight = {'sum': 1.0, 'avg': 1.0 / pg.size(), 'premul': plan.factor}[plan.op]
        exchanges = [
            Exchange(
                bucket.grad_data,
                group.owned_grad_shard(index),
                dtype=wire_dtype_of(choice.wire_dtype, bucket.grad_data.dtype),
                weight=weight,
                group=pg,
                async_op=async_op,
            )
            for index, bucket in enumerate(group.buckets)
        ]
        return exchanges if async_op else []

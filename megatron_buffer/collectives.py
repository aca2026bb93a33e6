"""The collectives of a bucket group: small objects that launch and return what to wait for.

Stands for the communication part of ``_ParamAndGradBucketGroup.start_grad_sync`` and
``start_param_sync`` (``megatron/core/distributed/param_and_grad_buffer.py``). Upstream picks the
reduce-scatter through a module global; here it belongs to the group.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from megatron_buffer.strategies.reduce import ReduceKind

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup

_pgb: Any = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')
_fp32_rs = importlib.import_module(
    'megatron.core.distributed.reduce_scatter_with_fp32_accumulation'
)


class Waitable(Protocol):
    """Anything with a ``wait``."""

    def wait(self) -> Any:
        """Returns when the collective is done (on CUDA: when the stream is told to wait)."""
        ...


class Handles:
    """Several launches, waited for together."""

    def __init__(self, handles: Sequence[Waitable]) -> None:
        self._handles = list(handles)

    def wait(self) -> None:
        """Waits for each launch."""
        for handle in self._handles:
            handle.wait()
        self._handles.clear()


class GradCollective(Protocol):
    """Reduces the gradients of all buckets of a group."""

    def launch(self, group: ParamAndGradBucketGroup, op: Any, async_op: bool) -> Waitable | None:
        """Starts the collective; returns a handle when ``async_op``, else waits and returns None."""
        ...


class AllReduce:
    """Sums (or averages) whole buckets in place; every rank gets everything."""

    def launch(self, group: ParamAndGradBucketGroup, op: Any, async_op: bool) -> Waitable | None:
        """One coalesced launch over the group's buckets."""
        pg = group.communication_group
        with _pgb._coalescing_manager(pg, async_ops=async_op) as handle:
            for bucket in group.buckets:
                dist.all_reduce(bucket.grad_data, op=op, group=pg, async_op=async_op)
        return handle if async_op else None


class ReduceScatter:
    """Reduces into the shard that this rank owns, a view of the bucket itself."""

    def launch(self, group: ParamAndGradBucketGroup, op: Any, async_op: bool) -> Waitable | None:
        """One coalesced launch over the group's buckets."""
        pg = group.communication_group
        reduce_scatter = _plain_reduce_scatter()
        with _pgb._coalescing_manager(pg, async_ops=async_op) as handle:
            for index, bucket in enumerate(group.buckets):
                reduce_scatter(
                    group.owned_grad_shard(index),
                    bucket.grad_data,
                    op=op,
                    group=pg,
                    async_op=async_op,
                )
        return handle if async_op else None


def _plain_reduce_scatter() -> Any:
    """Upstream's module-level function, unless a stock model has set it to the one with fp32 sums."""
    function = _pgb.dist_reduce_scatter_func
    if function is _fp32_rs.reduce_scatter_with_fp32_accumulation:
        return dist.reduce_scatter_tensor
    return function


class AllToAllFp32Sum:
    """Sends shards as they are and sums them in fp32 at the owner.

    The received shards live until ``wait``, so groups are drained one after the other
    (``previous_grad_reduce_bucket_group``). It takes one bucket at a time: its handle does the summing,
    which the coalescing manager does not know about.
    """

    def launch(self, group: ParamAndGradBucketGroup, op: Any, async_op: bool) -> Waitable | None:
        """An all-to-all per bucket, by upstream's own function."""
        handles = [
            _fp32_rs.reduce_scatter_with_fp32_accumulation(
                group.owned_grad_shard(index),
                bucket.grad_data,
                op=op,
                group=group.communication_group,
                async_op=async_op,
            )
            for index, bucket in enumerate(group.buckets)
        ]
        if not async_op:
            return None
        return handles[0] if len(handles) == 1 else Handles(handles)


_COLLECTIVES: dict[ReduceKind, GradCollective] = {
    'all_reduce': AllReduce(),
    'reduce_scatter': ReduceScatter(),
    'a2a_fp32_sum': AllToAllFp32Sum(),
}


def launch_grad_reduce(
    group: ParamAndGradBucketGroup, *, kind: ReduceKind, op: Any
) -> Waitable | None:
    """Starts the reduction of a group, over several optimizer instances if there are any.

    Args:
        group: The group; its gradients are scaled already.
        kind: Which collective.
        op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.

    Returns:
        A handle, or None when it is done (no overlap) or ordered by streams (several instances).
    """
    config = group.ddp_config
    several_instances = config.num_distributed_optimizer_instances > 1
    async_op = config.overlap_grad_reduce and not several_instances
    with _communication_stream(group, several_instances and config.overlap_grad_reduce):
        handle = _COLLECTIVES[kind].launch(group, op, async_op)
        if several_instances and config.use_distributed_optimizer:
            _all_reduce_across_instances(group, op)
    return handle


@contextlib.contextmanager
def _communication_stream(group: ParamAndGradBucketGroup, aside: bool) -> Iterator[None]:
    """Several instances overlap by a side stream that first waits for the gradients."""
    if not aside:
        yield
        return
    side = group.communication_stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def _all_reduce_across_instances(group: ParamAndGradBucketGroup, op: Any) -> None:
    """Each instance holds the sum over its own ranks; owners of the same shard add theirs up."""
    pg = group.inter_distributed_optimizer_instance_group
    assert pg is not None, 'DDP sets the inter-instance group of every bucket group'
    with _pgb._coalescing_manager(pg, async_ops=False):
        for index in range(len(group.buckets)):
            dist.all_reduce(group.owned_grad_shard(index), op=op, group=pg, async_op=False)


def launch_param_gather(group: ParamAndGradBucketGroup, *, async_op: bool) -> Waitable | None:
    """Starts the all-gather of a group's parameters from the shards that the ranks own.

    Args:
        group: A group under the distributed optimizer.
        async_op: False waits here.

    Returns:
        A handle when ``async_op``, else None.
    """
    pg = group.communication_group
    handles: list[Waitable] = []
    for launch in group.param_gather_launches:
        with _pgb._coalescing_manager(pg, async_ops=async_op) as handle:
            for index in launch:
                _pgb.dist_all_gather_func(
                    group.buckets[index].param_data,
                    group.owned_param_shard(index),
                    group=pg,
                    async_op=async_op,
                )
        handles.append(handle)
    if not async_op:
        return None
    return handles[0] if len(handles) == 1 else Handles(handles)


def shard(cache: list[Any], index: int, data: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The ``rank``-th of ``size`` equal shards of ``data``; views are made once and cached."""
    if cache[index] is None:
        cache[index] = _pgb.shard_buffer(data, size)
    return cache[index][rank]


@contextlib.contextmanager
def reduce_scatter_global_preserved() -> Iterator[None]:
    """Undoes what a ``super()`` call does to upstream's process-wide ``dist_reduce_scatter_func``."""
    before = _pgb.dist_reduce_scatter_func
    try:
        yield
    finally:
        _pgb.dist_reduce_scatter_func = before

"""The collectives of a bucket group: small objects that launch and return what to wait for.

Stands for the communication part of ``_ParamAndGradBucketGroup.start_grad_sync`` and
``start_param_sync`` (``megatron/core/distributed/param_and_grad_buffer.py``). Upstream picks the
reduce-scatter through a module global; here it belongs to the group.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from megatron_buffer.collectives_a2a import AllToAllFp32Sum
from megatron_buffer.strategies.reduce import ReduceChoice, ReduceKind
from megatron_buffer.strategies.scaling import ScalingPlan

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup

_pgb: Any = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')
_fp32_rs = importlib.import_module(
    'megatron.core.distributed.reduce_scatter_with_fp32_accumulation'
)
# Newer torch has these under other names, and warns at each call by the old one, which takes longer than the
# launch. Megatron-Core calls them by the old names.
_NAMED_ANEW: dict[Any, Any] = {
    getattr(dist, old): getattr(dist, new)
    for old, new in (
        ('all_gather_into_tensor', 'all_gather_single'),
        ('reduce_scatter_tensor', 'reduce_scatter_single'),
    )
    if hasattr(dist, new)
}


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


class Scaled:
    """Several launches, whose result is multiplied once it is there.

    Args:
        handles: What to wait for.
        results: Tensors that the reduction has written; multiplied in place.
        factor: What they are multiplied by.
    """

    def __init__(
        self, handles: Sequence[Waitable], results: Sequence[torch.Tensor], factor: float
    ) -> None:
        self._handles = Handles(handles)
        self._results = list(results)
        self._factor = factor

    def wait(self) -> None:
        """Waits for each launch and multiplies the results; the second time does nothing."""
        self._handles.wait()
        with torch.no_grad():
            for result in self._results:
                result.mul_(self._factor)
        self._results.clear()


class GradCollective(Protocol):
    """Reduces the gradients of all buckets of a group."""

    def launch(
        self,
        group: ParamAndGradBucketGroup,
        choice: ReduceChoice,
        plan: ScalingPlan,
        async_op: bool,
    ) -> Sequence[Waitable]:
        """Starts the collective; returns what to wait for, nothing unless ``async_op``."""
        ...


def launch_together(
    launches: Sequence[Sequence[int]], start: Callable[[int], Any], pg: Any, async_op: bool
) -> Sequence[Waitable]:
    """Starts a collective for each bucket; those of one launch are coalesced into one.

    A launch of a single bucket does without torch's coalescing manager, whose bookkeeping takes longer than
    starting the collective. The collective, and so its bits, are the same.

    Args:
        launches: Positions of the buckets of each launch.
        start: Starts the collective of the bucket at a position; returns torch's handle if ``async_op``.
        pg: The process group.
        async_op: What ``start`` passes on.

    Returns:
        What to wait for, nothing unless ``async_op``.
    """
    handles: list[Waitable] = []
    for indices in launches:
        if len(indices) == 1:
            handle = start(indices[0])
        else:
            with _pgb._coalescing_manager(pg, async_ops=async_op) as handle:
                for index in indices:
                    start(index)
        handles.append(handle)
    assert (
        not async_op or None not in handles
    ), 'torch returns a handle for every asynchronous launch'
    return handles if async_op else []


class AllReduce:
    """Sums (or averages) whole buckets in place; every rank gets everything."""

    def launch(
        self,
        group: ParamAndGradBucketGroup,
        choice: ReduceChoice,
        plan: ScalingPlan,
        async_op: bool,
    ) -> Sequence[Waitable]:
        """One coalesced launch over the group's buckets of one dtype."""
        pg, op = group.communication_group, _reduce_op(plan)

        def reduce(index: int) -> Any:
            whole = group.buckets[index].grad_data
            return dist.all_reduce(whole, op=op, group=pg, async_op=async_op)

        return launch_together(group.grad_reduce_launches, reduce, pg, async_op)


class ReduceScatter:
    """Reduces into the shard that this rank owns, a view of the bucket itself."""

    def launch(
        self,
        group: ParamAndGradBucketGroup,
        choice: ReduceChoice,
        plan: ScalingPlan,
        async_op: bool,
    ) -> Sequence[Waitable]:
        """One coalesced launch over the group's buckets of one dtype."""
        pg, op = group.communication_group, _reduce_op(plan)
        reduce_scatter = _plain_reduce_scatter()

        def reduce(index: int) -> Any:
            owned, whole = group.owned_grad_shard(index), group.buckets[index].grad_data
            return reduce_scatter(owned, whole, op=op, group=pg, async_op=async_op)

        return launch_together(group.grad_reduce_launches, reduce, pg, async_op)


def _plain_reduce_scatter() -> Any:
    """Upstream's module-level function, unless a stock model has set it to the one with fp32 sums."""
    function = _pgb.dist_reduce_scatter_func
    if function is _fp32_rs.reduce_scatter_with_fp32_accumulation:
        function = dist.reduce_scatter_tensor
    return _NAMED_ANEW.get(function, function)


def _all_gather() -> Any:
    """Upstream's module-level function."""
    function = _pgb.dist_all_gather_func
    return _NAMED_ANEW.get(function, function)


class UpstreamAllToAll:
    """Upstream's reduce-scatter with fp32 sums: shards are sent as they are, and summed at the owner.

    The received shards live until ``wait``, so groups are drained one after the other
    (``previous_grad_reduce_bucket_group``). It takes one bucket at a time: its handle does the summing,
    which the coalescing manager does not know about.
    """

    def launch(
        self,
        group: ParamAndGradBucketGroup,
        choice: ReduceChoice,
        plan: ScalingPlan,
        async_op: bool,
    ) -> Sequence[Waitable]:
        """An all-to-all per bucket."""
        handles = [
            _fp32_rs.reduce_scatter_with_fp32_accumulation(
                group.owned_grad_shard(index),
                bucket.grad_data,
                op=_reduce_op(plan),
                group=group.communication_group,
                async_op=async_op,
            )
            for index, bucket in enumerate(group.buckets)
        ]
        return handles if async_op else []


_COLLECTIVES: dict[ReduceKind, GradCollective] = {
    'all_reduce': AllReduce(),
    'reduce_scatter': ReduceScatter(),
    'upstream_a2a': UpstreamAllToAll(),
    'a2a': AllToAllFp32Sum(),
}


def _reduce_op(plan: ScalingPlan) -> Any:
    if plan.op == 'premul':
        return dist._make_nccl_premul_sum(plan.factor)
    return dist.ReduceOp.AVG if plan.op == 'avg' else dist.ReduceOp.SUM


def launch_grad_reduce(
    group: ParamAndGradBucketGroup, *, choice: ReduceChoice, plan: ScalingPlan, whole: bool = False
) -> Waitable | None:
    """Starts the reduction of a group, over several optimizer instances if there are any.

    With several instances each reduces over its own ranks first; then the owners of one shard add up
    theirs. The rest of a bucket holds no more than its instance's sum, also after an all-reduce, unless it
    is wanted whole. Of a single rank (experts that all ranks share out) the sum is there already, so
    nothing is launched.

    Args:
        group: The group; its buckets are multiplied by ``plan.bucket_factor`` already.
        choice: Which collective; all but the all-reduce need the distributed optimizer.
        plan: How contributions are added up, and what the result is multiplied by.
        whole: Whether with several instances owners send each other what they have added up.

    Returns:
        A handle whose ``wait`` also does what is left to do with the result (fp32 sums, scaling), or
        None when all of it is done (no overlap) or ordered by streams (several instances).
    """
    config = group.ddp_config
    several_instances = config.num_distributed_optimizer_instances > 1
    async_op = config.overlap_grad_reduce and not several_instances
    with _communication_stream(group, several_instances and config.overlap_grad_reduce):
        handles: Sequence[Waitable] = []
        if group.communication_group.size() > 1 or plan.op == 'premul':
            handles = _COLLECTIVES[choice.kind].launch(group, choice, plan, async_op)
        if several_instances and config.use_distributed_optimizer:
            _all_reduce_across_instances(group, plan)
            if whole:
                _gather_grads(group)
        if plan.post_factor != 1.0:
            scaled = Scaled(handles, _reduced(group, choice), plan.post_factor)
            if not async_op:
                scaled.wait()
            handles = [scaled]
    if not async_op:
        return None
    return handles[0] if len(handles) == 1 else Handles(handles)


def _reduced(group: ParamAndGradBucketGroup, choice: ReduceChoice) -> list[torch.Tensor]:
    """Views of what a reduction leaves on this rank: whole buckets or owned shards."""
    if choice.kind == 'all_reduce':
        return [bucket.grad_data for bucket in group.buckets]
    return [group.owned_grad_shard(index) for index in range(len(group.buckets))]


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


def _all_reduce_across_instances(group: ParamAndGradBucketGroup, plan: ScalingPlan) -> None:
    """Each instance holds the sum over its own ranks; owners of the same shard add theirs up.

    A mean of means is the mean, as instances have equal sizes; a factor is not applied a second time.
    """
    pg = group.inter_distributed_optimizer_instance_group
    assert pg is not None, 'DDP sets the inter-instance group of every bucket group'
    op = dist.ReduceOp.AVG if plan.op == 'avg' else dist.ReduceOp.SUM

    def add_up(index: int) -> Any:
        return dist.all_reduce(group.owned_grad_shard(index), op=op, group=pg, async_op=False)

    launch_together(group.grad_reduce_launches, add_up, pg, async_op=False)


def _gather_grads(group: ParamAndGradBucketGroup) -> None:
    """Every rank of an instance gets the reduced gradients of all owners, bit for bit."""
    pg = group.communication_group
    all_gather = _all_gather()

    def gather(index: int) -> Any:
        whole = group.buckets[index].grad_data
        return all_gather(whole, group.owned_grad_shard(index), group=pg)

    launch_together(group.grad_reduce_launches, gather, pg, async_op=False)


def launch_param_gather(group: ParamAndGradBucketGroup, *, async_op: bool) -> Waitable | None:
    """Starts the all-gather of a group's parameters from the shards that the ranks own; a single one has them.

    Args:
        group: A group under the distributed optimizer.
        async_op: False waits here.

    Returns:
        A handle when ``async_op``, else None.
    """
    pg = group.communication_group
    if pg.size() == 1:
        return Handles(()) if async_op else None
    all_gather = _all_gather()

    def gather(index: int) -> Any:
        whole, owned = group.buckets[index].param_data, group.owned_param_shard(index)
        return all_gather(whole, owned, group=pg, async_op=async_op)

    handles = launch_together(group.param_gather_launches, gather, pg, async_op)
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

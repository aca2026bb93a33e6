"""``bucket_groups``: which buckets are communicated together.

Stands for ``partition_buckets`` of ``megatron/core/distributed/param_and_grad_buffer.py``. The
strategy is a pure function of counts and kinds, because upstream partitions twice: DDP for the groups
it trains with, and ``DistributedOptimizer.__init__`` for a list that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from megatron_buffer.config_layout import MergeIntoFirstFp8 as MergeIntoFirstFp8Params
from megatron_buffer.config_layout import MergeIntoLastFp8 as MergeIntoLastFp8Params
from megatron_buffer.config_layout import NearestReadyGroups as NearestReadyParams
from megatron_buffer.config_layout import SeparateGroups as SeparateParams
from megatron_buffer.config_layout import SingleGroup as SingleParams
from megatron_buffer.errors import LayoutError
from megatron_buffer.strategies.registry import strategy


class BufferBuckets(NamedTuple):
    """One buffer, as far as grouping is concerned.

    Attributes:
        is_fp8: True when its parameters are stored as bytes (``param_dtype`` is uint8).
        ready_at: For each bucket the lowest forward index among its parameters: backward completes the
            bucket when it gets there, so a smaller number is later. Bucket 0 is the end of the model.
        is_layer_wise: True when LayerWise (Muon) owns its parameters.
    """

    is_fp8: bool
    ready_at: Sequence[int]
    is_layer_wise: bool = False

    @property
    def num_buckets(self) -> int:
        """How many buckets it has."""
        return len(self.ready_at)


class BucketRef(NamedTuple):
    """A bucket: which buffer of the list, and which bucket of that buffer."""

    buffer: int
    bucket: int


class BucketGrouping(Protocol):
    """Partitions the buckets of several buffers into groups."""

    def partition(
        self, buffers: Sequence[BufferBuckets], *, single_group: bool, one_bucket_per_group: bool
    ) -> list[list[BucketRef]]:
        """Returns the groups; upstream's come buffer by buffer, the end of the model first.

        Args:
            buffers: The buffers of one model chunk that share a process group.
            single_group: Bucketing is off for this chunk: everything is one group.
            one_bucket_per_group: The collective in use cannot take several buckets.

        Raises:
            LayoutError: If these buffers cannot be grouped.
        """
        ...


@strategy('bucket_groups', MergeIntoLastFp8Params)
class MergeIntoLastFp8:
    """A group per bucket; with fp8 parameters the other buckets join the last fp8 group.

    The other buckets of an fp8 model are small (biases, norms) and hold parameters of every layer:
    their gradients are complete only when backward is, as are those of the last fp8 bucket.
    """

    def __init__(self, params: MergeIntoLastFp8Params) -> None:
        self.params = params

    def partition(
        self, buffers: Sequence[BufferBuckets], *, single_group: bool, one_bucket_per_group: bool
    ) -> list[list[BucketRef]]:
        """See the class; ``one_bucket_per_group`` splits what would have been merged."""
        fp8_buffers = _fp8_buffers(self.params.name, buffers)
        refs = [_refs(index, buffer) for index, buffer in enumerate(buffers)]
        if single_group and refs:
            return [[ref for of_buffer in refs for ref in of_buffer]]
        if not fp8_buffers:
            return [[ref] for of_buffer in refs for ref in of_buffer]
        groups = [[ref] for ref in refs[fp8_buffers[0]]]
        others = [ref for of_buffer in refs for ref in of_buffer if ref.buffer != fp8_buffers[0]]
        if one_bucket_per_group:
            return groups + [[ref] for ref in others]
        groups[-1].extend(others)
        return groups


@strategy('bucket_groups', SeparateParams)
class Separate:
    """A group per bucket, buffer by buffer."""

    def __init__(self, params: SeparateParams) -> None:
        self.params = params

    def partition(
        self, buffers: Sequence[BufferBuckets], *, single_group: bool, one_bucket_per_group: bool
    ) -> list[list[BucketRef]]:
        """With ``single_group`` one group per kind of optimizer, if the collective can take it."""
        if single_group and not one_bucket_per_group:
            return _one_per_kind(buffers)
        return _one_per_bucket(buffers)


@strategy('bucket_groups', SingleParams)
class Single:
    """One group for what DistributedOptimizer owns, and one for what LayerWise owns."""

    def __init__(self, params: SingleParams) -> None:
        self.params = params

    def partition(
        self, buffers: Sequence[BufferBuckets], *, single_group: bool, one_bucket_per_group: bool
    ) -> list[list[BucketRef]]:
        """``one_bucket_per_group`` leaves nothing to join."""
        return _one_per_bucket(buffers) if one_bucket_per_group else _one_per_kind(buffers)


@strategy('bucket_groups', NearestReadyParams)
class NearestReady:
    """Each other bucket joins the first fp8 group to be complete that does not have to wait for it.

    A bucket whose last gradient comes after every fp8 group's joins the last one of them, which then is
    complete when the bucket is. Any number of fp8 buffers will do.
    """

    def __init__(self, params: NearestReadyParams) -> None:
        self.params = params

    def partition(
        self, buffers: Sequence[BufferBuckets], *, single_group: bool, one_bucket_per_group: bool
    ) -> list[list[BucketRef]]:
        """``one_bucket_per_group`` leaves nothing to join; without fp8 it is a group per bucket."""
        if one_bucket_per_group:
            return _one_per_bucket(buffers)
        if single_group:
            return _one_per_kind(buffers)
        return _joined(buffers, _nearest)


@strategy('bucket_groups', MergeIntoFirstFp8Params)
class MergeIntoFirstFp8:
    """The other buckets join the first fp8 group, which then waits for the whole of backward."""

    def __init__(self, params: MergeIntoFirstFp8Params) -> None:
        self.params = params

    def partition(
        self, buffers: Sequence[BufferBuckets], *, single_group: bool, one_bucket_per_group: bool
    ) -> list[list[BucketRef]]:
        """As ``nearest_ready``, but like upstream it knows one fp8 buffer only."""
        _fp8_buffers(self.params.name, buffers)
        if one_bucket_per_group:
            return _one_per_bucket(buffers)
        if single_group:
            return _one_per_kind(buffers)
        return _joined(buffers, lambda hosts_ready_at, ready_at: 0)


def _nearest(hosts_ready_at: Sequence[int], ready_at: int) -> int:
    """Backward counts down: the highest of ``hosts_ready_at`` that is not above ``ready_at``."""
    in_time = [host for host in hosts_ready_at if host <= ready_at]
    return hosts_ready_at.index(max(in_time) if in_time else min(hosts_ready_at))


def _joined(
    buffers: Sequence[BufferBuckets], choose: Callable[[Sequence[int], int], int]
) -> list[list[BucketRef]]:
    """A group per fp8 bucket; the others join one, or have their own where their kind has none.

    Args:
        buffers: LayerWise's buckets join LayerWise's only.
        choose: From the ``ready_at`` of the fp8 buckets, in layout order, and of another bucket, which
            of the former the latter joins.
    """
    groups: dict[BucketRef, list[BucketRef]] = {}
    hosts: dict[bool, list[BucketRef]] = {False: [], True: []}
    for index, buffer in enumerate(buffers):
        for ref in _refs(index, buffer):
            groups[ref] = [ref]
            if buffer.is_fp8:
                hosts[buffer.is_layer_wise].append(ref)

    def ready_at(ref: BucketRef) -> int:
        return buffers[ref.buffer].ready_at[ref.bucket]

    for ref in list(groups):
        buffer = buffers[ref.buffer]
        candidates = hosts[buffer.is_layer_wise]
        if candidates and not buffer.is_fp8:
            host = candidates[choose([ready_at(other) for other in candidates], ready_at(ref))]
            groups[host] += groups.pop(ref)
    return list(groups.values())


def _fp8_buffers(strategy_name: str, buffers: Sequence[BufferBuckets]) -> list[int]:
    """Which of ``buffers`` hold quantized parameters; more than one is refused."""
    fp8_buffers = [index for index, buffer in enumerate(buffers) if buffer.is_fp8]
    if len(fp8_buffers) > 1:
        raise LayoutError(
            f'bucket_groups: {strategy_name} found {len(fp8_buffers)} buffers of quantized '
            'parameters among those that share a process group, and can merge into one only. '
            'They differ in gradient dtype or in who owns them (LayerWise or DistributedOptimizer); '
            'set grad_reduce_in_fp32 so that they agree, keep one kind of quantized parameter, or choose '
            'bucket_groups: nearest_ready, separate or single.'
        )
    return fp8_buffers


def _one_per_bucket(buffers: Sequence[BufferBuckets]) -> list[list[BucketRef]]:
    return [[ref] for index, buffer in enumerate(buffers) for ref in _refs(index, buffer)]


def _one_per_kind(buffers: Sequence[BufferBuckets]) -> list[list[BucketRef]]:
    """One group per kind of optimizer: a group's first bucket tells Megatron-Core who owns them all."""
    kinds = dict.fromkeys(buffer.is_layer_wise for buffer in buffers)
    return [
        [
            ref
            for index, buffer in enumerate(buffers)
            if buffer.is_layer_wise == kind
            for ref in _refs(index, buffer)
        ]
        for kind in kinds
    ]


def _refs(index: int, buffer: BufferBuckets) -> list[BucketRef]:
    return [BucketRef(index, bucket) for bucket in range(buffer.num_buckets)]

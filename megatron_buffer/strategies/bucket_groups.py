"""``bucket_groups``: which buckets are communicated together.

Stands for ``partition_buckets`` of ``megatron/core/distributed/param_and_grad_buffer.py``. The
strategy is a pure function of counts and kinds, because upstream partitions twice: DDP for the groups
it trains with, and ``DistributedOptimizer.__init__`` for a list that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megatron_buffer.config_layout import MergeIntoLastFp8 as MergeIntoLastFp8Params
from megatron_buffer.errors import LayoutError
from megatron_buffer.strategies.registry import strategy


class BufferBuckets(NamedTuple):
    """One buffer, as far as grouping is concerned.

    Attributes:
        is_fp8: True when its parameters are stored as bytes (``param_dtype`` is uint8).
        num_buckets: How many buckets it has; bucket 0 is the end of the model.
    """

    is_fp8: bool
    num_buckets: int


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
        fp8_buffers = [index for index, buffer in enumerate(buffers) if buffer.is_fp8]
        if len(fp8_buffers) > 1:
            raise LayoutError(
                f'bucket_groups: {self.params.name} found {len(fp8_buffers)} buffers of quantized '
                'parameters among those that share a process group, and can merge into one only. '
                'They differ in gradient dtype or in who owns them (LayerWise or DistributedOptimizer); '
                'set grad_reduce_in_fp32 so that they agree, or keep one kind of quantized parameter.'
            )
        refs = [_refs(index, buffer) for index, buffer in enumerate(buffers)]
        if single_group:
            return [[ref for of_buffer in refs for ref in of_buffer]]
        if not fp8_buffers:
            return [[ref] for of_buffer in refs for ref in of_buffer]
        groups = [[ref] for ref in refs[fp8_buffers[0]]]
        others = [ref for of_buffer in refs for ref in of_buffer if ref.buffer != fp8_buffers[0]]
        if one_bucket_per_group:
            return groups + [[ref] for ref in others]
        groups[-1].extend(others)
        return groups


def _refs(index: int, buffer: BufferBuckets) -> list[BucketRef]:
    return [BucketRef(index, bucket) for bucket in range(buffer.num_buckets)]

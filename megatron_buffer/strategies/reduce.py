"""``grad_reduce``: which collective reduces a bucket group's gradients.

Stands for the choice in ``_ParamAndGradBucketGroup.start_grad_sync`` and for the module global
``dist_reduce_scatter_func`` (``megatron/core/distributed/param_and_grad_buffer.py``), which upstream
sets for the whole process; here it is a property of the group.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from megatron_buffer.config_runtime import AllReduceGrads as AllReduceParams
from megatron_buffer.config_runtime import AllToAllFp32Sum as AllToAllFp32SumParams
from megatron_buffer.config_runtime import ReduceScatterGrads as ReduceScatterParams
from megatron_buffer.config_runtime import UpstreamReduce as UpstreamReduceParams
from megatron_buffer.strategies.registry import strategy

ReduceKind = Literal['all_reduce', 'reduce_scatter', 'upstream_a2a', 'a2a']
WireDtype = Literal['bf16', 'fp16', 'fp32']


class ReduceChoice(NamedTuple):
    """A collective.

    Attributes:
        kind: ``all_reduce``: whole buckets. The others reduce into the shard that a rank owns:
            ``reduce_scatter``; ``upstream_a2a``, upstream's own all-to-all with fp32 sums; ``a2a``, ours.
        wire_dtype: For ``a2a``: the dtype that gradients are sent in; None is that of the buffer.
    """

    kind: ReduceKind
    wire_dtype: WireDtype | None = None


ALL_REDUCE = ReduceChoice('all_reduce')


class GradReduce(Protocol):
    """Names the collective of a bucket group."""

    def choice(self, *, dist_opt: bool, fp32_accumulation: bool) -> ReduceChoice:
        """Returns the collective.

        Args:
            dist_opt: ``ddp_config.use_distributed_optimizer``: this rank owns a shard of each bucket.
            fp32_accumulation: ``ddp_config.reduce_scatter_with_fp32_accumulation``.
        """
        ...


@strategy('grad_reduce', UpstreamReduceParams)
class UpstreamReduce:
    """What ddp_config says: a reduce-scatter under the distributed optimizer, else an all-reduce."""

    def __init__(self, params: UpstreamReduceParams) -> None:
        self.params = params

    def choice(self, *, dist_opt: bool, fp32_accumulation: bool) -> ReduceChoice:
        """An all-to-all with fp32 sums takes the reduce-scatter's place if ddp_config asks for it."""
        if not dist_opt:
            return ALL_REDUCE
        return ReduceChoice('upstream_a2a' if fp32_accumulation else 'reduce_scatter')


@strategy('grad_reduce', AllReduceParams)
class AllReduceGrads:
    """Every rank of an optimizer instance gets the whole sum."""

    def __init__(self, params: AllReduceParams) -> None:
        self.params = params

    def choice(self, *, dist_opt: bool, fp32_accumulation: bool) -> ReduceChoice:
        """Always the same."""
        return ALL_REDUCE


@strategy('grad_reduce', ReduceScatterParams)
class ReduceScatterGrads:
    """Every rank gets the sum of the shard that it owns; refused where nobody owns shards."""

    def __init__(self, params: ReduceScatterParams) -> None:
        self.params = params

    def choice(self, *, dist_opt: bool, fp32_accumulation: bool) -> ReduceChoice:
        """Always the same."""
        return ReduceChoice('reduce_scatter')


@strategy('grad_reduce', AllToAllFp32SumParams)
class AllToAllFp32Sum:
    """Shards are sent to their owners in a narrow dtype and summed there in fp32."""

    def __init__(self, params: AllToAllFp32SumParams) -> None:
        self.params = params

    def choice(self, *, dist_opt: bool, fp32_accumulation: bool) -> ReduceChoice:
        """Always the same, whether ddp_config asks for fp32 sums too or not."""
        return ReduceChoice('a2a', self.params.wire_dtype)

"""``grad_reduce``: which collective reduces a bucket group's gradients.

Stands for the choice in ``_ParamAndGradBucketGroup.start_grad_sync`` and for the module global
``dist_reduce_scatter_func`` (``megatron/core/distributed/param_and_grad_buffer.py``), which upstream
sets for the whole process; here it is a property of the group.
"""

from __future__ import annotations

from typing import Literal, Protocol

from megatron_buffer.config_runtime import UpstreamReduce as UpstreamReduceParams
from megatron_buffer.strategies.registry import strategy

ReduceKind = Literal['all_reduce', 'reduce_scatter', 'a2a_fp32_sum']


class GradReduce(Protocol):
    """Names the collective of a bucket group."""

    def kind(self, *, dist_opt: bool, fp32_accumulation: bool) -> ReduceKind:
        """Returns the collective.

        Args:
            dist_opt: ``ddp_config.use_distributed_optimizer``.
            fp32_accumulation: ``ddp_config.reduce_scatter_with_fp32_accumulation``.
        """
        ...


@strategy('grad_reduce', UpstreamReduceParams)
class UpstreamReduce:
    """What ddp_config says: a reduce-scatter under the distributed optimizer, else an all-reduce."""

    def __init__(self, params: UpstreamReduceParams) -> None:
        self.params = params

    def kind(self, *, dist_opt: bool, fp32_accumulation: bool) -> ReduceKind:
        """An all-to-all with fp32 sums takes the reduce-scatter's place if ddp_config asks for it."""
        if not dist_opt:
            return 'all_reduce'
        return 'a2a_fp32_sum' if fp32_accumulation else 'reduce_scatter'

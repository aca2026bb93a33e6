"""The resolved bucket size and the reason for it; pure.

Stands for the rule in ``DistributedDataParallel.__init__``
(``megatron/core/distributed/distributed_data_parallel.py``) and its copies in
``megatron/training/training.py``: ``resolve_ddp_bucket_size`` and
``megatron/training/models/dist_utils.py``: ``_ddp_wrap``. Upstream applies it silently.
"""

from __future__ import annotations

from typing import NamedTuple


class BucketSize(NamedTuple):
    """Resolved size in elements (None: one bucket) and a sentence saying why."""

    elems: int | None
    reason: str


def default_bucket_size(dp_size: int) -> int:
    """Megatron's default in elements: large enough for rings over ``dp_size`` ranks."""
    return max(40_000_000, 1_000_000 * dp_size)


def resolve_bucket_size(
    *,
    configured_elems: int | None,
    ddp_bucket_size_elems: int | None,
    num_buckets: int | None,
    overlap_grad_reduce: bool,
    disable_bucketing: bool,
    pp_rank: int,
    dp_size: int,
    dp_cp_size: int | None = None,
) -> BucketSize:
    """Applies Megatron's rule.

    Args:
        configured_elems: ``bucketing.bucket_size_elems`` of the YAML config, or None.
        ddp_bucket_size_elems: ``ddp_config.bucket_size`` as the caller set it, or None.
        num_buckets: ``ddp_config.num_buckets``: megatron.training has turned it into a size already.
        overlap_grad_reduce: Without it one collective per buffer is all that is needed.
        disable_bucketing: Set by the wrap sites for model chunks after the first.
        pp_rank: Pipeline rank; only stage 0's reduction is on the critical path.
        dp_size: Size of the data-parallel group.
        dp_cp_size: Its size with context parallelism, from which megatron.training takes its default.

    Returns:
        The size in use and the reason.
    """
    if not overlap_grad_reduce:
        return BucketSize(None, 'one bucket per buffer: overlap_grad_reduce is off')
    if disable_bucketing:
        return BucketSize(
            None,
            'one bucket per buffer: bucketing is disabled for this model chunk (chunks after the first '
            'of an interleaved schedule, or overlap_param_gather_with_optimizer_step)',
        )
    if pp_rank > 0:
        return BucketSize(
            None, f'one bucket per buffer: pipeline rank {pp_rank} is not on the critical path'
        )
    if configured_elems is not None:
        return BucketSize(configured_elems, 'bucketing.bucket_size_elems of the config')
    if num_buckets is not None and ddp_bucket_size_elems is not None:
        return BucketSize(ddp_bucket_size_elems, f'from num_buckets={num_buckets}')
    for size in (dp_size, dp_cp_size or dp_size):
        default = default_bucket_size(size)
        if ddp_bucket_size_elems in (None, default):
            return BucketSize(default, f'default: max(40,000,000, 1,000,000 x dp_size={size})')
    return BucketSize(ddp_bucket_size_elems, 'ddp_config.bucket_size')

"""Chains the parameter gathers in the order in which forward needs them, where a profile tells it.

Stands for the loop over ``next_param_gather_bucket_group`` in ``DistributedDataParallel.__init__``
(``megatron/core/distributed/distributed_data_parallel.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from megatron_buffer.agreement import check_agreement
from megatron_buffer.runtime import ModelChunk


def maybe_chain_gathers(ddp: Any, chunk: ModelChunk) -> None:
    """Lets each group's gather start the one that forward needs next, if ``param_order`` knows it.

    Megatron chains the groups from the last one of its list to the first; where forward does not call
    modules in the order of their registration, it then gathers too late and warns. Dense and expert groups
    keep a chain each. Does nothing without ``overlap_param_gather``.

    Args:
        ddp: The wrapped chunk, with its bucket groups.
        chunk: Its pipeline stage and chunk number.

    Raises:
        LayoutError: If the profile lacks the chunk.
        RankMismatchError: If the ranks would gather in different orders.
    """
    find_order = getattr(ddp.runtime.layout.param_order, 'gather_order', None)
    if find_order is None or not ddp.ddp_config.overlap_param_gather:
        return
    name_of, lines = ddp._names(), []
    for groups in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups):
        names = [
            [name_of[p] for bucket in group.buckets for p in bucket.params_list] for group in groups
        ]
        order = find_order(names, chunk.pp_rank, chunk.vp_stage)
        if order is None:
            return
        chain_gathers(groups, order)
        lines += [f'the group that starts with {names[i][0]}' for i in order]
    if ddp.runtime.config.checks.rank_agreement:
        check_agreement('the order of gathers', ddp.dp_cp_group, 'data-parallel', lambda: lines)


def chain_gathers(groups: Sequence[Any], order: Sequence[int]) -> None:
    """Chains bucket groups: ``groups[order[0]]`` starts the gather of ``groups[order[1]]``, and so on."""
    ordered = [groups[index] for index in order]
    for group, following in itertools.zip_longest(ordered, ordered[1:]):
        group.next_param_gather_bucket_group = following

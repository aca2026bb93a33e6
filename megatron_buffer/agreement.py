"""Ranks compare what they must agree on, once, after wrapping.

Two ranks with different layouts reduce different parameters against each other without any error from
the collectives. Upstream has no counterpart.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_buffer.errors import RankMismatchError

logger = logging.getLogger(__name__)

_ADVICE = 'All ranks must build the same model with the same config, flags and package versions.'


def check_agreement(
    what: str, group: Any, group_name: str, describe: Callable[[], Sequence[str]]
) -> None:
    """Compares what ``describe`` says over ``group``, by their hash; a collective, called by every rank of the group alike.

    Args:
        what: What is compared, for the message, such as 'the layout of buffer (bf16, fp32)'.
        group: Process group, or anything else (None, a list) where there is none to compare over.
        group_name: Its name, for the message.
        describe: Lines that must be equal on all ranks; not asked where there is nobody to compare with, and
            sent only when the hashes differ.

    Raises:
        RankMismatchError: On every rank of the group, naming the first rank and line that differ.
    """
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return
    lines = describe()
    digests = _gather(hashlib.sha256('\n'.join(lines).encode()).hexdigest(), group)
    odd = next((i for i, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    of_rank = _gather(list(lines), group)
    ranks = dist.get_process_group_ranks(group)
    mine, theirs = _first_difference(of_rank[0], of_rank[odd])
    raise RankMismatchError(
        f'{what} differs between rank {ranks[0]} and rank {ranks[odd]} ({group_name} group): '
        f'rank {ranks[0]} has {mine}; rank {ranks[odd]} has {theirs}. {_ADVICE}'
    )


def check_against_first(what: str, key: str, mine: str) -> None:
    """Compares ``mine`` with what the first rank of the job to come here had; waits for nobody.

    Pipeline stages build and wrap their chunks in step with collectives of their own, so a collective
    across stages could wait for ever here.

    Args:
        what: What is compared, for the message.
        key: Name of the comparison; the same on all ranks, and new for each comparison.
        mine: Text that must be equal on all ranks.

    Raises:
        RankMismatchError: On each rank that differs from the first one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store: Any = dist.distributed_c10d.PrefixStore(
        'megatron_buffer/agreement', dist.distributed_c10d._get_default_store()
    )
    entry = json.dumps([dist.get_rank(), mine])
    try:
        first_rank, first = json.loads(store.compare_set(key, '', entry))
    except Exception as error:  # a store kind without compare_set, such as a fake one
        logger.debug('%s is not compared between ranks: %s', what, error)
        return
    if first != mine:
        raise RankMismatchError(
            f'{what} differs between rank {first_rank} and rank {dist.get_rank()}: rank {first_rank} '
            f'has {first}; rank {dist.get_rank()} has {mine}. {_ADVICE}'
        )


def _gather(value: Any, group: Any) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _first_difference(left: Sequence[str], right: Sequence[str]) -> tuple[str, str]:
    for a, b in zip(left, right, strict=False):
        if a != b:
            return a, b
    if len(left) == len(right):
        return 'the same description', 'the same description'
    shorter = min(len(left), len(right))
    return (
        left[shorter] if len(left) > shorter else 'nothing more',
        right[shorter] if len(right) > shorter else 'nothing more',
    )

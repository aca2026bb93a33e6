"""How far apart the clocks of two hosts are: bounds from a few exchanges, no clock is set.

Upstream has no counterpart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

_ROUNDS = 6


class Offset(NamedTuple):
    """This rank's monotonic clock against rank 0's.

    Attributes:
        offset_ns: To be taken from this rank's times.
        uncertainty_ns: The true one is not further away than this.
    """

    offset_ns: int
    uncertainty_ns: int


def offset_to_first() -> Offset:
    """Exchanges clocks over the default process group; a collective call.

    Nobody leaves a gather before everybody has entered it. So on one clock rank 0 enters before this rank
    leaves, and this rank enters before rank 0 leaves, and the smallest of these gaps bound the offset. Ranks
    of one host have one clock, which is then taken as it is.
    """
    size = dist.get_world_size()
    if size == 1:
        return Offset(0, 0)
    host, left = _host(), 0
    rounds: list[tuple[tuple[int, int], tuple[int, int]]] = []
    same_host = False
    for number in range(_ROUNDS + 1):
        entered = time.perf_counter_ns()
        all_ranks: list[tuple[str, int, int]] = [('', 0, 0)] * size
        dist.all_gather_object(all_ranks, (host, entered, left))
        first_host, first_entered, first_left = all_ranks[0]
        same_host = first_host == host
        if number:  # when rank 0 has left a round is known in the next one
            (mine, first), _ = rounds[-1]
            rounds[-1] = ((mine, first), (left, first_left))
        left = time.perf_counter_ns()
        rounds.append(((entered, first_entered), (left, 0)))
    return combine(rounds[:-1], same_host=same_host)


def combine(
    rounds: Iterable[tuple[tuple[int, int], tuple[int, int]]], *, same_host: bool
) -> Offset:
    """The offset that all rounds allow; pure.

    Args:
        rounds: Of each, when this rank and rank 0 entered, and when they left, each on its own clock, ns.
        same_host: Both may have the same clock.
    """
    lowest, highest = -(2**62), 2**62
    for (entered, first_entered), (left, first_left) in rounds:
        lowest = max(lowest, entered - first_left)
        highest = min(highest, left - first_entered)
    if same_host and lowest <= 0 <= highest:
        return Offset(0, 0)
    return Offset((lowest + highest) // 2, max(0, highest - lowest) // 2)


def _host() -> str:
    """Unique to a boot of a machine, whose processes share a monotonic clock."""
    with contextlib.suppress(OSError):
        return Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'unknown {dist.get_rank()}'

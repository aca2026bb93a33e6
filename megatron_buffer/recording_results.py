"""What the ranks recorded becomes one profile: averaged in each stage, collected from all stages, written.

Upstream has no counterpart.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import __version__ as core_version

from megatron_buffer import __version__
from megatron_buffer.profile import (
    SCHEMA_VERSION,
    ChunkProfile,
    Profile,
    World,
    dense_positions,
    dump_chunks,
    load_chunks,
    write_profile,
)

logger = logging.getLogger(__name__)

_WAIT_FOR_STAGES_S = 120.0

_num_recordings = 0
"""Recordings that this process has ended: every rank counts alike, so it names their keys in the store."""


class Order(NamedTuple):
    """Of each parameter its place, and its seconds after the first one; None where it was not seen."""

    places: Sequence[int | None]
    seconds: Sequence[float | None]


def over_ranks(
    mine: Order, names: Sequence[str], group: Any, device: torch.device
) -> tuple[Order, int]:
    """The order of the mean places over a group, with the mean times; a collective.

    Args:
        mine: What this rank found.
        names: Of the parameters; equal places are ordered by them.
        group: Data-parallel group.
        device: Where the group's backend wants its tensors.

    Returns:
        The same on every rank: the order, and the number of parameters whose place is not the same on all
        of them.
    """
    if not names:
        return mine, 0
    place = torch.tensor(
        [-1 if p is None else p for p in mine.places], dtype=torch.float64, device=device
    )
    seconds = torch.tensor([s or 0.0 for s in mine.seconds], dtype=torch.float64, device=device)
    seen = (place >= 0).double()
    sums = torch.stack([seen, place * seen, seconds])
    extremes = torch.stack([place, -place])
    dist.all_reduce(sums, group=group)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    num_seen, places, times = sums.tolist()
    highest, lowest = extremes.tolist()
    means = [p / n if n else None for p, n in zip(places, num_seen, strict=True)]
    return Order(
        dense_positions(means, names),
        [round(t / n, 9) if n else None for t, n in zip(times, num_seen, strict=True)],
    ), sum(high != -low for high, low in zip(highest, lowest, strict=True))


def hand_in(ddp: Any, chunks: Mapping[str, ChunkProfile], pp_rank: int, path: str) -> None:
    """Collects the chunks of all stages at the first stage's leader, which writes the file.

    A stage's leader is its rank with tensor- and data-parallel rank 0. No collective: the stages are not
    in step here, and the others go on training. Nothing that goes wrong ends the training.

    Args:
        ddp: A wrapped chunk of this process, for its groups.
        chunks: All chunks of this process.
        pp_rank: Pipeline stage.
        path: The profile.
    """
    global _num_recordings
    number = _num_recordings
    _num_recordings += 1
    if ddp.tp_group.rank() != 0 or ddp.dp_cp_group.rank() != 0:
        return
    pp_size = (ddp.pp_group[0] if isinstance(ddp.pp_group, list) else ddp.pp_group).size()
    everything = dict(chunks)
    if pp_size > 1:
        store: Any = dist.distributed_c10d.PrefixStore(
            f'megatron_buffer/recording/{number}', dist.distributed_c10d._get_default_store()
        )
        store.set(str(pp_rank), zlib.compress(dump_chunks(chunks)))
        if pp_rank != 0:
            return
        missing = _wait_for(store, [str(stage) for stage in range(pp_size)])
        if missing:
            logger.warning(
                f'the profile {path} was not written: within {_WAIT_FOR_STAGES_S:g} s nothing came from '
                f'pipeline stage {", ".join(missing)}'
            )
            return
        for stage in range(1, pp_size):
            everything |= load_chunks(zlib.decompress(store.get(str(stage))))
    world = World(
        tp=ddp.tp_group.size(),
        pp=pp_size,
        vpp=len(chunks),
        dp=ddp.dp_cp_group.size(),
        ep=ddp.ep_group.size(),
    )
    _write(path, everything, world)


def _wait_for(store: Any, keys: Sequence[str]) -> list[str]:
    """The keys that are still missing when the time is up."""
    pause, deadline = threading.Event(), time.monotonic() + _WAIT_FOR_STAGES_S
    while missing := [key for key in keys if not store.check([key])]:
        if time.monotonic() > deadline:
            break
        pause.wait(0.05)
    return missing


def _write(path: str, chunks: dict[str, ChunkProfile], world: World) -> None:
    now = datetime.datetime.now(datetime.UTC)
    profile = Profile(
        schema_version=SCHEMA_VERSION,
        megatron_buffer=__version__,
        megatron_core=core_version.partition('+')[0],  # then a commit of the working directory
        created=now.isoformat(timespec='seconds'),
        world=world,
        chunks=chunks,
    )
    try:
        write_profile(path, profile)
    except OSError as error:
        logger.error(f'the profile {path} was not written: {error}')
        return
    num_params = sum(len(chunk.params) for chunk in chunks.values())
    logger.info(f'wrote the profile {path}: {num_params} parameters in {", ".join(chunks)}')
    for key, chunk in chunks.items():
        if not any(param.gradients_per_backward for param in chunk.params):
            logger.warning(f'{path}: no gradient was seen in model chunk {key}')
        if not chunk.agreed:
            logger.warning(
                f'{path}: the ranks of model chunk {key} did not find the same orders: '
                f'{chunk.differing_grad_arrivals} places in backward and {chunk.differing_forward_uses} '
                'in forward differ, and their means were taken'
            )

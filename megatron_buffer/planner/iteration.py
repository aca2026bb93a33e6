"""From the ledger of a stage, a network and the times of its chunks to the iteration that is simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from megatron_buffer.config_network import Network, Placement
from megatron_buffer.planner.ledger import bytes_of
from megatron_buffer.planner.stages import Ask, BufferLedger, ChunkLedger, StageLedger
from megatron_buffer.planner.timeline import ChunkWork, GroupWork, Iteration
from megatron_buffer.planner.view import GroupView
from megatron_buffer.planner.work import ChunkTimes


class Schedule(NamedTuple):
    """The micro-batches of an iteration, and what starts collectives.

    Attributes:
        microbatches: How many there are.
        microbatch_group_size: How many run through a chunk before the next chunk's turn
            (``microbatch_group_size_per_vp_stage``).
        align_grad_reduce: Whether with several chunks the schedule starts their reductions.
        align_param_gather: Whether it starts their gathers.
        overlap_param_gather: Whether gathers may run beside forward at all.
    """

    microbatches: int = 1
    microbatch_group_size: int = 1
    align_grad_reduce: bool = True
    align_param_gather: bool = True
    overlap_param_gather: bool = True


def iteration_of(
    stage: StageLedger,
    ask: Ask,
    network: Network,
    times: Mapping[int, ChunkTimes],
    schedule: Schedule,
) -> Iteration:
    """What a rank of a stage has to do.

    Args:
        stage: Its ledger.
        ask: What it was made for.
        network: How long collectives take.
        times: By chunk, how long it computes.
        schedule: The micro-batches, and what the schedule starts.
    """
    job = stage.job
    waves = schedule.microbatch_group_size if len(stage.chunks) > 1 else 1
    once = sum(t.forward_s + t.backward_s for t in times.values())
    deferred = ask.runtime.config.readiness.name == 'deferred'
    return Iteration(
        chunks=tuple(
            ChunkWork(
                forward_s=times[number].forward_s,
                backward_s=times[number].backward_s,
                groups=tuple(
                    _group(chunk, group, stage, ask, network, times[number])
                    for group in chunk.view.groups
                ),
            )
            for number, chunk in enumerate(stage.chunks)
        ),
        optimizer_s=_optimizer_s(stage, ask, network),
        microbatches=schedule.microbatches,
        waves=waves,
        bubble_s=(job.pp - 1) * once / len(stage.chunks),
        overlap_reduce=ask.ddp.overlap and not deferred,
        overlap_gather=ask.ddp.overlap and schedule.overlap_param_gather,
        align_reduce=schedule.align_grad_reduce,
        align_gather=schedule.align_param_gather,
        in_order=ask.runtime.config.dispatch_order.name == 'in_order',
    )


def _group(
    chunk: ChunkLedger,
    group: GroupView,
    stage: StageLedger,
    ask: Ask,
    network: Network,
    times: ChunkTimes,
) -> GroupWork:
    members = [(chunk.buffers[ref.buffer], ref.bucket) for ref in group.buckets]
    names = [
        buffer.view.params[slot.param].name
        for buffer, bucket in members
        for slot in buffer.view.slots_by_bucket[bucket]
    ]
    # Of equals the one that lies last, which is the first of the model in the order of upstream.
    last = max(reversed(names), key=lambda name: times.ready_s[name])
    read = [name for name in reversed(names) if name in times.first_use_s]
    first = min(read, key=lambda name: times.first_use_s[name], default=last)
    place = placement_of(stage, members[0][0], network)
    grads = sum(
        buffer.view.layout.buckets[bucket].numel_elems * buffer.sizes.grad_bytes
        for buffer, bucket in members
    )
    sizes = members[0][0].sizes
    sent = sum(
        buffer.view.layout.buckets[bucket].numel_elems
        * (buffer.sizes.wire_grad_bytes or buffer.sizes.grad_bytes)
        for buffer, bucket in members
    )
    whole = not sizes.dist_opt or sizes.reduce_kind == 'all_reduce'
    reduce_s = network.seconds('all_reduce' if whole else 'reduce_scatter', sent, place)
    if sizes.instances > 1:
        between = network.placement(sizes.instances, stage.job.stage_size // sizes.instances)
        part = grads / sizes.num_shards if sizes.dist_opt else grads
        reduce_s += network.seconds('all_reduce', part, between)
    return GroupWork(
        name=_name(chunk, group, len(stage.chunks)),
        params=len(names),
        bytes=grads,
        ready_s=times.ready_s[last],
        last_gradient=last,
        reduce_s=reduce_s,
        dispatch_position=group.dispatch_position,
        first_use_s=times.first_use_s.get(first, times.forward_s),
        first_used=first,
        gather_s=_gather_s(members, ask, network, place),
        gather_position=group.gather_position,
        is_expert_parallel=group.is_expert_parallel,
    )


def _gather_s(
    members: list[tuple[BufferLedger, int]], ask: Ask, network: Network, place: Placement
) -> float:
    """Of a group's gathers: one for all of its buckets, or one per dtype."""
    if not members[0][0].sizes.dist_opt:
        return 0.0
    stored: list[tuple[int, torch.dtype]] = [
        (buffer.sizes.gathered_bits, buffer.view.key.param_dtype) for buffer, _ in members
    ]
    return sum(
        network.seconds(
            'all_gather',
            sum(
                bytes_of(members[i][0].view.layout.buckets[members[i][1]].numel_elems, stored[i][0])
                for i in launch
            ),
            place,
        )
        for launch in ask.runtime.param_gather.launches(stored, 'nccl')
    )


def placement_of(stage: StageLedger, buffer: BufferLedger, network: Network) -> Placement:
    """Where the ranks are that a buffer is reduced over."""
    job = stage.job
    inner = job.expert_model_size if buffer.view.key.is_expert_parallel else job.tp
    return network.placement(buffer.sizes.num_shards, inner)


def _name(chunk: ChunkLedger, group: GroupView, num_chunks: int) -> str:
    """``bucket 3``, or with the chunk or the buffer in front where there are several."""
    of = f'chunk {chunk.view.job.chunk}, ' if num_chunks > 1 else ''
    several = len(chunk.buffers) > 1
    buckets = [
        (f'{chunk.view.buffers[ref.buffer].label} ' if several else '') + f'bucket {ref.bucket}'
        for ref in group.buckets
    ]
    more = f' and {len(buckets) - 1} more' if len(buckets) > 1 else ''
    return f'{of}{buckets[0]}{more}'


def _optimizer_s(stage: StageLedger, ask: Ask, network: Network) -> float:
    """State is read and written, gradients are read, parameters written."""
    total = 0.0
    for buffer in stage.buffers:
        elems = max(buffer.shard_params_elems)
        state = ask.optimizer.bytes_per_elem(buffer.sizes.param_bytes)
        moved = 2 * state + buffer.sizes.grad_bytes + buffer.sizes.param_bytes
        total += elems * moved
    return total / (network.memory_gbyte_per_s * 1e9)

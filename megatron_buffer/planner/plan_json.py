"""A plan as JSON, with keys that stay as they are (``docs/plan.md`` lists them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_buffer.planner.averages import memory_as_dict
from megatron_buffer.planner.ledger import Memory, Wire
from megatron_buffer.planner.params import short_dtype
from megatron_buffer.planner.stages import Ask, BufferLedger, ChunkLedger, StageLedger

SCHEMA_VERSION = 1


def plan_as_dict(stages: Sequence[StageLedger], ask: Ask, notes: Sequence[str]) -> dict[str, Any]:
    """The whole plan.

    Args:
        stages: Every pipeline stage, in order.
        ask: What the plan was made for.
        notes: What else should be known.

    Returns:
        ``schema_version``; ``kind`` ('layout'); ``model``; ``config``; ``job``; ``ddp``; ``totals`` of the
        job; ``heaviest`` rank; ``stages``, each with its sums; ``classes``, with the buffers and buckets
        of stages that are the same; ``notes``.
    """
    config, first = ask.runtime.config, stages[0]
    heaviest = max(stages, key=lambda stage: stage.memory.resident_bytes)
    view = first.chunks[0].view
    recipe = ask.recipe
    wires = [stage.wire for stage in stages]
    return {
        'schema_version': SCHEMA_VERSION,
        'kind': 'layout',
        'model': ask.model,
        'config': {'source': config.source, 'hash': ask.runtime.hash, 'short': config.short_str()},
        'job': first.job.sizes(),
        'ddp': {
            'use_distributed_optimizer': ask.ddp.use_distributed_optimizer,
            'overlap': ask.ddp.overlap,
            'pad_buckets_for_high_nccl_busbw': ask.ddp.pad_buckets_for_high_nccl_busbw,
            'param_dtype': short_dtype(ask.dtype),
            'grad_dtype': 'fp32' if ask.ddp.grad_reduce_in_fp32 else short_dtype(ask.dtype),
            'quantized': recipe.name if recipe else None,
            'bucket_size_elems': view.bucket_size.elems,
            'bucket_size_reason': view.bucket_size.reason,
            'main_params_bytes_per_elem': ask.optimizer.main_bytes,
            'exp_avg_bytes_per_elem': ask.optimizer.exp_avg_bytes,
            'exp_avg_sq_bytes_per_elem': ask.optimizer.exp_avg_sq_bytes,
        },
        'totals': {
            'resident_bytes': sum(stage.resident_bytes_of_all for stage in stages),
            'wire_bytes_per_iter': sum(sum(wire) for wire in wires) * first.job.stage_size,
            'num_buckets': sum(len(b.bucket_wires) for stage in stages for b in stage.buffers),
            'padding_elems': sum(
                b.view.layout.padding_elems for stage in stages for b in stage.buffers
            ),
        },
        'heaviest': {
            'rank': heaviest.heaviest_rank,
            'pp_rank': heaviest.job.pp_rank,
            **memory_as_dict(heaviest.memory),
        },
        'stages': [_stage(stage, index) for index, stage in _with_class(stages)],
        'classes': [
            {
                'kind': of_class[0].kind,
                'pp_ranks': [stage.job.pp_rank for stage in of_class],
                'chunks': [_chunk(chunk) for chunk in of_class[0].chunks],
            }
            for of_class in classes(stages)
        ],
        'notes': list(notes),
    }


def classes(stages: Sequence[StageLedger]) -> list[list[StageLedger]]:
    """Stages that are the same, together; in the order of the first of each."""
    found: dict[tuple[object, ...], list[StageLedger]] = {}
    for stage in stages:
        found.setdefault(stage.signature(), []).append(stage)
    return list(found.values())


def _with_class(stages: Sequence[StageLedger]) -> list[tuple[int, StageLedger]]:
    numbered = [(i, stage) for i, of_class in enumerate(classes(stages)) for stage in of_class]
    return sorted(numbered, key=lambda item: item[1].job.pp_rank)


def _wire(wire: Wire) -> dict[str, int]:
    return {f'{name}_per_iter': value for name, value in wire._asdict().items()}


def _stage(stage: StageLedger, index: int) -> dict[str, Any]:
    buffers = stage.buffers
    return {
        'pp_rank': stage.job.pp_rank,
        'kind': stage.kind,
        'class': index,
        'heaviest_rank': stage.heaviest_rank,
        'least_resident_bytes': stage.least_resident_bytes,
        **memory_as_dict(stage.memory),
        **_wire(stage.wire),
        'num_params': sum(len(b.view.params) for b in buffers),
        'params_elems': sum(b.sizes.params_elems for b in buffers),
        'padding_elems': sum(b.view.layout.padding_elems for b in buffers),
        'num_buckets': sum(len(b.bucket_wires) for b in buffers),
        'num_reductions_per_iter': sum(chunk.num_reductions for chunk in stage.chunks),
        'num_gathers_per_iter': sum(chunk.num_gathers for chunk in stage.chunks),
    }


def _chunk(chunk: ChunkLedger) -> dict[str, Any]:
    return {
        'chunk': chunk.view.job.chunk,
        'bucket_size_elems': chunk.view.bucket_size.elems,
        'bucket_size_reason': chunk.view.bucket_size.reason,
        'num_groups': len(chunk.view.groups),
        'num_reductions_per_iter': chunk.num_reductions,
        'num_gathers_per_iter': chunk.num_gathers,
        'buffers': [_buffer(chunk, buffer) for buffer in chunk.buffers],
    }


def _buffer(chunk: ChunkLedger, buffer: BufferLedger) -> dict[str, Any]:
    view, sizes = buffer.view, buffer.sizes
    memory: Memory = buffer.memory
    return {
        'index': view.index,
        'label': view.label,
        'param_dtype': short_dtype(view.key.param_dtype),
        'grad_dtype': short_dtype(view.key.grad_dtype),
        'quantized': sizes.recipe.name if sizes.recipe else None,
        'is_expert_parallel': view.key.is_expert_parallel,
        'num_params': len(view.params),
        'params_elems': sizes.params_elems,
        'numel_elems': sizes.numel_elems,
        'padding_elems': view.layout.padding_elems,
        'padding_bytes': view.layout.padding_elems * sizes.grad_bytes,
        'num_ranks': sizes.num_shards,
        'num_shards': view.num_shards,
        'shard_elems': sizes.numel_elems // view.num_shards,
        'shard_params_elems_max': max(buffer.shard_params_elems),
        'shard_params_elems_min': min(buffer.shard_params_elems),
        **memory_as_dict(memory),
        **_wire(buffer.wire),
        'num_buckets': len(buffer.bucket_wires),
        'buckets': [_bucket(chunk, buffer, index) for index in range(len(buffer.bucket_wires))],
    }


def _bucket(chunk: ChunkLedger, buffer: BufferLedger, index: int) -> dict[str, Any]:
    view, sizes = buffer.view, buffer.sizes
    span, padding = view.layout.buckets[index], view.bucket_padding_elems(index)
    group = chunk.view.group_of(view.index, index)
    return {
        'index': index,
        'group': group.index,
        'num_params': len(view.slots_by_bucket[index]),
        'numel_elems': span.numel_elems,
        'padding_elems': padding,
        'padding_bytes': padding * sizes.grad_bytes,
        'shard_elems': span.numel_elems // view.num_shards,
        'grad_bytes': span.numel_elems * sizes.grad_bytes,
        **buffer.bucket_wires[index]._asdict(),
    }

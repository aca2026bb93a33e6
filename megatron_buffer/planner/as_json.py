"""A layout as JSON, with keys that stay as they are (``docs/layout.md`` lists them).

Offsets are elements from the start of the buffer; positions and indices count from 0.
"""

from __future__ import annotations

from typing import Any

from megatron_buffer.planner.job import DdpOptions, Job
from megatron_buffer.planner.params import short_dtype
from megatron_buffer.planner.view import BufferView, LayoutView

SCHEMA_VERSION = 1


def layout_as_dict(view: LayoutView, *, with_params: bool = True) -> dict[str, Any]:
    """The whole layout.

    Args:
        view: The layout.
        with_params: Also every parameter of every bucket.

    Returns:
        ``schema_version``; ``model``; ``config`` (``source``, ``hash``, ``short``: what differs from
        upstream); ``job`` (sizes, ``world_size``, ``pp_rank``, ``chunk``); ``ddp`` (what DDP is asked for,
        the resolved ``bucket_size_elems``, None for one bucket per buffer, and ``bucket_size_reason``);
        ``totals``; ``buffers``; ``groups``; ``dispatch`` and ``gather`` (``strategy`` in words, and
        ``order``: indices of groups; of gathers one per chain); ``notes``.
    """
    config = view.runtime.config
    return {
        'schema_version': SCHEMA_VERSION,
        'model': view.model,
        'config': {'source': config.source, 'hash': view.runtime.hash, 'short': config.short_str()},
        'job': _job(view.job),
        'ddp': _ddp(view.ddp)
        | {
            'param_dtype': short_dtype(view.param_dtype),
            'bucket_size_elems': view.bucket_size.elems,
            'bucket_size_reason': view.bucket_size.reason,
        },
        'totals': {
            'num_params': view.num_params,
            'params_elems': view.numel_params_elems,
            'numel_elems': view.numel_elems,
            'padding_elems': view.numel_elems - view.numel_params_elems,
            'num_buffers': len(view.buffers),
            'num_buckets': sum(len(buffer.layout.buckets) for buffer in view.buffers),
            'num_groups': len(view.groups),
            'grad_bytes': sum(_bytes(b, b.layout.numel_elems)['grad_bytes'] for b in view.buffers),
        },
        'buffers': [_buffer(view, buffer, with_params) for buffer in view.buffers],
        'groups': [
            {
                'index': group.index,
                'is_expert_parallel': group.is_expert_parallel,
                'buckets': [{'buffer': ref.buffer, 'bucket': ref.bucket} for ref in group.buckets],
                'numel_elems': sum(
                    view.buffers[ref.buffer].layout.buckets[ref.bucket].numel_elems
                    for ref in group.buckets
                ),
                'ready_at': group.ready_at,
                'dispatch_position': group.dispatch_position,
                'gather_position': group.gather_position,
            }
            for group in view.groups
        ],
        'dispatch': {'strategy': view.dispatch, 'order': view.dispatch_order},
        'gather': {
            'strategy': view.gather,
            'order': {'dense': view.gather_order(False), 'expert': view.gather_order(True)},
        },
        'notes': list(view.notes),
    }


def _job(job: Job) -> dict[str, Any]:
    return {**job.sizes(), 'pp_rank': job.pp_rank, 'chunk': job.chunk}


def _ddp(ddp: DdpOptions) -> dict[str, Any]:
    return {
        'use_distributed_optimizer': ddp.use_distributed_optimizer,
        'overlap': ddp.overlap,
        'grad_reduce_in_fp32': ddp.grad_reduce_in_fp32,
        'pad_buckets_for_high_nccl_busbw': ddp.pad_buckets_for_high_nccl_busbw,
    }


def _bytes(buffer: BufferView, numel_elems: int) -> dict[str, int]:
    return {
        'grad_bytes': numel_elems * buffer.key.grad_dtype.itemsize,
        'param_bytes': numel_elems * buffer.key.param_dtype.itemsize,
    }


def _buffer(view: LayoutView, buffer: BufferView, with_params: bool) -> dict[str, Any]:
    layout = buffer.layout
    return {
        'index': buffer.index,
        'label': buffer.label,
        'param_dtype': short_dtype(buffer.key.param_dtype),
        'grad_dtype': short_dtype(buffer.key.grad_dtype),
        'is_expert_parallel': buffer.key.is_expert_parallel,
        'num_params': len(buffer.params),
        'num_ranks': buffer.num_ranks,
        'num_shards': buffer.num_shards,
        'numel_elems': layout.numel_elems,
        'params_elems': layout.numel_params_elems,
        'padding_elems': layout.padding_elems,
        'shard_elems': layout.numel_elems // buffer.num_shards,
        'param_start_elems': layout.alignment.param_start_elems,
        'bucket_end_elems': layout.alignment.bucket_end_elems,
        'fingerprint': layout.fingerprint(),
        **_bytes(buffer, layout.numel_elems),
        'buckets': [
            _bucket(view, buffer, index, with_params) for index in range(len(layout.buckets))
        ],
    }


def _bucket(view: LayoutView, buffer: BufferView, index: int, with_params: bool) -> dict[str, Any]:
    span, slots = buffer.layout.buckets[index], buffer.slots_by_bucket[index]
    padding = buffer.bucket_padding_elems(index)
    group = view.group_of(buffer.index, index)
    result: dict[str, Any] = {
        'index': index,
        'group': group.index,
        'dispatch_position': group.dispatch_position,
        'gather_position': group.gather_position,
        'start_elems': span.start_elems,
        'end_elems': span.end_elems,
        'numel_elems': span.numel_elems,
        'numel_unpadded_elems': span.numel_unpadded,
        'params_elems': span.numel_elems - padding,
        'padding_elems': padding,
        'shard_elems': span.numel_elems // buffer.num_shards,
        **_bytes(buffer, span.numel_elems),
        'num_params': len(slots),
        'first_param': buffer.params[slots[0].param].name,
        'last_param': buffer.params[slots[-1].param].name,
    }
    if with_params:
        result['params'] = [
            {
                'name': param.name,
                'shape': None if param.shape is None else list(param.shape),
                'numel_elems': param.numel_elems,
                'start_elems': slot.start_elems,
                'end_elems': slot.end_elems,
                'forward_index': buffer.forward[slot.param],
                'shared_embedding': param.shared_embedding,
            }
            for slot in slots
            for param in [buffer.params[slot.param]]
        ]
    return result

"""Lays out the parameters of one model chunk and groups their buckets.

Stands for what ``DistributedDataParallel.__init__``
(``megatron/core/distributed/distributed_data_parallel.py``) does before it allocates anything: grouping,
layout, ``partition_buckets`` and the chain of gathers. Every decision is taken by the strategies and the
functions of :mod:`megatron_buffer.layout` that the runtime calls too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_buffer.bucket_size import BucketSize, default_bucket_size, resolve_bucket_size
from megatron_buffer.config import AXES
from megatron_buffer.config_layout import ForwardOrder as ForwardOrderParams
from megatron_buffer.errors import ConfigError
from megatron_buffer.layout import compute_buffer_layout, layout_order
from megatron_buffer.planner.job import DdpOptions, Job
from megatron_buffer.planner.params import PlannedParam
from megatron_buffer.planner.view import BufferView, GroupView, LayoutView
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.bucket_groups import BucketRef, BufferBuckets
from megatron_buffer.strategies.dispatch import InOrderDispatcher
from megatron_buffer.strategies.grouping import GroupKey
from megatron_buffer.strategies.names import matches, outermost_module
from megatron_buffer.strategies.order import ForwardOrder
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec

_AS_LISTED = ForwardOrder(ForwardOrderParams())


def collect(
    params: Sequence[PlannedParam],
    *,
    model: str,
    runtime: Runtime,
    job: Job,
    ddp: DdpOptions,
    param_dtype: torch.dtype,
    num_params_elems_of_rank: int | None = None,
    notes: Sequence[str] = (),
) -> LayoutView:
    """Lays out the parameters of one model chunk.

    Args:
        params: Trainable parameters of the chunk in registration order.
        model: What to call the model.
        runtime: The config, with its strategies.
        job: Parallel sizes and the place of the chunk.
        ddp: What ``ddp_config`` says.
        param_dtype: Dtype that the parameters were asked for in.
        num_params_elems_of_rank: Elements of all chunks of the rank, for ``num_buckets``; None: of this one.
        notes: Remarks to carry along.

    Raises:
        ConfigError: If the config and ``ddp`` contradict each other.
        LayoutError: If the strategies make a layout that Megatron-Core could not use.
    """
    _check_padding(runtime, ddp)
    total = sum(param.numel_elems for param in params)
    bucket_size = _bucket_size(runtime, job, ddp, num_params_elems_of_rank or total)
    buffers = tuple(_lay_out(params, runtime, job, ddp, bucket_size.elems))
    grouped = _partition(buffers, runtime, job, ddp)
    ready_at = [
        min(buffers[ref.buffer].ready_at(ref.bucket) for ref in refs) for _, refs in grouped
    ]
    reduced, dispatch = _dispatch_order(runtime, ddp, ready_at)
    reduced_at = {group: position for position, group in enumerate(reduced)}
    gathered, gather = _gather_order(buffers, grouped, runtime, job, ddp)
    groups = tuple(
        GroupView(
            index=index,
            is_expert_parallel=is_expert,
            buckets=tuple(refs),
            ready_at=ready_at[index],
            dispatch_position=reduced_at[index],
            gather_position=gathered.get(index),
        )
        for index, (is_expert, refs) in enumerate(grouped)
    )
    return LayoutView(
        model=model,
        runtime=runtime,
        job=job,
        ddp=ddp,
        param_dtype=param_dtype,
        bucket_size=bucket_size,
        buffers=buffers,
        groups=groups,
        dispatch=dispatch,
        gather=gather,
        notes=(*notes, *_unmatched_patterns(runtime, params)),
    )


def _bucket_size(runtime: Runtime, job: Job, ddp: DdpOptions, total_elems: int) -> BucketSize:
    """What a run under megatron.training resolves to, and why."""
    configured = getattr(runtime.config.bucketing, 'bucket_size_elems', None)
    requested = ddp.bucket_size
    if ddp.num_buckets is not None:
        requested = total_elems // ddp.num_buckets
    if configured is not None and requested is not None and configured != requested:
        option = '--bucket-size' if ddp.num_buckets is None else '--num-buckets'
        raise ConfigError(
            f'bucketing.bucket_size_elems is {configured} in {runtime.config.source}, and {option} asks '
            f'for {requested} elements; set one of them',
            yaml_path='bucketing.bucket_size_elems',
            source=runtime.config.source,
        )
    # megatron.training takes its default from dp x cp, a bare DDP from dp alone.
    default = default_bucket_size(job.dp_cp_size)
    return resolve_bucket_size(
        configured_elems=configured,
        ddp_bucket_size_elems=default if requested is None else requested,
        num_buckets=ddp.num_buckets,
        overlap_grad_reduce=ddp.overlap,
        disable_bucketing=job.chunk > 0,
        pp_rank=job.pp_rank,
        dp_size=job.dp,
        dp_cp_size=job.dp_cp_size,
    )


def _check_padding(runtime: Runtime, ddp: DdpOptions) -> None:
    configured = getattr(runtime.config.padding, 'high_busbw', None)
    if configured is False and ddp.pad_buckets_for_high_nccl_busbw:
        raise ConfigError(
            f'padding.high_busbw is false in {runtime.config.source}, and --high-busbw is given; leave '
            'one of them out',
            yaml_path='padding.high_busbw',
            source=runtime.config.source,
        )


def _lay_out(
    params: Sequence[PlannedParam],
    runtime: Runtime,
    job: Job,
    ddp: DdpOptions,
    bucket_size_elems: int | None,
) -> Iterator[BufferView]:
    """The buffers, dense ones first. Upstream: ``group_params_for_buffers`` and the layout functions."""
    members: dict[GroupKey, list[int]] = {}
    for index, param in enumerate(params):
        key = runtime.buffer_grouping.key(param.traits, ddp.grad_reduce_in_fp32)
        members.setdefault(key, []).append(index)
    high_busbw = ddp.pad_buckets_for_high_nccl_busbw
    for place, (key, registered) in enumerate(
        sorted(members.items(), key=lambda item: item[0].is_expert_parallel)
    ):
        num_ranks = job.num_shards(key.is_expert_parallel)
        traits = BufferTraits(
            dp_size=num_ranks,
            high_busbw=high_busbw,
            param_bytes=key.param_dtype.itemsize,
            grad_bytes=key.grad_dtype.itemsize,
            pp_rank=job.pp_rank,
            vp_stage=job.chunk,
            values_per_byte=ddp.values_per_byte if key.param_dtype == torch.uint8 else 1,
        )
        # An order does not know the number of shards: the runtime orders before it has one.
        order = layout_order(
            [_spec(params[i]) for i in registered],
            runtime.layout.param_order,
            traits._replace(dp_size=1, high_busbw=False),
        )
        forward = tuple(registered[i] for i in order)
        specs = [_spec(params[i]) for i in forward]
        layout = compute_buffer_layout(
            specs,
            dataclasses.replace(runtime.layout, param_order=_AS_LISTED),
            bucket_size_elems=bucket_size_elems,
            dist_opt=ddp.use_distributed_optimizer,
            buffer=traits,
        )
        layout.check(specs, isolate=ddp.use_distributed_optimizer)
        yield BufferView(
            index=place,
            key=key,
            params=tuple(params[i] for i in forward),
            forward=forward,
            layout=layout,
            num_ranks=num_ranks,
        )


def _spec(param: PlannedParam) -> ParamSpec:
    return ParamSpec(
        numel_elems=param.numel_elems,
        name=param.name,
        shared_embedding=param.shared_embedding,
        pipeline_synced=param.pipeline_synced,
    )


def _partition(
    buffers: Sequence[BufferView], runtime: Runtime, job: Job, ddp: DdpOptions
) -> list[tuple[bool, list[BucketRef]]]:
    """The groups of the dense buffers, then those of the expert ones. Upstream: ``partition_buckets``."""
    choice = runtime.grad_reduce.choice(
        dist_opt=ddp.use_distributed_optimizer, fp32_accumulation=False
    )
    one_bucket_per_group = choice.kind == 'a2a'
    result: list[tuple[bool, list[BucketRef]]] = []
    for is_expert in (False, True):
        part = [buffer for buffer in buffers if buffer.key.is_expert_parallel == is_expert]
        if not part:
            continue
        groups = runtime.bucket_groups.partition(
            [
                BufferBuckets(
                    is_fp8=buffer.key.param_dtype == torch.uint8,
                    ready_at=[buffer.ready_at(i) for i in range(len(buffer.layout.buckets))],
                    is_layer_wise=buffer.key.is_managed_by_layer_wise_optimizer,
                )
                for buffer in part
            ],
            single_group=job.chunk > 0 and not one_bucket_per_group,
            one_bucket_per_group=one_bucket_per_group,
        )
        result += [
            (is_expert, [BucketRef(part[ref.buffer].index, ref.bucket) for ref in refs])
            for refs in groups
        ]
    return result


@dataclasses.dataclass
class _Group:
    """What the dispatch strategies order."""

    index: int
    grad_reduce_dispatched: bool = False

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Nothing is reduced here."""


def _dispatch_order(
    runtime: Runtime, ddp: DdpOptions, ready_at: Sequence[int]
) -> tuple[list[int], str]:
    """The order of the reductions, and a sentence about it."""
    name = runtime.config.dispatch_order.name
    groups = [_Group(index) for index in range(len(ready_at))]
    holding: Sequence[Any] = runtime.dispatch_order.dispatcher(groups, ready_at).holding
    as_listed = list(range(len(groups)))
    if not ddp.overlap:
        return as_listed, 'all when backward has ended (no overlap)'
    order = [group.index for group in holding]
    order += [index for index in as_listed if index not in set(order)]
    if runtime.config.readiness.name == 'deferred':
        return order, 'all when backward has ended (readiness: deferred)'
    if holding:
        return (order, f'the same order on every rank ({name})')
    expected = InOrderDispatcher(groups, ready_at, None).sequence
    text = f'the expected order; each rank follows its own backward ({name})'
    return [group.index for group in expected if isinstance(group, _Group)], text


def _gather_order(
    buffers: Sequence[BufferView],
    grouped: Sequence[tuple[bool, Sequence[BucketRef]]],
    runtime: Runtime,
    job: Job,
    ddp: DdpOptions,
) -> tuple[dict[int, int], str]:
    """Position of each group in its chain, and a sentence about it."""
    if not ddp.use_distributed_optimizer:
        return {}, 'none: every rank has all parameters (no distributed optimizer)'
    find_order = getattr(runtime.layout.param_order, 'gather_order', None)
    positions: dict[int, int] = {}
    text = 'each starts the next'
    for is_expert in (False, True):
        chain = [i for i, (kind, _) in enumerate(grouped) if kind == is_expert]
        order: list[int] | None = None
        if ddp.overlap and chain and find_order is not None:
            names = [_names(buffers, grouped[i][1]) for i in chain]
            order = find_order(names, job.pp_rank, job.chunk)
            if order is not None:
                text = 'each starts the next, as recorded'
        if order is None:
            order = list(range(len(chain)))[:: -1 if ddp.overlap else 1]
        positions |= {chain[index]: position for position, index in enumerate(order)}
    if not ddp.overlap:
        text = 'all after the optimizer step (no overlap)'
    elif any(is_expert for is_expert, _ in grouped):
        text += '; expert groups apart'
    return positions, text


def _names(buffers: Sequence[BufferView], refs: Sequence[BucketRef]) -> list[str]:
    return [
        buffers[ref.buffer].params[slot.param].name
        for ref in refs
        for slot in buffers[ref.buffer].slots_by_bucket[ref.bucket]
    ]


def _unmatched_patterns(runtime: Runtime, params: Sequence[PlannedParam]) -> Iterator[str]:
    """Patterns of the config that match no parameter here."""
    for axis in AXES:
        strategy = getattr(runtime.layout, axis, None) or getattr(runtime, axis)
        find_patterns: Any = getattr(strategy, 'patterns', None)
        for path, pattern in () if find_patterns is None else find_patterns():
            of_modules = (axis, path) == ('bucketing', 'pattern')
            if not any(
                outermost_module(p.name, pattern) if of_modules else matches(p.name, pattern)
                for p in params
            ):
                what = 'module' if of_modules else 'parameter'
                yield f'{axis}.{path}: {pattern!r} matches no {what} of this model chunk'

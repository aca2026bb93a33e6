"""Layout of real parameters: from ``torch.nn.Parameter`` to specs, and back to upstream's dataclasses.

Stands for ``group_params_for_buffers`` and ``_compute_default_per_buffer_param_layout``
(``megatron/core/distributed/param_and_grad_buffer.py``) and
``DistributedOptimizer._compute_per_buffer_param_layout`` (``megatron/core/optimizer/distrib_optimizer.py``).
The decisions are in :mod:`megatron_buffer.layout` and the strategies.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.param_layout import BufferKey, PerBufferParamLayout

from megatron_buffer import runtime as runtime_module
from megatron_buffer.config_layout import ReverseOrder as ReverseOrderParams
from megatron_buffer.layout import ParamSpec, compute_buffer_layout, layout_order
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.grouping import ParamTraits
from megatron_buffer.strategies.order import ReverseOrder
from megatron_buffer.strategies.specs import BufferTraits

_pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')
_HAS_NUM_OPTIMIZER_SHARDS = 'num_optimizer_shards' in {
    field.name for field in dataclasses.fields(PerBufferParamLayout)
}
# The list handed to upstream is permuted already; upstream walks it backwards.
_AS_LISTED = ReverseOrder(ReverseOrderParams())


def uses_quantized_storage(param: torch.nn.Parameter) -> bool:
    """True when the parameter owns Transformer Engine's quantized bytes."""
    upstream = getattr(_pgb, '_param_uses_quantized_storage', None)
    if upstream is not None:
        return upstream(param)
    return _pgb.is_float8tensor(param) or _pgb.is_nvfp4tensor(param)


def is_packed(param: torch.nn.Parameter) -> bool:
    """True for NVFP4 parameters, two of whose values share a byte; grouped ones (from core_v0.19 on) too."""
    is_grouped = getattr(_pgb, 'is_grouped_nvfp4tensor', lambda param: False)
    return _pgb.is_nvfp4tensor(param) or is_grouped(param)


def has_own_address(param: torch.nn.Parameter) -> bool:
    """False for Transformer Engine's tensors: quantized ones, and grouped ones, are wrappers of others.

    0.18 has no name for grouped tensors; what all wrappers have in common is a storage without an address.
    """
    data = param.data
    if type(data) is torch.Tensor and data.layout is torch.strided:
        return True  # most parameters; the other questions take longer
    if uses_quantized_storage(param):
        return False
    try:
        param.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def group_params_for_buffers(
    params: Sequence[torch.nn.Parameter], grad_reduce_in_fp32: bool
) -> dict[BufferKey, tuple[list[torch.nn.Parameter], list[int]]]:
    """Groups parameters into buffers, each group in the order that the config asks for.

    Upstream: ``param_and_grad_buffer.py: group_params_for_buffers``.

    Args:
        params: Trainable parameters in registration order.
        grad_reduce_in_fp32: ``ddp_config.grad_reduce_in_fp32``.

    Returns:
        Per key the parameters and, in the same order, each one's index among those of the same logical
        dtype (needed to load high-precision checkpoints into fp8 parameters).
    """
    known = runtime_module.current_chunk().grouped
    if known is None:
        return _group(params, grad_reduce_in_fp32)
    question = (grad_reduce_in_fp32, *map(id, params))
    if question not in known:
        known[question] = _group(params, grad_reduce_in_fp32)
    return {
        key: (list(members), list(indices)) for key, (members, indices) in known[question].items()
    }


def _group(
    params: Sequence[torch.nn.Parameter], grad_reduce_in_fp32: bool
) -> dict[BufferKey, tuple[list[torch.nn.Parameter], list[int]]]:
    runtime = runtime_module.current()
    grouped: dict[BufferKey, list[tuple[torch.nn.Parameter, int]]] = {}
    next_index: dict[BufferKey, int] = {}
    for position, param in enumerate(params):
        if not param.requires_grad:
            raise ValueError(
                f'group_params_for_buffers: parameter {position} of shape {tuple(param.shape)} does '
                'not require a gradient; hand over trainable parameters only'
            )
        key = _key_of(param, runtime, grad_reduce_in_fp32)
        logical = key
        if key.param_dtype != param.dtype:
            logical = dataclasses.replace(key, param_dtype=param.dtype)
        index = next_index.get(logical, 0)
        next_index[logical] = index + 1
        grouped.setdefault(key, []).append((param, index))
    result: dict[BufferKey, tuple[list[torch.nn.Parameter], list[int]]] = {}
    for key, members in grouped.items():
        traits = _traits_of(key, dp_size=1, high_busbw=False)
        specs = specs_of([param for param, _ in members])
        order = layout_order(specs, runtime.layout.param_order, traits)[::-1]
        result[key] = ([members[i][0] for i in order], [members[i][1] for i in order])
    return result


def specs_of(params: Sequence[torch.nn.Parameter]) -> list[ParamSpec]:
    """Specs of ``params``, in their order; with names while a model is being wrapped."""
    names = runtime_module.current_chunk().names
    return [
        ParamSpec(
            numel_elems=param.data.nelement(),
            name=names.get(param, ''),
            shared_embedding=getattr(param, 'shared_embedding', False),
            pipeline_synced=is_pipeline_synced(param),
        )
        for param in params
    ]


def is_pipeline_synced(param: torch.nn.Parameter) -> bool:
    """True for the marks of conditional embedders and flextron routers.

    Upstream: ``finalize_model_grads.py: _allreduce_conditional_embedding_grads, _allreduce_router_grads``,
    which sum the whole main_grad over pipeline stages after each stage has sharded it in its own way.
    """
    return getattr(param, 'pipeline_parallel', False) or getattr(
        param, 'flextron_router_pp_sync', False
    )


def _key_of(param: torch.nn.Parameter, runtime: Runtime, grad_reduce_in_fp32: bool) -> BufferKey:
    traits = ParamTraits(
        name=runtime_module.current_chunk().names.get(param, ''),
        dtype=param.dtype,
        has_quantized_storage=uses_quantized_storage(param),
        is_expert_parallel=not getattr(param, 'allreduce', True),
        is_managed_by_layer_wise_optimizer=getattr(
            param, 'is_managed_by_layer_wise_optimizer', False
        ),
        shared_embedding=getattr(param, 'shared_embedding', False),
    )
    return BufferKey(*runtime.buffer_grouping.key(traits, grad_reduce_in_fp32))


def _traits_of(key: BufferKey, *, dp_size: int, high_busbw: bool) -> BufferTraits:
    chunk = runtime_module.current_chunk()
    return BufferTraits(
        dp_size=dp_size,
        high_busbw=high_busbw,
        param_bytes=key.param_dtype.itemsize,
        grad_bytes=key.grad_dtype.itemsize,
        pp_rank=chunk.pp_rank,
        vp_stage=chunk.vp_stage,
    )


def compute_per_buffer_param_layout(
    params: Sequence[torch.nn.Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config: Any,
    param_indices: list[int] | None = None,
) -> PerBufferParamLayout:
    """Layout of one buffer under the distributed optimizer.

    Upstream: ``distrib_optimizer.py: DistributedOptimizer._compute_per_buffer_param_layout``.

    Args:
        params: As :func:`group_params_for_buffers` ordered them.
        bucket_size: Resolved size in elements, or None for one bucket.
        data_parallel_world_size: Ranks that each bucket is sharded over.
        ddp_config: Supplies ``pad_buckets_for_high_nccl_busbw`` and ``grad_reduce_in_fp32``.
        param_indices: Passed on with the layout.

    Returns:
        Upstream's dataclass.
    """
    runtime = runtime_module.current()
    traits = BufferTraits(dp_size=data_parallel_world_size)
    if params:
        traits = _traits_of(
            _key_of(params[0], runtime, ddp_config.grad_reduce_in_fp32),
            dp_size=data_parallel_world_size,
            high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
        )._replace(values_per_byte=2 if any(map(is_packed, params)) else 1)
    layout = _convert(params, runtime, bucket_size, dist_opt=True, buffer=traits)
    layout.param_indices = param_indices if param_indices is not None else []
    if _HAS_NUM_OPTIMIZER_SHARDS:
        layout.num_optimizer_shards = data_parallel_world_size
    return layout


def compute_default_per_buffer_param_layout(
    params: Sequence[torch.nn.Parameter], bucket_size: int | None
) -> PerBufferParamLayout:
    """Layout of one buffer without the distributed optimizer: nothing is padded.

    Upstream: ``param_and_grad_buffer.py: _compute_default_per_buffer_param_layout``.
    """
    runtime = runtime_module.current()
    return _convert(params, runtime, bucket_size, dist_opt=False, buffer=BufferTraits())


def _convert(
    params: Sequence[torch.nn.Parameter],
    runtime: Runtime,
    bucket_size_elems: int | None,
    *,
    dist_opt: bool,
    buffer: BufferTraits,
) -> PerBufferParamLayout:
    specs = specs_of(params)
    layout = compute_buffer_layout(
        specs,
        dataclasses.replace(runtime.layout, param_order=_AS_LISTED),
        bucket_size_elems=bucket_size_elems,
        dist_opt=dist_opt,
        buffer=buffer,
    )
    layout.check(specs, isolate=dist_opt)
    return PerBufferParamLayout(
        param_index_map={
            params[slot.param]: (slot.start_elems, slot.end_elems, slot.bucket)
            for slot in layout.slots
        },
        bucket_indices=[(span.start_elems, span.end_elems) for span in layout.buckets],
        per_bucket_numel_unpadded=[span.numel_unpadded for span in layout.buckets],
    )

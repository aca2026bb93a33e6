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
from megatron_buffer.layout import ParamSpec, compute_buffer_layout
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.grouping import ParamTraits
from megatron_buffer.strategies.order import ReverseOrder

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
    runtime = runtime_module.current()
    grouped: dict[BufferKey, list[tuple[torch.nn.Parameter, int]]] = {}
    next_index: dict[tuple[Any, ...], int] = {}
    for position, param in enumerate(params):
        if not param.requires_grad:
            raise ValueError(
                f'group_params_for_buffers: parameter {position} of shape {tuple(param.shape)} does '
                'not require a gradient; hand over trainable parameters only'
            )
        traits = ParamTraits(
            name='',
            dtype=param.dtype,
            has_quantized_storage=uses_quantized_storage(param),
            is_expert_parallel=not getattr(param, 'allreduce', True),
            is_managed_by_layer_wise_optimizer=getattr(
                param, 'is_managed_by_layer_wise_optimizer', False
            ),
        )
        key = BufferKey(*runtime.buffer_grouping.key(traits, grad_reduce_in_fp32))
        logical = (param.dtype, key.grad_dtype, *traits[3:])
        index = next_index.get(logical, 0)
        next_index[logical] = index + 1
        grouped.setdefault(key, []).append((param, index))
    result: dict[BufferKey, tuple[list[torch.nn.Parameter], list[int]]] = {}
    for key, members in grouped.items():
        order = list(runtime.layout.param_order.layout_order([''] * len(members)))[::-1]
        result[key] = ([members[i][0] for i in order], [members[i][1] for i in order])
    return result


def specs_of(params: Sequence[torch.nn.Parameter]) -> list[ParamSpec]:
    """Specs of ``params``, in their order."""
    return [
        ParamSpec(
            numel_elems=param.data.nelement(),
            shared_embedding=getattr(param, 'shared_embedding', False),
        )
        for param in params
    ]


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
        ddp_config: Supplies ``pad_buckets_for_high_nccl_busbw``.
        param_indices: Passed on with the layout.

    Returns:
        Upstream's dataclass.
    """
    layout = _convert(
        params,
        runtime_module.current(),
        bucket_size_elems=bucket_size,
        dp_size=data_parallel_world_size,
        dist_opt=True,
        high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
    )
    layout.param_indices = param_indices if param_indices is not None else []
    if _HAS_NUM_OPTIMIZER_SHARDS:
        layout.num_optimizer_shards = data_parallel_world_size
    return layout


def compute_default_per_buffer_param_layout(
    params: Sequence[torch.nn.Parameter], bucket_size: int | None
) -> PerBufferParamLayout:
    """Layout of one buffer without the distributed optimizer: nothing is padded or isolated.

    Upstream: ``param_and_grad_buffer.py: _compute_default_per_buffer_param_layout``.
    """
    return _convert(
        params,
        runtime_module.current(),
        bucket_size_elems=bucket_size,
        dp_size=1,
        dist_opt=False,
        high_busbw=False,
    )


def _convert(
    params: Sequence[torch.nn.Parameter], runtime: Runtime, **how: Any
) -> PerBufferParamLayout:
    specs = specs_of(params)
    strategies = dataclasses.replace(runtime.layout, param_order=_AS_LISTED)
    layout = compute_buffer_layout(specs, strategies, **how)
    layout.check(specs)
    return PerBufferParamLayout(
        param_index_map={
            params[slot.param]: (slot.start_elems, slot.end_elems, slot.bucket)
            for slot in layout.slots
        },
        bucket_indices=[(span.start_elems, span.end_elems) for span in layout.buckets],
        per_bucket_numel_unpadded=[span.numel_unpadded for span in layout.buckets],
    )

"""``buffer_grouping``: which parameters share one contiguous buffer.

Stands for the key built in ``megatron/core/distributed/param_and_grad_buffer.py``:
``group_params_for_buffers`` (core_v0.18.2, core_v0.19.0).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from megatron_buffer.config_layout import UpstreamGrouping as UpstreamGroupingParams
from megatron_buffer.strategies.registry import strategy


class ParamTraits(NamedTuple):
    """What grouping may look at.

    Attributes:
        name: Name in the wrapped module; '' where upstream hands over bare parameters.
        dtype: Logical dtype: the high-precision one for an fp8 or fp4 parameter.
        has_quantized_storage: True when the storage is Transformer Engine's quantized bytes.
        is_expert_parallel: True when the gradient is reduced over the expert data-parallel group.
        is_managed_by_layer_wise_optimizer: True when LayerWise (Muon) owns the parameter.
    """

    name: str
    dtype: torch.dtype
    has_quantized_storage: bool
    is_expert_parallel: bool
    is_managed_by_layer_wise_optimizer: bool


class GroupKey(NamedTuple):
    """Field for field upstream's ``BufferKey``: one buffer per distinct key."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert_parallel: bool
    is_managed_by_layer_wise_optimizer: bool


class BufferGrouping(Protocol):
    """Maps a parameter to the key of its buffer."""

    def key(self, param: ParamTraits, grad_reduce_in_fp32: bool) -> GroupKey:
        """Returns the key; parameters with equal keys share a buffer, in registration order."""
        ...


@strategy('buffer_grouping', UpstreamGroupingParams)
class UpstreamGrouping:
    """By storage dtype, gradient dtype, expert parallelism and LayerWise ownership."""

    def __init__(self, params: UpstreamGroupingParams) -> None:
        self.params = params

    def key(self, param: ParamTraits, grad_reduce_in_fp32: bool) -> GroupKey:
        """Storage bytes are uint8 for quantized parameters; gradients fp32 if asked for."""
        return GroupKey(
            param_dtype=torch.uint8 if param.has_quantized_storage else param.dtype,
            grad_dtype=torch.float32 if grad_reduce_in_fp32 else param.dtype,
            is_expert_parallel=param.is_expert_parallel,
            is_managed_by_layer_wise_optimizer=param.is_managed_by_layer_wise_optimizer,
        )

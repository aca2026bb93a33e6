"""``buffer_grouping``: which parameters share one contiguous buffer.

Stands for the key built in ``megatron/core/distributed/param_and_grad_buffer.py``:
``group_params_for_buffers`` (core_v0.18.2, core_v0.19.0).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from megatron_buffer.config_layout import GradDtypeRules as GradDtypeRulesParams
from megatron_buffer.config_layout import UpstreamGrouping as UpstreamGroupingParams
from megatron_buffer.strategies.names import matches
from megatron_buffer.strategies.registry import strategy

_TIED_NAMES = ('embedding.word_embeddings.weight', 'output_layer.weight')
_DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


class ParamTraits(NamedTuple):
    """What grouping may look at.

    Attributes:
        name: Name in the wrapped module; '' where it is not known.
        dtype: Logical dtype: the high-precision one for an fp8 or fp4 parameter.
        has_quantized_storage: True when the storage is Transformer Engine's quantized bytes.
        is_expert_parallel: True when the gradient is reduced over the expert data-parallel group.
        is_managed_by_layer_wise_optimizer: True when LayerWise (Muon) owns the parameter.
        shared_embedding: Megatron's mark on embeddings tied across pipeline stages.
    """

    name: str
    dtype: torch.dtype
    has_quantized_storage: bool
    is_expert_parallel: bool
    is_managed_by_layer_wise_optimizer: bool
    shared_embedding: bool = False


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
        return _upstream_key(param, grad_reduce_in_fp32)


@strategy('buffer_grouping', GradDtypeRulesParams)
class GradDtypeRules:
    """As upstream, but names decide about gradient dtypes first.

    ``ddp_config.grad_reduce_in_fp32`` goes on to decide for parameters without a rule. A parameter's
    gradients are accumulated, reduced and sharded in its rule's dtype; the distributed optimizer keeps
    a buffer's state under (storage dtype, gradient dtype), so a checkpoint needs the same rules.

    An embedding tied across pipeline stages has one name on the first and another one on the last, and
    both stages add up their gradients: a rule that matches either name holds for both.
    """

    needs_names = True

    def __init__(self, params: GradDtypeRulesParams) -> None:
        self.params = params

    def patterns(self) -> list[tuple[str, str]]:
        """YAML path inside the axis and pattern, for each rule."""
        return [(f'rules[{i}].pattern', rule.pattern) for i, rule in enumerate(self.params.rules)]

    def key(self, param: ParamTraits, grad_reduce_in_fp32: bool) -> GroupKey:
        """Upstream's key with the gradient dtype of the first rule that matches."""
        key = _upstream_key(param, grad_reduce_in_fp32)
        names = _names_of(param)
        for rule in self.params.rules:
            if any(matches(name, rule.pattern) for name in names):
                return key._replace(grad_dtype=_DTYPES[rule.grad_dtype])
        return key


def _names_of(param: ParamTraits) -> list[str]:
    """The parameter's name; of a tied embedding also the one that it has on the other stage."""
    names = [param.name]
    if param.shared_embedding:
        for mine, other in (_TIED_NAMES, _TIED_NAMES[::-1]):
            if param.name.endswith(mine):
                names.append(param.name.removesuffix(mine) + other)
    return names


def _upstream_key(param: ParamTraits, grad_reduce_in_fp32: bool) -> GroupKey:
    return GroupKey(
        param_dtype=torch.uint8 if param.has_quantized_storage else param.dtype,
        grad_dtype=torch.float32 if grad_reduce_in_fp32 else param.dtype,
        is_expert_parallel=param.is_expert_parallel,
        is_managed_by_layer_wise_optimizer=param.is_managed_by_layer_wise_optimizer,
    )

"""A model whose matrices are stored quantized, in Transformer Engine's own tensor classes; and its data.

Each layer has an fp32 gain, a quantized matrix and a bf16 bias: three buffers. Forward dequantizes; the
gradient arrives at the quantized parameter, as in TE's modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import MethodType
from typing import Any

import torch

RECIPES = ('tensorwise', 'delayed', 'blockwise', 'mxfp8', 'nvfp4')
BATCH = 4


@dataclass(frozen=True, kw_only=True)
class QuantCase:
    """What a run is made of.

    Attributes:
        recipe: How matrices are stored; one of `RECIPES`, or 'bf16' for none of it.
        reuse: reuse_grad_buf_for_mxfp8_param_ag.
        overlap: overlap_grad_reduce and overlap_param_gather.
        widths: Number of features before, between and after the layers.
        experts: Which layers' parameters are reduced over the expert data-parallel group.
        chunks: The layers are dealt out to so many model chunks, each wrapped by itself.
        plain: Which layers' matrices stay bf16.
        bucket_size: In elements; None is one bucket.
        fp32_patterns: param_name_patterns_for_fp32_local_accumulation.
        fp32_grads: Gradients that one process alone keeps in fp32: patterns of names, as in grad_dtype_rules.
        grouped: Each layer's matrix is a group of two, stored as one parameter (moe_single_grouped_weight).
        single: Which layer's matrix is stored in another recipe, and in which.
    """

    recipe: str = 'tensorwise'
    reuse: bool = False
    overlap: bool = True
    widths: tuple[int, ...] = (64, 96, 64, 96, 64)
    experts: tuple[int, ...] = ()
    chunks: int = 1
    plain: tuple[int, ...] = ()
    bucket_size: int | None = 7000
    grad_reduce_in_fp32: bool = True
    fp32_patterns: tuple[str, ...] = ()
    fp32_grads: tuple[str, ...] = ()
    grouped: bool = False
    micro_batches: int = 2
    steps: int = 4
    high_busbw: bool = False
    single: tuple[int, str] | None = None

    def __str__(self) -> str:
        """The fields that differ from the default: a name for a test."""
        default = type(self)()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return '-'.join(k if v is True else f'{k}={v}' for k, v in changed.items()) or 'default'


def quantizer(recipe: str) -> Any:
    """What stores the weights of a linear layer in a recipe: by TE's own factories, where it has one."""
    import transformer_engine.pytorch.custom_recipes.quantization_recipes_base as factories
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.quantization import QuantizerRole
    from transformer_engine.pytorch.tensor import Float8Quantizer

    if (
        recipe == 'delayed'
    ):  # its scale comes from a history of amaxes, which is the module's business
        return Float8Quantizer(torch.tensor([64.0]), torch.zeros(1), DType.kFloat8E4M3)
    factory = {
        'tensorwise': factories.current_scaling_quantizer_factory,
        'blockwise': factories.float8_block_scaling_quantizer_factory,
        'mxfp8': factories.mxfp8_quantizer_factory,
        'nvfp4': factories.nvfp4_quantizer_factory,
    }[recipe]
    return factory(QuantizerRole(module_type='linear', tensor_type='weight'))


def quantized_parameter(value: torch.Tensor, recipe: str) -> torch.nn.Parameter:
    """A parameter in quantized storage."""
    return remembering(torch.nn.Parameter(quantizer(recipe)(value)), value)


def remembering(param: torch.nn.Parameter, value: torch.Tensor) -> torch.nn.Parameter:
    """`param`, which tells the optimizer the value it was quantized from, as TE's modules do."""
    param._high_precision_init_val = value.clone()  # type: ignore[attr-defined]

    def get(self: Any) -> torch.Tensor | None:
        return getattr(self, '_high_precision_init_val', None)

    def clear(self: Any) -> None:
        if hasattr(self, '_high_precision_init_val'):
            del self._high_precision_init_val

    param.get_high_precision_init_val = MethodType(get, param)  # type: ignore[attr-defined]
    param.clear_high_precision_init_val = MethodType(clear, param)  # type: ignore[attr-defined]
    return param


class _FromGroup(torch.autograd.Function):
    """The members of a group as one plain tensor; the gradient goes to the group."""

    @staticmethod
    def forward(ctx: Any, group: Any) -> torch.Tensor:
        if group.quantizer is None:
            return group.rowwise_data.detach().view(group.shape).clone()
        return torch.stack([member.dequantize() for member in group.quantized_tensors])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def grouped_parameter(value: torch.Tensor, recipe: str) -> torch.nn.Parameter:
    """Matrices `[members, rows, columns]` in one of TE's grouped tensors."""
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    group = GroupedTensor.make_grouped_tensor_with_shapes(
        len(value),
        [tuple(value.shape[1:])] * len(value),
        quantizer=None if recipe == 'bf16' else quantizer(recipe),
        device=value.device,
        dtype=value.dtype,
    )
    if recipe == 'bf16':
        group.rowwise_data.copy_(value.reshape(-1))
    else:
        group.quantized_tensors = group.split_into_quantized_tensors()
        for member, matrix in zip(group.quantized_tensors, value, strict=True):
            group.quantizer.update_quantized(matrix, member)
    return remembering(torch.nn.Parameter(group), value)


class Layer(torch.nn.Module):
    """``tanh(W (gain * x) + bias)``."""

    def __init__(
        self, inputs: int, outputs: int, recipe: str, seed: int, is_expert: bool, grouped: bool
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        self.gain = torch.nn.Parameter(torch.ones(inputs))
        if grouped:
            self.weight = grouped_parameter(torch.stack([value, -value / 2]).bfloat16(), recipe)
        elif recipe == 'bf16':
            self.weight = torch.nn.Parameter(value.bfloat16())
        else:
            self.weight = quantized_parameter(value.bfloat16(), recipe)
        self.bias = torch.nn.Parameter(torch.zeros(outputs, dtype=torch.bfloat16))
        if is_expert:
            for param in self.parameters():
                param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[batch, outputs]``."""
        weight: Any = self.weight
        if hasattr(weight, 'rowwise_data'):
            weight = _FromGroup.apply(weight).sum(0)
        elif hasattr(weight, 'dequantize') and type(weight) is not torch.nn.Parameter:
            weight = weight.dequantize()
        return torch.tanh(torch.nn.functional.linear((x * self.gain).bfloat16(), weight, self.bias))


def make_chunks(case: QuantCase) -> list[torch.nn.Module]:
    """The model's chunks, each a sequence of layers with the same weights on every rank."""
    pairs = list(pairwise(case.widths))
    layers: list[torch.nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairs):
        recipe = 'bf16' if i in case.plain else case.recipe
        if case.single and case.single[0] == i:
            recipe = case.single[1]
        layers.append(Layer(inputs, outputs, recipe, 100 + i, i in case.experts, case.grouped))
    size = -(-len(layers) // case.chunks)
    return [torch.nn.Sequential(*layers[i : i + size]) for i in range(0, len(layers), size)]


def batch(case: QuantCase, rank: int, step: int, micro_batch: int) -> torch.Tensor:
    """Other data on every rank; ``[batch, features]`` in bf16."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank + 1)
    return torch.randn(BATCH, case.widths[0], generator=generator).bfloat16()


def stored(param: Any) -> dict[str, torch.Tensor]:
    """Copies of all that a parameter consists of; of padded tables of scales the part that is used."""
    if hasattr(param, 'rowwise_data'):  # a group
        if param.quantizer is None:
            return {'data': param.rowwise_data.detach().clone()}
        return {
            f'{i}/{name}': value
            for i, member in enumerate(param.quantized_tensors)
            for name, value in stored(member).items()
        }
    param = param.detach()
    if type(param) in (torch.Tensor, torch.nn.Parameter):
        return {'data': param.clone()}
    parts = {}
    for name in (
        *('_data', '_scale_inv', '_rowwise_data', '_columnwise_data'),
        *('_rowwise_scale_inv', '_columnwise_scale_inv', '_amax_rowwise', '_amax_columnwise'),
    ):
        value = getattr(param, name, None)
        if value is not None:
            if 'wise_scale_inv' in name:
                value = value[tuple(slice(n) for n in _used(param, name))]
            parts[name.removeprefix('_')] = value.detach().clone()
    return parts


def _used(param: Any, name: str) -> tuple[int, int]:
    """Rows and columns of a table of scales that belong to elements."""
    rows, columns = param.shape
    kind = type(param).__name__
    turned = name.startswith('_columnwise')
    if kind == 'MXFP8Tensor':
        return (-(-rows // 32), columns) if turned else (rows, -(-columns // 32))
    if turned:
        rows, columns = columns, rows
    if kind == 'NVFP4Tensor':
        return rows, -(-columns // 16)
    return -(-rows // 128), -(-columns // 128)

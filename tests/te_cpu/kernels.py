"""Reference kernels in pure torch: tensorwise, delayed, blockwise and MXFP8 scaling, and multi-tensor helpers.

Each function stands for the one of the same name in ``transformer_engine_torch``, as far as Megatron's
quantized parameters reach it. How NVIDIA rounds: fp8 casts saturate; a block scale of MXFP8 is a power of
two, rounded up; blockwise scales are powers of two, rounded down, per tile of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.te_cpu import nvfp4

BLOCK, MX_BLOCK = 128, 32
_E5M2 = 8  # DType.kFloat8E5M2


def fp8_format(dtype: Any) -> tuple[torch.dtype, float]:
    """torch's dtype and its largest value, for TE's."""
    return (torch.float8_e5m2, 57344.0) if int(dtype) == _E5M2 else (torch.float8_e4m3fn, 448.0)


def cast(x: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Saturating cast to fp8, as bytes."""
    torch_dtype, largest = fp8_format(dtype)
    return x.float().clamp(-largest, largest).to(torch_dtype).view(torch.uint8)


def scale_of(amax: torch.Tensor, largest: float, pow_2: bool, eps: float) -> torch.Tensor:
    """What values are multiplied by so that ``amax`` becomes ``largest``; 1 where there is nothing."""
    amax = amax.clamp(min=eps) if eps else amax
    usable = (amax > 0) & torch.isfinite(amax)
    # A true division: torch makes `number / tensor` a product with the reciprocal.
    scale = torch.where(usable, torch.full_like(amax, largest) / amax, torch.ones_like(amax))
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if pow_2:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return scale


def tiles(x: torch.Tensor, size: int) -> torch.Tensor:
    """``[rows, columns]`` padded with zeros, as ``[row tiles, size, column tiles, size]``."""
    pad = [-x.shape[1] % size, -x.shape[0] % size]
    padded = torch.nn.functional.pad(x, (0, pad[0], 0, pad[1]))
    return padded.reshape(padded.shape[0] // size, size, padded.shape[1] // size, size)


def spread(per_tile: torch.Tensor, rows: int, columns: int, size: int) -> torch.Tensor:
    """A value per tile, for each element: ``[rows, columns]``."""
    each = per_tile.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return each[:rows, :columns]


def embedded(fragment: torch.Tensor, rows: int, columns: int, start: int) -> torch.Tensor:
    """A zero matrix with ``fragment`` at flat offset ``start``."""
    whole = torch.zeros(rows * columns)
    whole[start : start + fragment.numel()] = fragment.reshape(-1).float()
    return whole.view(rows, columns)


def _e8m0(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Biased exponent of ``amax / largest``, rounded up."""
    bits = (amax.float() * (1.0 / largest)).view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    tiny = (exponent == 0) & (mantissa <= 0x400000)
    return (exponent + ((mantissa > 0) & (exponent != 0xFE) & ~tiny).int()).to(torch.uint8)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """``2 ** -(exponent - 127)``."""
    return torch.ldexp(torch.ones(exponent.shape), 127 - exponent.int())


def _mxfp8(x: torch.Tensor, dtype: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and block exponents, in blocks of 32 along the columns."""
    blocks = x.float().reshape(x.shape[0], -1, MX_BLOCK)
    exponent = _e8m0(blocks.abs().amax(-1), fp8_format(dtype)[1])
    return cast((blocks * _power(exponent)[..., None]).reshape(x.shape), dtype), exponent


def _blockwise(x: torch.Tensor, q: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scales of the tiles, without padding of the latter."""
    amax = tiles(x.float(), BLOCK).abs().amax((1, 3))
    scale = scale_of(amax, fp8_format(q.dtype)[1], q.force_pow_2_scales, q.amax_epsilon)
    return cast(x.float() * spread(scale, *x.shape, BLOCK), q.dtype), 1.0 / scale


def _put(target: torch.Tensor, value: torch.Tensor) -> None:
    """Into the corner of a padded table of scales."""
    target[: value.shape[0], : value.shape[1]] = value


def create_empty_quantized_tensor(
    q: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool = False
) -> Any:
    """A tensor of the quantizer's class, with zeros for data and scales."""
    from transformer_engine.pytorch import tensor as te
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    def zeros(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    common: dict[str, Any] = {'shape': tuple(shape), 'dtype': dtype, 'quantizer': q}
    if isinstance(q, te.Float8Quantizer | te.Float8CurrentScalingQuantizer):
        return te.Float8Tensor(
            data=zeros(shape),
            fp8_scale_inv=torch.ones(1),
            fp8_dtype=q.dtype,
            data_transpose=None,
            device=device,
            **common,
        )
    if isinstance(q, NVFP4Quantizer):
        return nvfp4.create_empty(q, zeros, common)
    is_mx = isinstance(q, te.MXFP8Quantizer)
    if not is_mx and not isinstance(q, te.Float8BlockQuantizer):
        raise NotImplementedError(f'tests/te_cpu: no tensor for {type(q).__name__}')
    scales = torch.uint8 if is_mx else torch.float32
    columns, turned = q.columnwise_usage, shape if is_mx else (shape[-1], *shape[:-1])
    parts = {
        'rowwise_data': zeros(shape),
        'rowwise_scale_inv': zeros(q.get_scale_shape(shape, False), scales),
        'columnwise_data': zeros(turned) if columns else None,
        'columnwise_scale_inv': zeros(q.get_scale_shape(shape, True), scales) if columns else None,
        'fp8_dtype': q.dtype,
    }
    if is_mx:
        return te.MXFP8Tensor(with_gemm_swizzled_scales=False, device=device, **parts, **common)
    return te.Float8BlockwiseQTensor(is_2D_scaled=True, **parts, **common)


@torch.no_grad()
def quantize(src: torch.Tensor, q: Any, dst: Any = None, noop: Any = None) -> Any:
    """Quantizes ``src`` into ``dst``, or into a new tensor."""
    from transformer_engine.pytorch import tensor as te
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    src = src.detach()
    if dst is None:
        dst = create_empty_quantized_tensor(q, src.shape, src.dtype, src.device)
    if isinstance(q, NVFP4Quantizer):
        nvfp4.quantize(src, dst)
    elif isinstance(q, te.Float8Quantizer | te.Float8CurrentScalingQuantizer):
        if isinstance(q, te.Float8Quantizer):
            scale = q.scale.float()
            if q.amax.numel():
                q.amax.copy_(torch.maximum(q.amax, src.float().abs().amax().view_as(q.amax)))
        else:
            amax = src.float().abs().amax().view(1)
            largest = fp8_format(q.dtype)[1]
            scale = scale_of(amax, largest, q.force_pow_2_scales, q.amax_epsilon)
        dst._data.copy_(cast(src.float() * scale, q.dtype).view(dst._data.shape))
        dst._scale_inv.copy_((1.0 / scale).view_as(dst._scale_inv))
    else:
        x = src.reshape(-1, src.shape[-1])
        is_mx = isinstance(q, te.MXFP8Quantizer)
        data, scales = _mxfp8(x, q.dtype) if is_mx else _blockwise(x, q)
        dst._rowwise_data.copy_(data.view(dst._rowwise_data.shape))
        _put(dst._rowwise_scale_inv, scales)
        if dst._columnwise_data is not None:
            if is_mx:
                data, scales = (part.t() for part in _mxfp8(x.t().contiguous(), q.dtype))
            else:
                data, scales = data.t(), scales.t()
            dst._columnwise_data.copy_(data.reshape(dst._columnwise_data.shape))
            _put(dst._columnwise_scale_inv, scales)
    return dst


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    """MXFP8 and NVFP4 only: TE does the others in Python."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.tensor import MXFP8TensorStorage

    if not isinstance(tensor, MXFP8TensorStorage):
        return nvfp4.dequantize(tensor).to(TE_DType_To_Torch[dtype])
    data = tensor._rowwise_data
    x = data.view(fp8_format(tensor._fp8_dtype)[0]).float().reshape(-1, data.shape[-1])
    exponent = tensor._rowwise_scale_inv[: x.shape[0], : x.shape[1] // MX_BLOCK]
    factor = 1.0 / _power(exponent)
    y = x.reshape(x.shape[0], -1, MX_BLOCK) * factor[..., None]
    return y.reshape(data.shape).to(TE_DType_To_Torch[dtype])


def compute_amax(x: torch.Tensor, amax: torch.Tensor) -> None:
    """The largest magnitude."""
    amax.copy_(x.detach().float().abs().amax().view_as(amax))


def fp8_transpose(x: torch.Tensor, dtype: Any, *unused: Any, out: Any = None) -> torch.Tensor:
    """Rows and columns of bytes exchanged."""
    turned = x.reshape(-1, x.shape[-1]).t().contiguous()
    return turned if out is None else out.copy_(turned)


def fp8_block_scaling_compute_partial_amax(
    x: torch.Tensor, amax: torch.Tensor, rows: int, columns: int, start: int, block: int
) -> None:
    """amax of each tile, as far as the fragment ``x`` of the matrix knows it."""
    _put(amax, tiles(embedded(x, rows, columns, start), block).abs().amax((1, 3)))


def fp8_block_scaling_partial_cast(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    rows: int,
    columns: int,
    start: int,
    block: int,
    dtype: Any,
) -> None:
    """Bytes of the fragment ``x`` of the matrix."""
    each = spread(scale, rows, columns, block).reshape(-1)[start : start + x.numel()]
    out.copy_(cast(x.reshape(-1).float() * each, dtype).view(out.shape))


def multi_tensor_scale(chunk: int, noop: Any, lists: Any, scale: float) -> None:
    """Multiplies one list of tensors into another."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk: int, noop: Any, lists: Any, per_tensor: bool = False) -> Any:
    """Norm over all tensors, and of each if asked for."""
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm().view(1), norms if per_tensor else torch.zeros(0)


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, noop: Any, lists: Any, largest: float, pow_2: bool, eps: float
) -> None:
    """Scales and their inverses from amaxes."""
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, largest, pow_2, eps))
        scale_inv.copy_(1.0 / scale)


KERNELS = (
    create_empty_quantized_tensor,
    quantize,
    dequantize,
    compute_amax,
    fp8_transpose,
    fp8_block_scaling_compute_partial_amax,
    fp8_block_scaling_partial_cast,
    multi_tensor_scale,
    multi_tensor_l2norm,
    multi_tensor_compute_scale_and_scale_inv,
)

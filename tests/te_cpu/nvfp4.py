"""Reference kernels in pure torch for NVFP4: two values to a byte, a scale per 16 x 16 tile, one per tensor.

Each function of ``KERNELS`` stands for the one of the same name in ``transformer_engine_torch``. The element
``2i`` is the low half of byte ``i``. With ``S = 448 * 6 / amax`` of the whole tensor, the scale of a tile in
fp8 is ``amax of the tile / 6 * S``, and a value is encoded as ``x / (scale / S)`` in fp4 (e2m1), ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

TILE = 16
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_MAX, _FP8_MAX, _FP32_MAX = 6.0, 448.0, torch.finfo(torch.float32).max
# Half way between two neighbours; where a tie goes to the upper one.
_HALVES = torch.tensor([(a + b) / 2 for a, b in pairwise(_VALUES)])
_TIE_UP = torch.tensor([index % 2 == 1 for index in range(7)])


def fp4(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 of the nearest values, a byte each."""
    magnitude = x.abs()[..., None]
    above = (magnitude > _HALVES) | ((magnitude == _HALVES) & _TIE_UP)
    return (above.sum(-1) + 8 * torch.signbit(x).int()).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte, along the last dimension."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """A byte to two codes, along the last dimension."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)


def _tiled(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0] // TILE, TILE, x.shape[1] // TILE, TILE)


def _each(per_tile: torch.Tensor) -> torch.Tensor:
    return per_tile.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)


def _tensor_scale(amax: torch.Tensor) -> torch.Tensor:
    scale = (torch.full_like(amax, _FP8_MAX * _FP4_MAX) / amax).clamp(max=_FP32_MAX)
    return torch.where(amax > 0, scale, torch.where(scale == 0, 1.0, scale))


def _tile_scales(tile_amax: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """In fp8, as fp32 values."""
    scale = tile_amax * (tensor_scale * torch.tensor(1.0 / _FP4_MAX))
    return scale.clamp(max=_FP8_MAX).to(torch.float8_e4m3fn).float()


def _codes(x: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    encode = (1.0 / (scale * (1.0 / tensor_scale))).clamp(max=_FP32_MAX)
    return fp4((x.float() * encode).clamp(-_FP4_MAX, _FP4_MAX))


def create_empty(q: Any, zeros: Callable[..., torch.Tensor], common: dict[str, Any]) -> Any:
    """An ``NVFP4Tensor`` of zeros."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor

    shape, columns = common['shape'], q.columnwise_usage
    turned = q.get_columnwise_shape(shape)
    return NVFP4Tensor(
        rowwise_data=zeros(q.convert_shape_for_fp4(shape)),
        rowwise_scale_inv=zeros(q.get_scale_shape(shape, False)),
        columnwise_data=zeros(q.convert_shape_for_fp4(turned)) if columns else None,
        columnwise_scale_inv=zeros(q.get_scale_shape(shape, True)) if columns else None,
        amax_rowwise=zeros((1,), torch.float32),
        amax_columnwise=zeros((1,), torch.float32) if columns else None,
        fp4_dtype=q.dtype,
        with_gemm_swizzled_scales=False,
        **common,
    )


def quantize(src: torch.Tensor, dst: Any) -> None:
    """Quantizes a matrix with a scale per 16 x 16 tile, as weights are."""
    q = dst._get_quantizer()
    if not q.with_2d_quantization or q.with_rht or q.stochastic_rounding or q.nvfp4_use_4over6:
        raise NotImplementedError(
            'tests/te_cpu: NVFP4 as for weights only: 2D tiles, plain rounding'
        )
    x = src.reshape(-1, src.shape[-1]).float()
    amax = x.abs().amax().view(1)
    tensor_scale = _tensor_scale(amax)
    scale = _tile_scales(_tiled(x).abs().amax((1, 3)), tensor_scale)
    dst._rowwise_data.copy_(pack(_codes(x, _each(scale), tensor_scale)).view_as(dst._rowwise_data))
    dst._amax_rowwise.copy_(amax)
    _write_scales(dst._rowwise_scale_inv, scale)
    if dst._columnwise_data is not None:
        dst._amax_columnwise.copy_(amax)
        _transpose(dst._rowwise_data, dst._columnwise_data, *x.shape)
        _write_scales(dst._columnwise_scale_inv, scale.t())


def _write_scales(target: torch.Tensor, scale: torch.Tensor) -> None:
    """A tile's scale on each of its 16 rows, in the corner of a padded table of bytes."""
    rows = scale.contiguous().repeat_interleave(TILE, 0).to(torch.float8_e4m3fn).view(torch.uint8)
    target[: rows.shape[0], : rows.shape[1]] = rows


def _transpose(data: torch.Tensor, out: torch.Tensor, rows: int, columns: int) -> None:
    codes = unpack(data.reshape(rows, columns // 2))
    out.copy_(pack(codes.t().contiguous()).view_as(out))


def dequantize(tensor: Any) -> torch.Tensor:
    """fp32 values."""
    data = tensor._rowwise_data
    codes = unpack(data.reshape(-1, data.shape[-1])).long()
    values = torch.tensor([*_VALUES, *(-v for v in _VALUES)])[codes]
    rows, columns = values.shape
    scales = tensor._rowwise_scale_inv.view(torch.float8_e4m3fn).float()
    scale = scales[:rows, : columns // TILE].repeat_interleave(TILE, 1)
    amax = tensor._amax_rowwise
    return (values * scale * (amax * (1.0 / (_FP8_MAX * _FP4_MAX)))).view(tensor.size())


def nvfp4_multi_tensor_compute_partial_amax(
    fragments: Sequence[torch.Tensor],
    tile_amaxes: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
    starts: Sequence[int],
    tile: int,
) -> None:
    """amax of each tile and of the tensor, as far as a fragment of the matrix knows it."""
    for x, of_tiles, amax, rows, columns, start in zip(
        fragments, tile_amaxes, amaxes, heights, widths, starts, strict=True
    ):
        whole = torch.zeros(rows * columns)
        whole[start : start + x.numel()] = x.reshape(-1).float().abs()
        of_tiles.copy_(_tiled(whole.view(rows, columns)).amax((1, 3)))
        amax.copy_(whole.amax().view(1))


def nvfp4_compute_global_scale(amaxes: torch.Tensor, scales: torch.Tensor) -> None:
    """Scale of each tensor from its amax."""
    scales.copy_(_tensor_scale(amaxes))


def nvfp4_multi_tensor_fused_scale(
    tile_amaxes: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
    tile_scales: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    amax_targets: Sequence[torch.Tensor],
    *unused: Any,
) -> None:
    """Scales of the tiles, as values and as the bytes of the tensor; and its amax."""
    for of_tiles, amax, scale, target, amax_target in zip(
        tile_amaxes, amaxes, tile_scales, targets, amax_targets, strict=True
    ):
        scale.copy_(_tile_scales(of_tiles, _tensor_scale(amax)))
        _write_scales(target, scale)
        amax_target.copy_(amax)


def nvfp4_multi_tensor_2d_partial_cast(
    fragments: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    tile_scales: Sequence[torch.Tensor],
    tensor_scales: Sequence[torch.Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
    starts: Sequence[int],
    tile: int,
) -> None:
    """Bytes of a fragment; one that starts or ends inside a byte is an error of the layout."""
    for x, out, scale, tensor_scale, rows, columns, start in zip(
        fragments, outs, tile_scales, tensor_scales, heights, widths, starts, strict=True
    ):
        assert start % 2 == x.numel() % 2 == 0, 'a shard ends inside a byte'
        assert scale.shape == (rows // TILE, columns // TILE)
        each = _each(scale).reshape(-1)[start : start + x.numel()]
        out.copy_(pack(_codes(x.reshape(-1), each, tensor_scale)))


def nvfp4_2d_multi_tensor_transpose(
    rowwise: Sequence[torch.Tensor],
    columnwise: Sequence[torch.Tensor],
    row_scales: Sequence[torch.Tensor],
    column_scales: Sequence[torch.Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
) -> None:
    """Columnwise bytes and scales from the rowwise ones."""
    for data, out, scales, out_scales, rows, columns in zip(
        rowwise, columnwise, row_scales, column_scales, heights, widths, strict=True
    ):
        _transpose(data, out, rows, columns)
        of_tiles = scales[:rows:TILE, : columns // TILE].view(torch.float8_e4m3fn).float()
        _write_scales(out_scales, of_tiles.t())


KERNELS = (
    nvfp4_multi_tensor_compute_partial_amax,
    nvfp4_compute_global_scale,
    nvfp4_multi_tensor_fused_scale,
    nvfp4_multi_tensor_2d_partial_cast,
    nvfp4_2d_multi_tensor_transpose,
)

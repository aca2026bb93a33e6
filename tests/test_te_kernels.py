"""The reference kernels of tests/te_cpu: equal to NVIDIA's own reference quantizers, and to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.te_cpu.model import RECIPES, quantizer, stored
from tests.te_cpu.ranks import run_te_ranks

pytestmark = pytest.mark.te

SHAPES = ((16, 16), (64, 96), (96, 32), (160, 288))


def _matrices(seed: int) -> list[torch.Tensor]:
    """Ordinary ones, and what scales stumble over: zeros, a zero tile, tiny, huge, ties, one outlier."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rows, columns in SHAPES:
        x = torch.randn(rows, columns, generator=generator)
        outlier, hole = x.clone(), x.clone()
        outlier[3, 5] = 1e4
        hole[:16, :16] = 0
        ties = torch.randint(-24, 25, (rows, columns), generator=generator) / 4
        found += [x, torch.zeros_like(x), hole, outlier, x * 1e-30, x * 1e30, ties]
    return [x.bfloat16() for x in found]


def _against_nvidia(rank: int, world_size: int) -> list[str]:
    from transformer_engine.pytorch.custom_recipes import utils
    from transformer_engine.pytorch.custom_recipes.quantization_ref_current_scaling import (
        CurrentScalingQuantizerRef,
    )
    from transformer_engine.pytorch.custom_recipes.quantization_ref_nvfp4 import NVFP4QuantizerRef

    wrong = []
    fp8 = CurrentScalingQuantizerRef(torch.float8_e4m3fn)
    fp4 = NVFP4QuantizerRef(utils.Fp4Formats.E2M1, quant_tile_shape=(16, 16))
    for index, x in enumerate(_matrices(1)):
        ours, theirs = stored(quantizer('tensorwise')(x)), fp8.quantize(x)
        if not torch.equal(ours['data'], theirs.data.view(torch.uint8)):
            wrong.append(f'tensorwise data {index}')
        if not torch.equal(ours['scale_inv'], theirs.scale.view(1)):
            wrong.append(f'tensorwise scale {index}')
        ours, theirs = stored(quantizer('nvfp4')(x)), fp4.quantize(x)
        pairs = {
            'rowwise_data': theirs.data,
            'rowwise_scale_inv': theirs.scale,
            'columnwise_data': theirs.data_t,
            'columnwise_scale_inv': theirs.scale_t,
            'amax_rowwise': theirs.global_amax_row,
        }
        for name, expected in pairs.items():
            mine = ours[name]
            got = expected.view(mine.dtype)[tuple(slice(n) for n in mine.shape)]
            if not torch.equal(mine, got):
                wrong.append(f'nvfp4 {name} {index}: {int((mine != got).sum())} of {mine.numel()}')
    return wrong


def test_quantizing_equals_nvidias_reference_quantizers() -> None:
    """TE ships one in Python for current scaling and one for NVFP4."""
    assert run_te_ranks(_against_nvidia, 1) == [[]]


def _against_the_definition(rank: int, world_size: int) -> list[str]:
    wrong = []
    for index, x in enumerate(_matrices(2)):
        exact = x.double()
        for recipe, block in (('mxfp8', (1, 32)), ('blockwise', (128, 128))):
            if recipe == 'mxfp8' and (x.shape[0] % 32 or x.shape[1] % 32):
                continue
            tensor = quantizer(recipe)(x)
            parts = stored(tensor)
            scale = parts['rowwise_scale_inv']
            if recipe == 'mxfp8':
                scale = torch.exp2(scale.double() - 127)
            scale = scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            scale = scale[: x.shape[0], : x.shape[1]]
            values = parts['rowwise_data'].view(torch.float8_e4m3fn).double()
            if not torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5)):
                wrong.append(f'{recipe} {index}: a scale is no power of two')
            if (values.abs() > 448).any() or values.isnan().any():
                wrong.append(f'{recipe} {index}: no saturation')
            # The nearest fp8 value: within half a unit of the last of 3 bits, or of the smallest one.
            error, unit = (values * scale - exact).abs(), values.abs().clamp(min=2.0**-6)
            if (error > 2.0**-4 * unit * scale * (1 + 1e-12)).any():
                wrong.append(f'{recipe} {index}: off by {float((error / unit / scale).max())}')
            plain = tensor.dequantize()
            if not torch.equal(plain, (values * scale).to(plain.dtype)):
                wrong.append(f'{recipe} {index}: dequantize')
    return wrong


def test_mxfp8_and_blockwise_are_what_their_definition_says() -> None:
    """TE ships no reference for these two: power-of-two scales, the nearest fp8 value, saturation."""
    assert run_te_ranks(_against_the_definition, 1) == [[]]


def _fragments(rank: int, world_size: int) -> list[str]:
    from megatron.core.fp4_utils import quantize_nvfp4_param_shard
    from megatron.core.fp8_utils import post_all_gather_processing, quantize_param_shard

    wrong = []
    group: Any = torch.distributed.group.WORLD
    for recipe in (r for r in RECIPES if r != 'mxfp8'):
        for index, x in enumerate(_matrices(3)):
            # Two parameters, of which this rank has the first part, or none, and the last part.
            cut = (x.numel() // 6) * 2
            mine = slice(0, cut) if rank == 0 else slice(cut, x.numel())
            tensors = [quantizer(recipe)(torch.zeros_like(x)) for _ in range(2)]
            masters = [x.float().reshape(-1)[mine], x.float().reshape(-1) if rank else None]
            starts = [mine.start, 0 if rank else None]
            cast = quantize_nvfp4_param_shard if recipe == 'nvfp4' else quantize_param_shard
            cast(tensors, masters, starts, group)
            for tensor, whose in zip(tensors, (mine, None), strict=True):
                data = tensor._data if hasattr(tensor, '_data') else tensor._rowwise_data
                flat = data.view(-1)
                scale = x.numel() // flat.numel()
                parts = [torch.empty_like(flat) for _ in range(world_size)]
                torch.distributed.all_gather(parts, flat)
                flat.copy_(parts[1])
                if whose is not None:
                    flat[: cut // scale] = parts[0][: cut // scale]
            post_all_gather_processing(tensors)
            expected = stored(quantizer(recipe)(x))
            for tensor in tensors:
                for name, value in stored(tensor).items():
                    if name in expected and not torch.equal(value, expected[name]):
                        wrong.append(f'{recipe} {index} {name}')
    return wrong


def test_shards_of_a_master_weight_become_the_bytes_of_the_whole() -> None:
    """Megatron casts each rank's shard with scales that all ranks agree on."""
    assert run_te_ranks(_fragments, 2) == [[], []]


def _missing(rank: int, world_size: int) -> str:
    import transformer_engine_torch as tex

    try:
        tex.generic_gemm()
    except NotImplementedError as error:
        return str(error)
    return ''


def test_a_kernel_without_reference_says_so() -> None:
    [message] = run_te_ranks(_missing, 1)
    assert 'transformer_engine_torch.generic_gemm has no reference kernel' in message

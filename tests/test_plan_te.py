"""The planned storage of quantized weights is what Transformer Engine's own tensors hold."""

from __future__ import annotations

import pytest
import torch

from megatron_buffer.planner.ledger import RECIPES, te_storage
from tests.te_cpu.model import quantizer
from tests.te_cpu.ranks import run_te_ranks

pytestmark = pytest.mark.te

SHAPES = ((64, 96), (160, 288), (256, 128))
NAMES = {'fp8': 'tensorwise', 'mxfp8': 'mxfp8', 'nvfp4': 'nvfp4'}


def _sizes(rank: int, world_size: int) -> dict[tuple[str, tuple[int, ...]], dict[str, int]]:
    found = {}
    for ours, theirs in NAMES.items():
        for shape in SHAPES:
            tensor = quantizer(theirs)(torch.randn(shape).bfloat16())
            found[ours, shape] = {
                key.strip('_'): value.numel() * value.element_size()
                for key, value in vars(tensor).items()
                if isinstance(value, torch.Tensor)
            }
    return found


def test_storage_is_as_planned() -> None:
    (found,) = run_te_ranks(_sizes, 1)
    for (recipe, shape), sizes in found.items():
        planned = te_storage(shape, RECIPES[recipe])
        if recipe == 'fp8':  # rowwise alone here; the columnwise copy is its transpose
            assert (sizes['data'] + sizes['scale_inv'], sizes['data']) == planned
            continue
        for copy, total in zip(('rowwise', 'columnwise'), planned, strict=True):
            assert sum(size for key, size in sizes.items() if copy in key) == total, (recipe, shape)

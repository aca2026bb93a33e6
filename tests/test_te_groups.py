"""When each bucket group of a quantized model starts, and how many collectives an iteration has, by strategy.

Seen below torch.distributed while the second iteration runs: the first one counts gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.te_cpu.model import QuantCase
from tests.te_cpu.ranks import run_te_ranks

pytestmark = pytest.mark.te

# Eight layers with a matrix of 4096 elements each, of which the last two are bf16; a bucket holds two.
CASE = QuantCase(widths=(64,) * 9, plain=(6, 7), bucket_size=8000, micro_batches=1, steps=2)
LAYERS = 8
_SHORT = {torch.uint8: 'uint8', torch.bfloat16: 'bf16', torch.float32: 'fp32'}


class _Moments(TorchDispatchMode):
    """Notes every collective, with how far backward is: the lowest layer whose backward has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LAYERS
        self.seen: list[tuple[str, int, set[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == 'c10d' and 'barrier' not in func.__name__:
            flat, _ = tree_flatten((args, kwargs))
            tensors = [item for item in flat if isinstance(item, torch.Tensor)]
            storages = {t.untyped_storage().data_ptr() for t in tensors}
            self.seen.append((func.__name__, self.layer, storages))
        return func(*args, **(kwargs or {}))


def _watched_step(rank: int, world_size: int, arm: Any) -> dict[str, Any]:
    from tests.te_cpu import training

    run = training.build(CASE, arm)
    [ddp] = run.chunks
    training.run_step(CASE, run, rank, 0)
    run.optimizer.step()
    moments = _Moments()
    for index, layer in enumerate(ddp.module):

        def began(module: Any, grad: Any, index: int = index) -> None:
            moments.layer = min(moments.layer, index)

        layer.register_full_backward_pre_hook(began)
    kinds = {
        buffer.grad_data.untyped_storage().data_ptr(): _SHORT[buffer.param_dtype]
        for buffer in ddp.buffers
    }
    with moments:
        training.run_step(CASE, run, rank, 1)
    reductions = [
        ' '.join([str(layer), *sorted(kinds[s] for s in storages if s in kinds)])
        for name, layer, storages in moments.seen
        if 'reduce_scatter' in name
    ]
    gathers = sum('gather' in name for name, *_ in moments.seen)
    return {'groups': len(ddp.bucket_groups), 'reductions': reductions, 'gathers': gathers}


# `4 uint8` is a reduction of quantized matrices that starts while backward is in layer 4. Those of layers 5
# and 4 are a bucket, 3 and 2, 1 and 0; the bf16 matrices 7 and 6 are one, and the biases below them another;
# the gains of all layers are one in fp32.
EXPECTED = {
    'separate': (['6 bf16', '4 uint8', '2 uint8', '0 uint8', '0 bf16', '0 fp32'], 6),
    'nearest_ready': (['4 bf16 uint8', '2 uint8', '0 bf16 fp32 uint8'], 6),
    'merge_into_last_fp8': (['4 uint8', '2 uint8', '0 bf16 fp32 uint8'], 5),
    'merge_into_first_fp8': (['2 uint8', '0 bf16 fp32 uint8', '0 uint8'], 5),
    'single': (['0 bf16 fp32 uint8'], 3),
}


@pytest.mark.parametrize('name', [*EXPECTED, 'stock'])
def test_when_groups_start_and_how_often_they_talk(name: str) -> None:
    """In `merge_into_first_fp8` the first matrices to be complete wait for all of backward.

    With `merge_into_last_fp8`, as in stock, only the other dtypes wait; with `nearest_ready` they go along
    with the first matrices that are complete after them. gloo gathers each dtype by itself.
    """
    reductions, gathers = EXPECTED['merge_into_last_fp8' if name == 'stock' else name]
    arm = name if name == 'stock' else {'bucket_groups': name}
    for found in run_te_ranks(_watched_step, 2, arm):
        assert sorted(found['reductions']) == sorted(reductions)
        assert found['gathers'] == gathers
        assert found['groups'] == len(reductions)

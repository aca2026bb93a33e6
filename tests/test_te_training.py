"""Quantized parameters trained on two ranks: as stock, and as one process alone, byte for byte.

Every recipe with every strategy of `bucket_groups`; with and without overlap, experts, several model chunks,
bf16 layers in between, gradients in bf16, and what stock gets wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_buffer.config import AXES
from tests.te_cpu.model import RECIPES, QuantCase
from tests.te_cpu.ranks import run_te_ranks
from tests.te_cpu.training import Installed, parity

pytestmark = pytest.mark.te

GROUPS = [{'bucket_groups': name} for name in AXES['bucket_groups'].strategies]
BUILT_AS_STOCK = Installed('upstream')


def check(case: QuantCase, arms: list[Any], world_size: int = 2) -> None:
    """Nothing differs, on any rank."""
    nothing = {'alone': [], **{str(arm): [] for arm in arms}}
    assert run_te_ranks(parity, world_size, case, arms) == [nothing] * world_size


def _case(recipe: str, **kwargs: Any) -> QuantCase:
    return QuantCase(recipe=recipe, reuse=recipe == 'mxfp8', **kwargs)


@pytest.mark.parametrize('recipe', RECIPES)
def test_every_recipe_with_every_group_strategy(recipe: str) -> None:
    assert len(GROUPS) == 5
    check(_case(recipe), GROUPS)


@pytest.mark.parametrize('recipe', RECIPES)
def test_without_overlap(recipe: str) -> None:
    check(_case(recipe, overlap=False), [BUILT_AS_STOCK])


MIXED = {
    'experts': {'experts': (1, 2)},
    'chunks': {'chunks': 2},
    'plain': {'plain': (0, 2)},
    'bf16_grads': {'grad_reduce_in_fp32': False},
    'one_bucket': {'bucket_size': None},
    'high_busbw': {'high_busbw': True},
    'all': {'experts': (1,), 'chunks': 2, 'plain': (2,), 'grad_reduce_in_fp32': False},
}
DEFAULT_MIXED = ('mxfp8-all', 'nvfp4-experts', 'tensorwise-all')


def _mixed() -> list[Any]:
    found = []
    for recipe in RECIPES:
        for name, kwargs in MIXED.items():
            marks = [] if f'{recipe}-{name}' in DEFAULT_MIXED else [pytest.mark.slow]
            found.append(pytest.param(recipe, kwargs, marks=marks, id=f'{recipe}-{name}'))
    return found


@pytest.mark.parametrize(('recipe', 'kwargs'), _mixed())
def test_mixed_models(recipe: str, kwargs: dict[str, Any]) -> None:
    check(_case(recipe, **kwargs), [BUILT_AS_STOCK, {'bucket_groups': 'nearest_ready'}])


OURS: dict[str, Any] = {
    'recommended': Installed('recommended'),
    'eager': Installed({'param_gather': 'eager'}),
    'per_dtype': {'param_gather': 'per_dtype'},
    'first_last': {
        'bucketing': {'name': 'first_last', 'first_size_elems': 4000, 'last_size_elems': 4000}
    },
    'forward': {'param_order': 'forward'},
    'in_order': {'dispatch_order': 'in_order', 'readiness': 'golden_static'},
    'minimal': {'padding': 'minimal'},
    'bytes': {'padding': {'name': 'byte_aligned', 'param_start_bytes': 48}},
}


@pytest.mark.parametrize('recipe', RECIPES)
def test_other_strategies_end_with_the_same_bytes(recipe: str) -> None:
    """Layouts differ from stock's here, so the parameters are compared, with one process alone."""
    arms = dict(OURS)
    if recipe == 'mxfp8':  # refused: the next zero_grad_buffer would wipe the gather
        del arms['eager'], arms['recommended']
    found = run_te_ranks(_ours_against_alone, 2, _case(recipe, steps=3), arms)
    assert found == [{name: [] for name in arms}] * 2


def _ours_against_alone(
    rank: int, world_size: int, case: QuantCase, arms: dict[str, Any]
) -> dict[str, list[str]]:
    from tests.te_cpu.training import alone, differences, train

    expected = alone(case, world_size)
    return {
        name: differences(train(rank, case, arm), expected, 'param/') for name, arm in arms.items()
    }


def _shards_of_packed_bytes(
    rank: int, world_size: int, case: QuantCase, arm: Any
) -> tuple[list[int], list[str]]:
    """How the sizes of the shards differ, and which weights are not what the masters say."""
    from megatron_buffer.testing.tiny_results import optimizer_state
    from tests.te_cpu import training
    from tests.te_cpu.model import quantizer, stored

    run = training.build(case, arm)
    for step in range(case.steps):
        training.run_step(case, run, rank, step)
        run.optimizer.step()
    training.gather(case, run)
    off = [
        2 * bucket.param_data.numel() - bucket.grad_data.numel()
        for buffer in run.chunks[0].buffers
        if buffer.param_dtype == torch.uint8
        for bucket in buffer.buckets
    ]
    mine = {k: v for k, v in optimizer_state(run).items() if k.endswith('weight/master')}
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, mine)
    wrong = []
    for name, param in training.named(run.chunks):
        bare = name.removeprefix('0.')
        if name.endswith('weight'):
            shards = [of_rank.get(f'{bare}/master') for of_rank in everyone]
            whole = torch.cat([shard.reshape(-1) for shard in shards if shard is not None])
            expected = stored(quantizer(case.recipe)(whole.view(param.shape).bfloat16()))
            if any(not torch.equal(v, expected[k]) for k, v in stored(param).items()):
                wrong.append(bare)
    return off, wrong


ODD = QuantCase(recipe='nvfp4', widths=(64, 64, 64, 48), bucket_size=4000, steps=2)


@pytest.mark.parametrize('world_size', [3, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    'padding', [{'name': 'megatron', 'whole_bytes': True}, 'minimal', 'byte_aligned'], ids=str
)
def test_packed_shards_are_the_gradients_shards(padding: Any, world_size: int) -> None:
    """Each rank's bytes are those of the values whose gradients it owns, for any number of ranks."""
    found = run_te_ranks(_shards_of_packed_bytes, world_size, ODD, {'padding': padding})
    assert found == [([0, 0], [])] * world_size


@pytest.mark.stock_fault
def test_stock_gathers_other_bytes_than_it_wrote() -> None:
    """At dp=3 its packed buckets end elsewhere, and ranks gather shards that others have written."""
    found = run_te_ranks(_shards_of_packed_bytes, 3, ODD, 'stock')
    for off, wrong in found:
        assert any(off)
        assert wrong


def _mixed_packing(rank: int, world_size: int, arm: Any) -> str:
    from megatron_buffer.errors import LayoutError
    from tests.te_cpu import training

    try:
        training.build(QuantCase(recipe='nvfp4', single=(1, 'tensorwise')), arm)
    except LayoutError as error:
        return str(error)
    return ''


def test_fp4_and_fp8_in_one_buffer_are_refused() -> None:
    [message, other] = run_te_ranks(_mixed_packing, 2, 'upstream')
    assert message == other
    assert '2.weight is an NVFP4 parameter and' in message or '0.weight is an NVFP4' in message
    assert '1.weight is not' in message


def _mxfp8_in_place(rank: int, world_size: int, arm: Any) -> str:
    from tests.te_cpu.training import train

    try:
        train(rank, QuantCase(recipe='mxfp8'), arm)
    except NotImplementedError as error:
        return str(error)
    return ''


def test_mxfp8_needs_the_gradients_buffer() -> None:
    """TE 2.18 cannot move its storage: without the reuse both stop where the parameter is mounted."""
    messages = [*run_te_ranks(_mxfp8_in_place, 2, 'stock')]
    messages += run_te_ranks(_mxfp8_in_place, 2, 'upstream')
    assert set(messages) == {'replace_raw_data for MXFP8Tensor is not supported yet'}

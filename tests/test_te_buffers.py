"""Where quantized parameters lie, what is zeroed, which dtype gradients have: with real TE tensors."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.te_cpu.model import RECIPES, QuantCase, make_chunks, quantizer
from tests.te_cpu.ranks import run_te_ranks
from tests.te_cpu.training import Installed, parity

pytestmark = pytest.mark.te


def _bytes_of(param: Any) -> torch.Tensor:
    return param._data if hasattr(param, '_data') else param._rowwise_data


def _mounted(rank: int, world_size: int, recipe: str) -> list[str]:
    from tests.te_cpu import training

    case = QuantCase(recipe=recipe, reuse=recipe == 'mxfp8', steps=2)
    run = training.build(case, 'upstream')
    wrong = []
    for step in range(case.steps):
        for buffer in run.chunks[0].buffers:
            quantized = buffer.param_dtype == torch.uint8
            values_per_byte = 2 if quantized and recipe == 'nvfp4' else 1
            for param, (start, end, _) in buffer.param_index_map.items():
                data = _bytes_of(param) if quantized else param.data
                expected = buffer.param_data[start // values_per_byte : end // values_per_byte]
                own = quantized and recipe == 'mxfp8'
                if (data.data_ptr() == expected.data_ptr()) == own:
                    wrong.append(f'{step}: {buffer.param_to_name[param]} lies elsewhere')
                if not own and data.numel() != expected.numel():
                    wrong.append(f'{step}: {buffer.param_to_name[param]}: {data.numel()}')
            shared = buffer.param_data.untyped_storage().data_ptr()
            if (shared == buffer.grad_data.untyped_storage().data_ptr()) != (
                quantized and recipe == 'mxfp8'
            ):
                wrong.append(f'{step}: storage of {buffer.param_dtype}')
        training.run_step(case, run, rank, step)
        run.optimizer.step()
    return wrong


@pytest.mark.parametrize('recipe', RECIPES)
def test_bytes_stay_where_the_layout_has_them(recipe: str) -> None:
    """In the buffer, packed for NVFP4; MXFP8 keeps its own and gathers through the gradients' storage."""
    assert run_te_ranks(_mounted, 2, recipe) == [[], []]


def _packed_layouts(rank: int, world_size: int) -> tuple[int, int]:
    """Draws layouts; returns how many of stock's have equal shards, and how many do not."""
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_buffer import runtime
    from megatron_buffer.buffer import ParamAndGradBuffer
    from megatron_buffer.config import load_config
    from megatron_buffer.param_layout import compute_per_buffer_param_layout

    q = quantizer('nvfp4')
    sizes = [(16, 16), (16, 48), (64, 64), (48, 80), (128, 256)]
    made = [[q(torch.zeros(s, dtype=torch.bfloat16)) for s in sizes] for _ in range(6)]
    in_force = runtime.Runtime(load_config({'padding': {'name': 'megatron', 'whole_bytes': True}}))
    count = {True: 0, False: 0}

    def packed(cls: Any, layout: Any, params: list[Any], config: Any, dp: int) -> Any:
        buffer = object.__new__(cls)
        buffer.runtime = in_force
        buffer.ddp_config, buffer.data_parallel_world_size = config, dp
        buffer.param_index_map, buffer.bucket_indices = (
            layout.param_index_map,
            layout.bucket_indices,
        )
        buffer._compute_nvfp4_packed_layout([(param, 'p') for param in params])
        return buffer.nvfp4_packed_param_index_map, buffer.nvfp4_packed_bucket_indices

    @settings(max_examples=120, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=6),
        st.sampled_from([1, 2, 3, 5, 6, 8, 12, 24, 64, 96, 128, 256, 384]),
        st.sampled_from([None, 1, 5000, 40000]),
        st.booleans(),
    )
    def check(chosen: list[int], dp: int, bucket_size: int | None, high_busbw: bool) -> None:
        params = [made[i][size] for i, size in enumerate(chosen)]
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=high_busbw
        )
        with runtime.scope(in_force):
            ours = compute_per_buffer_param_layout(params, bucket_size, dp, config)
        stock = DistributedOptimizer._compute_per_buffer_param_layout(
            params, bucket_size, dp, config
        )
        theirs = packed(_ParamAndGradBuffer, stock, params, config, dp)
        agrees = all(
            (2 * a, 2 * b) == span
            for (a, b), span in zip(theirs[1], stock.bucket_indices, strict=True)
        )
        count[agrees] += 1
        mine = packed(ParamAndGradBuffer, ours, params, config, dp)
        if agrees:
            assert ours.param_index_map == stock.param_index_map
            assert ours.bucket_indices == stock.bucket_indices
            assert mine == theirs
        for (a, b), (start, end) in zip(mine[1], ours.bucket_indices, strict=True):
            assert (b - a) % dp == 0
            assert 2 * ((b - a) // dp) == (end - start) // dp
        for param, (start, end, bucket) in ours.param_index_map.items():
            assert mine[0][param] == (start // 2, end // 2, bucket)
            assert start % 64 == 0
            assert end - start == param.numel()

    check()
    return count[True], count[False]


def test_packed_layouts_equal_stocks_wherever_stocks_shards_are_right() -> None:
    [(right, wrong)] = run_te_ranks(_packed_layouts, 1, init=False)
    assert right > 20
    assert wrong > 8


def _foreign_layout(rank: int, world_size: int) -> str:
    """A layout that stock computed for another number of ranks, whose shards would cut a byte."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.param_layout import BufferKey, FullParamLayout

    import megatron_buffer
    from megatron_buffer.param_layout import compute_per_buffer_param_layout
    from megatron_buffer.testing.small_model import transformer_config

    parallel_state.initialize_model_parallel()
    [module] = make_chunks(QuantCase(recipe='nvfp4', widths=(64, 48), plain=()))
    del module[0].gain, module[0].bias
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, fp4_param_gather=True)
    params = list(module.parameters())
    with megatron_buffer.runtime.scope(megatron_buffer.runtime.resolve('upstream')):
        layout = compute_per_buffer_param_layout(params, None, 1, config, [0])
    end = layout.bucket_indices[0][1]
    layout.bucket_indices = [(0, end + 1)]
    key = BufferKey(torch.uint8, torch.bfloat16, False, False)
    try:
        megatron_buffer.DistributedDataParallel(
            transformer_config(),
            config,
            module,
            full_param_layout=FullParamLayout({key: layout}),
            buffer_config={'padding': {'name': 'megatron', 'whole_bytes': True}},
        )
    except megatron_buffer.errors.LayoutError as error:
        return str(error)
    return ''


def test_a_layout_that_cuts_a_byte_is_refused() -> None:
    [message] = run_te_ranks(_foreign_layout, 1)
    assert '0.weight is an NVFP4 parameter, two of whose values share a byte' in message
    assert 'expected an even start and a multiple of 2 (2 x dp_size)' in message


def _zeroed(rank: int, world_size: int, arm: Any) -> list[tuple[bool, ...]]:
    """Which buffers hold only zeros at the end of the second forward pass, and after the next zeroing."""
    from tests.te_cpu import training
    from tests.te_cpu.model import batch

    case = QuantCase(recipe='mxfp8', reuse=True, micro_batches=1)
    run = training.build(case, arm)
    [ddp] = run.chunks
    ddp.disable_forward_pre_hook(param_sync=False)
    training.run_step(case, run, rank, 0)
    run.optimizer.step()
    ddp.enable_forward_pre_hook()

    def zeros(attribute: str) -> tuple[bool, ...]:
        return tuple(not getattr(buffer, attribute).any() for buffer in ddp.buffers)

    found = [zeros('grad_data')]
    ddp.zero_grad_buffer()
    found.append(zeros('grad_data'))
    for part in getattr(run.optimizer, 'chained_optimizers', [run.optimizer]):
        part._copy_main_params_to_param_buffer()
    found.append(zeros('grad_data'))
    ddp(batch(case, rank, 1, 0))
    found += [zeros('grad_data'), zeros('param_data')]
    return found


@pytest.mark.parametrize('arm', ['stock', 'upstream'])
def test_lent_gradients_are_zero_again_when_backward_begins(arm: str) -> None:
    """MXFP8: the gather leaves zeros where quantized matrices went through, and only there."""
    for gradients, zeroed, lent, after, params in run_te_ranks(_zeroed, 2, arm):
        assert not any(gradients)
        assert all(zeroed)
        assert sorted(lent) == [False, True, True]  # the matrices' buffer holds parameters
        assert all(after)
        assert sorted(params) == [False, False, True]  # biases and gains stay


def _offload(rank: int, world_size: int, recipe: str) -> str:
    from megatron_buffer.errors import ParamStorageError
    from tests.te_cpu import training

    case = QuantCase(recipe=recipe, reuse=recipe == 'mxfp8', steps=1)
    run = training.build(case, 'upstream')
    training.run_step(case, run, rank, 0)
    run.optimizer.step()
    before = training.result_of(run)
    try:
        run.chunks[0].offload_grad_buffers()
    except ParamStorageError as error:
        return str(error)
    run.chunks[0].restore_grad_buffers()
    return ', '.join(training.differences(before, training.result_of(run)))


@pytest.mark.parametrize('recipe', ['tensorwise', 'nvfp4', 'mxfp8'])
def test_gradients_are_offloaded_alone(recipe: str) -> None:
    """Not where parameters are gathered through the same memory."""
    for message in run_te_ranks(_offload, 2, recipe):
        assert ('reuse_grad_buf_for_mxfp8_param_ag' in message) == (recipe == 'mxfp8')
        assert recipe == 'mxfp8' or not message


RULES = {
    'buffer_grouping': {
        'name': 'grad_dtype_rules',
        'rules': [{'pattern': '[01].weight', 'grad_dtype': 'fp32'}],
    }
}


@pytest.mark.parametrize('recipe', ['tensorwise', 'nvfp4', 'mxfp8'])
def test_two_buffers_of_quantized_parameters(recipe: str) -> None:
    """Some matrices' gradients in fp32, others' in bf16: stock knows one quantized buffer only."""
    case = QuantCase(
        recipe=recipe,
        reuse=recipe == 'mxfp8',
        grad_reduce_in_fp32=False,
        fp32_grads=('[01].weight',),
    )
    # Stock's optimizer groups the buffers once more, for a list that nobody reads; hence install().
    names = ('nearest_ready', 'separate', 'single')
    arms = {name: Installed({**RULES, 'bucket_groups': name}) for name in names}
    found = run_te_ranks(_two_buffers, 2, case, arms)
    assert found == [{name: (2, []) for name in arms}] * 2


def _two_buffers(
    rank: int, world_size: int, case: QuantCase, arms: dict[str, Any]
) -> dict[str, tuple[int, list[str]]]:
    from tests.te_cpu.training import alone, differences, train

    expected = alone(case, world_size)
    found = {}
    for name, arm in arms.items():
        result = train(rank, case, arm)
        found[name] = int(result['quantized_buffers']), differences(result, expected, 'param/')
    return found


def _accumulation(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients of fp8 matrices after four micro-batches, and bytes of memory they take, by method."""
    from tests.te_cpu import training

    rules = [{'pattern': '*.weight', 'grad_dtype': 'fp32'}]
    ways = {
        'bf16': ((), 'upstream'),
        'patterns': (('*.weight',), 'upstream'),
        'rules': ((), {'buffer_grouping': {'name': 'grad_dtype_rules', 'rules': rules}}),
    }
    found: dict[str, Any] = {}
    for name, (patterns, arm) in ways.items():
        case = QuantCase(
            grad_reduce_in_fp32=False, fp32_patterns=patterns, micro_batches=4, overlap=False
        )
        run = training.build(case, arm)
        training.run_step(case, run, rank, 0)
        [buffer] = [b for b in run.chunks[0].buffers if b.param_dtype == torch.uint8]
        extra = sum(grad.numel() * grad.element_size() for grad in buffer.extra_main_grads)
        size = buffer.grad_data.numel() * buffer.grad_data.element_size() + extra
        grads, _ = training.owned_grads(run.chunks)
        weights = {k: v.float() for k, v in grads.items() if k.endswith('weight')}
        found[name] = SimpleNamespace(grads=weights, bytes_per_elem=size / buffer.numel)
    return found


def test_fp32_accumulation_with_and_without_copies() -> None:
    """By patterns: 6 bytes an element, and the sum goes over the wire in bf16; by rules: 4, in fp32.

    Both accumulate in fp32, so they agree within the rounding of the wire, and better than bf16 sums do.
    """
    for found in run_te_ranks(_accumulation, 2):
        assert found['bf16'].bytes_per_elem == 2
        assert found['rules'].bytes_per_elem == 4
        assert 5.9 < found['patterns'].bytes_per_elem <= 6

        def error(name: str, found: Any = found) -> float:
            exact = found['rules'].grads
            return max(
                float((found[name].grads[key] - exact[key]).abs().max() / exact[key].abs().max())
                for key in exact
            )

        assert error('patterns') < 2**-7
        assert error('patterns') < error('bf16')


@pytest.mark.parametrize('recipe', ['tensorwise', 'nvfp4'])
def test_fp32_accumulation_by_patterns_is_stocks(recipe: str) -> None:
    case = QuantCase(recipe=recipe, grad_reduce_in_fp32=False, fp32_patterns=('*[02].weight',))
    for found in run_te_ranks(parity, 2, case, ['upstream']):
        assert found['upstream'] == []


@pytest.mark.parametrize('recipe', ['bf16', 'nvfp4', 'mxfp8'])
def test_grouped_parameters(recipe: str) -> None:
    """Several matrices stored as one parameter (moe_single_grouped_weight)."""
    case = QuantCase(recipe=recipe, reuse=recipe == 'mxfp8', grouped=True, widths=(64, 96, 64))
    arms = [{'bucket_groups': 'nearest_ready'}, Installed('upstream')]
    nothing = {'alone': [], **{str(arm): [] for arm in arms}}
    if run_te_ranks(_core_knows_grouped_tensors, 1, init=False) == [True]:
        assert run_te_ranks(parity, 2, case, arms) == [nothing] * 2
    else:  # 0.18: stock trains copies that nobody reads
        for outcome in run_te_ranks(parity, 2, case, arms, expect_failure=True):
            assert outcome.error_type == 'LayoutError'
            assert 'use Megatron-Core 0.19' in outcome.error


def _core_knows_grouped_tensors(rank: int, world_size: int) -> bool:
    pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')
    return hasattr(pgb, 'is_grouped_tensor')

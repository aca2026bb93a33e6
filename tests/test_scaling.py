"""Scaling and reduction strategies: the same mean, wherever the division happens and whatever travels."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer.config import BufferConfig, load_config
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.scaling import UNSCALED, ScalingContext, ScalingPlan
from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase, compare, flat_tensors, train

SCALINGS = ('prescale', 'average', 'shard_postscale', 'premul_sum')
RUNTIMES = {scaling: Runtime(load_config({'scaling': scaling})) for scaling in SCALINGS}
PROPERTY = settings(max_examples=400, deadline=None, derandomize=True, database=None)


def plan_of(scaling: str, **context: Any) -> ScalingPlan:
    plain = ScalingContext(8, 4, False, False, False)
    return RUNTIMES[scaling].scaling.plan(plain._replace(**context))


# ------------------------------------------------------------------ plans


@PROPERTY
@given(
    scaling=st.sampled_from(SCALINGS),
    edp=st.integers(1, 2000),
    ep=st.integers(1, 64),
    is_expert=st.booleans(),
    average=st.booleans(),
)
def test_every_plan_makes_the_mean_over_the_dense_data_parallel_group(
    scaling: str, edp: int, ep: int, is_expert: bool, average: bool
) -> None:
    dp = edp * ep
    plan = plan_of(
        scaling,
        dp_size=dp,
        expert_dp_size=edp,
        is_expert_parallel=is_expert,
        average_in_collective=average,
    )
    in_collective = 1.0 / (edp if is_expert else dp) if plan.op == 'avg' else 1.0
    assert math.isclose(plan.factor * in_collective * plan.post_factor, 1.0 / dp)
    assert sum(f != 1.0 for f in (plan.bucket_factor, plan.post_factor)) <= 1


@pytest.mark.parametrize('scaling', SCALINGS)
def test_per_token_loss_leaves_gradients_alone(scaling: str) -> None:
    for is_expert in (False, True):
        plan = plan_of(scaling, per_token_loss=True, is_expert_parallel=is_expert)
        assert plan == UNSCALED == ScalingPlan(1.0, 'sum', 1.0)


def test_plans() -> None:
    assert plan_of('prescale') == (0.125, 'sum', 1.0)
    assert plan_of('prescale', average_in_collective=True) == (1.0, 'avg', 1.0)
    assert plan_of('average') == (1.0, 'avg', 1.0)
    assert plan_of('average', is_expert_parallel=True) == (0.5, 'avg', 1.0)
    assert plan_of('shard_postscale') == (1.0, 'sum', 0.125)
    assert plan_of('shard_postscale', dp_size=1) == UNSCALED
    assert plan_of('premul_sum', is_expert_parallel=True) == (0.125, 'premul', 1.0)
    assert plan_of('premul_sum').bucket_factor == 1.0


# ------------------------------------------------------------------ against an unwrapped model

OVERLAP = {'overlap_grad_reduce': True, 'bucket_size': 100}
PATHS: dict[str, dict[str, Any]] = {
    'plain': {},
    'plain, overlap': OVERLAP,
    'dist-opt': {'use_distributed_optimizer': True},
    'dist-opt, overlap': {'use_distributed_optimizer': True, **OVERLAP},
    'fp32 accumulation beside the buffer': {
        'param_name_patterns_for_fp32_local_accumulation': ('*second*',),
        **OVERLAP,
    },
    'the same, dist-opt': {
        'use_distributed_optimizer': True,
        'param_name_patterns_for_fp32_local_accumulation': ('*second*',),
        **OVERLAP,
    },
}


def configs(dist_opt: bool) -> list[dict[str, Any]]:
    """Every pair of scaling and reduction that works on gloo."""
    reductions: list[Any] = ['upstream', 'all_reduce']
    if dist_opt:
        reductions += ['reduce_scatter', 'a2a_fp32_sum']
        reductions += [{'name': 'a2a_fp32_sum', 'wire_dtype': 'bf16'}]
    pairs = itertools.product(('prescale', 'average', 'shard_postscale'), reductions)
    return [{'scaling': scaling, 'grad_reduce': reduce} for scaling, reduce in pairs]


def _against_oracle(rank: int, world_size: int, path: str) -> list[str]:
    import megatron_buffer
    from tests import small_model as sm

    flags = PATHS[path]
    wrong = []
    oracle = [sm.oracle_grads(rank, world_size, step, micro_batches=2) for step in range(2)]
    for config in configs('use_distributed_optimizer' in flags):
        model = sm.wrap(
            sm.make_net(), megatron_buffer.DistributedDataParallel, buffer_config=config, **flags
        )
        # bf16 on the wire rounds every contribution but one's own: half a unit in the last place.
        rtol = 2.0**-8 if 'bf16' in str(config) else 1e-6
        for step, expected in enumerate(oracle):
            sm.run_window(model, rank, step, micro_batches=2)
            owned = sm.owned_main_grads(model)
            if not sm.covered(model, owned):
                wrong.append(f'{config}: not every element has exactly one owner')
            wrong += [f'{config}: {text}' for text in sm.differences(owned, expected, rtol)]
            for name, param in model.module.named_parameters():
                if 'second' in name and 'beside' in path:
                    # What the optimizer reads; the buffer only carries it.
                    found = {name: param.main_grad.flatten().float()}
                    one = {name: expected[name]}
                    wrong += [f'{config}: main_grad {text}' for text in sm.differences(found, one)]
    return wrong


@pytest.mark.long
@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize('path', PATHS)
def test_reduced_gradients_equal_an_unwrapped_models(path: str, world_size: int) -> None:
    assert run_ranks(_against_oracle, world_size, path) == [[]] * world_size


def _whole_buckets(rank: int, world_size: int) -> list[str]:
    """force_all_reduce, for saving weight gradients: every rank has, and scales, every element."""
    import megatron_buffer
    from tests import small_model as sm

    wrong = []
    for scaling, overlap in itertools.product(('average', 'shard_postscale'), (False, True)):
        model = sm.wrap(
            sm.make_net(),
            megatron_buffer.DistributedDataParallel,
            buffer_config={'scaling': scaling, 'grad_reduce': 'a2a_fp32_sum'},
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            bucket_size=100,
        )
        for step in range(2):
            model.zero_grad_buffer()
            model.force_all_reduce = True
            model(sm.batch(rank, step, 0)).square().mean().backward()
            model.finish_grad_sync(force_all_reduce=True)
            expected = sm.oracle_grads(rank, world_size, step, micro_batches=1)
            grads = {n: p.main_grad.flatten() for n, p in model.module.named_parameters()}
            wrong += [f'{scaling} {overlap}: {x}' for x in sm.differences(grads, expected)]
    return wrong


def test_an_all_reduce_that_is_forced_scales_whole_buckets() -> None:
    assert run_ranks(_whole_buckets, 2) == [[], []]


# ------------------------------------------------------------------ bits

FULL = TrainCase(
    bucket_size=2000,
    dist_opt=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    dtype='bf16',
    steps=3,
)


def _same_bits(rank: int, world_size: int, case: TrainCase, config: Any, stock: Any) -> list[str]:
    reference, ours = train(stock, 'stock'), train(case, config)
    assert len(flat_tensors(ours)) > 20
    return compare(reference, ours)


POSTSCALE = {'scaling': 'shard_postscale'}
AVERAGE = {'scaling': 'average'}
A2A = {'grad_reduce': 'a2a_fp32_sum'}
slow = pytest.mark.slow
BITS = [
    # A division by a power of two is exact before the sum and after it.
    pytest.param(2, FULL, POSTSCALE, {}),
    pytest.param(2, replace(FULL, dist_opt=False, overlap_param_gather=False), POSTSCALE, {}),
    pytest.param(2, replace(FULL, pp=2), POSTSCALE, {}, marks=slow),
    pytest.param(2, replace(FULL, tp=2, sp=True), POSTSCALE, {}, marks=slow),
    pytest.param(2, replace(FULL, moe=True, ep=2), POSTSCALE, {}, marks=slow),
    pytest.param(2, replace(FULL, per_token_loss=True), POSTSCALE, {}, marks=slow),
    pytest.param(4, replace(FULL, instances=2), POSTSCALE, {}, marks=slow),
    # What ddp_config.average_in_collective does, without it.
    pytest.param(2, FULL, AVERAGE, {'average_in_collective': True}, marks=slow),
    pytest.param(
        4, replace(FULL, moe=True, ep=2), AVERAGE, {'average_in_collective': True}, marks=slow
    ),
    pytest.param(
        4, replace(FULL, instances=2), AVERAGE, {'average_in_collective': True}, marks=slow
    ),
    # Two contributions have one sum, however they travel.
    pytest.param(2, FULL, A2A, {}),
    pytest.param(
        2, replace(FULL, grad_reduce_in_fp32=False), A2A, {'rs_fp32_accum': True}, marks=slow
    ),
    pytest.param(2, FULL, {'grad_reduce': 'all_reduce'}, {}, marks=slow),
    pytest.param(2, FULL, {'grad_reduce': 'reduce_scatter'}, {}, marks=slow),
]


@pytest.mark.long
@pytest.mark.parametrize(('world_size', 'case', 'config', 'stock'), BITS)
def test_training_has_the_bits_of_stock(
    world_size: int, case: TrainCase, config: Any, stock: dict[str, Any]
) -> None:
    results = run_ranks(_same_bits, world_size, case, config, replace(case, **stock), timeout_s=240)
    assert results == [[]] * world_size


# ------------------------------------------------------------------ what is refused when a model is wrapped

DIST_OPT = {'use_distributed_optimizer': True}
FP32_SUM = {'use_distributed_optimizer': True, 'reduce_scatter_with_fp32_accumulation': True}
EAGER_FLAGS = {**DIST_OPT, 'overlap_grad_reduce': True, 'overlap_param_gather': True}
WIRE_FP16 = {'grad_reduce': {'name': 'a2a_fp32_sum', 'wire_dtype': 'fp16'}}
REFUSED: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    (
        {'grad_reduce': 'reduce_scatter'},
        {},
        (
            'grad_reduce.name is reduce_scatter',
            'ddp_config.use_distributed_optimizer',
            'all_reduce',
        ),
    ),
    (A2A, {}, ('grad_reduce.name is a2a_fp32_sum', 'ddp_config.use_distributed_optimizer')),
    (
        {'grad_reduce': 'all_reduce'},
        FP32_SUM,
        ('grad_reduce.name is all_reduce', 'ddp_config.reduce_scatter_with_fp32_accumulation'),
    ),
    (
        {'grad_reduce': 'reduce_scatter'},
        FP32_SUM,
        ('grad_reduce.name is reduce_scatter', 'ddp_config.reduce_scatter_with_fp32_accumulation'),
    ),
    (
        'upstream',
        {**FP32_SUM, 'average_in_collective': True},
        ('ddp_config.reduce_scatter_with_fp32_accumulation', 'ddp_config.average_in_collective'),
    ),
    (
        AVERAGE,
        FP32_SUM,
        (
            'scaling.name is average',
            'ddp_config.reduce_scatter_with_fp32_accumulation',
            'a2a_fp32_sum',
        ),
    ),
    (
        POSTSCALE,
        {**DIST_OPT, 'average_in_collective': True},
        ('scaling.name is shard_postscale', 'ddp_config.average_in_collective'),
    ),
    (
        {'scaling': 'premul_sum'},
        {**DIST_OPT, 'average_in_collective': True},
        ('scaling.name is premul_sum', 'ddp_config.average_in_collective'),
    ),
    ({'scaling': 'premul_sum'}, DIST_OPT, ('scaling.name is premul_sum', 'NCCL', 'gloo')),
    (
        POSTSCALE,
        {**DIST_OPT, 'dtype': torch.float16},
        ('scaling.name is shard_postscale', 'fp16', 'ddp_config.grad_reduce_in_fp32'),
    ),
    (
        {**POSTSCALE, **WIRE_FP16},
        DIST_OPT,
        ('grad_reduce.wire_dtype is fp16', 'scaling.name is shard_postscale', 'bf16'),
    ),
    (
        {**AVERAGE, **WIRE_FP16},
        DIST_OPT,
        ('grad_reduce.wire_dtype is fp16', 'scaling.name is average'),
    ),
    (
        {'param_gather': 'eager'},
        {**EAGER_FLAGS, 'use_distributed_optimizer': False},
        ('param_gather.name is eager', 'ddp_config.use_distributed_optimizer'),
    ),
    (
        {'param_gather': 'eager'},
        {**EAGER_FLAGS, 'fp8_param_gather': True, 'reuse_grad_buf_for_mxfp8_param_ag': True},
        ('param_gather.name is eager', 'ddp_config.reuse_grad_buf_for_mxfp8_param_ag'),
    ),
    (
        {'param_gather': 'eager'},
        {**EAGER_FLAGS, 'config': {'qk_clip': True}},
        ('param_gather.name is eager', 'qk_clip'),
    ),
    (
        AVERAGE,
        {**DIST_OPT, 'config_attributes': {'gtp_weight_remat_size': 2}},
        ('scaling.name is average', 'gtp_weight_remat_size'),
    ),
]


def _refusals(rank: int, world_size: int) -> list[tuple[str, str]]:
    return [_refusal(config, **flags) for config, flags, _ in REFUSED]


def _refusal(
    buffer_config: Any,
    *,
    dtype: torch.dtype = torch.float32,
    config_attributes: dict[str, Any] | None = None,
    **flags: Any,
) -> tuple[str, str]:
    """The message and the YAML path."""
    import megatron_buffer
    from megatron_buffer import wrap_checks
    from megatron_buffer.errors import ConflictError
    from tests import small_model as sm

    net = sm.make_net(dtype=dtype)
    ours = megatron_buffer.DistributedDataParallel
    try:
        model = sm.wrap(net, ours, buffer_config=buffer_config, **flags)
        # Megatron-Core as installed here has no such groups to build a model over.
        for name, value in (config_attributes or {}).items():
            setattr(model.config, name, value)
        wrap_checks.check_collectives(model)
    except ConflictError as error:
        return str(error), error.yaml_path
    return '', ''


def test_what_cannot_work_is_refused_with_both_sides_and_the_way_out() -> None:
    found, _ = run_ranks(_refusals, 2)
    for (config, _, named), (message, yaml_path) in zip(REFUSED, found, strict=True):
        for text in named:
            assert text in message, f'{config}: {message!r}'
        if config != 'upstream':
            assert yaml_path.partition('.')[0] in config
            assert f'{yaml_path} is ' in message


def _notes(rank: int, world_size: int) -> list[list[tuple[str, str]]]:
    """Level and text of what is said about configs that work."""
    import megatron_buffer
    from tests import small_model as sm

    records: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda r: records.append((r.levelname, r.getMessage()))  # type: ignore[method-assign]
    log = logging.getLogger('megatron_buffer.wrap_checks')
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    said = []
    wire_fp32 = {'grad_reduce': {'name': 'a2a_fp32_sum', 'wire_dtype': 'fp32'}}
    for config, flags, dtype in (
        (A2A, FP32_SUM, 'float32'),
        (wire_fp32, DIST_OPT, 'bfloat16'),
        (wire_fp32, DIST_OPT, 'float32'),
        ({'param_gather': 'eager'}, DIST_OPT, 'float32'),
        ({'param_gather': 'eager'}, {**EAGER_FLAGS, 'align_param_gather': True}, 'float32'),
        ({'param_gather': 'eager'}, EAGER_FLAGS, 'float32'),
        (WIRE_FP16, DIST_OPT, 'float32'),
        (
            {**WIRE_FP16, **AVERAGE},
            {**DIST_OPT, 'config': {'calculate_per_token_loss': True}},
            'float32',
        ),
    ):
        sm.wrap(
            sm.make_net(dtype=getattr(torch, dtype)),
            megatron_buffer.DistributedDataParallel,
            buffer_config=config,
            **flags,
        )
        said.append(list(records))
        records.clear()
    return said


def test_what_has_no_effect_is_said_once() -> None:
    [found] = run_ranks(_notes, 1)
    expected = [
        ('INFO', 'ddp_config.reduce_scatter_with_fp32_accumulation asks for the same'),
        ('WARNING', 'grad_reduce.wire_dtype is fp32'),
        None,
        ('WARNING', 'ddp_config.overlap_param_gather is false'),
        ('WARNING', 'ddp_config.align_param_gather'),
        ('WARNING', 'megatron_buffer.install()'),
        None,
        None,
    ]
    for said, wanted in zip(found, expected, strict=True):
        if wanted is None:
            assert said == []
            continue
        [(level, text)] = said
        assert level == wanted[0]
        assert wanted[1] in text


def test_upstreams_choices_are_upstreams() -> None:
    assert plan_of('prescale') == Runtime(BufferConfig()).scaling.plan(
        ScalingContext(8, 4, False, False, False)
    )

"""Our DistributedDataParallel on its own: right gradients, nothing left patched, errors with names."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

PATHS = {
    'plain': {},
    'plain_overlap': {'overlap_grad_reduce': True, 'bucket_size': 100},
    'dist_opt': {'use_distributed_optimizer': True},
    'dist_opt_overlap': {
        'use_distributed_optimizer': True,
        'overlap_grad_reduce': True,
        'overlap_param_gather': True,
        'bucket_size': 100,
    },
    'average': {
        'use_distributed_optimizer': True,
        'overlap_grad_reduce': True,
        'bucket_size': 100,
        'average_in_collective': True,
    },
    'fp32_sum': {
        'use_distributed_optimizer': True,
        'overlap_grad_reduce': True,
        'bucket_size': 100,
        'reduce_scatter_with_fp32_accumulation': True,
    },
    'local_fp32': {
        'overlap_grad_reduce': True,
        'bucket_size': 100,
        'param_name_patterns_for_fp32_local_accumulation': ('*second*',),
    },
}


def _matches_oracle(
    rank: int, world_size: int, flags: dict[str, Any], config: Any = 'upstream'
) -> list[str]:
    import megatron_buffer
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(), megatron_buffer.DistributedDataParallel, buffer_config=config, **flags
    )
    wrong = []
    for step in range(3):
        sm.run_window(model, rank, step)
        owned = sm.owned_main_grads(model)
        if not sm.covered(model, owned):
            wrong.append(f'step {step}: not every element has exactly one owner')
        wrong += sm.differences(owned, sm.oracle_grads(rank, world_size, step))
    return wrong


@pytest.mark.long
@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize('path', PATHS)
def test_reduced_gradients_equal_an_unwrapped_models(path: str, world_size: int) -> None:
    assert run_ranks(_matches_oracle, world_size, PATHS[path]) == [[]] * world_size


@pytest.mark.long
@pytest.mark.parametrize(
    'config',
    [
        {'padding': {'name': 'megatron', 'param_start_elems': 1, 'bucket_end_elems': 1}},
        {'padding': {'name': 'megatron', 'param_start_elems': 256, 'bucket_end_elems': 2}},
        {'padding': {'name': 'megatron', 'high_busbw': True}},
        {'bucketing': {'name': 'fixed_size', 'bucket_size_elems': 150}},
    ],
    ids=['packed', 'wide', 'high_busbw', 'size'],
)
def test_parameters_of_the_config_leave_the_gradients_right(config: Any) -> None:
    flags = dict(PATHS['dist_opt_overlap'])
    if 'bucketing' in config:
        del flags['bucket_size']
    assert run_ranks(_matches_oracle, 3, flags, config) == [[]] * 3


def _per_token(rank: int, world_size: int) -> list[str]:
    import megatron_buffer
    from megatron_buffer.finalize import finalize_model_grads
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        buffer_config='upstream',
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=100,
        config={'calculate_per_token_loss': True},
    )
    tokens = torch.tensor(3 if rank == 0 else 2)
    model.zero_grad_buffer()
    model(sm.batch(rank, 0, 0)).square().mean().backward()
    finalize_model_grads([model], num_tokens=tokens)
    assert int(tokens) == 3 + 2 * (world_size - 1)
    expected = sm.oracle_grads(rank, world_size, 0, micro_batches=1, scale=1.0 / int(tokens))
    return sm.differences(sm.owned_main_grads(model), expected)


def test_per_token_loss_divides_by_the_tokens_of_all_ranks() -> None:
    assert run_ranks(_per_token, 2) == [[], []]


def _direct_use(rank: int, world_size: int) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig

    from tests import small_model as sm

    watched = [
        importlib.import_module(f'megatron.core.{name}')
        for name in (
            'distributed.distributed_data_parallel',
            'distributed.param_and_grad_buffer',
            'optimizer.distrib_optimizer',
        )
    ]
    import megatron_buffer

    ours = megatron_buffer.DistributedDataParallel
    before = [dict(vars(module)) for module in watched]
    sm.init_parallel()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        reduce_scatter_with_fp32_accumulation=True,
    )
    model = ours(sm.transformer_config(), ddp_config, sm.make_net())
    changed = [
        f'{module.__name__}.{name}'
        for module, old in zip(watched, before, strict=True)
        for name, value in vars(module).items()
        if old.get(name) is not value
    ]
    return {
        'changed': changed,
        'bucket_size': ddp_config.bucket_size,
        'ours': [type(x).__module__ for x in (model.buffers[0], model.bucket_groups[0])],
        'patching_imported': 'megatron_buffer.patching' in sys.modules,
    }


def test_direct_use_leaves_nothing_patched_and_the_callers_config_alone() -> None:
    for found in run_ranks(_direct_use, 2):
        assert found == {
            'changed': [],
            'bucket_size': None,
            'ours': ['megatron_buffer.buffer', 'megatron_buffer.bucket_groups'],
            'patching_imported': False,
        }


def _constructor_fails(rank: int, world_size: int) -> list[str]:
    import megatron_buffer
    from tests import small_model as sm

    ddp = importlib.import_module('megatron.core.distributed.distributed_data_parallel')
    names = ('_ParamAndGradBuffer', 'partition_buckets', 'group_params_for_buffers')
    before = [getattr(ddp, name) for name in names]
    with pytest.raises(AssertionError):
        # Upstream's own refusal, in the middle of its constructor.
        sm.wrap(
            sm.make_net(),
            megatron_buffer.DistributedDataParallel,
            config={'calculate_per_token_loss': True},
            average_in_collective=True,
        )
    return [n for n, old in zip(names, before, strict=True) if getattr(ddp, n) is not old]


def test_a_constructor_that_fails_leaves_nothing_patched() -> None:
    assert run_ranks(_constructor_fails, 2) == [[], []]


def _fp32_then_stock(rank: int, world_size: int) -> dict[str, Any]:
    """Stock's second model never reduces when the first one was stock's (UPSTREAM.md F4)."""
    import megatron_buffer
    from tests import small_model as sm

    flags = {'use_distributed_optimizer': True, 'overlap_grad_reduce': True, 'bucket_size': 100}
    ours = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        reduce_scatter_with_fp32_accumulation=True,
        **flags,
    )
    stock = sm.wrap(sm.make_net(), **flags)
    assert type(stock).__module__.startswith('megatron.core')
    wrong = {'ours': [], 'stock': []}
    for step in range(3):
        for name, model in (('ours', ours), ('stock', stock)):
            sm.run_window(model, rank, step)
            expected = sm.oracle_grads(rank, world_size, step)
            wrong[name] += sm.differences(sm.owned_main_grads(model), expected)
    return wrong


def test_fp32_sums_of_one_model_do_not_reach_a_stock_model_in_the_same_process() -> None:
    assert run_ranks(_fp32_then_stock, 2) == [{'ours': [], 'stock': []}] * 2


def _log_records(level: int = logging.INFO) -> list[str]:
    """A list that our messages are added to from now on."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger('megatron_buffer')
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    handler.setLevel(level)
    return records


def _partly_unused(rank: int, world_size: int, later: bool) -> str:
    import megatron_buffer
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(unused=True),
        megatron_buffer.DistributedDataParallel,
        overlap_grad_reduce=True,
        bucket_size=1_000_000,
    )

    def with_spare(output: torch.Tensor) -> torch.Tensor:
        spare = model.module.spare
        return output.square().mean() + spare.weight.square().sum() + spare.bias.square().sum()

    if later:
        sm.run_window(model, rank, 0, loss=with_spare)
    with pytest.raises(ReadinessError) as caught:
        sm.run_window(model, rank, 1)
    return str(caught.value)


@pytest.mark.parametrize('later', [False, True])
def test_a_parameter_without_gradient_is_named_in_the_same_window(later: bool) -> None:
    for message in run_ranks(_partly_unused, 2, later):
        assert 'spare.weight' in message
        assert 'spare.bias' in message
        assert 'first.weight' not in message


def _too_many_backwards(rank: int, world_size: int) -> str:
    """Stock asserts without a word (UPSTREAM.md F1, one synced backward after windows of two)."""
    import megatron_buffer
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        overlap_grad_reduce=True,
        bucket_size=100,
    )
    model.zero_grad_buffer()
    for micro_batch in range(2):
        model(sm.batch(rank, 0, micro_batch)).square().mean().backward()
    model.finish_grad_sync()
    model.zero_grad_buffer()
    model(sm.batch(rank, 1, 0)).square().mean().backward()
    with pytest.raises(ReadinessError) as caught:
        model.finish_grad_sync()
    return str(caught.value)


def test_a_window_that_does_not_repeat_the_first_ones_counts_is_explained() -> None:
    for message in run_ranks(_too_many_backwards, 2):
        assert 'too few for' in message
        assert 'no_sync()' in message


def _late(rank: int, world_size: int) -> list[str]:
    """Stock is silently wrong here (UPSTREAM.md F1, three synced backwards after a window of one)."""
    import megatron_buffer
    from tests import small_model as sm

    records = _log_records()
    model = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        overlap_grad_reduce=True,
        bucket_size=100,
    )
    sm.run_window(model, rank, 0, micro_batches=1)
    model.zero_grad_buffer()
    for _ in range(2):
        model(sm.batch(rank, 1, 0)).square().mean().backward()
        for group in model.bucket_groups:  # stock asserts if the first reduction is still in flight
            group.finish_grad_sync()
    model.finish_grad_sync()
    model.zero_grad_buffer()  # ends the window
    return [text for text in records if 'after their bucket group' in text]


def test_a_gradient_after_the_reduction_is_named_in_a_warning() -> None:
    for warnings in run_ranks(_late, 2):
        assert len(warnings) == 1
        assert 'too many for' in warnings[0]


def _wholly_unused(rank: int, world_size: int) -> list[str]:
    import megatron_buffer
    from tests import small_model as sm

    records = _log_records(logging.WARNING)
    model = sm.wrap(
        sm.make_net(unused=True),
        megatron_buffer.DistributedDataParallel,
        overlap_grad_reduce=True,
        bucket_size=1,
    )
    for step in range(3):
        sm.run_window(model, rank, step)
    expected = sm.oracle_grads(rank, world_size, 2, unused=True)
    assert sm.differences(sm.owned_main_grads(model), expected) == []
    return [text for text in records if 'no gradient' in text]


def test_wholly_unused_groups_are_reduced_as_zeros_with_one_warning() -> None:
    on_rank_0, on_rank_1 = run_ranks(_wholly_unused, 2)
    assert len(on_rank_0) == 1
    assert 'spare.weight' in on_rank_0[0]
    assert on_rank_1 == []


def _disagree(rank: int, world_size: int, what: str) -> str:
    import megatron_buffer
    from megatron_buffer.errors import RankMismatchError
    from tests import small_model as sm

    net = sm.make_net()
    flags: dict[str, Any] = {'overlap_grad_reduce': True, 'buffer_config': 'upstream'}
    if what == 'config' and rank == 1:
        flags['buffer_config'] = {'padding': {'name': 'megatron', 'param_start_elems': 32}}
    if what == 'frozen' and rank == 1:
        net.second.weight.requires_grad_(False)
    if what == 'bucket_size':
        flags['bucket_size'] = 100 if rank == 1 else 200
    if what == 'shape' and rank == 1:
        net.third = torch.nn.Linear(16, 8, bias=False)
    with pytest.raises(RankMismatchError) as caught:
        sm.wrap(net, megatron_buffer.DistributedDataParallel, **flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ('what', 'named'),
    [
        ('config', 'config hash'),
        ('frozen', 'rank 0 has second.weight at [152, 408)'),
        ('bucket_size', 'rank 1 has the end of bucket 0 at 136'),
        ('shape', 'rank 0 has third.bias at [0, 8)'),
    ],
)
def test_ranks_that_disagree_stop_on_every_rank_with_the_difference(what: str, named: str) -> None:
    messages = run_ranks(_disagree, 2, what)
    assert messages[0] == messages[1]
    assert 'rank 0' in messages[0]
    assert 'rank 1' in messages[0]
    assert named in messages[0], messages[0]


def _conflicts(rank: int, world_size: int) -> list[str]:
    import megatron_buffer
    from megatron_buffer.errors import ConflictError
    from tests import small_model as sm

    sized = {'bucketing': {'name': 'fixed_size', 'bucket_size_elems': 300}}
    cases: list[dict[str, Any]] = [
        {'buffer_config': sized, 'overlap_grad_reduce': True, 'bucket_size': 100},
        {'buffer_config': 'upstream', 'use_megatron_fsdp': True},
        {
            'buffer_config': {'padding': {'name': 'megatron', 'high_busbw': False}},
            'use_distributed_optimizer': True,
            'pad_buckets_for_high_nccl_busbw': True,
        },
    ]
    messages = []
    for flags in cases:
        with pytest.raises(ConflictError) as caught:
            sm.wrap(sm.make_net(), megatron_buffer.DistributedDataParallel, **flags)
        messages.append(str(caught.value))
    agreed = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        buffer_config=sized,
        overlap_grad_reduce=True,
    )
    assert agreed.bucket_size == 300
    return messages


def test_a_flag_that_contradicts_the_config_is_refused_with_both_named() -> None:
    for sizes, fsdp, busbw in run_ranks(_conflicts, 2):
        assert 'bucketing.bucket_size_elems is 300' in sizes
        assert 'ddp_config.bucket_size asks for 100' in sizes
        assert 'use_megatron_fsdp' in fsdp
        assert 'padding.high_busbw' in busbw


def _foreign_layout(rank: int, world_size: int) -> list[str]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Stock

    import megatron_buffer
    from megatron_buffer.errors import LayoutError
    from tests import small_model as sm

    sm.init_parallel()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=100
    )
    net = sm.make_net()
    layout = Stock.compute_full_param_layout(list(net.parameters()), 100, world_size, ddp_config)
    ours = megatron_buffer.DistributedDataParallel
    # The same layout by stock's own function is the config's layout.
    ours(
        sm.transformer_config(), ddp_config, net, full_param_layout=layout, buffer_config='upstream'
    )
    messages = []
    net = sm.make_net()
    layout = Stock.compute_full_param_layout(list(net.parameters()), 100, world_size, ddp_config)
    with pytest.raises(LayoutError) as caught:
        ours(
            sm.transformer_config(),
            ddp_config,
            net,
            full_param_layout=layout,
            buffer_config={'padding': {'name': 'megatron', 'param_start_elems': 128}},
        )
    messages.append(str(caught.value))
    return messages


def test_a_layout_of_another_config_is_refused() -> None:
    for messages in run_ranks(_foreign_layout, 2):
        assert 'full_param_layout is not what' in messages[0]
        assert 'padding' in messages[0]


def _stock_layouts(rank: int, world_size: int) -> int:
    """With stock's axes any layout that stock accepts is accepted."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import (
        _compute_default_per_buffer_param_layout as default_layout,
    )
    from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Stock
    from megatron.core.optimizer.param_layout import FullParamLayout

    import megatron_buffer
    from tests import small_model as sm

    sm.init_parallel()
    accepted = 0
    for dist_opt in (False, True):
        flags = DistributedDataParallelConfig(
            use_distributed_optimizer=dist_opt, overlap_grad_reduce=True, bucket_size=100
        )
        net = sm.make_net()
        params = list(net.parameters())
        if dist_opt:  # cut at another size than ddp_config's
            layout = Stock.compute_full_param_layout(params, 300, world_size, flags)
        else:
            layout = FullParamLayout()
            for key, (members, indices) in group_params_for_buffers(params, False).items():
                layout.layouts[key] = default_layout(members, 300)
                layout.layouts[key].param_indices = indices
        model = megatron_buffer.DistributedDataParallel(
            sm.transformer_config(),
            flags,
            net,
            full_param_layout=layout,
            buffer_config={'checks': {'rank_agreement': False}},
        )
        accepted += len(model.buffers[0].buckets) == 2
    return accepted


def test_a_layout_that_stock_accepts_is_accepted_with_stocks_axes() -> None:
    assert run_ranks(_stock_layouts, 2) == [2, 2]


def _half_of_the_groups_disagree(rank: int, world_size: int) -> str:
    from megatron.core import parallel_state

    import megatron_buffer
    from megatron_buffer.errors import RankMismatchError
    from tests import small_model as sm

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = {'padding': {'name': 'megatron', 'param_start_elems': 32}} if rank == 2 else 'upstream'
    try:
        sm.wrap(sm.make_net(), megatron_buffer.DistributedDataParallel, buffer_config=config)
    except RankMismatchError as error:
        return str(error)
    return ''


def test_a_mismatch_leaves_nobody_waiting() -> None:
    # Data-parallel groups are 0, 2 and 1, 3; tensor-parallel ones 0, 1 and 2, 3.
    messages = run_ranks(_half_of_the_groups_disagree, 4, timeout_s=240)
    assert ['data-parallel' in m for m in messages] == [True, False, True, False]
    assert messages[1] == ''
    assert 'tensor-parallel' in messages[3]


def _two_dtypes_one_group(rank: int, world_size: int) -> str:
    from megatron.core.distributed import DistributedDataParallelConfig

    import megatron_buffer
    from megatron_buffer.errors import LayoutError
    from tests import small_model as sm

    sm.init_parallel()
    net = sm.make_net()
    net.second.to(torch.bfloat16)
    with pytest.raises(LayoutError) as caught:
        megatron_buffer.DistributedDataParallel(
            sm.transformer_config(),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce=True,
                reduce_scatter_with_fp32_accumulation=True,
            ),
            net,
            disable_bucketing=True,
        )
    return str(caught.value)


def test_a_group_that_its_collective_cannot_take_is_refused_at_start() -> None:
    for message in run_ranks(_two_dtypes_one_group, 2):
        assert 'one bucket per group' in message


def _summary(rank: int, world_size: int) -> list[str]:
    import megatron_buffer
    from tests import small_model as sm

    records = _log_records()
    for flags in (
        {},
        {'overlap_grad_reduce': True},
        {'overlap_grad_reduce': True, 'bucket_size': 100},
    ):
        sm.wrap(sm.make_net(), megatron_buffer.DistributedDataParallel, **flags)
    return [text for text in records if text.startswith('bucket size')]


def test_the_resolved_bucket_size_and_its_reason_are_logged_once() -> None:
    on_rank_0, on_rank_1 = run_ranks(_summary, 2)
    assert on_rank_1 == []
    assert [text.split(';')[0] for text in on_rank_0] == [
        'bucket size: none (one bucket per buffer: overlap_grad_reduce is off)',
        'bucket size: 40,000,000 elements (default: max(40,000,000, 1,000,000 x dp_size=2))',
        'bucket size: 100 elements (ddp_config.bucket_size)',
    ]


def _installed_configs_differ(rank: int, world_size: int, how: str) -> None:
    import megatron_buffer
    from megatron_buffer import errors
    from tests import small_model as sm

    configs = {
        'padding': {'padding': {'name': 'megatron', 'param_start_elems': 32}},
        'unchecked': {'checks': {'rank_agreement': False}},
    }
    megatron_buffer.install(configs[how] if rank == 1 else 'upstream')
    from megatron.core import parallel_state

    if how == 'padding':  # stages share no data-parallel group
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    with errors.guard():
        sm.wrap(sm.make_net(), use_distributed_optimizer=True)
        torch.distributed.barrier()


@pytest.mark.parametrize(('how', 'named'), [('padding', 'config hash'), ('unchecked', 'false')])
def test_configs_that_differ_between_ranks_without_a_common_group(how: str, named: str) -> None:
    outcomes = run_ranks(
        _installed_configs_differ, 2, how, expect_failure=True, timeout_s=240, grace_s=20
    )
    errors = {outcome.error_type: outcome.error for outcome in outcomes}
    assert set(errors) == {'RankMismatchError', 'RankFailure'}
    assert all(named in error for error in errors.values()), errors


def _freed_before_backward(rank: int, world_size: int, accumulation: str) -> dict[str, Any]:
    import gc
    import weakref

    import megatron_buffer
    from tests import small_model as sm

    net = sm.make_net()
    config = {'accumulation': accumulation}
    model = sm.wrap(
        net,
        megatron_buffer.DistributedDataParallel,
        buffer_config=config,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
    )
    sm.run_window(model, rank, 0)
    model.zero_grad_buffer()
    loss = model(sm.batch(rank, 1, 0)).square().mean()  # its graph reaches the hooks
    this = weakref.ref(model)
    del model
    gc.collect()
    before = {name: param.main_grad.clone() for name, param in net.named_parameters()}
    loss.backward()
    return {
        'gone': this() is None,
        'without_grad': [name for name, param in net.named_parameters() if param.grad is None],
        'written': [
            name
            for name, param in net.named_parameters()
            if not param.main_grad.view(torch.int32).equal(before[name].view(torch.int32))
        ],
    }


@pytest.mark.parametrize('accumulation', ['zero_then_add', 'first_write'])
def test_hooks_of_a_model_that_is_gone_leave_gradients_where_torch_puts_them(
    accumulation: str,
) -> None:
    for found in run_ranks(_freed_before_backward, 2, accumulation):
        assert found == {'gone': True, 'without_grad': [], 'written': []}

"""Stale weights, shared storage, values that are not finite, offload: right, or stopped by name.

What stock does silently in the same situation is shown by the tests marked ``stock_fault``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

FLAGS = {
    'use_distributed_optimizer': True,
    'overlap_grad_reduce': True,
    'overlap_param_gather': True,
    'bucket_size': 100,
}


# Large steps, so that last step's weights give other losses.
LR, EPS = 0.05, 1e-5


def _activated(config: Any) -> Any:
    import megatron_buffer

    return contextlib.nullcontext() if config == 'stock' else megatron_buffer.activated(config)


def _optimizer(model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer='adam',
            lr=LR,
            min_lr=LR,
            adam_eps=EPS,
            weight_decay=0.0,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        [model],
    )


class _Borrowing(torch.nn.Module):
    """Its first layer multiplies by the last layer's weight, before that layer's own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(8, 8)
        self.middle = torch.nn.Linear(8, 64)
        self.narrow = torch.nn.Linear(64, 8)
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(torch.nn.functional.linear(x, self.last.weight))
        x = torch.tanh(self.middle(self.first(x)))
        return self.last(torch.tanh(self.narrow(x)))


# F5: weights that are read before their gather has finished ---------------------------------------


def _borrowed(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    """Losses of six steps, with the borrowed weight, and those of plain Adam on all ranks' data."""
    from tests import small_model as sm

    losses, said = [], ''
    with _activated(config):
        model = sm.wrap(_Borrowing(), **FLAGS)
        optimizer = _optimizer(model)
        try:
            for step in range(6):
                model.zero_grad_buffer()
                loss = model(sm.batch(rank, step, 0)).square().mean()
                loss.backward()
                model.finish_grad_sync()
                optimizer.step()
                losses.append(loss.item())
        except RuntimeError as error:
            said = f'{type(error).__name__}: {error}'
        del model, optimizer
    net = _Borrowing()
    reference = torch.optim.AdamW(net.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    expected = []
    for step in range(6):
        reference.zero_grad()
        for other in range(world_size):
            loss = net(sm.batch(other, step, 0)).square().mean()
            (loss / world_size).backward()
            if other == rank:
                expected.append(loss.item())
        reference.step()
    return {'losses': losses, 'expected': expected, 'said': said}


@pytest.mark.parametrize('policy', ['wait', 'learn'])
def test_a_weight_that_another_module_reads_is_waited_for(policy: str) -> None:
    for found in run_ranks(_borrowed, 2, {'checks': {'stale_read': policy}}):
        assert found['losses'] == pytest.approx(found['expected'], rel=1e-5)


def test_a_weight_that_another_module_reads_too_early_is_named() -> None:
    outcomes = run_ranks(_borrowed, 2, {'checks': {'stale_read': 'error'}}, expect_failure=True)
    said = [o.result['said'] if o.status == 'ok' else o.error for o in outcomes]
    assert any('StaleReadError' in text or 'last.weight' in text for text in said)
    named = next(text for text in said if 'last.weight' in text)
    assert 'linear' in named
    assert 'test_guards.py' in named


@pytest.mark.stock_fault
def test_stock_reads_last_steps_weight() -> None:
    results = run_ranks(_borrowed, 2, 'stock')
    if all(r['losses'] == pytest.approx(r['expected'], rel=1e-5) for r in results):
        pytest.skip('stock now right: a weight read by another module')


def _export(rank: int, world_size: int, policy: str) -> dict[str, Any]:
    """state_dict() between step and forward."""
    from megatron_buffer.errors import StaleReadError
    from tests import small_model as sm
    from tests.test_window import _log_records

    records = _log_records()
    with _activated({'checks': {'export': policy}}):
        model = sm.wrap(sm.make_net(), **FLAGS)
        optimizer = _optimizer(model)
        model.zero_grad_buffer()
        model(sm.batch(rank, 0, 0)).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        error, state = '', {}
        try:
            state = {k: v.clone() for k, v in model.state_dict().items()}
        except StaleReadError as caught:
            error = str(caught)
        model.start_param_sync(force_sync=True)
        fresh = {k: v.clone() for k, v in model.state_dict().items()}
        del model, optimizer
    same = bool(state) and all(torch.equal(state[k], fresh[k]) for k in fresh)
    return {'error': error, 'same': same, 'warned': [r for r in records if 'state_dict()' in r]}


def test_an_export_between_step_and_forward_gathers_or_says_so() -> None:
    for found in run_ranks(_export, 2, 'gather'):
        assert found['same']
        assert found['error'] == ''
    for found in run_ranks(_export, 2, 'error'):
        assert '.weight' in found['error']
        assert 'checks.export: gather' in found['error']
    results = run_ranks(_export, 2, 'warn')
    assert not all(found['same'] for found in results)
    assert all(found['warned'] for found in results)


def _pre_hooks(rank: int, world_size: int) -> list[int]:
    from tests import small_model as sm

    with _activated('upstream'):
        model = sm.wrap(sm.make_net(), **FLAGS)
        found = []
        for call in ('enable', 'disable', 'disable', 'enable', 'enable'):
            getattr(model, f'{call}_forward_pre_hook')()
            found.append(len(model.remove_forward_pre_hook_handles))
        del model
    return found


def test_forward_pre_hooks_can_be_switched_twice() -> None:
    for number, *others in run_ranks(_pre_hooks, 2):
        assert number > 0
        assert others == [0, 0, number, number]


# F6: values that are not finite -------------------------------------------------------------------


def _nan(rank: int, world_size: int, value: float, where: str) -> str:
    import megatron_buffer
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        buffer_config={'checks': {'nan_in_grad': where == 'after'}},
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=1000,
        check_for_nan_in_grad=where == 'before',
    )
    with megatron_buffer.errors.guard():
        sm.run_window(model, rank, 0)
        model.zero_grad_buffer()
        loss = model(sm.batch(rank, 1, 0)).square().mean()
        if rank == 1:
            loss.register_hook(lambda gradient: gradient)
            model.module.second.weight.register_hook(lambda g: g * value)
        loss.backward()
        model.finish_grad_sync()
    return 'not noticed'


@pytest.mark.parametrize('where', ['before', 'after'])
@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_a_value_that_is_not_finite_is_named_on_every_rank(value: float, where: str) -> None:
    outcomes = run_ranks(_nan, 2, value, where, expect_failure=True)
    for outcome in outcomes:
        assert outcome.status == 'error', outcome.headline()
        assert 'second.weight' in outcome.error


# Aliased parameters -------------------------------------------------------------------------------


class _Aliased(torch.nn.Module):
    """Two Parameter objects over one tensor, or over overlapping halves of one."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.one = torch.nn.Linear(8, 8, bias=False)
        self.two = torch.nn.Linear(8, 8, bias=False)
        if halves:
            whole = torch.randn(12, 8)
            self.one.weight = torch.nn.Parameter(whole[:8])
            self.two.weight = torch.nn.Parameter(whole[4:])
        else:
            self.two.weight = torch.nn.Parameter(self.one.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def _aliased(rank: int, world_size: int, policy: str, halves: bool) -> dict[str, Any]:
    import megatron_buffer
    from megatron_buffer.errors import ParamStorageError
    from tests import small_model as sm
    from tests.test_window import _log_records

    records = _log_records()
    net = _Aliased(halves)
    config = {'checks': {'aliased_params': policy}}
    try:
        model = sm.wrap(net, megatron_buffer.DistributedDataParallel, buffer_config=config, **FLAGS)
    except ParamStorageError as error:
        return {'error': str(error)}
    found = {
        'error': '',
        'warned': [text for text in records if 'share storage' in text],
        'tied': net.one.weight is net.two.weight,
        'params': len(list(net.parameters())),
    }
    if policy == 'tie':
        model.zero_grad_buffer()
        model(sm.batch(rank, 0, 0)).square().mean().backward()
        model.finish_grad_sync()
        weight = _Aliased(halves).one.weight.detach().clone().requires_grad_()
        for other in range(world_size):
            x = torch.tanh(torch.nn.functional.linear(sm.batch(other, 0, 0), weight))
            loss = torch.nn.functional.linear(x, weight).square().mean()
            (loss / world_size).backward()
        expected = {'one.weight': weight.grad.flatten()}
        found['wrong'] = sm.differences(sm.owned_main_grads(model), expected)
    return found


def test_parameters_that_share_storage_are_named_refused_or_tied() -> None:
    for found in run_ranks(_aliased, 2, 'error', False):
        assert 'one.weight and two.weight' in found['error']
    for found in run_ranks(_aliased, 2, 'warn', False):
        assert len(found['warned']) == 1
        assert not found['tied']
    for found in run_ranks(_aliased, 2, 'tie', False):
        assert (found['tied'], found['params'], found['wrong']) == (True, 1, [])
    for found in run_ranks(_aliased, 2, 'tie', True):
        assert 'one.weight and two.weight' in found['error']


def test_storage_shared_without_overlap_is_no_alias() -> None:
    from megatron_buffer.param_checks import shared_storage

    whole = torch.randn(20)
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(whole[:10])
    module.b = torch.nn.Parameter(whole[10:])
    assert shared_storage(module) == []
    module.register_buffer('view', whole[9:12])
    assert sorted(pair.names for pair in shared_storage(module)) == [('a', 'view'), ('b', 'view')]


def _replaced(rank: int, world_size: int, policy: str) -> str:
    import megatron_buffer
    from megatron_buffer.errors import ParamStorageError
    from tests import small_model as sm
    from tests.test_window import _log_records

    model = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        buffer_config={'checks': {'replaced_param_data': policy}},
        **FLAGS,
    )
    sm.run_window(model, rank, 0)
    model.module.third.weight.data = torch.zeros(8, 16)
    if policy == 'error':
        with pytest.raises(ParamStorageError) as caught:
            model.zero_grad_buffer()
        return str(caught.value)
    records = _log_records()
    for _ in range(3):
        model.zero_grad_buffer()
    [message] = [text for text in records if 'was replaced' in text]
    return message


@pytest.mark.parametrize('policy', ['warn', 'error'])
def test_param_data_that_was_replaced_is_found_at_the_next_step(policy: str) -> None:
    for message in run_ranks(_replaced, 2, policy):
        assert 'third.weight' in message
        assert 'second.weight' not in message


# Frozen and unfrozen ------------------------------------------------------------------------------


def _thawed(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    import megatron_buffer
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm
    from tests.test_window import _log_records

    records = _log_records()
    net = sm.make_net()
    net.second.requires_grad_(False)
    model = sm.wrap(net, megatron_buffer.DistributedDataParallel, buffer_config=config, **FLAGS)
    sm.run_window(model, rank, 0)
    net.second.requires_grad_(True)
    error = ''
    try:
        sm.run_window(model, rank, 1)
    except ReadinessError as caught:
        error = str(caught)
    return {'error': error, 'warned': [r for r in records if 'frozen when' in r]}


def test_a_parameter_that_is_unfrozen_after_wrapping_is_named() -> None:
    for found in run_ranks(_thawed, 2, 'upstream'):
        assert len(found['warned']) == 1
        assert 'second.weight' in found['warned'][0]
    for found in run_ranks(_thawed, 2, 'recommended'):
        assert 'second.weight' in found['error']


def _frozen(rank: int, world_size: int) -> list[str]:
    """Frozen after wrapping: no gradient comes any more, and zeros are right."""
    import megatron_buffer
    from tests import small_model as sm
    from tests.test_window import _log_records

    records = _log_records()
    net = sm.make_net()
    model = sm.wrap(
        net, megatron_buffer.DistributedDataParallel, buffer_config='recommended', **FLAGS
    )
    sm.run_window(model, rank, 0)
    net.second.requires_grad_(False)
    for step in range(1, 4):
        sm.run_window(model, rank, step)
        expected = sm.oracle_grads(rank, world_size, step)
        expected = {n: g for n, g in expected.items() if not n.startswith('second')}
        assert sm.differences(sm.owned_main_grads(model), expected) == []
    owned = sm.owned_main_grads(model)['second.weight']
    assert not owned[~owned.isnan()].any()
    return [text for text in records if 'no gradient' in text]


def test_a_parameter_that_is_frozen_after_wrapping_is_reduced_as_zeros() -> None:
    on_rank_0, _ = run_ranks(_frozen, 2)
    assert len(on_rank_0) == 1
    assert 'second.weight (frozen after wrapping)' in on_rank_0[0]


# Offload ------------------------------------------------------------------------------------------


def _offload(rank: int, world_size: int) -> dict[str, Any]:
    import megatron_buffer
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(), megatron_buffer.DistributedDataParallel, buffer_config='upstream', **FLAGS
    )
    model.zero_grad_buffer()
    with model.no_sync():
        model(sm.batch(rank, 0, 0)).square().mean().backward()
    with pytest.raises(ReadinessError) as caught:
        model.offload_grad_buffers()
    model.finish_grad_sync()
    model.offload_grad_buffers()
    freed = [buffer.grad_data.untyped_storage().size() for buffer in model.buffers]
    model.restore_grad_buffers()
    zero = all(not buffer.grad_data.any() for buffer in model.buffers)
    wrong = []
    for step in range(2):
        sm.run_window(model, rank, step)
        wrong += sm.differences(sm.owned_main_grads(model), sm.oracle_grads(rank, world_size, step))
    return {'message': str(caught.value), 'freed': freed, 'zero': zero, 'wrong': wrong}


def test_grad_buffers_are_offloaded_between_windows_only() -> None:
    for found in run_ranks(_offload, 2):
        assert 'in the middle of an accumulation window' in found['message']
        assert '.weight' in found['message'] or '.bias' in found['message']
        assert set(found['freed']) == {0}
        assert found['zero']
        assert found['wrong'] == []


def _scaled_too_early(rank: int, world_size: int) -> str:
    import megatron_buffer
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(), megatron_buffer.DistributedDataParallel, buffer_config='upstream', **FLAGS
    )
    model.zero_grad_buffer()
    model.start_grad_sync()
    with pytest.raises(ReadinessError) as caught:
        model.scale_gradients(0.5)
    model.finish_grad_sync()
    model.scale_gradients(0.5)
    return str(caught.value)


def test_gradients_are_not_scaled_while_they_are_reduced() -> None:
    for message in run_ranks(_scaled_too_early, 2):
        assert 'finish_grad_sync() first' in message


# Megatron's own checks of hooks --------------------------------------------------------------------


def _captured(rank: int, world_size: int, config: Any) -> int:
    """What CudaGraphManager does with the forward hooks of each module before it replays a graph."""
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    from tests import small_model as sm

    with _activated(config):
        model = sm.wrap(sm.make_net(), **FLAGS)
        sm.run_window(model, rank, 0)
        hooked = 0
        for module in model.module.modules():
            CudaGraphManager.call_ddp_preforward_hook(None, module)
            hooked += len(module._forward_pre_hooks)
        del model
    return hooked


@pytest.mark.parametrize(
    'config',
    ['stock', 'recommended', pytest.param({'unused_params': 'error'}, marks=pytest.mark.slow)],
    ids=str,
)
def test_cuda_graphs_take_the_forward_hooks_for_megatrons(config: Any) -> None:
    for hooked in run_ranks(_captured, 2, config):
        assert hooked > 0


def _empty_parameter(rank: int, world_size: int) -> None:
    """It has no address, wherever it lies."""
    from tests import small_model as sm

    with _activated('recommended'):
        net = sm.make_net()
        net.empty = torch.nn.Parameter(torch.empty(0, 4))
        model = sm.wrap(net, **FLAGS)
        model.zero_grad_buffer()
        model.zero_grad_buffer()
        del model


def test_a_parameter_without_elements_is_where_it_was() -> None:
    run_ranks(_empty_parameter, 2)


def _nested_forward(rank: int, world_size: int) -> int:
    """A module that calls its own wrapper."""
    from torch.overrides import _len_torch_function_stack

    from tests import small_model as sm

    class Nested(sm.Net):
        wrapper: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.wrapper:
                wrapper, self.wrapper = self.wrapper.pop(), None
                wrapper(x)
            return super().forward(x)

    with _activated('upstream'):
        net = Nested()
        model = sm.wrap(net, **FLAGS)
        optimizer = _optimizer(model)
        before = _len_torch_function_stack()
        for step in range(3):
            sm.run_window(model, rank, step)
            optimizer.step()
            net.wrapper = [model]
        del model, optimizer
        net.wrapper = None
    return _len_torch_function_stack() - before


def test_a_forward_inside_a_forward_leaves_no_watch_behind() -> None:
    assert run_ranks(_nested_forward, 2) == [0, 0]

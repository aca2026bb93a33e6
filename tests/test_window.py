"""Readiness, dispatch order and unused parameters: gradients that are late, missing or out of step.

The right values come from an unwrapped copy of the model that knows no buffer. Where stock goes wrong, a
test marked ``stock_fault`` shows it, so that we notice when upstream's behaviour changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks

OVERLAP = {'overlap_grad_reduce': True, 'bucket_size': 100}
PLAIN_AND_SHARDED = [False, True]


def _flags(dist_opt: bool) -> dict[str, Any]:
    return {**OVERLAP, 'use_distributed_optimizer': dist_opt}


def _ours() -> Any:
    import megatron_buffer

    return megatron_buffer.DistributedDataParallel


def _log_records() -> list[str]:
    """A list that our warnings are added to from now on."""
    import logging

    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger('megatron_buffer').addHandler(handler)
    return records


def _synced_backwards(model: Any, rank: int, step: int, number: int) -> None:
    """A window whose backward passes are all synchronised, as without no_sync()."""
    from tests import small_model as sm

    model.zero_grad_buffer()
    for micro_batch in range(number):
        model(sm.batch(rank, step, micro_batch)).square().mean().backward()
    model.finish_grad_sync()


# F1: as many synchronised backward passes as it pleases ------------------------------------------


def _changing_windows(rank: int, world_size: int, config: Any, dist_opt: bool) -> list[str]:
    from tests import small_model as sm

    model = sm.wrap(sm.make_net(), _ours(), buffer_config=config, **_flags(dist_opt))
    wrong = []
    for step, number in enumerate([2, 1, 3, 4, 1, 1]):
        _synced_backwards(model, rank, step, number)
        expected = sm.oracle_grads(rank, world_size, step, micro_batches=number)
        found = sm.differences(sm.owned_main_grads(model), expected)
        wrong += [f'{number} backwards at step {step}: {text}' for text in found]
    return wrong


@pytest.mark.long
@pytest.mark.parametrize('dist_opt', PLAIN_AND_SHARDED)
@pytest.mark.parametrize(
    'config',
    [
        {'readiness': 'golden_checked'},
        {'readiness': 'golden_static'},
        {'readiness': 'deferred'},
        {'unused_params': 'zero_fill'},
        {'readiness': 'golden_checked', 'dispatch_order': 'in_order', 'scaling': 'shard_postscale'},
    ],
    ids=str,
)
def test_windows_of_changing_length_are_reduced_right(config: Any, dist_opt: bool) -> None:
    assert run_ranks(_changing_windows, 2, config, dist_opt) == [[], []]


def _asked(rank: int, world_size: int) -> list[list[tuple[int, bool]]]:
    """Per window: elements of each all-reduce of bytes, and whether all reductions were still to be waited for."""
    import torch.distributed as dist

    from tests import small_model as sm

    model = sm.wrap(sm.make_net(), _ours(), buffer_config='recommended', **_flags(True))
    asked: list[tuple[int, bool]] = []
    all_reduce = dist.all_reduce

    def recorded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.uint8:
            before_waits = all(g.grad_reduce_handle is not None for g in model.bucket_groups)
            asked.append((tensor.numel(), before_waits))
        return all_reduce(tensor, *args, **kwargs)

    windows = []
    # Rank 1's second window has a late gradient, rank 0's has none.
    for step, number in enumerate([1, 1 + rank, 1]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, 'all_reduce', recorded)
            _synced_backwards(model, rank, step, number)
        windows.append([*asked])
        asked.clear()
    return windows


def test_ranks_ask_whether_gradients_are_late_beside_the_reductions() -> None:
    # A net of six parameters in three groups; the first window asks which groups are used, too.
    expected = [[(1 + 3, True)], [(1, True), (6, False)], [(1, True)]]
    assert run_ranks(_asked, 2) == [expected, expected]


def _stock_windows(rank: int, world_size: int) -> list[str]:
    from tests import small_model as sm

    model = sm.wrap(sm.make_net(), **_flags(False))
    _synced_backwards(model, rank, 0, 2)
    _synced_backwards(model, rank, 1, 4)
    expected = sm.oracle_grads(rank, world_size, 1, micro_batches=4)
    return sm.differences(sm.owned_main_grads(model), expected)


@pytest.mark.stock_fault
def test_stock_is_silently_wrong_after_a_longer_window() -> None:
    outcomes = run_ranks(_stock_windows, 2, expect_failure=True)
    if all(o.status == 'ok' and o.result == [] for o in outcomes):
        pytest.skip('stock now right: windows of changing length')
    assert any(o.failed or o.result for o in outcomes)


# When groups are dispatched ----------------------------------------------------------------------


def _dispatched_before_finish(
    rank: int, world_size: int, config: Any, unused: bool
) -> list[tuple[int, int]]:
    """For each step: groups whose reduction was started inside backward, of how many."""
    from tests import small_model as sm

    model = sm.wrap(sm.make_net(unused=unused), _ours(), buffer_config=config, **_flags(True))
    found = []
    for step in range(3):
        model.zero_grad_buffer()
        model(sm.batch(rank, step, 0)).square().mean().backward()
        started = [group.grad_reduce_dispatched for group in model.bucket_groups]
        model.finish_grad_sync()
        found.append((sum(started), len(started)))
        expected = sm.oracle_grads(rank, world_size, step, 1, unused=unused)
        assert sm.differences(sm.owned_main_grads(model), expected) == []
    return found


def test_the_first_batch_overlaps_when_the_counts_are_known() -> None:
    for found in run_ranks(_dispatched_before_finish, 2, {'readiness': 'golden_static'}, False):
        assert all(started == groups > 2 for started, groups in found)
    for found in run_ranks(_dispatched_before_finish, 2, {'readiness': 'golden_lazy'}, False):
        assert [started for started, _ in found] == [0, found[1][1], found[2][1]]
    for found in run_ranks(_dispatched_before_finish, 2, {'readiness': 'deferred'}, False):
        assert [started for started, _ in found] == [0, 0, 0]


@pytest.mark.parametrize('readiness', ['golden_lazy', 'golden_checked', 'golden_static'])
def test_unused_parameters_leave_the_overlap_when_zeros_stand_for_them(readiness: str) -> None:
    config = {'readiness': readiness, 'unused_params': 'zero_fill', 'dispatch_order': 'in_order'}
    for found in run_ranks(_dispatched_before_finish, 2, config, True):
        groups = found[0][1]
        first = groups if readiness == 'golden_static' else 0
        # A group of nothing but unused parameters goes at finish, and holds up nobody.
        assert found[0][0] in (first, first - 1, 0)
        assert all(started >= groups - 2 > 0 for started, _ in found[1:])


# Unused parameters -------------------------------------------------------------------------------


def _unused(rank: int, world_size: int, config: Any, bucket_size: int) -> list[str]:
    from tests import small_model as sm

    records = _log_records()
    flags = {**_flags(True), 'bucket_size': bucket_size}
    model = sm.wrap(sm.make_net(unused=True), _ours(), buffer_config=config, **flags)
    for step in range(3):
        sm.run_window(model, rank, step)
        expected = sm.oracle_grads(rank, world_size, step, unused=True)
        assert sm.differences(sm.owned_main_grads(model), expected) == []
    spare = sm.owned_main_grads(model)['spare.weight']
    assert not spare[~spare.isnan()].any()
    return [text for text in records if 'no gradient' in text]


@pytest.mark.parametrize('bucket_size', [1, pytest.param(100, marks=pytest.mark.slow), 1_000_000])
def test_zero_fill_reduces_zeros_and_names_each_parameter_once(bucket_size: int) -> None:
    on_rank_0, on_rank_1 = run_ranks(_unused, 2, {'unused_params': 'zero_fill'}, bucket_size)
    assert len(on_rank_0) == 1
    assert 'spare.weight (its module did not run in forward)' in on_rank_0[0]
    assert 'spare.bias' in on_rank_0[0]
    assert 'second.weight' not in on_rank_0[0]
    assert on_rank_1 == []


def _unused_is_error(rank: int, world_size: int, bucket_size: int) -> str:
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    flags = {**_flags(False), 'bucket_size': bucket_size}
    config = {'unused_params': 'error'}
    model = sm.wrap(sm.make_net(unused=True), _ours(), buffer_config=config, **flags)
    with pytest.raises(ReadinessError) as caught:
        sm.run_window(model, rank, 0)
    return str(caught.value)


@pytest.mark.parametrize('bucket_size', [1, 1_000_000])
def test_an_unused_parameter_is_an_error_where_the_config_says_so(bucket_size: int) -> None:
    for message in run_ranks(_unused_is_error, 2, bucket_size):
        assert 'spare.weight (its module did not run in forward)' in message
        assert 'first.weight' not in message


def _used_every_other_step(rank: int, world_size: int, config: Any) -> list[str]:
    """The spare layer takes part in steps 1 and 3 only, and on rank 0 only."""
    from tests import small_model as sm

    model = sm.wrap(sm.make_net(unused=True), _ours(), buffer_config=config, **_flags(True))

    def loss(net: Any, output: torch.Tensor, used: bool) -> torch.Tensor:
        spare = net.spare.weight.square().sum() + net.spare.bias.square().sum()
        return output.square().mean() + (spare if used else 0.0)

    wrong = []
    for step in range(5):
        model.zero_grad_buffer()
        used = step % 2 == 1
        loss(model.module, model(sm.batch(rank, step, 0)), used and rank == 0).backward()
        model.finish_grad_sync()
        net = sm.make_net(unused=True)
        for other in range(world_size):
            output = net(sm.batch(other, step, 0))
            (loss(net, output, used and other == 0) / world_size).backward()
        expected = {n: p.grad.flatten() for n, p in net.named_parameters() if p.grad is not None}
        found = sm.differences(sm.owned_main_grads(model), expected)
        wrong += [f'step {step}: {text}' for text in found]
    return wrong


@pytest.mark.parametrize(
    'readiness', ['golden_lazy', 'golden_checked', 'golden_static', 'deferred']
)
def test_a_parameter_that_comes_and_goes_is_reduced_right(readiness: str) -> None:
    config = {'readiness': readiness, 'unused_params': 'zero_fill', 'dispatch_order': 'in_order'}
    assert run_ranks(_used_every_other_step, 2, config) == [[], []]


# F3: ranks whose control flow differs ------------------------------------------------------------


class _Branching(torch.nn.Module):
    """Rank 1 skips the middle layer."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = torch.nn.Linear(8, 16)
        self.middle = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 8)
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x if self.skips else torch.tanh(self.middle(x)))


def _branching(rank: int, world_size: int, config: Any, bucket_size: int) -> list[str]:
    from tests import small_model as sm

    cls = None if config == 'stock' else _ours()
    flags: dict[str, Any] = {**OVERLAP, 'bucket_size': bucket_size}
    if config != 'stock':
        flags['buffer_config'] = config
    model = sm.wrap(_Branching(rank == 1), cls, **flags)
    wrong = []
    for step in range(4):
        model.zero_grad_buffer()
        model(sm.batch(rank, step, 0)).square().mean().backward()
        model.finish_grad_sync()
        nets = [_Branching(other == 1) for other in range(world_size)]
        for other, net in enumerate(nets):
            (net(sm.batch(other, step, 0)).square().mean() / world_size).backward()
        expected = {
            name: sum(
                p.grad for net in nets if (p := dict(net.named_parameters())[name]).grad is not None
            ).flatten()
            for name, _ in nets[0].named_parameters()
        }
        wrong += sm.differences(sm.owned_main_grads(model), expected)
    return wrong


@pytest.mark.parametrize('bucket_size', [1, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize('readiness', ['golden_lazy', 'golden_checked', 'golden_static'])
def test_ranks_that_skip_different_modules_reduce_the_same_buckets(
    readiness: str, bucket_size: int
) -> None:
    config = {'readiness': readiness, 'unused_params': 'zero_fill', 'dispatch_order': 'in_order'}
    assert run_ranks(_branching, 2, config, bucket_size) == [[], []]


def test_recommended_is_right_where_ranks_skip_different_modules() -> None:
    assert run_ranks(_branching, 2, 'recommended', 1) == [[], []]


@pytest.mark.stock_fault
def test_stock_mixes_buckets_where_ranks_skip_different_modules() -> None:
    outcomes = run_ranks(_branching, 2, 'stock', 1, expect_failure=True, timeout_s=60)
    if all(o.status == 'ok' and o.result == [] for o in outcomes):
        pytest.skip('stock now right: ranks whose control flow differs')


# Late gradients ----------------------------------------------------------------------------------


def _late_is_error(rank: int, world_size: int) -> str:
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    config = {'readiness': {'name': 'golden_checked', 'on_late': 'error'}}
    model = sm.wrap(sm.make_net(), _ours(), buffer_config=config, **_flags(True))
    sm.run_window(model, rank, 0, micro_batches=1)
    with pytest.raises(ReadinessError) as caught:
        _synced_backwards(model, rank, 1, 2)
    return str(caught.value)


def test_a_late_gradient_is_an_error_where_the_config_says_so() -> None:
    for message in run_ranks(_late_is_error, 2):
        assert 'third.' in message
        assert 'after its bucket group was reduced' in message


def _late_under_no_sync(rank: int, world_size: int, config: Any, overlap: bool) -> list[str]:
    """Micro-batches under no_sync() after the synchronised one, and after finish."""
    from tests import small_model as sm

    flags = {**_flags(True), 'overlap_grad_reduce': overlap}
    model = sm.wrap(sm.make_net(), _ours(), buffer_config=config, **flags)
    wrong = []
    for step in range(3):
        model.zero_grad_buffer()
        model(sm.batch(rank, step, 0)).square().mean().backward()
        if not overlap:
            model.finish_grad_sync()
        with model.no_sync():
            model(sm.batch(rank, step, 1)).square().mean().backward()
        model.finish_grad_sync()
        model(sm.batch(rank, step, 2)).square().mean().backward()
        model.finish_grad_sync()
        model.finish_grad_sync()
        wrong += sm.differences(
            sm.owned_main_grads(model), sm.oracle_grads(rank, world_size, step, micro_batches=3)
        )
    return wrong


@pytest.mark.parametrize('overlap', [True, False])
def test_gradients_after_the_reduction_are_reduced_at_the_next_finish(overlap: bool) -> None:
    assert run_ranks(_late_under_no_sync, 2, {'readiness': 'golden_checked'}, overlap) == [[], []]


def _late_upstream(rank: int, world_size: int) -> list[str]:
    from tests import small_model as sm

    records = _log_records()
    model = sm.wrap(sm.make_net(), _ours(), buffer_config='upstream', **OVERLAP)
    sm.run_window(model, rank, 0)
    sm.run_window(model, rank, 1)
    with model.no_sync():
        model(sm.batch(rank, 1, 7)).square().mean().backward()
    model.finish_grad_sync()
    return [text for text in records if 'after their bucket group was reduced' in text]


def test_with_upstreams_choices_a_late_gradient_is_named_in_a_warning() -> None:
    for warnings in run_ranks(_late_upstream, 2):
        assert len(warnings) == 1
        assert 'third.weight' in warnings[0]


def _fused_late(rank: int, world_size: int) -> str:
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    config = {'readiness': 'golden_checked'}
    model = sm.wrap(sm.make_net(), _ours(), buffer_config=config, **OVERLAP)
    sm.run_window(model, rank, 0)
    sm.run_window(model, rank, 1)
    model.module.third.weight.grad_added_to_main_grad = True  # as a fused kernel leaves it
    with pytest.raises(ReadinessError) as caught:
        model(sm.batch(rank, 1, 7)).square().mean().backward()
    return str(caught.value)


def test_a_late_gradient_that_a_fused_kernel_has_written_is_a_named_error() -> None:
    for message in run_ranks(_fused_late, 2):
        assert 'third.weight' in message
        assert 'fused kernel' in message


# Parameters used several times per backward ------------------------------------------------------


class _TwiceCheckpointed(torch.nn.Module):
    """One layer inside two re-entrant checkpoints: two gradients per backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(8, 8)
        self.shared = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)
        return checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)


def _twice(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    from tests import small_model as sm

    records = _log_records()
    model = sm.wrap(_TwiceCheckpointed(), _ours(), buffer_config=config, **OVERLAP)
    wrong = []
    for step in range(3):
        model.zero_grad_buffer()
        model(sm.batch(rank, step, 0)).square().mean().backward()
        model.finish_grad_sync()
        net = _TwiceCheckpointed()
        for other in range(world_size):
            (net(sm.batch(other, step, 0)).square().mean() / world_size).backward()
        expected = {name: param.grad.flatten() for name, param in net.named_parameters()}
        wrong += sm.differences(sm.owned_main_grads(model), expected)
    return {'wrong': wrong, 'said': [text for text in records if 'golden_static' in text]}


@pytest.mark.parametrize('readiness', ['golden_lazy', 'golden_checked', 'golden_static'])
def test_two_reentrant_checkpoints_of_one_layer_are_counted_right(readiness: str) -> None:
    for found in run_ranks(_twice, 2, {'readiness': readiness}):
        assert found['wrong'] == []
        if readiness == 'golden_static':
            assert len(found['said']) == 1
            assert 'shared.weight (1 expected, 2 came)' in found['said'][0]


def test_declared_counts_take_the_place_of_the_prediction() -> None:
    counts = [{'pattern': 'shared.*', 'count': 2}]
    config = {'readiness': {'name': 'golden_static', 'counts': counts}}
    for found in run_ranks(_twice, 2, config):
        assert found == {'wrong': [], 'said': []}


# Order of calls ----------------------------------------------------------------------------------


def _repeated(rank: int, world_size: int, config: Any, overlap: bool) -> list[str]:
    """start_grad_sync by hand, finish twice; the next window as if nothing had happened."""
    from tests import small_model as sm

    flags = {**_flags(True), 'overlap_grad_reduce': overlap}
    model = sm.wrap(sm.make_net(), _ours(), buffer_config=config, **flags)
    wrong = []
    for step in range(3):
        model.zero_grad_buffer()
        model.zero_grad_buffer()
        with model.no_sync():
            model(sm.batch(rank, step, 0)).square().mean().backward()
        model.start_grad_sync()
        model.finish_grad_sync()
        model.finish_grad_sync()
        wrong += sm.differences(
            sm.owned_main_grads(model), sm.oracle_grads(rank, world_size, step, micro_batches=1)
        )
    return wrong


@pytest.mark.parametrize('overlap', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize('config', ['upstream', 'recommended'])
def test_reductions_that_are_asked_for_twice_happen_once(config: str, overlap: bool) -> None:
    assert run_ranks(_repeated, 2, config, overlap) == [[], []]


def _broken_off(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    from tests import small_model as sm

    records = _log_records()
    model = sm.wrap(sm.make_net(), _ours(), buffer_config=config, **_flags(True))
    sm.run_window(model, rank, 0)
    wrong = []
    for step in range(1, 4):
        model.zero_grad_buffer()
        model(sm.batch(rank, 50, 0)).square().mean().backward()  # and no finish_grad_sync()
        model.eval()
        with torch.no_grad():
            model(sm.batch(rank, 51, 0))
        model.train()
        sm.run_window(model, rank, step)
        wrong += sm.differences(sm.owned_main_grads(model), sm.oracle_grads(rank, world_size, step))
    return {'wrong': wrong, 'said': sum('broken off' in text for text in records)}


@pytest.mark.parametrize(
    'config', ['upstream', 'recommended', {'readiness': 'golden_static'}], ids=str
)
def test_an_iteration_that_was_broken_off_leaves_no_trace(config: Any) -> None:
    for found in run_ranks(_broken_off, 2, config):
        assert found == {'wrong': [], 'said': 3}


def _aligned(rank: int, world_size: int) -> list[str]:
    """Gradients come under no_sync() and the reductions are started from outside, as schedules do it."""
    from tests import small_model as sm

    config = {'unused_params': 'error', 'grad_reduce': 'a2a_fp32_sum', 'readiness': 'golden_static'}
    model = sm.wrap(sm.make_net(), _ours(), buffer_config=config, **_flags(True))
    wrong = []
    for step in range(3):
        model.zero_grad_buffer()
        with model.no_sync():
            model(sm.batch(rank, step, 0)).square().mean().backward()
        model.start_grad_sync()  # each group waits for the one before, to free its temporaries
        model.finish_grad_sync()
        wrong += sm.differences(
            sm.owned_main_grads(model), sm.oracle_grads(rank, world_size, step, micro_batches=1)
        )
    return wrong


def test_reductions_that_are_started_from_outside_have_no_unused_parameters() -> None:
    assert run_ranks(_aligned, 2) == [[], []]

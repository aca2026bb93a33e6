"""Recording a profile while a model trains, and training by it."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_buffer.profile import ChunkProfile, Profile, load_profile
from tests.harness import run_ranks

STEPS = 2
WINDOWS = 2 + STEPS


class Tied(torch.nn.Module):
    """Multiplies with a weight that it is given."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)


class Shuffled(torch.nn.Module):
    """Registered as a, b, c, d, e; forward calls c, ``tied`` with the weight of d, a twice, d, b.

    Nothing calls e. ``a`` is recomputed by re-entrant checkpoints, each of which gives it a gradient.

    Attributes:
        ties: Forward calls ``tied``.
        d_first: Forward calls d before a.
        skips_b: Forward does without b.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in 'abcde':
            setattr(self, name, torch.nn.Linear(8, 8))
        self.tied = Tied()
        self.ties = True
        self.d_first = False
        self.skips_b = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[batch, 8]``."""
        x = torch.tanh(self.c(x))
        if self.ties:
            x = torch.tanh(self.tied(x, weight=self.d.weight))
        if self.d_first:
            x = torch.tanh(self.d(x))
        for _ in range(2):
            x = torch.tanh(checkpoint(self.a, x, use_reentrant=True))
        if not self.d_first:
            x = torch.tanh(self.d(x))
        return x if self.skips_b else self.b(x)


FORWARD = ['c.weight', 'c.bias', 'd.weight', 'a.weight', 'a.bias', 'd.bias', 'b.weight', 'b.bias']


def shuffled() -> Shuffled:
    torch.manual_seed(7)
    return Shuffled()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def oracle(rank: int, world_size: int, step: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """Gradients of an unwrapped copy, summed over all ranks and micro-batches."""
    from tests import small_model as sm

    net = shuffled()
    for other in range(world_size):
        for micro_batch in range(micro_batches):
            (loss_of(net(sm.batch(other, step, micro_batch))) / world_size).backward()
    return {n: p.grad.flatten() for n, p in net.named_parameters() if p.grad is not None}


def wrap(net: torch.nn.Module, **flags: Any) -> Any:
    import megatron_buffer
    from tests import small_model as sm

    return sm.wrap(net, megatron_buffer.DistributedDataParallel, **flags)


def only_chunk(profile: Profile) -> ChunkProfile:
    (chunk,) = profile.chunks.values()
    return chunk


def in_order(chunk: ChunkProfile, field: str) -> list[str]:
    """Names by their place."""
    seen = [p for p in chunk.params if getattr(p, field) is not None]
    return [p.name for p in sorted(seen, key=lambda p: getattr(p, field))]


@pytest.fixture
def record(tmp_path: Path) -> dict[str, str]:
    """The environment that asks for a profile."""
    return {
        'MEGATRON_BUFFER_RECORD': str(tmp_path / 'profile.json'),
        'MEGATRON_BUFFER_RECORD_STEPS': str(STEPS),
    }


def profile_of(record: dict[str, str]) -> Profile:
    return load_profile(record['MEGATRON_BUFFER_RECORD'])


# What is recorded


def _record_shuffled(rank: int, world_size: int, micro_batches: int) -> list[str]:
    from tests import small_model as sm

    model = wrap(shuffled())
    wrong = []
    for step in range(WINDOWS + 1):
        sm.run_window(model, rank, step, micro_batches)
        expected = oracle(rank, world_size, step, micro_batches)
        wrong += sm.differences(sm.owned_main_grads(model), expected)
        with torch.no_grad():  # an evaluation reads in another order
            model.module.d_first = True
            model(sm.batch(rank, step, 0))
            model.module.d_first = False
    assert 'finish_grad_sync' not in vars(model)
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.module.modules())
    assert hooks == 0, 'the recorder leaves nothing behind'
    return wrong


def test_orders_times_and_counts(record: dict[str, str]) -> None:
    assert run_ranks(_record_shuffled, 2, 3, env=record) == [[], []]
    profile = profile_of(record)
    chunk = only_chunk(profile)
    assert list(profile.chunks) == ['pp0.vp0']
    assert (profile.world.dp, profile.world.pp) == (2, 1)
    assert (chunk.steps, chunk.ranks, chunk.clock, chunk.agreed) == (STEPS, 2, 'host', True)
    assert [p.name for p in chunk.params] == [n for n, _ in shuffled().named_parameters()]
    assert {p.numel_elems for p in chunk.params} == {64, 8}
    assert {p.dtype for p in chunk.params} == {'float32'}
    assert in_order(chunk, 'forward_use') == FORWARD
    assert in_order(chunk, 'grad_arrival') == last_arrivals()
    for place, time in (('forward_use', 'forward_time_s'), ('grad_arrival', 'grad_time_s')):
        by_name = {p.name: p for p in chunk.params}
        times = [getattr(by_name[name], time) for name in in_order(chunk, place)]
        assert times[0] == 0
        assert times == sorted(times)
        assert times[-1] < 10
    counts = {p.name: p.gradients_per_backward for p in chunk.params}
    assert {counts[name] for name in ('a.weight', 'a.bias')} == {2}
    assert {counts[f'{m}.{p}'] for m in 'bcd' for p in ('weight', 'bias')} == {1}
    assert {counts[name] for name in ('e.weight', 'e.bias')} == {0}
    unseen = [p for p in chunk.params if p.name.startswith('e.')]
    assert {(p.grad_arrival, p.grad_time_s, p.forward_use, p.forward_time_s) for p in unseen} == {
        (None, None, None, None)
    }


def last_arrivals() -> list[str]:
    """The order by another kind of hook, on a model that nobody has wrapped."""
    from tests import small_model as sm

    arrived: list[str] = []
    net = shuffled()
    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    loss_of(net(sm.batch(0, 0, 0))).backward()
    return [name for i, name in enumerate(arrived) if name not in arrived[i + 1 :]]


def _conditional(rank: int, world_size: int) -> None:
    from tests import small_model as sm

    model = wrap(shuffled())
    for step in range(WINDOWS):
        model.zero_grad_buffer()
        for micro_batch in range(4):
            model.module.skips_b = micro_batch % 2 == 1
            loss_of(model(sm.batch(rank, step, micro_batch))).backward()
        model.finish_grad_sync()


def test_a_parameter_that_takes_part_in_earlier_micro_batches_only(record: dict[str, str]) -> None:
    run_ranks(_conditional, 2, env=record)
    chunk = only_chunk(profile_of(record))
    assert in_order(chunk, 'forward_use') == FORWARD[:-2]
    assert in_order(chunk, 'grad_arrival') == [
        name for name in last_arrivals() if not name.startswith('b.')
    ]
    counts = {p.name: p.gradients_per_backward for p in chunk.params}
    assert (counts['b.weight'], counts['a.weight'], counts['c.weight']) == (0.5, 2, 1)


def _disagree(rank: int, world_size: int) -> None:
    from tests import small_model as sm

    net = shuffled()
    net.d_first = rank == 0
    model = wrap(net)
    for step in range(WINDOWS):
        sm.run_window(model, rank, step)


def test_ranks_that_differ_are_averaged_and_counted(record: dict[str, str]) -> None:
    run_ranks(_disagree, 2, env=record)
    chunk = only_chunk(profile_of(record))
    assert not chunk.agreed
    # Rank 0 reads c, d.weight, d.bias, a.weight, a.bias; rank 1 has d.bias last: places 3, 4, 5 of
    # d.bias, a.weight, a.bias against 5, 3, 4. The means are 4, 3.5, 4.5.
    assert chunk.differing_forward_uses == 3
    assert in_order(chunk, 'forward_use')[3:6] == ['a.weight', 'd.bias', 'a.bias']
    assert chunk.differing_grad_arrivals > 0


def _freed(rank: int, world_size: int) -> list[bool]:
    """In the middle of a recording, with a graph alive that reaches the hooks."""
    from megatron_buffer import recording
    from tests import small_model as sm

    freed = []
    for steps in (0, 1, WINDOWS - 1):
        model = wrap(shuffled())
        for step in range(steps):
            sm.run_window(model, rank, step)
        kept = model(sm.batch(rank, 0, 0)).mean()
        alive = weakref.ref(model.module)
        del model
        gc.collect()
        freed.append(alive() is None)
        del kept
    assert not any(recorder.is_pending for recorder in recording._recorders)
    return freed


def test_a_recorder_keeps_no_model_alive(record: dict[str, str]) -> None:
    assert run_ranks(_freed, 2, env=record) == [[True] * 3] * 2


@contextlib.contextmanager
def _messages() -> Any:
    """What our package logs meanwhile."""
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger('megatron_buffer')
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield records
    log.removeHandler(handler)


def _said(rank: int, world_size: int) -> list[str]:
    from megatron_buffer import recording
    from tests import small_model as sm

    with _messages() as records:
        model = wrap(shuffled())
        second = wrap(shuffled())
        sm.run_window(model, rank, 0)
        recording._warn_if_unfinished()
        for step in range(1, WINDOWS):
            sm.run_window(model, rank, step)
        recording._warn_if_unfinished()  # nothing is missing now
        del second
    return [text for text in records if 'profile' in text]


def test_what_is_said(record: dict[str, str]) -> None:
    path = record['MEGATRON_BUFFER_RECORD']
    Path(path).write_text('an earlier one')
    on_rank_0, on_rank_1 = run_ranks(_said, 2, env=record)
    begin, second, unfinished, written = on_rank_0
    assert begin.startswith(f'recording iterations 3 to {WINDOWS} of this run')
    assert begin.endswith('in place of the one there')
    assert 'a second model is wrapped as chunk pp0.vp0' in second
    assert f'not written: the run ended after 1 of the {WINDOWS} iterations' in unfinished
    assert written == f'wrote the profile {path}: 10 parameters in pp0.vp0'
    assert not [text for text in on_rank_1 if 'wrote' in text or 'recording' in text]


def _refused(rank: int, world_size: int) -> list[str]:
    from megatron_buffer.errors import ConfigError

    messages = []
    for flags in ({}, {'config': {'cuda_graph_impl': 'local'}}):
        with pytest.raises(ConfigError) as caught:
            wrap(shuffled(), **flags)
        messages.append(str(caught.value))
        os.environ['MEGATRON_BUFFER_RECORD'] = '/tmp/profile.json'
    return messages


def test_what_is_refused(tmp_path: Path) -> None:
    env = {'MEGATRON_BUFFER_RECORD': str(tmp_path / 'none' / 'profile.json')}
    (messages,) = run_ranks(_refused, 1, env=env)
    assert 'does not exist; make it first' in messages[0]
    assert 'cannot see what CUDA graphs replay' in messages[1]


# Several stages


def _record_gpt(rank: int, world_size: int, case: Any) -> None:
    import megatron_buffer
    from tests import tiny_gpt

    with megatron_buffer.activated('upstream'):
        tiny_gpt.init_parallel(case)
        run = tiny_gpt.wrap(case)
        for step in range(WINDOWS):
            tiny_gpt.run_backward(case, run, step)
            run.optimizer.step()
        del run
        gc.collect()


def gpt(**how: Any) -> Any:
    from tests.tiny_gpt import TrainCase

    return TrainCase(dist_opt=True, overlap_grad_reduce=True, **how)


@pytest.mark.long
@pytest.mark.parametrize(
    ('vpp', 'world_size'), [pytest.param(0, 4, marks=pytest.mark.slow), (2, 2)]
)
def test_all_stages_are_in_one_file(record: dict[str, str], vpp: int, world_size: int) -> None:
    case = gpt(pp=2, vpp=vpp, layers=4, micro_batches=2, dtype='bf16')
    run_ranks(_record_gpt, world_size, case, env=record)
    profile = profile_of(record)
    keys = [f'pp{pp}.vp{vp}' for pp in range(2) for vp in range(max(vpp, 1))]
    assert sorted(profile.chunks) == keys
    assert (profile.world.vpp, profile.world.dp) == (max(vpp, 1), world_size // 2)
    layers = 4 // len(keys)
    for key, chunk in profile.chunks.items():
        assert chunk.agreed
        names = [p.name for p in chunk.params]
        assert all(name.startswith('module.') for name in names)  # Float16Module
        assert sum('self_attention.linear_qkv.weight' in name for name in names) == layers
        assert len(in_order(chunk, 'grad_arrival')) == len(names)
        assert {p.gradients_per_backward for p in chunk.params} == {1}
        has_embedding = any('embedding.word_embeddings' in name for name in names)
        assert has_embedding == (key == 'pp0.vp0')
        first = in_order(chunk, 'forward_use')[0]
        assert ('embedding' in first) == has_embedding


def _record_then_train(rank: int, world_size: int, case: Any) -> list[str]:
    from megatron.core import parallel_state

    from tests import tiny_gpt

    _record_gpt(rank, world_size, case)
    parallel_state.destroy_model_parallel()
    dist.barrier()
    order = {'name': 'recorded', 'profile': os.environ.pop('MEGATRON_BUFFER_RECORD')}
    stock = tiny_gpt.train(case)['params']
    ours = tiny_gpt.train(case, {'param_order': order})['params']
    return [name for name, param in stock.items() if not torch.equal(param, ours[name])]


@pytest.mark.slow
@pytest.mark.parametrize('how', [{'tp': 2}, {'moe': True, 'ep': 2}], ids=['tp', 'ep'])
def test_other_parallelism(record: dict[str, str], how: dict[str, Any]) -> None:
    case = gpt(overlap_param_gather=True, clip=0.0, steps=3, **how)
    assert run_ranks(_record_then_train, 2, case, env=record) == [[], []]
    profile = profile_of(record)
    assert (profile.world.tp, profile.world.ep) == (how.get('tp', 1), how.get('ep', 1))
    names = [p.name for p in only_chunk(profile).params]
    assert any('experts' in name for name in names) == ('moe' in how)


def _missing_stage(rank: int, world_size: int) -> list[str]:
    from megatron.core import parallel_state

    from megatron_buffer import recording_results
    from tests import small_model as sm

    recording_results._WAIT_FOR_STAGES_S = 0.2
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    if rank == 1:
        del os.environ['MEGATRON_BUFFER_RECORD']
    with _messages() as records:
        model = wrap(shuffled())
        for step in range(WINDOWS):
            sm.run_window(model, rank, step)
    dist.barrier()
    return [text for text in records if 'not written' in text]


def test_a_stage_that_says_nothing_is_named(record: dict[str, str]) -> None:
    on_rank_0, on_rank_1 = run_ranks(_missing_stage, 2, env=record)
    assert len(on_rank_0) == 1
    assert on_rank_0[0].endswith('within 0.2 s nothing came from pipeline stage 1')
    assert on_rank_1 == []
    assert not os.path.exists(record['MEGATRON_BUFFER_RECORD'])


# Training by a profile


def _record_and_use(rank: int, world_size: int, by: str, dist_opt: bool) -> Any:
    from tests import small_model as sm

    flags: dict[str, Any] = {'use_distributed_optimizer': dist_opt, 'bucket_size': 80}
    model = wrap(shuffled(), **flags)
    for step in range(WINDOWS):
        sm.run_window(model, rank, step)
    dist.barrier()  # the file is there when rank 0 comes
    path = os.environ.pop('MEGATRON_BUFFER_RECORD')
    order = {'name': 'recorded', 'profile': path, 'layout_by': by}
    net = shuffled()
    net.e.requires_grad_(False)
    model = wrap(net, overlap_grad_reduce=True, buffer_config={'param_order': order}, **flags)
    wrong = []
    for step in range(3):
        sm.run_window(model, rank, step)
        wrong += sm.differences(sm.owned_main_grads(model), oracle(rank, world_size, step, 3))
    assert sm.covered(model, sm.owned_main_grads(model))
    names = sm.names_of(model)
    spans = {span[0]: names[p] for p, span in model.buffers[0].param_index_map.items()}
    return wrong, [spans[start] for start in sorted(spans)], len(model.bucket_groups)


@pytest.mark.long
@pytest.mark.parametrize(
    ('by', 'dist_opt'), [('grad_arrival', True), ('grad_arrival', False), ('forward_use', True)]
)
def test_training_in_recorded_order(record: dict[str, str], by: str, dist_opt: bool) -> None:
    for wrong, layout, num_groups in run_ranks(_record_and_use, 2, by, dist_opt, env=record):
        assert wrong == []
        assert layout == (last_arrivals() if by == 'grad_arrival' else FORWARD[::-1])
        assert num_groups > 2


def _gathers(rank: int, world_size: int) -> dict[str, Any]:
    """Records, then trains stock and ours, with and without the profile."""
    from megatron.core.distributed import DistributedDataParallel as Stock

    from tests import small_model as sm

    model = wrap(untied())
    for step in range(WINDOWS):
        sm.run_window(model, rank, step)
    dist.barrier()
    order = {'name': 'recorded', 'profile': os.environ.pop('MEGATRON_BUFFER_RECORD')}
    by_forward = {**order, 'layout_by': 'forward_use'}
    arms: dict[str, dict[str, Any]] = {
        'stock': {'cls': Stock},
        'unchained': {'buffer_config': {'param_order': {**order, 'chain_gathers': False}}},
        'by arrival': {'buffer_config': {'param_order': order}},
        'by forward': {'buffer_config': {'param_order': by_forward}},
    }
    return {name: _train_arm(rank, **arm) for name, arm in arms.items()}


def untied() -> Shuffled:
    """Reads every weight in the module that owns it, as DDP's own hooks expect."""
    net = shuffled()
    net.ties = False
    net.e.requires_grad_(False)
    return net


def _train_arm(rank: int, **how: Any) -> Any:
    import megatron_buffer
    from tests import small_model as sm

    net = untied()
    how = {'cls': megatron_buffer.DistributedDataParallel} | how
    flags = dict.fromkeys(('use_distributed_optimizer', 'overlap_grad_reduce'), True)
    model = sm.wrap(net, overlap_param_gather=True, bucket_size=1, **flags, **how)
    exposed: list[str] = []

    def look(name: str, module: torch.nn.Module, args: Any) -> None:
        for param in [p for p in module.parameters(recurse=False) if p.requires_grad][:1]:
            if not model.param_to_bucket_group[param].param_gather_dispatched:
                exposed.append(name)

    for name, module in net.named_modules():
        module.register_forward_pre_hook(functools.partial(look, name), prepend=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for step in range(4):
            sm.run_window(model, rank, step)
            for buffer in model.buffers:  # what an optimizer does: each rank changes what it owns
                for bucket in buffer.buckets:
                    size = bucket.param_data.numel() // dist.get_world_size()
                    mine = slice(rank * size, (rank + 1) * size)
                    bucket.param_data[mine] -= 0.1 * bucket.grad_data[mine]
    model.start_param_sync(force_sync=True)
    late = [w for w in caught if 'already been dispatched' in str(w.message).replace('\n', ' ')]
    params = {name: param.detach().clone() for name, param in net.named_parameters()}
    return SimpleNamespace(late=len(late), exposed=exposed, params=params)


def test_gathers_in_the_order_of_forward(record: dict[str, str]) -> None:
    """Megatron's own chain goes by registration; UPSTREAM.md, F10."""
    for arms in run_ranks(_gathers, 2, env=record):
        assert arms['stock'].late > 0
        assert len(arms['stock'].exposed) > 4
        for arm in (arms['by arrival'], arms['by forward']):
            assert arm.late == 0
            assert (
                arm.exposed == ['c'] * 4
            )  # the first one of each iteration has nobody to start it
        for name, param in arms['stock'].params.items():
            for arm in arms.values():
                assert torch.equal(arm.params[name], param), name

"""Statistics of runs, stock Megatron's and ours: what is counted, what is written, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_buffer import launch_flags
from megatron_buffer.errors import ConfigError
from megatron_buffer.observe import request
from tests.harness import run_ranks
from tests.test_launch import launcher, make_script

STEPS = 3
ITEM_BYTES = {'torch.float32': 4, 'torch.bfloat16': 2}


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has written."""
    return [json.loads(line) for line in (folder / f'rank-{rank}.jsonl').read_text().splitlines()]


def of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line['kind'] == kind]


def observed(folder: Path, run: Callable[[], Any]) -> Any:
    """What ``run`` returns, observed into a folder, in a rank's process."""
    from megatron_buffer.observe import session

    os.environ['MEGATRON_BUFFER_STATS'] = str(folder)
    session.observe_stock()
    result = run()
    session.finish()
    del os.environ['MEGATRON_BUFFER_STATS']
    return result


# Collectives against the closed form


def case(**how: Any) -> Any:
    from tests.tiny_gpt import TrainCase

    how = {'steps': STEPS, 'layers': 1, 'micro_batches': 2, 'dtype': 'bf16'} | how
    return TrainCase(**how)


CASES = {
    'all_reduce': {},
    'all_reduce overlapped': {'overlap_grad_reduce': True},
    'no overlap': {'dist_opt': True},
    'overlaps': {'dist_opt': True, 'overlap_grad_reduce': True, 'overlap_param_gather': True},
    'all_to_all': {'dist_opt': True, 'overlap_grad_reduce': True, 'rs_fp32_accum': True},
}


def _train(rank: int, world_size: int, how: Any, folder: Path) -> list[Any]:
    from tests import tiny_gpt

    unobserved = [tiny_gpt.train(how)] if how.overlap_param_gather else []
    arms = {'stock': 'stock', 'ours': 'upstream'}
    seen = [
        observed(folder / name, lambda arm=arm: tiny_gpt.train(how, arm))
        for name, arm in arms.items()
    ]
    changed = [tiny_gpt.compare(result, seen[0]) for result in [*unobserved, *seen[1:]]]
    return [changed, seen[0]['layout'], seen[0]['losses'], seen[0]['grad_norms']]


@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=[pytest.mark.slow] if n == 'all_reduce' else []) for n in CASES]
)
def test_collectives_are_the_closed_form(tmp_path: Path, name: str) -> None:
    _check_closed_form(tmp_path, name, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_collectives_on_four_ranks(tmp_path: Path, name: str) -> None:
    _check_closed_form(tmp_path, name, ranks=4)


def _check_closed_form(folder: Path, name: str, ranks: int) -> None:
    how = case(**CASES[name])
    for rank, (changed, layout, _, norms) in enumerate(
        run_ranks(_train, ranks, how, folder, timeout_s=120)
    ):
        assert not any(changed), 'observation changes nothing'
        for arm in ('stock', 'ours'):
            lines = lines_of(folder / arm, rank)
            run, *_ = lines
            assert (run['kind'], run['schema'], run['rank']) == ('run', 1, rank)
            assert run['buffer'] == ('stock' if arm == 'stock' else 'megatron_buffer')
            assert (run['config'] is None) == (arm == 'stock')
            assert run['device'] == 'cpu'
            _check_layout(of_kind(lines, 'layout'), layout, ranks)
            steps = of_kind(lines, 'step')
            assert [step['step'] for step in steps] == [1, 2, 3]
            assert [step['grad_norm'] for step in steps] == norms
            for step in steps:
                _check_step(step, expected(how, layout, ranks))
            assert lines[-1] == {'kind': 'end', 'steps': STEPS}


def expected(how: Any, layout: list[dict[str, Any]], ranks: int) -> dict[str, dict[str, int]]:
    """Collectives of an iteration: one per bucket, a ring's bytes."""
    sizes = [
        (elems, ITEM_BYTES[buffer['grad_dtype']], ITEM_BYTES[buffer['param_dtype']])
        for buffer in layout
        for _, elems, _, _ in buffer['buckets']
    ]
    grads = sum(elems * item for elems, item, _ in sizes)
    params = sum(elems * item for elems, _, item in sizes)

    def entry(payload: int, rounds: int) -> dict[str, int]:
        return {
            'count': len(sizes),
            'tensors': len(sizes),
            'bytes': rounds * (ranks - 1) * payload // ranks,
            'payload_bytes': payload,
        }

    if not how.dist_opt:
        return {'all_reduce': entry(grads, 2)}
    reduction = 'all_to_all' if how.rs_fp32_accum else 'reduce_scatter'
    return {reduction: entry(grads, 1), 'all_gather': entry(params, 1)}


def _check_layout(found: list[dict[str, Any]], layout: Any, ranks: int) -> None:
    (line,) = found
    assert line['chunk'] == 'pp0/vp0'
    for mine, buffer in zip(line['buffers'], layout, strict=True):
        buckets = buffer['buckets']
        assert mine['bucket_elems'] == [elems for _, elems, _, _ in buckets]
        assert mine['buckets'] == len(buckets)
        assert mine['elems'] == sum(mine['bucket_elems'])
        assert 'torch.' + mine['grad_dtype'] == buffer['grad_dtype']
        assert 'torch.' + mine['param_dtype'] == buffer['param_dtype']
        assert (mine['dp_size'], mine['is_expert']) == (ranks, False)
        # Padding at the ends of buckets is in neither; that before parameters is padding too.
        assert mine['padding_elems'] >= sum(elems - unpadded for _, elems, unpadded, _ in buckets)
    assert line['bucket_groups'] == sum(len(buffer['buckets']) for buffer in layout)


def _check_step(step: dict[str, Any], collectives: dict[str, dict[str, int]]) -> None:
    assert step['collectives'] == collectives
    assert step['update_successful'] is True
    assert step['peak_memory_bytes'] > 10**7
    assert (step['time_s'] is None) == (step['step'] == 1)
    waited_s = step['exposed_grad_s'] + step['exposed_param_s']
    assert waited_s >= 0
    if step['time_s'] is not None:
        assert waited_s <= step['time_s'], 'waits do not overlap, and are part of the iteration'
    assert step['late_params'] == 0
    assert step['unused_params'] in (0, None)


# A loop of one's own


def _plain_loop(rank: int, world_size: int, arm: str, folder: Path) -> list[str]:
    import megatron_buffer
    from tests import small_model as sm

    wrapper = megatron_buffer.DistributedDataParallel if arm == 'ours' else None

    def loop() -> list[str]:
        model = sm.wrap(sm.make_net(unused=True), wrapper, overlap_grad_reduce=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            sm.run_window(model, rank, step, 2)
            if step != 1:
                megatron_buffer.report_loss(torch.tensor(step + 1.0, dtype=torch.bfloat16))
            megatron_buffer.report_loss(step + 3, 'loss')
            optimizer.step()
            optimizer.step()  # without a reduction in between this is no iteration
            megatron_buffer.report_loss(7.0, 'aux')
        return [name for name in vars(model) if name in ('finish_grad_sync', 'zero_grad_buffer')]

    return observed(folder, loop)


@pytest.mark.parametrize('arm', ['stock', 'ours'])
def test_a_plain_loop_reports_its_loss(tmp_path: Path, arm: str) -> None:
    assert (
        run_ranks(_plain_loop, 2, arm, tmp_path) == [['zero_grad_buffer', 'finish_grad_sync']] * 2
    )
    for rank in range(2):
        steps = of_kind(lines_of(tmp_path, rank), 'step')
        losses = [step['loss'] for step in steps]
        assert losses == [
            {'loss': 2.0, 'aux': 7.0},
            {'loss': 4.0, 'aux': 7.0},
            {'loss': 4.0, 'aux': 7.0},
        ]
        assert {(step['grad_norm'], step['update_successful']) for step in steps} == {(None, None)}
        assert lines_of(tmp_path, rank)[-1] == {'kind': 'end', 'steps': STEPS}


def _unused(rank: int, world_size: int, folder: Path) -> None:
    import megatron_buffer
    from tests import small_model as sm

    def loop() -> None:
        model = sm.wrap(
            sm.make_net(unused=True),
            megatron_buffer.DistributedDataParallel,
            overlap_grad_reduce=True,
            bucket_size=1,
            buffer_config={'unused_params': {'name': 'zero_fill'}},
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            sm.run_window(model, rank, step)
            optimizer.step()

    observed(folder, loop)


def test_unused_parameters_are_counted(tmp_path: Path) -> None:
    run_ranks(_unused, 2, tmp_path)
    steps = of_kind(lines_of(tmp_path, 0), 'step')
    assert [step['unused_params'] for step in steps] == [2] * STEPS  # weight and bias of one layer


def _off_or_broken(rank: int, world_size: int, folder: Path) -> tuple[list[str], bool]:
    import megatron_buffer
    from megatron_buffer.observe import session
    from tests import small_model as sm

    model = sm.wrap(sm.make_net(), megatron_buffer.DistributedDataParallel)
    megatron_buffer.report_loss(1.0)
    touched = [name for group in model.bucket_groups for name in vars(group) if 'sync' in name]
    os.environ['MEGATRON_BUFFER_STATS'] = str(folder)
    model = sm.wrap(sm.make_net(), megatron_buffer.DistributedDataParallel)
    with pytest.raises(KeyError), request.noting_failure():
        raise KeyError('broken')
    session.finish()
    return touched, session._session is None


def test_nothing_is_touched_when_off_and_a_failed_run_has_no_end(tmp_path: Path) -> None:
    assert run_ranks(_off_or_broken, 1, tmp_path) == [([], True)]
    assert [line['kind'] for line in lines_of(tmp_path, 0)] == ['run', 'layout']


# On a GPU marks are read late


def test_a_line_waits_until_the_gpu_has_passed_its_marks(tmp_path: Path) -> None:
    run_ranks(_late_marks, 1, tmp_path)
    steps = of_kind(lines_of(tmp_path, 0), 'step')
    assert [step['time_s'] for step in steps] == [None, 0.5]
    assert [step['exposed_grad_s'] for step in steps] == [0.25, 0.25]


def _late_marks(rank: int, world_size: int, folder: Path) -> None:
    from megatron_buffer.observe.marks import Clock
    from megatron_buffer.observe.stats import StatsWriter
    from megatron_buffer.observe.watch import StepEnd

    class Event:
        """As ``torch.cuda.Event``, in milliseconds."""

        passed = False

        def __init__(self, at: float) -> None:
            self.at = at

        def query(self) -> bool:
            return self.passed

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    writer = StatsWriter(str(folder), Clock(on_cuda=False))
    for number in (1, 2):
        writer.waited(SimpleNamespace(), 'grad', Event(0), Event(250))  # type: ignore[arg-type]
        writer.step_ended(StepEnd(number, Event(0), Event(500.0 * number), True, 1.0))
    assert of_kind(lines_of(folder, 0), 'step') == []
    Event.passed = True
    writer.close(complete=True)


# What is asked for


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--custom-buffer-stats='], '--custom-buffer-stats is empty'),
        (['--custom-buffer-trace='], '--custom-buffer-trace is empty'),
        (
            ['--custom-buffer-stats', '{file}'],
            "--custom-buffer-stats: the folder '.*' cannot be made: it is a file",
        ),
        (['--custom-buffer-trace', '{file}/x'], 'cannot be made: not a directory'),
        (['--custom-buffer-trace-steps', '3'], 'has no effect without --custom-buffer-trace DIR'),
        (['--custom-buffer-trace={new}', '--custom-buffer-trace-steps=0'], 'must be at least 1'),
        (['--custom-buffer-stat={new}'], 'did you mean --custom-buffer-stats?'),
    ],
)
@pytest.mark.parametrize('rank', ['0', '1'])
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str, rank: str
) -> None:
    """On every rank alike, since every rank writes."""
    monkeypatch.setenv('RANK', rank)
    file = tmp_path / 'file'
    file.touch()
    told = [flag.format(file=file, new=tmp_path / 'new') for flag in flags]
    with pytest.raises(ConfigError, match=message):
        launch_flags.parse_command_line([__file__, *told])


def test_a_folder_is_made_and_stock_may_be_observed(tmp_path: Path) -> None:
    folder = tmp_path / 'a' / 'b'
    launch_flags.parse_command_line([__file__, '--custom-buffer-stats', str(folder)])
    assert folder.is_dir()


def test_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (request.STATS_VARIABLE, request.TRACE_VARIABLE, request.METRICS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert request.requested() is None
    monkeypatch.setenv(request.METRICS_VARIABLE, '0')
    assert request.requested() is None
    monkeypatch.setenv(request.TRACE_VARIABLE, 'traces')
    wanted = request.requested()
    assert wanted is not None
    assert (wanted.trace, wanted.trace_steps) == (os.path.abspath('traces'), 5)
    assert (wanted.stats, wanted.metrics) == (None, False)
    monkeypatch.setenv(request.TRACE_STEPS_VARIABLE, 'few')
    with pytest.raises(ConfigError, match='MEGATRON_BUFFER_TRACE_STEPS'):
        request.requested()


@pytest.mark.slow
@pytest.mark.parametrize(('ending', 'ends'), [('', True), ('sys.exit(3)', False), ('1 / 0', False)])
def test_under_the_launcher(tmp_path: Path, ending: str, ends: bool) -> None:
    """Stock, in a script of its own with one rank."""
    code = """
        import sys
        import torch
        import torch.distributed as dist

        store = dist.FileStore(sys.argv[1], 1)
        dist.init_process_group('gloo', store=store, rank=0, world_size=1)
        from tests import small_model as sm

        model = sm.wrap(sm.make_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sm.run_window(model, 0, 0)
        optimizer.step()
        """
    script = make_script(tmp_path, code)
    Path(script).write_text(Path(script).read_text() + f'\n{ending}\n')
    flags = ['--custom-buffer-cpu', '--custom-buffer-stats', 'stats']
    done = launcher(script, str(tmp_path / 'store'), *flags, cwd=tmp_path)
    assert (done.returncode == 0) == ends, done.stderr
    kinds = [line['kind'] for line in lines_of(tmp_path / 'stats', 0)]
    assert kinds == ['run', 'layout', 'step', *(['end'] * ends)]

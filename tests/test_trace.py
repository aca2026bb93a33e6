"""Traces of real runs against what must hold, and the command that reads them."""

from __future__ import annotations

import copy
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_buffer import cli
from megatron_buffer.observe.align import combine
from megatron_buffer.observe.trace_file import RankTrace, read_traces
from megatron_buffer.observe.trace_summary import summarize, violations_of
from tests.harness import run_ranks

STEPS = 3
MICRO_BATCHES = 2


def _train(rank: int, world_size: int, arm: Any, folder: Path, how: dict[str, Any]) -> bool:
    from megatron_buffer.observe import session
    from tests import tiny_gpt

    os.environ['MEGATRON_BUFFER_TRACE'] = str(folder)
    os.environ['MEGATRON_BUFFER_TRACE_STEPS'] = str(STEPS)
    session.observe_stock()
    case = tiny_gpt.TrainCase(
        steps=STEPS + 1, layers=2, micro_batches=MICRO_BATCHES, **how  # the last one is not traced
    )
    tiny_gpt.train(case, arm)
    written_before_the_end = (folder / f'rank-{rank}.trace.json').exists()
    session.finish()
    return written_before_the_end


OVERLAPS = {'dist_opt': True, 'overlap_grad_reduce': True, 'overlap_param_gather': True}


@pytest.fixture(scope='module')
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ours, with golden counts that are known before the first batch."""
    folder = tmp_path_factory.mktemp('static')
    config = {'readiness': {'name': 'golden_static'}}
    assert run_ranks(_train, 2, config, folder, OVERLAPS, timeout_s=120) == [True, True]
    return folder


@pytest.fixture(scope='module')
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stock, whose first batch does not overlap."""
    folder = tmp_path_factory.mktemp('stock')
    assert run_ranks(_train, 2, 'stock', folder, OVERLAPS, timeout_s=120) == [True, True]
    return folder


def spans(trace: RankTrace, category: str, name: str = '', **args: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in trace.events
        if event.get('cat') == category
        and name in ('', event['name'])
        and all(event['args'][key] == value for key, value in args.items())
    ]


def is_in(event: dict[str, Any], outer: list[dict[str, Any]]) -> bool:
    """Whether the beginning of an event is in one of the spans."""
    return any(s['ts'] <= event['ts'] <= s['ts'] + s['dur'] + 0.002 for s in outer)


def end_of(event: dict[str, Any]) -> float:
    return event['ts'] + event.get('dur', 0)


def groups_of(trace: RankTrace) -> list[str]:
    return [group['name'] for group in trace.header['groups']]


# What must hold in every trace


@pytest.mark.parametrize('run', ['static', 'stock'])
def test_the_life_of_each_group(run: str, request: pytest.FixtureRequest) -> None:
    traces = read_traces(str(request.getfixturevalue(run)))
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        names = groups_of(trace)
        assert len(names) > 3
        assert trace.header['steps'] == STEPS
        assert trace.header['offset_ns'] == 0, 'one host, one clock'
        assert len(spans(trace, 'phase', 'optimizer step')) == STEPS
        assert len(spans(trace, 'phase', 'forward')) == STEPS * MICRO_BATCHES
        assert len(spans(trace, 'phase', 'backward')) == STEPS * MICRO_BATCHES
        for step in range(1, STEPS + 1):
            (zero,) = spans(trace, 'phase', 'zero', step=step)
            (finish,) = spans(trace, 'phase', 'finish', step=step)
            (update,) = spans(trace, 'phase', 'optimizer step', step=step)
            assert end_of(zero) <= finish['ts'] <= end_of(finish) <= update['ts']
            for name in names:
                _check_reduction(trace, name, step, zero, finish)
                _check_gather(trace, name, step, zero, finish)
    assert summarize(traces)['ok']


def _check_reduction(trace: RankTrace, name: str, step: int, zero: Any, finish: Any) -> None:
    (reduce,) = spans(trace, 'reduce', group=name, step=step)
    (wait,) = spans(trace, 'wait', f'wait for reduce of {name}', step=step)
    assert zero['ts'] <= reduce['ts'] <= wait['ts']
    assert end_of(reduce) == pytest.approx(end_of(wait), abs=0.01)
    assert is_in(wait, [finish])
    firsts = spans(trace, 'gradient', 'first gradient', group=name, step=step)
    lasts = spans(trace, 'gradient', 'last gradient', group=name, step=step)
    assert len(firsts) == len(lasts) == len(group_of(trace, name)['buckets'])
    backwards = spans(trace, 'phase', 'backward', step=step)
    for first, last in zip(firsts, lasts, strict=True):
        assert first['ts'] <= last['ts'] <= reduce['ts']
        assert is_in(first, backwards)
        assert is_in(last, backwards[-1:])
    latest = max(lasts, key=lambda event: event['ts'])
    assert reduce['args']['last_gradient'] == latest['args']['param']
    assert reduce['args']['payload_bytes'] == group_of(trace, name)['grad_bytes']


def _check_gather(trace: RankTrace, name: str, step: int, zero: Any, finish: Any) -> None:
    """In the forward of the iteration, with the values of the last one, before the group is used."""
    (gather,) = spans(trace, 'gather', group=name, step=step)
    (use,) = spans(trace, 'use', group=name, step=step)
    assert gather['args']['values_of_step'] == step - 1
    forwards = spans(trace, 'phase', 'forward', step=step)
    assert is_in(gather, forwards[:1])
    assert is_in(use, forwards[:1])
    assert use['args']['param'] in group_params(trace, name)


def group_of(trace: RankTrace, name: str) -> dict[str, Any]:
    return next(group for group in trace.header['groups'] if group['name'] == name)


def group_params(trace: RankTrace, name: str) -> list[str]:
    return [param for bucket in group_of(trace, name)['buckets'] for param in bucket['params']]


def test_counts_known_beforehand_let_the_first_batch_overlap(static: Path, stock: Path) -> None:
    """Every reduction starts in the last backward pass; in stock those of the first batch start at finish."""
    for folder, first_step_in_backward in ((static, True), (stock, False)):
        for trace in read_traces(str(folder)):
            for step in range(1, STEPS + 1):
                backward = spans(trace, 'phase', 'backward', step=step)[-1:]
                starts = spans(trace, 'dispatch', 'reduce dispatch', step=step)
                assert len(starts) == len(groups_of(trace))
                in_backward = [is_in(start, backward) for start in starts]
                if step > 1 or first_step_in_backward:
                    assert all(in_backward), (folder.name, step)
                else:
                    finish = spans(trace, 'phase', 'finish', step=step)
                    assert not any(in_backward)
                    assert all(is_in(start, finish) for start in starts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('arm', 'how'),
    [
        ('stock', {'dist_opt': True}),
        ('upstream', {}),
        ('recommended', {**OVERLAPS, 'moe': True, 'ep': 2}),
        ('upstream', {**OVERLAPS, 'pp': 2, 'vpp': 2, 'layers': 4}),
    ],
    ids=['no overlap', 'all_reduce', 'experts', 'interleaved'],
)
def test_other_runs_keep_the_ledger(tmp_path: Path, arm: str, how: dict[str, Any]) -> None:
    how = {'layers': 2} | how
    run_ranks(_train_any, 2, arm, tmp_path, how, timeout_s=200)
    summary = summarize(read_traces(str(tmp_path)))
    assert summary['violations'] == []
    assert summary['groups']


def _train_any(rank: int, world_size: int, arm: Any, folder: Path, how: dict[str, Any]) -> None:
    from megatron_buffer.observe import session
    from tests import tiny_gpt

    os.environ['MEGATRON_BUFFER_TRACE'] = str(folder)
    session.observe_stock()
    tiny_gpt.train(tiny_gpt.TrainCase(steps=STEPS, micro_batches=2, **how), arm)
    session.finish()


def _finish_twice(rank: int, world_size: int, folder: Path) -> None:
    """Without overlap stock reduces again what it has reduced."""
    import torch

    from megatron_buffer.observe import session
    from tests import small_model as sm

    os.environ['MEGATRON_BUFFER_TRACE'] = str(folder)
    session.observe_stock()
    model = sm.wrap(sm.make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        sm.run_window(model, rank, step)
        if step == 1:
            model.finish_grad_sync()
        optimizer.step()
    session.finish()


def test_a_group_that_is_reduced_twice_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(_finish_twice, 2, tmp_path)
    for trace in read_traces(str(tmp_path)):
        (text,) = violations_of(trace)
        assert text == (
            f'rank {trace.rank}, step 2: pp0/vp0/group0 (third.bias, third.weight and 4 more) was '
            'reduced twice instead of once'
        )
    assert cli.main(['trace', str(tmp_path)]) == 1
    assert 'ledger violated: rank 0, step 2: pp0/vp0/group0' in capsys.readouterr().out


def _profiled(rank: int, world_size: int, folder: Path) -> list[str]:
    import torch

    from megatron_buffer.observe import session
    from tests import small_model as sm

    os.environ['MEGATRON_BUFFER_TRACE'] = str(folder)
    session.observe_stock()
    model = sm.wrap(sm.make_net(), overlap_grad_reduce=True)
    with torch.autograd.profiler.profile() as profile:
        sm.run_window(model, rank, 0)
    session.finish()
    return sorted({e.name for e in profile.function_events if e.name.startswith('megatron_buffer')})


def test_profilers_see_ranges(tmp_path: Path) -> None:
    (names,) = run_ranks(_profiled, 1, tmp_path)
    assert names == [
        'megatron_buffer/finish/pp0/vp0',
        'megatron_buffer/grad_dispatch/pp0/vp0/group0',
        'megatron_buffer/grad_wait/pp0/vp0/group0',
        'megatron_buffer/zero/pp0/vp0',
    ]


# The ledger


def without(trace: RankTrace, **args: Any) -> RankTrace:
    """The trace less the dispatches that match."""
    gone = spans(trace, 'dispatch', **args)
    assert gone
    return RankTrace(trace.header, [event for event in trace.events if event not in gone])


def test_what_is_missing_is_named(static: Path) -> None:
    trace, _ = read_traces(str(static))
    name = groups_of(trace)[1]
    (text,) = violations_of(without(trace, name='reduce dispatch', group=name, step=2))
    assert f'rank 0, step 2: {name} (' in text
    assert text.endswith('was reduced never instead of once')
    lost = without(trace, name='gather dispatch', group=name, values_of_step=1)
    (text,) = violations_of(lost)
    assert f'step 1: {name} (' in text
    assert text.endswith('was gathered never instead of once')
    # The gathers of the last traced step come after the trace.
    assert not spans(trace, 'dispatch', 'gather dispatch', values_of_step=STEPS)
    unfinished = [e for e in trace.events if not (e['name'] == 'finish' and e['args']['step'] == 3)]
    texts = violations_of(RankTrace(trace.header, unfinished))
    assert len(texts) == len(groups_of(trace))
    assert 'finish_grad_sync was not called' in texts[0]
    skipped = copy.deepcopy(lost)
    (update,) = spans(skipped, 'phase', 'optimizer step', step=1)
    update['args']['update_successful'] = False
    assert violations_of(skipped) == []


# What the summary says


def test_who_waited_for_what(static: Path) -> None:
    traces = read_traces(str(static))
    name = groups_of(traces[0])[0]
    for trace in traces:
        for wait in spans(trace, 'wait'):
            wait['dur'] = 1.0
    (wait,) = spans(traces[1], 'wait', f'wait for reduce of {name}', step=3)
    wait['dur'] = 5001.0
    for step in (2, 3):
        for trace, late_us in zip(traces, (0, 400), strict=True):
            (start,) = spans(trace, 'dispatch', 'reduce dispatch', group=name, step=step)
            start['ts'] = 1e6 * step + late_us
            start['args']['last_gradient'] = f'of rank {trace.rank}'
    summary = summarize(traces)
    row = summary['groups'][0]
    assert row['name'] == name, 'the group waited for longest comes first'
    reduce = row['reduce']
    # 5001, 1, 1 and 1 microseconds: two ranks, steps 2 and 3.
    assert reduce['wait_s'] == pytest.approx(1251e-6)
    assert (reduce['worst_s'], reduce['worst_rank'], reduce['worst_step']) == (0.005001, 1, 3)
    assert (reduce['param'], reduce['last_rank']) == ('of rank 1', 1)
    assert reduce['ranks_apart_s'] == pytest.approx(400e-6)
    assert row['gather']['param'] in group_params(traces[0], name)
    waits = len(summary['groups']) * 1e-6
    assert summary['exposed']['gather'] == pytest.approx(waits)
    assert summary['exposed']['reduce'] == pytest.approx(waits + 1250e-6)
    for of_rank in summary['by_rank']:
        waited = of_rank['exposed_reduce_s'] + of_rank['exposed_gather_s']
        assert of_rank['compute_s'] == pytest.approx(of_rank['iteration_s'] - waited)
    slowest = max(summary['by_rank'], key=lambda rank: rank['compute_s'])
    assert summary['slowest_rank'] == slowest['rank']


# The command


def test_the_command(static: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = tmp_path / 'merged.json.gz'
    assert cli.main(['trace', str(static), '-o', str(merged)]) == 0
    out = capsys.readouterr().out
    assert '2 ranks, 3 iterations' in out
    assert 'every bucket group was reduced once per window and gathered once per step' in out
    data = json.loads(gzip.decompress(merged.read_bytes()))
    events = data['traceEvents']
    assert {event['pid'] for event in events} == {0, 1}
    assert min(event['ts'] for event in events if 'ts' in event) == 0
    names = {e['args']['name'] for e in events if e['name'] == 'process_name'}
    assert names == {'rank 0', 'rank 1'}
    for event in events:
        assert event['ph'] in 'MXi'
        assert event['ph'] != 'X' or event['dur'] >= 0
    assert cli.main(['trace', str(static), '--json']) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary['ok']
    assert summary['counted_steps'] == [2, 3]


def _broken(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """What is wrong, the folder, and what is said."""

    def copied(name: str) -> Path:
        target = folder / name
        target.mkdir()
        for rank in range(2):
            header = {'schema': 1, 'rank': rank, 'world_size': 2, 'steps': 0, 'groups': []}
            header |= {'clock': 'host', 'offset_ns': 0, 'offset_uncertainty_ns': 0}
            data = {'traceEvents': [], 'megatron_buffer': header}
            (target / f'rank-{rank}.trace.json').write_text(json.dumps(data))
        return target

    yield 'none', folder / 'nowhere', 'does not exist'
    (folder / 'empty').mkdir()
    yield 'empty', folder / 'empty', 'there is no trace in'
    yield 'short', copied('short'), 'no complete iteration'
    truncated = copied('truncated') / 'rank-1.trace.json'
    truncated.write_text(truncated.read_text()[:-9])
    yield 'truncated', truncated.parent, "rank-1.trace.json' cannot be read as JSON"
    missing = copied('missing') / 'rank-0.trace.json'
    missing.unlink()
    yield 'missing', missing.parent, 'holds the traces of 1 of 2 ranks, without rank 0'
    other = copied('other') / 'rank-1.trace.json'
    other.write_text('{"traceEvents": []}')
    yield 'other', other.parent, 'is not a trace of --custom-buffer-trace'
    renamed = copied('renamed') / 'rank-1.trace.json'
    renamed.write_text((renamed.parent / 'rank-0.trace.json').read_text())
    yield 'renamed', renamed.parent, 'is the trace of rank 0: was it renamed?'
    newer = copied('newer') / 'rank-0.trace.json'
    newer.write_text(newer.read_text().replace('"schema": 1', '"schema": 2'))
    yield 'newer', newer.parent, 'has schema 2'
    mixed = copied('mixed') / 'rank-1.trace.json'
    mixed.write_text(mixed.read_text().replace('"world_size": 2', '"world_size": 8'))
    yield 'mixed', mixed.parent, 'are of different runs'


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what, folder, message in _broken(tmp_path):
        assert cli.main(['trace', str(folder)]) == 2, what
        said = capsys.readouterr()
        assert said.out == ''
        assert said.err.startswith('megatron-buffer: error: ')
        assert said.err.count('\n') == 1
        assert message in said.err, what


def test_a_place_that_cannot_be_written(static: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(['trace', str(static), '-o', '/nowhere/merged.json']) == 2
    assert "cannot be written to '/nowhere/merged.json'" in capsys.readouterr().err


# Clocks


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(*[st.integers(0, 10**6)] * 4), min_size=1, max_size=8),
)
def test_the_true_offset_is_within_the_bounds(
    offset: int, rounds: list[tuple[int, int, int, int]]
) -> None:
    """Nobody leaves before everybody has entered, whatever the delays are."""
    now, seen = 0, []
    for enter_first, enter_mine, leave_first, leave_mine in rounds:
        first_entered, entered = now + enter_first, now + enter_mine
        met = max(first_entered, entered)
        first_left, left = met + leave_first, met + leave_mine
        seen.append(((entered + offset, first_entered), (left + offset, first_left)))
        now = max(first_left, left)
    found = combine(seen, same_host=False)
    assert abs(found.offset_ns - offset) <= found.uncertainty_ns + 1
    same = combine(seen, same_host=True)
    assert same in (found, (0, 0))

"""The harness: results, reports on failures, time limits, dead ranks, and what ranks start with."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import ROOT, RanksFailed, first_failure, run_ranks

# ------------------------------------------------------------------ functions that the ranks run


def parent(rank, world_size):
    return os.getppid()


def add_ranks(rank, world_size, start, factor=1):
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return rank, world_size, total.item() * factor


def report_process(rank, world_size):
    return {
        'pid': os.getpid(),
        'threads': torch.get_num_threads(),
        'python_threads': threading.active_count(),
        'megatron': 'megatron.training.training' in sys.modules,
        'initialized': dist.is_initialized(),
        'env': {k: os.environ.get(k) for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'EXTRA')},
    }


def leave_a_mark(rank, world_size):
    found = getattr(torch, 'mark_of_a_case', None)
    torch.mark_of_a_case = rank
    return found


def fail_on(rank, world_size, failing):
    print(f'rank {rank} says hello')
    if rank == failing:
        time.sleep(0.2)
        raise ValueError(f'no such thing on rank {rank}')
    dist.barrier()


def hang_on(rank, world_size, hanging):
    print(os.getpid(), flush=True)
    if rank == hanging:
        wait_for_ever()


def wait_for_ever():
    while True:
        time.sleep(1)


def note_pid_and_wait(rank, world_size, folder):
    Path(folder, str(rank)).write_text(str(os.getpid()))
    wait_for_ever()


def fail_alone(rank, world_size, failing):
    if rank == failing:
        raise ValueError('alone')
    wait_for_ever()


def die_on(rank, world_size, dying, peers_wait):
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    if peers_wait:
        dist.barrier()
    return 'alive'


def exit_quietly(rank, world_size):
    os._exit(3)


def call_sys_exit(rank, world_size):
    sys.exit(0)


def return_a_lock(rank, world_size):
    return threading.Lock()


def echo(rank, world_size, value):
    return value


def big_result(rank, world_size):
    return torch.full((1_000_000,), float(rank))


# ------------------------------------------------------------------ results


def test_results_come_back_in_rank_order():
    assert run_ranks(add_ranks, 2, 10) == [(0, 2, 21), (1, 2, 21)]


def test_keyword_arguments_and_four_ranks():
    assert [r[2] for r in run_ranks(add_ranks, 4, 0, factor=10)] == [60] * 4


def test_big_tensors_come_back():
    for rank, result in enumerate(run_ranks(big_result, 2, init=False)):
        assert torch.equal(result, torch.full((1_000_000,), float(rank)))


@pytest.mark.long
def test_tensors_travel_without_megatron_in_the_test_process():
    code = (
        'import sys, torch\n'
        'from tests.harness import run_ranks\n'
        'from tests.test_harness import echo\n'
        'assert torch.equal(run_ranks(echo, 1, torch.ones(3), init=False)[0], torch.ones(3))\n'
        'assert "megatron.core" not in sys.modules\n'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_rank_starts_with_megatron_one_thread_and_its_environment():
    before = dict(os.environ)
    got = run_ranks(report_process, 2, env={'EXTRA': 'yes'})
    assert dict(os.environ) == before
    assert len({r['pid'] for r in got} | {os.getpid()}) == 3
    for rank, r in enumerate(got):
        assert r['threads'] == 1
        assert r['python_threads'] == 1
        assert r['megatron']
        assert r['initialized']
        assert r['env'] == {
            'RANK': str(rank),
            'WORLD_SIZE': '2',
            'LOCAL_RANK': str(rank),
            'EXTRA': 'yes',
        }


def test_without_init_there_is_no_process_group():
    assert [r['initialized'] for r in run_ranks(report_process, 2, init=False)] == [False, False]


def test_cases_do_not_see_each_other():
    assert run_ranks(leave_a_mark, 2) == [None, None]
    assert run_ranks(leave_a_mark, 2) == [None, None]


def test_cases_are_forks_of_one_server():
    """Which is what makes them quick: importing Megatron anew takes ten seconds and more."""
    [first], [second] = run_ranks(parent, 1), run_ranks(parent, 1)
    assert first == second != os.getpid()


# ------------------------------------------------------------------ failures


def test_the_report_names_the_rank_that_failed_first():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on, 3, 1)
    report = str(caught.value)
    assert 'rank 1 first: ValueError: no such thing on rank 1' in report
    assert caught.value.first is not None
    assert caught.value.first.rank == 1
    # The traceback starts at the function, and every rank's own output is there.
    assert 'in fail_on' in caught.value.first.traceback
    assert 'run_rank' not in caught.value.first.traceback
    assert report.index('---- rank 1') < report.index('---- rank 0')
    assert all(f'rank {rank} says hello' in report for rank in range(3))


def test_a_rank_that_goes_on_after_a_failure_is_stopped_where_it_is():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_alone, 2, 0, grace_s=0.5)
    assert [o.status for o in caught.value.outcomes] == ['error', 'stopped']
    assert 'wait_for_ever' in str(caught.value)


def test_time_up_shows_where_each_rank_was():
    with pytest.raises(RanksFailed, match=r'not finished after 6 s') as caught:
        run_ranks(hang_on, 2, 1, timeout_s=6)
    assert caught.value.first is None
    assert [o.status for o in caught.value.outcomes] == ['ok', 'stopped']
    assert 'wait_for_ever' in caught.value.outcomes[1].stack
    assert 'wait_for_ever' in str(caught.value)


def test_expected_death_of_a_rank_whose_peers_wait_for_it():
    outcomes = run_ranks(die_on, 2, 1, peers_wait=True, expect_failure=True)
    assert [o.status for o in outcomes] == ['error', 'died']
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[1].headline() == 'killed by SIGKILL'
    assert 'barrier' in outcomes[0].traceback
    first = first_failure(outcomes)
    assert first is not None
    assert first.rank == 1


def test_a_dead_rank_does_not_delay_those_that_have_finished():
    start = time.monotonic()
    outcomes = run_ranks(die_on, 3, 0, peers_wait=False, expect_failure=True, grace_s=200)
    assert time.monotonic() - start < 190
    assert [(o.status, o.exit_code, o.result) for o in outcomes] == [
        ('died', -signal.SIGKILL, None),
        ('ok', 0, 'alive'),
        ('ok', 0, 'alive'),
    ]


@pytest.mark.parametrize(
    ('fn', 'status', 'says'),
    [
        (exit_quietly, 'died', 'exit code 3'),
        (call_sys_exit, 'error', 'SystemExit: 0'),
        (return_a_lock, 'error', 'TypeError'),
    ],
)
def test_no_way_of_ending_passes_for_success(fn, status, says):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fn, 1, init=False)
    assert caught.value.outcomes[0].status == status
    assert says in str(caught.value)


def test_expect_failure_returns_outcomes_when_nothing_fails():
    outcomes = run_ranks(add_ranks, 2, 1, expect_failure=True)
    assert [(o.status, o.result) for o in outcomes] == [('ok', (0, 2, 3)), ('ok', (1, 2, 3))]


def test_no_rank_is_left_behind():
    outcomes = run_ranks(hang_on, 2, 0, timeout_s=6, expect_failure=True)
    assert [o.status for o in outcomes] == ['stopped', 'ok']
    for outcome in outcomes:
        assert not is_running(int(outcome.output.split()[0]))


@pytest.mark.long
def test_ranks_end_with_a_test_process_that_is_killed():
    code = 'from tests.test_harness import *; run_ranks(note_pid_and_wait, 2, sys.argv[1])'
    # A killed process leaves its temporary files; a short path, since there are sockets among them.
    with tempfile.TemporaryDirectory(prefix='killed-', ignore_cleanup_errors=True) as folder:
        test = subprocess.Popen(
            [sys.executable, '-c', code, folder], cwd=ROOT, env={**os.environ, 'TMPDIR': folder}
        )
        try:
            pids = [int(wait_for_text(Path(folder, str(rank)))) for rank in range(2)]
            assert all(map(is_running, pids))
        finally:
            test.kill()
            test.wait()
        deadline = time.monotonic() + 100
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, pids))


def is_running(pid):
    try:
        return 'State:\tZ' not in Path(f'/proc/{pid}/status').read_text()
    except FileNotFoundError:
        return False


def wait_for_text(path, timeout_s=200):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f'{path} did not appear')

"""A rank that fails takes the others down with its reason, within seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness import ROOT, RankOutcome, run_ranks

LONG_S = 60.0


def _fail_while_the_others_wait(rank: int, world_size: int, how: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_buffer import errors

    assert errors.start_watch()
    dist.all_reduce(torch.ones(1))
    with errors.guard():
        if rank == 1:
            if how == 'raise':
                raise ValueError('the loss of batch 17 is not finite')
            if how == 'exit':
                sys.exit('out of data')
            # Posted, but the process stays: the others cannot notice by a closed connection.
            errors.post_failure(ValueError('posted and alive'))
            time.sleep(10)
        dist.all_reduce(torch.ones(1))


def _run(how: str, world_size: int = 3) -> tuple[list[RankOutcome], float]:
    started = time.monotonic()
    outcomes = run_ranks(
        _fail_while_the_others_wait,
        world_size,
        how,
        expect_failure=True,
        timeout_s=LONG_S,
        grace_s=20.0,
    )
    return outcomes, time.monotonic() - started


@pytest.mark.parametrize(
    ('how', 'reason'),
    [
        ('raise', 'ValueError: the loss of batch 17 is not finite'),
        ('exit', 'SystemExit: out of data'),
    ],
)
def test_the_other_ranks_report_the_first_ranks_reason(how: str, reason: str) -> None:
    outcomes, _ = _run(how)
    assert outcomes[1].error_type == reason.split(':')[0]
    for rank in (0, 2):
        assert outcomes[rank].error_type == 'RankFailure', outcomes[rank]
        assert outcomes[rank].error == f'rank 1 failed first: {reason}'


def _fail_after_another(rank: int, world_size: int) -> str:
    """Rank 0 fails when rank 1 has, before its watch looks again; says what it was told, and that this was all."""
    from megatron_buffer import errors

    errors._POLL_S = 1.5
    assert errors.start_watch()
    watch = errors._watch
    assert watch is not None
    said = ''
    try:
        with errors.guard():
            if rank == 0:
                watch.store.wait([errors._FAILURE_KEY])
            raise ValueError(f'rank {rank} has found a NaN')
    except (ValueError, errors.RankFailure) as error:
        said = str(error)
    # Where an error would be written down, here the watch is waited for.
    watch._thread.join(timeout=LONG_S)
    return said


def test_a_rank_that_fails_too_is_told_once() -> None:
    first, second = run_ranks(_fail_after_another, 2, timeout_s=LONG_S)
    assert first == 'rank 1 failed first: ValueError: rank 1 has found a NaN'
    assert second == 'rank 1 has found a NaN'


def test_a_rank_stuck_in_a_collective_is_ended_with_the_reason() -> None:
    outcomes, _ = _run('post')
    for rank in (0, 2):
        assert outcomes[rank].status == 'died'
        assert outcomes[rank].exit_code == 1
        assert 'rank 1 failed: ValueError: posted and alive' in outcomes[rank].output
        assert 'stuck in the call below' in outcomes[rank].output


def _killed_in_backward(rank: int, world_size: int) -> None:
    import signal

    import megatron_buffer
    from megatron_buffer import errors
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        buffer_config='upstream',
        overlap_grad_reduce=True,
        bucket_size=100,
    )
    with errors.guard():
        sm.run_window(model, rank, 0)
        if rank == 1:
            kill = lambda gradient: os.kill(os.getpid(), signal.SIGKILL)
            model.module.first.weight.register_hook(kill)
        sm.run_window(model, rank, 1)


@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_backward_is_named_by_the_others(world_size: int) -> None:
    outcomes = run_ranks(
        _killed_in_backward, world_size, expect_failure=True, timeout_s=LONG_S, grace_s=30.0
    )
    assert outcomes[1].headline() == 'killed by SIGKILL'
    for outcome in outcomes[:1] + outcomes[2:]:
        assert outcome.status in ('error', 'died'), outcome
        said = outcome.error + outcome.output
        assert 'rank 1 failed' in said
        assert 'ended without a word' in said


def _raise_in_python_code(rank: int, world_size: int) -> None:
    from megatron_buffer import errors

    assert errors.start_watch()
    if rank == 1:
        errors.post_failure(ValueError('no collective in sight'))
        return
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:  # a rank that computes for long is reached too
        pass


def test_a_rank_that_is_computing_is_reached() -> None:
    outcomes = run_ranks(_raise_in_python_code, 2, expect_failure=True, grace_s=20.0)
    assert outcomes[0].error == 'rank 1 failed first: ValueError: no collective in sight'


def _normal_end(rank: int, world_size: int) -> str:
    import torch.distributed as dist

    from megatron_buffer import errors

    assert errors.start_watch()
    assert errors.start_watch()  # once per process group
    with errors.guard():
        dist.barrier()
    hooked = sys.excepthook
    errors.stop_watch()
    assert sys.excepthook is not hooked
    return 'ended'


def test_a_run_without_failure_ends_as_ever() -> None:
    assert run_ranks(_normal_end, 2) == ['ended', 'ended']


def _secondary(rank: int, world_size: int) -> None:
    from megatron_buffer import errors

    errors.start_watch()
    with errors.guard():
        if rank == 1:
            raise ValueError('first')
        time.sleep(1.5)
        raise ConnectionError('only a consequence')


def _exit_codes(rank: int, world_size: int) -> None:
    from megatron_buffer import errors

    errors.start_watch()
    with errors.guard():
        sys.exit(16)  # Megatron's rerun state machine, on all ranks


def test_exit_codes_that_mean_something_pass_untouched() -> None:
    outcomes = run_ranks(_exit_codes, 2, expect_failure=True, grace_s=20.0)
    assert [(o.error_type, o.error) for o in outcomes] == [('SystemExit', '16')] * 2


def _second_group(rank: int, world_size: int, port: int) -> str:
    """A failure that everybody catches, then a new process group on the same store.

    The groups are fake ones on a real store: gloo's own second rendezvous on a store is unreliable.
    """
    import gc
    import weakref

    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    from megatron_buffer import errors

    store = dist.TCPStore('127.0.0.1', port, is_master=False)

    def meet(where: str) -> None:
        store.set(f'{where}/{rank}', '')
        store.wait([f'{where}/{other}' for other in range(world_size)])

    def start() -> None:
        dist.init_process_group('fake', store=store, rank=rank, world_size=world_size)
        assert errors.start_watch()
        hook = sys.excepthook
        sys.excepthook = lambda *args: hook(*args)  # as a library might wrap ours

    start()
    meet('first group')
    if rank == 1:
        errors.post_failure(ValueError('caught'))
    else:
        with pytest.raises(errors.RankFailure, match='caught'):
            _wait_for_ever()
    meet('failure seen')
    dist.destroy_process_group()
    start()
    meet('second group')
    _pause(1.5)  # what was posted before must not come again
    meet('nothing came')
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    _pause(1.5)
    gc.collect()
    assert group() is None, 'the watch keeps a destroyed process group'
    error = ValueError('through every hook')
    sys.excepthook(type(error), error, None)
    meet('end')
    return 'fine'


def _pause(seconds: float) -> None:
    """Lets the watch look a few times; nothing to wait for is the point."""
    time.sleep(seconds)


def _wait_for_ever() -> None:
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_failure_of_an_earlier_process_group_does_not_reach_the_next() -> None:
    import torch.distributed as dist

    # Here, not in a rank: whoever hosts the store must be the last to leave.
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    found = run_ranks(_second_group, 2, store.port, init=False, timeout_s=240)
    assert found == ['fine', 'fine']


def test_a_consequence_is_replaced_by_its_cause() -> None:
    outcomes = run_ranks(_secondary, 2, expect_failure=True, grace_s=20.0)
    assert outcomes[0].error == 'rank 1 failed first: ValueError: first'


SCRIPT = '''
import os, torch, torch.distributed as dist
from megatron_buffer import errors
dist.init_process_group('gloo')
errors.start_watch()
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError('no guard here')
dist.all_reduce(torch.ones(1))
'''


@pytest.mark.long
def test_a_script_without_guard_prints_who_failed_first(tmp_path: Path) -> None:
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc-per-node',
        '2',
    ]
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=LONG_S, env=env
    )
    assert done.returncode != 0
    assert 'rank 1 failed first: ValueError: no guard here' in done.stderr


def test_no_watch_without_a_process_group() -> None:
    from megatron_buffer import errors

    assert not errors.start_watch()
    assert errors.post_failure(ValueError('x')) is None
    with pytest.raises(ValueError, match='through'), errors.guard():
        raise ValueError('through')


def test_describe_is_one_line() -> None:
    from megatron_buffer.errors import describe

    assert describe(ValueError('a\nb\n\nc')) == 'ValueError: a b'
    assert describe(KeyboardInterrupt()) == 'KeyboardInterrupt'

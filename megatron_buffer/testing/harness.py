"""Run a test function on several ranks, each a process of its own, and say what went wrong on which.

A fork server loads torch and Megatron once (see :mod:`megatron_buffer.testing.preload`); each rank of each
case is then a fork of it. A case of 2 ranks costs some 0.4 s instead of the 20 s of two fresh interpreters,
and still starts from a process in which nothing has happened yet. It needs Linux, and no GPU: the ranks run
in CPU mode. Upstream has no counterpart.

    def add(rank, world_size, x):
        t = torch.tensor([x + rank])
        torch.distributed.all_reduce(t)
        return t.item()

    assert run_ranks(add, 2, 10) == [21, 21]

Rules: the function is a module-level one, of a module that can be imported with the caller's `sys.path` (a
script that calls this needs `if __name__ == '__main__':`); arguments and results go through pickle; the ranks
see the environment of the fork server plus `env=`, not later changes of the caller's `os.environ`.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_buffer.testing.rank_process import Settings, pack, run_rank, unpack

__all__ = ['RankOutcome', 'RanksFailed', 'first_failure', 'free_port', 'run_ranks']

PRELOAD = 'megatron_buffer.testing.preload'
OUTPUT_LINES = 40  # of each rank's own output, in a report
# Peers notice a rank's death through the closed connection, some time before its process is reaped here.
# What they report in that time is a consequence, so a death counts as that much earlier.
DEATH_SEEN_LATE_S = 0.5

# One thread for each rank, loopback only, and no GPU: these ranks are the CPU mode's.
_SERVER_ENV = {
    'OMP_NUM_THREADS': '1',
    'MKL_NUM_THREADS': '1',
    'OPENBLAS_NUM_THREADS': '1',
    'CUDA_VISIBLE_DEVICES': '',
    'GLOO_SOCKET_IFNAME': 'lo',
    # Megatron and torch warn a lot; a test that is about warnings switches them on.
    'PYTHONWARNINGS': 'ignore',
}

Status = Literal['ok', 'error', 'died', 'stopped']


@dataclasses.dataclass
class RankOutcome:
    """How one rank ended.

    `status` is `ok` (returned), `error` (raised), `died` (ended without a word: a signal or os._exit) or
    `stopped` (still running when the harness ended the case).
    """

    rank: int
    status: Status
    result: Any = None
    exit_code: int | None = None
    """As in `multiprocessing`: minus the signal's number where a signal ended the process."""
    error_type: str = ''
    error: str = ''
    traceback: str = ''
    stack: str = ''
    """Where a stopped rank was: the stacks of all its threads."""
    output: str = ''
    """What the rank wrote to standard output and standard error."""
    failed_at: float | None = None
    """Time of the failure on the machine's monotonic clock; orders the failures of a case."""

    @property
    def failed(self) -> bool:
        """True if the rank failed by itself."""
        return self.status in ('error', 'died')

    def headline(self) -> str:
        """One line that says how the rank ended."""
        if self.status == 'error':
            first = (self.error.splitlines() or [''])[0]
            return f'{self.error_type}: {first}'
        if self.status == 'died':
            if self.exit_code is not None and self.exit_code < 0:
                return f'killed by {signal.Signals(-self.exit_code).name}'
            return f'ended without a result, exit code {self.exit_code}'
        return 'finished' if self.status == 'ok' else 'was still running and was stopped'


class RanksFailed(Exception):
    """A case in which a rank failed or that took too long; the message is a report on every rank."""

    def __init__(self, report: str, outcomes: list[RankOutcome]) -> None:
        super().__init__(report)
        self.outcomes = outcomes

    @property
    def first(self) -> RankOutcome | None:
        """The rank that failed first, if one failed by itself."""
        return first_failure(self.outcomes)


def first_failure(outcomes: list[RankOutcome]) -> RankOutcome | None:
    """Return the outcome of the rank that failed first."""
    failed = [o for o in outcomes if o.failed]
    return min(failed, key=lambda o: o.failed_at or 0.0) if failed else None


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240.0,
    grace_s: float = 5.0,
    init: bool = True,
    expect_failure: bool = False,
    env: Mapping[str, str] | None = None,
    preload: str = PRELOAD,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` on every rank and return the results, rank 0 first.

    Args:
        fn: A module-level function.
        world_size: Number of ranks.
        args: Further arguments for `fn`.
        timeout_s: Limit for the whole case; then each rank's stacks are taken and the ranks are killed.
        grace_s: How long the other ranks may go on after the first failure.
        init: Initialize `torch.distributed` (gloo, FileStore) before calling `fn`.
        expect_failure: Don't raise; return a list of `RankOutcome` however the ranks ended.
        env: Environment variables to set in the ranks.
        preload: Module that the ranks' fork server imports once; it has a function `check`. Each has a fork
            server of its own.
        kwargs: Keyword arguments for `fn`.

    Raises:
        RanksFailed: If a rank failed or the time was up; not with `expect_failure`.
    """
    payload = pack((fn, args, kwargs))
    folder = Path(tempfile.mkdtemp(prefix='ranks-'))
    started = time.monotonic()
    try:
        settings = Settings(folder, world_size, init, timeout_s, dict(env or {}), preload)
        with _processes(settings, payload) as processes:
            timed_out = _wait(processes, folder, started + timeout_s, grace_s)
        outcomes = [_outcome(rank, process, folder) for rank, process in enumerate(processes)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if expect_failure:
        return outcomes
    if timed_out or any(o.status != 'ok' for o in outcomes):
        what = f'{fn.__module__}.{getattr(fn, "__qualname__", fn)} on {world_size} ranks'
        raise RanksFailed(_report(what, outcomes, timeout_s if timed_out else None), outcomes)
    for outcome in outcomes:
        if outcome.output:
            text = _indented(f'rank {outcome.rank} printed', outcome.output, '| ')
            sys.stdout.write(f'{text}\n')
    return [o.result for o in outcomes]


@functools.cache
def _server(preload: str) -> Any:
    """Start the fork server that imports `preload`, on the first call, with an environment of its own."""
    server: Any = multiprocessing.forkserver.ForkServer()
    server.set_forkserver_preload([preload])
    saved = dict(os.environ)
    try:
        # Python 3.12's fork server forgets the sys.path it was given: hence PYTHONPATH. (A rank is told
        # the sys.path of the moment it is started, so modules found later are no problem.)
        paths = [path or os.getcwd() for path in sys.path]
        # Hashes of strings differ from the caller's: what depends on them gives itself away.
        hash_seed = '2' if saved.get('PYTHONHASHSEED') == '1' else '1'
        os.environ.update(_SERVER_ENV, PYTHONPATH=os.pathsep.join(paths), PYTHONHASHSEED=hash_seed)
        server.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(saved)
    return server


@contextlib.contextmanager
def _asking(server: Any) -> Iterator[None]:
    """Let multiprocessing, which knows one fork server only, ask this one for a process."""
    usual = multiprocessing.forkserver.connect_to_new_process
    multiprocessing.forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        multiprocessing.forkserver.connect_to_new_process = usual


class _Process:
    """A rank's process and the time of its end."""

    def __init__(self, settings: Settings, payload: bytes, rank: int) -> None:
        self._process: Any = multiprocessing.get_context('forkserver').Process(
            target=run_rank, args=(settings, payload, rank), name=f'rank {rank}', daemon=True
        )
        with _asking(_server(settings.preload)):
            self._process.start()
        self.sentinel = self._process.sentinel
        self.exitcode: int | None = None
        self.ended_at: float | None = None
        self.stopped = False

    def reap(self) -> None:
        """Take the exit code of a process that has ended."""
        self._process.join()
        self.exitcode, self.ended_at = self._process.exitcode, time.monotonic()

    def dump_stacks(self) -> None:
        """Ask a rank that is about to be stopped to write down where its threads are."""
        self.stopped = True
        if self._process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End the process, if it is still there, and wait for it."""
        if self.exitcode is None:
            self._process.kill()
            self.reap()


@contextlib.contextmanager
def _processes(settings: Settings, payload: bytes) -> Iterator[list[_Process]]:
    """Start all ranks; whatever happens, none of them is left at the end."""
    processes: list[_Process] = []
    try:
        for rank in range(settings.world_size):
            processes.append(_Process(settings, payload, rank))
        yield processes
    finally:
        for process in processes:
            process.kill()


def _wait(processes: list[_Process], folder: Path, deadline: float, grace_s: float) -> bool:
    """Wait until all ranks have ended, time is up, or a failure's grace is over; True if time was up."""
    running = {p.sentinel: rank for rank, p in enumerate(processes)}
    failed = False
    while running:
        # After a failure look often: the ranks left may only be waiting for the one that is gone.
        left = deadline - time.monotonic()
        ended = multiprocessing.connection.wait(
            list(running), min(max(left, 0), 0.05 if failed else 5)
        )
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            processes[rank].reap()
            if not failed and not (folder / f'result.{rank}').exists():
                failed = True
                deadline = min(deadline, time.monotonic() + grace_s)
        if failed and all((folder / f'result.{rank}').exists() for rank in running.values()):
            return False
        if running and time.monotonic() >= deadline:
            for rank in running.values():
                processes[rank].dump_stacks()
            time.sleep(0.5)
            return not failed
    return False


def _outcome(rank: int, process: _Process, folder: Path) -> RankOutcome:
    """Read what a rank left behind."""
    outcome = RankOutcome(rank, 'died', exit_code=process.exitcode)
    outcome.failed_at = (process.ended_at or 0) - DEATH_SEEN_LATE_S
    outcome.output = _text(folder / f'output.{rank}')
    outcome.stack = _text(folder / f'stack.{rank}')
    if (path := folder / f'result.{rank}').exists():
        # An exit code other than 0 is ours then: it was only waiting for a rank that had died.
        outcome.status, outcome.exit_code, outcome.failed_at = 'ok', 0, None
        outcome.result = unpack(path.read_bytes())
    elif (path := folder / f'error.{rank}').exists():
        outcome.status = 'error'
        for key, value in pickle.loads(path.read_bytes()).items():
            setattr(outcome, key, value)
    elif process.stopped:
        outcome.status, outcome.failed_at = 'stopped', None
    return outcome


def _text(path: Path) -> str:
    return path.read_text(errors='replace') if path.exists() else ''


def _report(what: str, outcomes: list[RankOutcome], timeout_s: float | None) -> str:
    """Describe every rank, the one that failed first at the top."""
    first = first_failure(outcomes)
    if first is None:
        lines = [f'{what}: not finished after {timeout_s:g} s']
    else:
        count = sum(o.failed for o in outcomes)
        lines = [f'{what}: {count} failed, rank {first.rank} first: {first.headline()}']
    shown: dict[str, int] = {}
    order = sorted(outcomes, key=lambda o: (o is not first, not o.failed, o.failed_at or 0, o.rank))
    for o in order:
        later = ''
        if first is not None and o.failed and o is not first:
            later = f' ({(o.failed_at or 0) - (first.failed_at or 0):.1f} s later)'
        lines.append(f'---- rank {o.rank}{later}: {o.headline()}')
        if o.status == 'ok':
            continue
        if o.traceback in shown:
            lines.append(f'(the same traceback as rank {shown[o.traceback]})')
        elif o.traceback:
            shown[o.traceback] = o.rank
            lines.append(o.traceback.rstrip())
        if o.stack:
            lines.append(o.stack.rstrip())
        if o.output:
            lines.append(_indented('it printed', o.output, '    | '))
    return '\n'.join(lines)


def _indented(title: str, output: str, mark: str) -> str:
    lines = output.splitlines()
    if len(lines) > OUTPUT_LINES:
        title += f' (last {OUTPUT_LINES} of {len(lines)} lines)'
    return '\n'.join([f'{title}:', *(mark + line for line in lines[-OUTPUT_LINES:])])


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now; for `init=False` and torchrun."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

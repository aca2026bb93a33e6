"""Runs what a sweep still has to run, each run in fresh processes under a keeper.

One thread: it starts keepers, waits for whichever ends first, and stores what came out. Upstream has no
counterpart.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_buffer.ablation import failures, keeper
from megatron_buffer.ablation.launcher import command_of, environment_of
from megatron_buffer.ablation.machine import Machine, share_of
from megatron_buffer.ablation.plan import Run
from megatron_buffer.ablation.stats_files import StatsProblem, read_stats
from megatron_buffer.ablation.store import Store
from megatron_buffer.ablation.sweep import Sweep
from megatron_buffer.config import config_hash, dump_config, to_dict

SCHEMA = 1
_STOP_S = 3 * keeper.GRACE_S


class Watcher(Protocol):
    """Who is told how the sweep goes."""

    def started(self, run: Run) -> None:
        """A run has begun."""

    def ended(self, run: Run, result: dict[str, Any]) -> None:
        """A run has ended, well or not, and is stored."""


@dataclass
class _Active:
    run: Run
    slot: int
    folder: Path
    process: subprocess.Popen[bytes]
    handle: int
    started: str
    since_s: float


class Runner:
    """Runs a sweep's runs.

    Args:
        sweep: The sweep.
        runs: All of its runs, in order.
        store: Where they are kept.
        machine: This machine.
        jobs: Runs at a time.
        is_cpu: Whether they use the CPU.
        watcher: Who is told.
    """

    def __init__(
        self,
        sweep: Sweep,
        runs: Sequence[Run],
        store: Store,
        machine: Machine,
        *,
        jobs: int,
        is_cpu: bool,
        watcher: Watcher,
    ) -> None:
        self._sweep, self._runs, self._store = sweep, runs, store
        self._machine, self._jobs, self._is_cpu = machine, jobs, is_cpu
        self._watcher = watcher
        self._active: list[_Active] = []

    def run(self, todo: Sequence[Run], results: dict[str, dict[str, Any]]) -> None:
        """Runs ``todo``; ``results`` holds what is there already, and gets what comes.

        An exception such as KeyboardInterrupt ends the runs under way, which then are as if never begun.
        """
        waiting = list(todo)
        try:
            while waiting or self._active:
                while waiting and len(self._active) < self._jobs:
                    self._start(waiting.pop(0))
                for active in self._wait():
                    self._active.remove(active)
                    result = self._result(active)
                    self._store.finish(active.run, result)
                    results[active.run.name] = result
                    self._store.write_results(self._runs, results)
                    self._watcher.ended(active.run, result)
        finally:
            self._stop()

    def _start(self, run: Run) -> None:
        sweep, arm = self._sweep, self._sweep.arms[run.arm]
        folder = self._store.begin(run)
        (folder / 'stats').mkdir()
        if arm.config is not None:
            (folder / 'config.yaml').write_text(dump_config(arm.config), encoding='utf-8')
        command = command_of(
            sweep, arm, run.seed, folder, is_cpu=self._is_cpu, number=self._runs.index(run)
        )
        env = environment_of(sweep, arm, run.seed, is_cpu=self._is_cpu)
        slot = min(set(range(self._jobs)) - {active.slot for active in self._active})
        share = share_of(self._machine, slot, self._jobs, sweep.workload.ranks, is_cpu=self._is_cpu)
        if share and not self._is_cpu:
            env['CUDA_VISIBLE_DEVICES'] = ','.join(share)
        cwd = sweep.workload.cwd or folder
        (folder / 'command.txt').write_text(_as_shell(command, env, cwd), encoding='utf-8')
        limit = [str(sweep.time_limit_s)]
        with (folder / 'log.txt').open('wb') as log, _cpus(share if self._is_cpu else ()):
            process = subprocess.Popen(
                [sys.executable, '-I', '-S', keeper.__file__, *limit, *command],
                cwd=cwd,
                env=os.environ | env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
        handle = os.pidfd_open(process.pid)
        self._active.append(_Active(run, slot, folder, process, handle, now, time.monotonic()))
        self._watcher.started(run)

    def _wait(self) -> list[_Active]:
        """Those of which the keeper has ended; at least one."""
        readable, _, _ = select.select([active.handle for active in self._active], [], [])
        ended = [active for active in self._active if active.handle in readable]
        for active in ended:
            active.process.wait()
            _let_go(active)
        return ended

    def _result(self, active: _Active) -> dict[str, Any]:
        run, sweep, arm = active.run, self._sweep, self._sweep.arms[active.run.arm]
        code = active.process.returncode
        work = sweep.workload
        result: dict[str, Any] = {
            'schema': SCHEMA,
            'run': run.name,
            'key': run.key,
            'arm': run.arm,
            'repeat': run.repeat,
            'seed': run.seed,
            'status': 'ok',
            'error': None,
            'started': active.started,
            'wall_s': round(time.monotonic() - active.since_s, 3),
            'ranks': work.ranks,
            'steps': work.steps,
            'warmup_steps': work.warmup_steps,
            'flags': {**work.flags, **arm.flags},
            'env': {**sweep.env, **arm.env},
            'config_hash': None if arm.config is None else config_hash(arm.config),
            'config': None if arm.config is None else to_dict(arm.config),
        }
        problem = None
        if code == 0:
            try:
                stats = read_stats(active.folder / 'stats', work.ranks, work.steps)
                problem = _wrong_run(result, stats)
                result |= {**stats, 'config': result['config']}
            except StatsProblem as error:
                problem = str(error)
        if code != 0 or problem is not None:
            result['status'] = 'failed'
            result['error'] = failures.describe(active.folder / 'log.txt', code, sweep.time_limit_s)
            if problem is not None:
                result['error'] |= {'class': 'StatsProblem', 'message': problem}
        return result

    def _stop(self) -> None:
        """Ends what is under way, with all its processes."""
        for active in self._active:
            with contextlib.suppress(OSError):
                if active.process.stdin is not None:
                    active.process.stdin.close()
        until = time.monotonic() + _STOP_S
        for active in self._active:
            try:
                active.process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                active.process.kill()
            _let_go(active)
        self._active.clear()


def _wrong_run(asked: dict[str, Any], stats: dict[str, Any]) -> str | None:
    """What shows that the script did something else than the arm says; None if nothing does."""
    wanted = 'stock' if asked['config_hash'] is None else 'megatron_buffer'
    if stats['buffer'] != wanted:
        return f'the run used the buffer of {stats["buffer"]}, and the arm asks for {wanted}'
    if stats['config_hash'] != asked['config_hash']:
        return f'the run used the config {stats["config_hash"]}, and the arm asks for {asked["config_hash"]}'
    return None


def _let_go(active: _Active) -> None:
    if active.handle >= 0:
        os.close(active.handle)
        active.handle = -1
    if active.process.stdin is not None:
        with contextlib.suppress(OSError):
            active.process.stdin.close()


@contextlib.contextmanager
def _cpus(share: Sequence[str]) -> Iterator[None]:
    """Within the block this thread, and what it starts, may use these CPUs only."""
    if not share:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {int(cpu) for cpu in share})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _as_shell(command: Sequence[str], env: dict[str, str], cwd: Path) -> str:
    """The run as a command to repeat it by hand."""
    variables = ' '.join(f'{key}={shlex.quote(value)}' for key, value in sorted(env.items()))
    return f'cd {shlex.quote(str(cwd))}\n{variables} \\\n  {shlex.join(command)}\n'


def summary_line(result: dict[str, Any]) -> str:
    """One line about a finished run."""
    if result['status'] != 'ok':
        error = result['error']
        kind = f'{error["class"]}: ' if error['class'] else ''
        return f'FAILED, {kind}{error["message"]}'
    times = sorted(t for t in result['step_time_s'][result['warmup_steps'] :] if t is not None)
    parts = [f'{result["wall_s"]:.0f} s']
    if times:
        parts.append(f'{1000 * times[len(times) // 2]:.1f} ms a step')
    for name, series in result['loss'].items():
        if series and series[-1] is not None:
            parts.append(f'{name} {series[-1]:.6g}')
    return ', '.join(parts)

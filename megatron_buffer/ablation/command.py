"""``megatron-buffer ablate``: its options, and what it does with them.

Imports neither torch nor megatron; the runs do, in processes of their own. Upstream has no counterpart.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_buffer.ablation.launcher import command_of
from megatron_buffer.ablation.machine import Machine, check_room, runs_on_cpu, this_machine
from megatron_buffer.ablation.plan import Run, as_yaml, changes_of, runs_of, sweep_as_dict
from megatron_buffer.ablation.read_sweep import load_sweep, shipped_sweeps
from megatron_buffer.ablation.store import Store, check_folder, finished_runs
from megatron_buffer.ablation.sweep import Arm, Sweep
from megatron_buffer.config_yaml import did_you_mean
from megatron_buffer.errors import ConfigError
from megatron_buffer.printing import print_json

if TYPE_CHECKING:
    from rich.console import Console

"""What the command is for, in one line."""

OK, FOUND_SOMETHING, INTERRUPTED = 0, 1, 130


def add_ablate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``megatron-buffer ablate``."""
    parser.epilog = (
        'A sweep that was stopped or killed goes on when it is started again: what has finished is kept. '
        'Exit codes: 0 all right, 1 a run failed that was not expected to, 2 bad input, 130 stopped by Ctrl-C.'
    )
    parser.add_argument(
        'sweep',
        metavar='SWEEP',
        help=f'a YAML file (docs/ablations.md), or the name of a shipped sweep: {", ".join(shipped_sweeps())}',
    )
    parser.add_argument(
        '-o',
        '--output',
        metavar='RUN_DIR',
        help='folder of the results (default: ablation-NAME in the current folder)',
    )
    parser.add_argument(
        '--arm',
        action='append',
        metavar='NAME',
        help='run this arm, and others named likewise, instead of all; the others can be added later',
    )
    parser.add_argument(
        '--jobs',
        type=int,
        default=1,
        metavar='N',
        help='runs at a time (default: 1); refused where CPUs or GPUs would be shared',
    )
    parser.add_argument(
        '--dry-run',
        action='store_true',
        help='check everything, list what would run, and run nothing',
    )
    parser.add_argument(
        '--retry-failed',
        action='store_true',
        help='run again what has failed in this folder before',
    )


def ablate(options: argparse.Namespace, console: Console) -> int:
    """Runs ``megatron-buffer ablate``; returns the exit code.

    Raises:
        ConfigError: If something that was asked for is wrong; then nothing has run.
    """
    sweep = _chosen(load_sweep(options.sweep), options.arm)
    folder = Path(options.output or f'ablation-{sweep.name}')
    machine = this_machine()
    is_cpu = runs_on_cpu(sweep, machine)
    runs = runs_of(sweep, is_cpu=is_cpu)
    check_folder(folder)
    warning = ''
    try:
        warning = check_room(sweep, machine, options.jobs, is_cpu=is_cpu)
    except ConfigError as error:
        if not options.dry_run:
            raise
        warning = f'would be refused here: {error}'
    if options.dry_run:
        done = _finished(folder, runs, retry_failed=options.retry_failed)
        return _dry_run(options, sweep, runs, done, folder, warning, console, is_cpu=is_cpu)

    done, interrupted = _run(options, sweep, runs, folder, machine, warning, is_cpu=is_cpu)
    failed = [r for r in done.values() if r['status'] != 'ok' and not _may_fail(sweep, r['arm'])]
    summary = {
        'run_dir': str(folder),
        'runs': len(runs),
        'finished': len(done),
        'failed': [{'run': r['run'], 'arm': r['arm'], 'error': r['error']} for r in failed],
        'interrupted': interrupted,
        'warning': warning,
    }
    if options.json:
        print_json(summary, default=str)
    else:
        _say_end(summary, _command(options, folder), console)
    if interrupted:
        return INTERRUPTED
    return FOUND_SOMETHING if failed else OK


def _chosen(sweep: Sweep, names: list[str] | None) -> Sweep:
    """The sweep with some of its arms only, and what is expected of them.

    Raises:
        ConfigError: If there is no such arm, or one that is needed for comparison is left out.
    """
    if names is None:
        return sweep
    for name in names:
        if name not in sweep.arms:
            raise ConfigError(
                f'--arm {name}: {sweep.source} has no such arm.{did_you_mean(name, sweep.arms)} Arms: '
                f'{", ".join(sweep.arms)}'
            )
    for name in names:
        if sweep.against(name) not in names:
            raise ConfigError(
                f'--arm {name}: it is compared with {sweep.against(name)}, which must run too; add --arm '
                f'{shlex.quote(sweep.against(name))}'
            )
    expect = {
        name: tuple(e for e in sweep.expect.get(name, ()) if not e.than or e.than in names)
        for name in names
    }
    arms = {name: arm for name, arm in sweep.arms.items() if name in names}
    return dataclasses.replace(sweep, arms=arms, expect=expect)


def _run(
    options: argparse.Namespace,
    sweep: Sweep,
    runs: list[Run],
    folder: Path,
    machine: Machine,
    warning: str,
    *,
    is_cpu: bool,
) -> tuple[dict[str, Any], bool]:
    """Runs what has not run yet; returns all results by name, and whether it was stopped."""
    from megatron_buffer.ablation.progress import Progress
    from megatron_buffer.ablation.runner import Runner

    store = Store(folder)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        done = _finished(folder, runs, retry_failed=options.retry_failed)
        todo = [run for run in runs if run.name not in done]
        store.write_sweep(sweep.text, sweep_as_dict(sweep, runs, is_cpu=is_cpu))
        store.write_results(runs, done)
        stale = len(set(finished_runs(folder)) - {run.name for run in runs})
        with Progress(runs, todo, stale, folder, warning, quiet=options.json) as progress:
            runner = Runner(
                sweep, runs, store, machine, jobs=options.jobs, is_cpu=is_cpu, watcher=progress
            )
            try:
                runner.run(todo, done)
            except KeyboardInterrupt:
                return done, True
        return done, False
    finally:
        signal.signal(signal.SIGTERM, before)
        store.close()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _may_fail(sweep: Sweep, arm: str) -> bool:
    return any(expectation.kind == 'fails' for expectation in sweep.expect.get(arm, ()))


def _finished(folder: Path, runs: Sequence[Run], *, retry_failed: bool) -> dict[str, Any]:
    """The results that are there already.

    Raises:
        ConfigError: If there are some, and none is of this sweep: a folder is for one sweep, of which
            single arms may change.
    """
    earlier = finished_runs(folder)
    if earlier and not any(run.name in earlier for run in runs):
        raise ConfigError(
            f'{folder} holds {len(earlier)} finished runs, and none of them is one of this sweep as it is now: it is '
            'another sweep, or its workload (or environment, launcher, script) has changed, so that everything '
            'would run again. Name another folder with -o',
            source=str(folder),
        )
    return {
        run.name: earlier[run.name]
        for run in runs
        if run.name in earlier and not (retry_failed and earlier[run.name]['status'] != 'ok')
    }


def _command(options: argparse.Namespace, folder: Path) -> str:
    """The command that goes on with this sweep."""
    arms = [word for name in options.arm or () for word in ('--arm', name)]
    jobs = ['--jobs', str(options.jobs)] if options.jobs != 1 else []
    words = ['megatron-buffer', 'ablate', options.sweep, '-o', str(folder), *arms, *jobs]
    return shlex.join(words)


def _say_end(summary: dict[str, Any], command: str, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    folder = summary['run_dir']
    for one in summary['failed']:
        error = one['error']
        kind = f'{error["class"]}: ' if error['class'] else ''
        say(
            f'failed: {one["arm"]}: {kind}{error["message"]} (log: {folder}/runs/{one["run"]}/log.txt)'
        )
    if summary['interrupted']:
        say(
            f'Stopped with {summary["finished"]} of {summary["runs"]} runs finished. The same command goes on '
            f'from there: {command}'
        )
    else:
        say(f'{summary["finished"]} runs, {len(summary["failed"])} failed: {folder}/results.jsonl')
        say(f'Read it with: megatron-buffer report {shlex.quote(folder)}')


def _dry_run(
    options: argparse.Namespace,
    sweep: Sweep,
    runs: list[Run],
    done: dict[str, Any],
    folder: Path,
    warning: str,
    console: Console,
    *,
    is_cpu: bool,
) -> int:
    if options.json:
        plan = sweep_as_dict(sweep, runs, is_cpu=is_cpu)
        for run in plan['runs']:
            run['finished'] = run['name'] in done
        print_json({'run_dir': str(folder), 'warning': warning, **plan}, default=str)
        return OK
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if sweep.question:
        say(sweep.question)
    work = sweep.workload
    say(
        f'{len(runs)} runs of {work.steps} steps on {work.ranks} {"gloo ranks, CPU" if is_cpu else "GPUs"}: '
        f'{len(sweep.arms)} arms, {len(sweep.seeds)} seed{"s" * (len(sweep.seeds) > 1)}, {sweep.repeats} repeats; '
        f'{len(done)} have finished in {folder}'
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ('arm', 'compared with', 'what it changes', 'expected'):
        table.add_column(column, overflow='fold')
    for arm in sweep.arms.values():
        expected = ', '.join(e.kind for e in sweep.expect.get(arm.name, ()))
        than = '' if sweep.against(arm.name) == arm.name else sweep.against(arm.name)
        table.add_row(Text(arm.name), Text(than), Text(_changes(sweep, arm)), expected)
    console.print(table)
    say('Order:')
    for run in runs:
        say(f'  {"finished " if run.name in done else ""}{run.name}')
    example = next((run for run in runs if run.name not in done), runs[0])
    arm = sweep.arms[example.arm]
    path = folder.absolute() / 'runs' / example.name
    command = command_of(sweep, arm, example.seed, path, is_cpu=is_cpu, number=0)
    say(f'The next one is started by:\n  {shlex.join(command)}')
    if warning:
        say(f'note: {warning}')
    return OK


def _changes(sweep: Sweep, arm: Arm) -> str:
    lines = [] if arm.config is not None else ['stock Megatron-Core']
    for key, (_, new) in changes_of(sweep, arm).items():
        lines.append(f'{key}: {as_yaml(new)}')
    return '\n'.join(lines) or f'nothing: {sweep.base}'

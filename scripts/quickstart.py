"""Trains a small GPT twice on the CPU, stock Megatron-Core and through our buffer, and compares.

Both runs are ``scripts/pretrain_gpt.py`` under torchrun with gloo ranks: the real training loop and
model, distributed optimizer, both overlaps, bf16 parameters with fp32 gradients, several buckets,
three micro-batches per step, clipping on. Everything they end with is compared bit by bit.

Exit code: 0 if nothing differs, 1 if something does or a run fails, 2 for a wrong config.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_buffer.ablation import tiny
from megatron_buffer.config import load_config
from megatron_buffer.errors import MegatronBufferError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / 'scripts' / 'pretrain_gpt.py'
TIME_LIMIT_S = 300
LOG_TAIL_LINES = 40
KINDS = {
    'params': 'parameters',
    'main_grads': 'owned main_grad shards',
    'optimizer': 'optimizer state',
}
RECORDED_STEP = re.compile(r'recorded step (\d+)/(\d+): (.*)')

console = Console(highlight=False)


class Difference(NamedTuple):
    """A tensor that the two runs do not agree on."""

    rank: int
    kind: str
    name: str
    what: str


def main() -> int:
    options = parse_options()
    try:
        load_config(options.config)
    except MegatronBufferError as error:
        console.print(f'error: {error}', markup=False, soft_wrap=True)
        return 2
    started_s = time.monotonic()
    with working_folder(options.keep) as folder:
        console.print(
            f'[bold]Training a small GPT twice[/]: {options.nproc} gloo ranks, {options.steps} steps, '
            'distributed optimizer, grad reduce and param gather overlapped, bf16 with fp32 gradients'
        )
        runs = {
            'stock': (),
            'ours': ('--use-custom-buffer', '--custom-buffer-config', options.config),
        }
        for name, flags in runs.items():
            if not train(name, flags, folder, options):
                return 1
        states = {name: load_states(folder / name, options.nproc) for name in runs}
        show_losses(states['stock'][0], states['ours'][0])
        is_equal = show_comparison(states['stock'], states['ours'], options.steps)
        layouts = {
            name: json.loads((folder / name / 'layout-rank0.json').read_text()) for name in runs
        }
        show_layout(layouts['ours'])
        show_memory(layouts)
        is_ours = check_classes(layouts)
        if options.keep is not None:
            console.print(f'Logs and dumps: {options.keep}')
    console.print(f'Done in {time.monotonic() - started_s:.0f} s.')
    return 0 if is_equal and is_ours else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or '').split('\n\n')[0], allow_abbrev=False
    )
    parser.add_argument('--steps', type=positive, default=8, help='training steps (default: 8)')
    parser.add_argument('--nproc', type=positive, default=2, help='ranks (default: 2)')
    parser.add_argument(
        '--config',
        default=str(ROOT / 'configs' / 'upstream.yaml'),
        help='config of the second run: a YAML file or a shipped name (default: upstream.yaml)',
    )
    parser.add_argument('--keep', type=Path, metavar='DIR', help='keep logs and dumps there')
    options = parser.parse_args()
    if Path(options.config).is_file():  # the runs have another current folder
        options.config = str(Path(options.config).resolve())
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError('expected at least 1')
    return value


@contextlib.contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix='megatron-buffer-') as name:
            yield Path(name)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()


def megatron_flags(options: argparse.Namespace) -> list[str]:
    """Megatron's own flags: the small GPT that sweeps train by default too."""
    flags = tiny.flags(options.nproc) | {
        'train-iters': options.steps,
        'seed': 1234,
        'distributed-backend': 'gloo',
    }
    switches = [f'--{flag}' for flag, value in flags.items() if value is True]
    valued = ((flag, value) for flag, value in flags.items() if value is not True)
    return [text for flag, value in valued for text in (f'--{flag}', str(value))] + switches


def train(name: str, flags: tuple[str, ...], folder: Path, options: argparse.Namespace) -> bool:
    """Runs one training, shows its iterations, and says whether it went well."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    command += [f'--nproc-per-node={options.nproc}', '-m', 'megatron_buffer', 'run', str(SCRIPT)]
    command += [*megatron_flags(options), '--custom-buffer-cpu', *flags]
    command += ['--dump-state', str(folder / name)]
    environment = os.environ | {
        'CUDA_VISIBLE_DEVICES': '',
        'GLOO_SOCKET_IFNAME': os.environ.get('GLOO_SOCKET_IFNAME', 'lo'),
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')])),
        'PYTHONUNBUFFERED': '1',
        'PYTHONWARNINGS': 'ignore',
    }
    console.print(f'\n[bold]{name}[/] {escape(" ".join(flags))}'.rstrip())
    started_s = time.monotonic()
    log = folder / f'{name}.log'
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
        start_new_session=True,
    )
    watchdog = threading.Timer(TIME_LIMIT_S, stop, [process])
    watchdog.start()
    try:
        with console.status('starting'):
            show_iterations(process, log)
        code = process.wait()
    finally:
        watchdog.cancel()
        stop(process)
    elapsed_s = time.monotonic() - started_s
    if code == 0:
        console.print(f'  finished in {elapsed_s:.0f} s')
        return True
    reason = f'exit code {code}' if elapsed_s < TIME_LIMIT_S else f'stopped after {TIME_LIMIT_S} s'
    console.print(f'[bold red]The {name} run failed[/] ({reason}). The end of its log:')
    console.print('\n'.join(end_of_log(log)), markup=False, soft_wrap=True)
    return False


def end_of_log(log: Path) -> list[str]:
    """The last lines that the ranks wrote; torchrun's own report after them says no more."""
    lines = log.read_text().splitlines()
    reports = (i for i, line in enumerate(lines) if 'torch/distributed/elastic' in line)
    return lines[: next(reports, len(lines))][-LOG_TAIL_LINES:]


def show_iterations(process: subprocess.Popen[str], log: Path) -> None:
    """Copies the output to ``log`` and prints a line per training step."""
    assert process.stdout is not None
    with log.open('w') as file:
        for line in process.stdout:
            file.write(line)
            found = RECORDED_STEP.search(line)
            if found:
                console.print(f'  step {found[1]:>3} of {found[2]}   {found[3]}', markup=False)
            elif line.startswith('megatron-buffer:'):
                console.print(f'  {line.rstrip()}', markup=False, style='dim')


def stop(process: subprocess.Popen[str]) -> None:
    """Ends the run with all its ranks, if it is still there."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def load_states(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f'rank{rank}.pt', weights_only=True) for rank in range(ranks)]


def show_losses(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    table = Table(title='Losses and gradient norms', title_justify='left')
    for column in ('step', 'loss, stock', 'loss, ours', 'grad norm, stock', 'grad norm, ours', ''):
        table.add_column(column, justify='right')
    columns = [run[key] for key in ('losses', 'grad_norms') for run in (stock, ours)]
    for step, values in enumerate(zip(*columns, strict=False), start=1):
        is_equal = values[0] == values[1] and values[2] == values[3]
        verdict = '[green]equal[/]' if is_equal else '[red]differ[/]'
        table.add_row(str(step), *(f'{value:.9g}' for value in values), verdict)
    console.print()
    console.print(table)


def show_comparison(stock: list[dict[str, Any]], ours: list[dict[str, Any]], steps: int) -> bool:
    """Compares all ranks' states bit by bit; True if there was something to compare and it agrees."""
    table = Table(title='Comparison, bit by bit, all ranks', title_justify='left')
    for column in ('what', 'tensors', 'elements', 'differ'):
        table.add_column(column, justify='left' if column == 'what' else 'right')
    differences: list[Difference] = []
    total, is_complete = 0, True
    for kind, title in KINDS.items():
        found = [
            difference
            for rank, (left, right) in enumerate(zip(stock, ours, strict=True))
            for difference in compare(rank, kind, left[kind], right[kind])
        ]
        tensors = [tensor for state in stock for tensor in state[kind].values()]
        elements = sum(tensor.numel() for tensor in tensors)
        table.add_row(title, f'{len(tensors):,}', f'{elements:,}', str(len(found)))
        differences += found
        total += len(tensors)
        is_complete = is_complete and bool(tensors)
    console.print()
    console.print(table)
    for difference in differences[:10]:
        console.print(
            f'  rank {difference.rank}, {difference.kind}, {difference.name}: {difference.what}',
            style='red',
            markup=False,
        )
    curves = [(run['losses'], run['grad_norms']) for run in (stock[0], ours[0])]
    is_complete = is_complete and all(len(values) == steps for values in curves[0])
    is_equal = not differences and curves[0] == curves[1]
    if not is_complete:
        console.print('[bold red]The dumps are incomplete: nothing is proved.[/]')
    elif is_equal:
        console.print(f'[bold green]{total:,} tensors compared, 0 differ.[/]')
    else:
        curves_too = '' if curves[0] == curves[1] else ' Losses or gradient norms differ.'
        counted = f'{total:,} tensors compared, {len(differences)} differ.'
        console.print(f'[bold red]{counted}{curves_too}[/]')
    return is_equal and is_complete


def compare(
    rank: int, kind: str, stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]
) -> Iterator[Difference]:
    for name in [*stock, *(name for name in ours if name not in stock)]:
        if name not in stock or name not in ours:
            yield Difference(rank, kind, name, f'only in {"stock" if name in stock else "ours"}')
            continue
        left, right = stock[name], ours[name]
        if left.dtype != right.dtype or left.shape != right.shape:
            what = f'{left.dtype} {tuple(left.shape)} in stock, {right.dtype} {tuple(right.shape)}'
            yield Difference(rank, kind, name, what)
        elif not torch.equal(as_bytes(left), as_bytes(right)):
            gap = (left.double() - right.double()).abs()
            what = f'{int((gap != 0).sum())} of {gap.numel()} elements, by up to {gap.max():.3g}'
            yield Difference(rank, kind, name, what)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def show_layout(layout: dict[str, Any]) -> None:
    for index, buffer in enumerate(layout['buffers']):
        size = f'{buffer["numel"]:,} elements over {buffer["data_parallel_size"]} ranks'
        table = Table(
            title=f'Rank 0, buffer {index}: {buffer["param_dtype"]} parameters, '
            f'{buffer["grad_dtype"]} gradients, {size}',
            title_justify='left',
            show_lines=True,
        )
        for column in ('bucket', 'starts at', 'elements', 'padding'):
            table.add_column(column, justify='right')
        table.add_column('parameters, in the order of the buffer')
        for bucket in buffer['buckets']:
            params = sorted(bucket['params'], key=lambda param: param['start'])
            used = sum(param['end'] - param['start'] for param in params)
            table.add_row(
                str(bucket['bucket_id']),
                f'{bucket["offset"]:,}',
                f'{bucket["numel"]:,}',
                f'{bucket["numel"] - used:,}',
                escape(summary([param['name'] for param in params])),
            )
        console.print()
        console.print(table)


def summary(names: list[str]) -> str:
    """Parameter names with what neighbours share written once: a line per layer or module."""
    parts = []
    for name in names:
        found = re.match(r'(?:module\.)*(.*?layers\.\d+|[^.]+)\.(.+)', name)
        parts.append((found[1], found[2]) if found else ('', name))
    lines = []
    for owner, inside in itertools.groupby(parts, key=lambda part: part[0]):
        split = [name.rpartition('.') for _, name in inside]
        modules = [
            f'{module}.'.lstrip('.') + f'{{{", ".join(leaf for *_, leaf in leaves)}}}'
            for module, leaves in itertools.groupby(split, key=lambda parts: parts[0])
        ]
        lines.append(f'{owner}: {" ".join(modules)}')
    return '\n'.join(lines)


def show_memory(layouts: dict[str, dict[str, Any]]) -> None:
    table = Table(title='Resident bytes of rank 0', title_justify='left')
    for column in ('what', *layouts):
        table.add_column(column, justify='left' if column == 'what' else 'right')
    rows = {
        'parameter buffers': lambda layout: sum(b['param_bytes'] for b in layout['buffers']),
        'gradient buffers': lambda layout: sum(b['grad_bytes'] for b in layout['buffers']),
        'optimizer (main parameters, state)': lambda layout: layout['optimizer_bytes'],
    }
    for title, count in rows.items():
        table.add_row(title, *(f'{count(layout):,}' for layout in layouts.values()))
    totals = (sum(count(layout) for count in rows.values()) for layout in layouts.values())
    table.add_row('total', *(f'{total:,}' for total in totals), style='bold')
    console.print()
    console.print(table)


def check_classes(layouts: dict[str, dict[str, Any]]) -> bool:
    """Makes sure that the two runs were not the same thing twice."""
    classes = {name: {b['class'] for b in layout['buffers']} for name, layout in layouts.items()}
    is_right = all(name.startswith('megatron.') for name in classes['stock'])
    is_right = is_right and all(name.startswith('megatron_buffer.') for name in classes['ours'])
    for name, found in classes.items():
        console.print(f'buffers, {name}: {", ".join(sorted(found))}')
    if not is_right:
        console.print('[bold red]The runs did not use the buffers they should have.[/]')
    return is_right


if __name__ == '__main__':
    sys.exit(main())

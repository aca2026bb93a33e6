"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from benchmarks.compare import CannotRun, machine

NAMES = (
    *('hooks', 'accumulate', 'copies', 'step', 'step4', 'startup'),
    *('gpu', 'overlap', 'network', 'instructions'),
)


def main() -> int:
    """Runs the benchmarks named, prints a table each, and writes all of it as JSON if asked to."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks', description=__doc__)
    parser.add_argument('names', nargs='+', metavar='NAME', help=f'one of {", ".join(NAMES)}')
    parser.add_argument('--json', metavar='FILE', help='write the results there')
    parser.add_argument('--reps', type=int, default=15, help='turns of each case (default 15)')
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f'no benchmark {unknown[0]!r}; there are {", ".join(NAMES)}')
    if options.reps < 1:
        parser.error('--reps must be at least 1')
    results: dict[str, Any] = {}
    for name in options.names:
        module = importlib.import_module(f'benchmarks.{name}')
        try:
            result = module.run(options.reps)
        except CannotRun as reason:
            sys.stderr.write(f'{name}: {reason}\n')
            return 2
        if reason := result.get('skipped'):
            sys.stdout.write(f'{name}: skipped, {reason}\n')
            results[name] = result
            continue
        results[name] = {**result, 'machine': machine()}
        getattr(module, 'show', _show)(name, results[name])
    if options.json:
        whole = results[options.names[0]] if len(options.names) == 1 else results
        with open(options.json, 'w') as file:
            json.dump(whole, file, indent=2)
            file.write('\n')
    return 0


def _show(name: str, result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f'{name}: ours / stock (headline: {result["ratio"]:.3f})', title_justify='left'
    )
    for title in ('case', 'size', 'ratio', '95 % interval', 'verdict', 'ours', 'stock'):
        table.add_column(title, justify='left' if title in ('case', 'verdict') else 'right')
    for case in result['cases']:
        low, high = case['interval95']
        table.add_row(
            case['what'],
            str(case.get('params', case.get('size', ''))),
            f'{case["ratio"]:.3f}',
            f'{low:.3f} to {high:.3f}',
            case['verdict'],
            f'{1e3 * case["ours_s"]:.3f} ms',
            f'{1e3 * case["stock_s"]:.3f} ms',
        )
    console = Console(file=sys.stdout, width=130)
    console.print(table)
    for memory in result.get('memory', ()):
        console.print(
            f'peak memory, {memory["what"]}: tensors {memory["peak_tensor_bytes"] / 2**20:.3f} MiB, '
            f'process {memory["peak_growth_bytes"] / 2**20:.1f} MiB'
        )
    console.print(f'{result["headline"]}; one figure alone says little: compare ratios of one run.')


if __name__ == '__main__':
    sys.exit(main())

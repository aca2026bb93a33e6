"""The subcommand ``trace``: merges and summarises what ``--custom-buffer-trace`` has written.

Imports neither torch nor megatron. Upstream has no counterpart.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from megatron_buffer.observe.trace_file import read_traces, write_merged
from megatron_buffer.observe.trace_summary import summarize
from megatron_buffer.printing import print_json

if TYPE_CHECKING:
    from rich.console import Console


_MAX_GROUPS = 20
_MAX_RANKS = 16
_MAX_VIOLATIONS = 50


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``trace``."""
    parser.add_argument('folder', metavar='DIR', help='the DIR of --custom-buffer-trace')
    parser.add_argument(
        '-o',
        '--output',
        metavar='FILE',
        help='also write the merged trace of all ranks, on one clock, for ui.perfetto.dev or '
        'chrome://tracing (compressed if the name ends in .gz)',
    )


def trace(options: argparse.Namespace, console: Console) -> int:
    """Prints the summary; returns 1 if the ledger is violated, else 0.

    Raises:
        ConfigError: If there are no traces, or they cannot be read.
    """
    traces = read_traces(options.folder)
    summary = summarize(traces)
    if options.output is not None:
        write_merged(options.output, traces)
    if options.json:
        print_json(summary)
    else:
        _render(summary, options.output, console)
    return 0 if summary['ok'] else 1


def _render(summary: dict[str, Any], output: str | None, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    first, last = summary['counted_steps']
    counted = f'steps {first} to {last}' if first != last else f'step {first}'
    clock = 'the GPU' if summary['clock'] == 'cuda' else 'the host'
    say(
        f'{summary["ranks"]} ranks, {summary["steps"]} iterations; times of {clock}, means over {counted} '
        f'and all ranks; clocks of hosts agree within {_ms(summary["clock_uncertainty_s"])} ms'
    )
    exposed = summary['exposed']
    per_iteration = summary['iteration_s']
    share = sum(exposed.values()) / per_iteration if per_iteration else None
    say(
        f'an iteration takes {_ms(per_iteration)} ms; compute waits {_ms(exposed["reduce"])} ms of it for '
        f'gradients and {_ms(exposed["gather"])} ms for parameters'
        + ('' if share is None else f' ({share:.1%})')
    )
    _render_groups(summary['groups'], console)
    _render_ranks(summary, console)
    if output is not None:
        say(f'merged trace: {output} (open it in https://ui.perfetto.dev)')
    violations = summary['violations']
    if not violations:
        say('ledger: every bucket group was reduced once per window and gathered once per step')
    for text in violations[:_MAX_VIOLATIONS]:
        say(f'ledger violated: {text}')
    if len(violations) > _MAX_VIOLATIONS:
        say(f'... and {len(violations) - _MAX_VIOLATIONS} more (--json has all)')


def _render_groups(groups: list[dict[str, Any]], console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column('bucket group', no_wrap=True)
    table.add_column('', no_wrap=True)
    for name in ('elements', 'wait, ms', 'worst, ms (rank, step)', 'ranks apart, ms (last)'):
        table.add_column(name, justify='right', no_wrap=True)
    table.add_column('last gradient / first use', overflow='fold', min_width=24)
    for row in groups[:_MAX_GROUPS]:
        for phase in ('reduce', 'gather'):
            of_phase = row[phase]
            if of_phase['last_rank'] is None:
                continue
            worst_at = f'({of_phase["worst_rank"]}, {of_phase["worst_step"]})'
            table.add_row(
                Text(row['name']),
                phase,
                f'{row["elems"]:,}',
                _ms(of_phase['wait_s']),
                f'{_ms(of_phase["worst_s"])} {worst_at}' if of_phase['worst_s'] else '-',
                f'{_ms(of_phase["ranks_apart_s"])} ({of_phase["last_rank"]})',
                Text(of_phase['param'] or '-'),
            )
    console.print(table)
    if len(groups) > _MAX_GROUPS:
        console.print(
            f'and {len(groups) - _MAX_GROUPS} groups that were waited for less (--json has all)',
            highlight=False,
        )


def _render_ranks(summary: dict[str, Any], console: Console) -> None:
    rows = sorted(summary['by_rank'], key=lambda rank: -(rank['compute_s'] or 0.0))
    if summary['imbalance_s'] is None or len(rows) == 1:
        return
    shown = ', '.join(f'{row["rank"]}: {_ms(row["compute_s"])}' for row in rows[:_MAX_RANKS])
    more = f' and {len(rows) - _MAX_RANKS} more' if len(rows) > _MAX_RANKS else ''
    console.print(
        f'compute per iteration without waits, by rank, in ms: {shown}{more}; they differ by up to '
        f'{_ms(summary["imbalance_s"])} ms, rank {summary["slowest_rank"]} is the slowest',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _ms(seconds: float | None) -> str:
    return '-' if seconds is None else f'{seconds * 1e3:.3g}'

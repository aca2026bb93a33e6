"""The tables of a report, as text, for the HTML page and the Markdown one alike. Upstream has no counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_buffer.ablation.intervals import Interval
from megatron_buffer.ablation.judge import shown
from megatron_buffer.ablation.plan import as_yaml
from megatron_buffer.ablation.report import ArmReport, Report

_KINDS = ('reduce_scatter', 'all_reduce', 'all_gather', 'all_to_all')


class Table(NamedTuple):
    """A table.

    Attributes:
        key: For the page's anchors.
        title: Above it.
        text: A sentence about how to read it; may be ''.
        columns: Their heads.
        rows: Their cells.
        numbers: Which columns are set to the right.
    """

    key: str
    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()


def tables(report: Report) -> list[Table]:
    """Every table that has rows."""
    made = (
        _summary(report),
        _expected(report),
        _changes(report),
        _traffic(report),
        _layout(report),
        _failed(report),
        _provenance(report),
    )
    return [table for table in made if table.rows]


def headline(report: Report) -> str:
    """What came of it, in a sentence."""
    verdicts = [verdict.outcome for arm in report.arms for verdict in arm.verdicts]
    ended = sum(len(arm.rows) for arm in report.arms)
    text = f'{ended} of {len(report.sweep["runs"])} runs ended well.'
    if verdicts:
        counts = ', '.join(
            f'{verdicts.count(outcome)} {outcome}'
            for outcome in ('confirmed', 'not confirmed', 'undecided')
            if outcome in verdicts
        )
        text += f' Of {len(verdicts)} expectations: {counts}.'
    return text


def workload_text(report: Report) -> str:
    """What every run did."""
    work, sweep = report.sweep['workload'], report.sweep
    script = 'the small GPT that comes with the package' if work['is_tiny'] else work['script']
    seeds = ', '.join(map(str, sweep['seeds']))
    nodes = f' on {work["nodes"]} nodes' if work['nodes'] > 1 else ''
    return (
        f'{script}, {work["ranks"]} ranks{nodes} ({work["device"]}), {work["steps"]} steps of which the first '
        f'{work["warmup_steps"]} are not timed; seeds {seeds}; interleaved repeats: {sweep["repeats"]}.'
    )


def _summary(report: Report) -> Table:
    rows: list[list[str]] = []
    for arm in report.arms:
        found = arm.comparison
        exposed = None if found is None else found.exposed
        rows.append(
            [
                arm.name,
                _loss(arm),
                _ms(arm.time_s),
                _ratio(None if found is None else found.time),
                _ms(arm.waiting_s),
                '' if exposed is None else shown(exposed, 1e3, sign='+'),
                mebibytes(arm.memory_bytes),
                f'{len(arm.rows)}' + (f', {len(arm.failed)} failed' if arm.failed else ''),
            ]
        )
    return Table(
        'summary',
        'Arms',
        'Times are medians over steps, then over runs. Ratio and difference are those of pairs of runs of one '
        'round, with their 95 % interval; an interval that holds 1 (or 0) is no difference. Waiting is time in '
        'which the compute of the slowest rank waited for collectives of the buffer.',
        (
            *('arm', 'loss', 'step, ms', 'ratio of step times', 'waiting, ms', 'difference, ms'),
            *('peak, MiB', 'runs'),
        ),
        rows,
        (2, 3, 4, 5, 6),
    )


def _loss(arm: ArmReport) -> str:
    if arm.comparison is None:
        return f'{arm.loss[-1]:.6g} at the end' if arm.loss and arm.loss[-1] is not None else ''
    loss = arm.comparison.loss
    if loss is None or not loss.is_known:
        return 'not compared'
    if loss.is_bit_equal:
        return 'bit-equal'
    return f'differs by {loss.largest:.2g}' if loss.largest else 'equal; grad norms differ'


def _expected(report: Report) -> Table:
    rows = [
        [arm.name, verdict.text, verdict.outcome, verdict.why]
        for arm in report.arms
        for verdict in arm.verdicts
    ]
    text = 'What the sweep file expected, and whether it came true.'
    return Table('expected', 'Expected', text, ('arm', 'expected', 'outcome', 'why'), rows)


def _changes(report: Report) -> Table:
    base = report.sweep['base']
    rows: list[list[str]] = []
    for arm in report.arms:
        is_stock = report.sweep['arms'][arm.name]['config_hash'] is None
        if is_stock:
            rows.append([arm.name, 'buffer', '', 'stock Megatron-Core'])
        for path, (old, new) in arm.changes.items():
            if (
                isinstance(old, dict)
                and isinstance(new, dict)
                and old.get('name') == new.get('name')
            ):
                for key in new:
                    if old.get(key) != new[key]:
                        rows.append(
                            [arm.name, f'{path}.{key}', as_yaml(old.get(key)), as_yaml(new[key])]
                        )
            else:
                rows.append([arm.name, path, as_yaml(old), as_yaml(new)])
        if not is_stock and not arm.changes:
            rows.append([arm.name, 'nothing', '', f'{base}, as it is'])
    text = f'What each arm has unlike {base} and the workload.'
    return Table('changes', 'What was changed', text, ('arm', 'what', f'in {base}', 'here'), rows)


def _traffic(report: Report) -> Table:
    kinds = [kind for kind in _KINDS if any(kind in arm.collectives for arm in report.arms)]
    rows: list[list[str]] = []
    for arm in report.arms:
        if arm.rows:
            cells = [arm.collectives.get(kind, (0, 0)) for kind in kinds]
            total = (sum(count for count, _ in cells), sum(size for _, size in cells))
            rows.append([arm.name, *(_traffic_cell(*cell) for cell in (*cells, total))])
    columns = ('arm', *(kind.replace('_', '-') for kind in kinds), 'together')
    text = "The buffer's collectives per step: how many, and bytes that a rank sends, by the ring formula."
    return Table('collectives', 'Collectives', text, columns, rows, range(1, len(columns)))


def _traffic_cell(count: float, size: float) -> str:
    return f'{count:,.0f} × {size / count:,.0f} = {size:,.0f}' if count else '0'


def _layout(report: Report) -> Table:
    rows = [
        [
            arm.name,
            *(
                f'{arm.layout.get(key, 0):,}'
                for key in ('elems', 'padding_elems', 'buckets', 'bucket_groups')
            ),
        ]
        for arm in report.arms
        if arm.rows
    ]
    columns = ('arm', 'elements', 'of these padding', 'buckets', 'bucket groups')
    return Table('layout', 'Layout', 'Of the fullest rank.', columns, rows, range(1, 5))


def _failed(report: Report) -> Table:
    rows = [
        [
            row['run'],
            row['error']['class'],
            row['error']['message'],
            str(row['error']['exit_code']),
            '\n'.join(row['error']['log_tail'][-12:]),
        ]
        for arm in report.arms
        for row in arm.failed
    ]
    columns = ('run', 'error', 'message', 'exit code', 'end of the log')
    return Table('failed', 'Failed runs', '', columns, rows)


def _provenance(report: Report) -> Table:
    good = [row for row in report.rows if row['status'] == 'ok']
    rows: list[list[str]] = [
        ['sweep', str(report.sweep['source'])],
        ['base config', report.sweep['base']],
    ]
    if good:
        rows += [[key, str(value)] for key, value in good[0]['versions'].items() if value]
        rows += [
            ['device', str(good[0]['device'])],
            ['first run', report.rows[0]['started']],
            ['last run', report.rows[-1]['started']],
        ]
    rows += [['environment', f'{key}={value}'] for key, value in report.sweep['env'].items()]
    rows.append(['launcher', ' '.join(report.sweep['launcher'])])
    rows += [
        [f'config hash, {name}', arm['config_hash'] or 'stock']
        for name, arm in report.sweep['arms'].items()
    ]
    return Table('provenance', 'Where this comes from', '', ('what', 'value'), rows)


def _ms(seconds: float | None) -> str:
    return '' if seconds is None else f'{1e3 * seconds:,.2f}'


def _ratio(ratio: Interval | None) -> str:
    return '' if ratio is None else shown(ratio)


def mebibytes(size: float | None) -> str:
    """Bytes as MiB."""
    return '' if size is None else f'{size / 2**20:,.1f}'

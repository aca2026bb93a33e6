"""What became of upstream's tests: outcomes of ranks merged, stock and ours compared, and the table.

Pure: reads what :mod:`megatron_buffer.testing.upstream_plugin` wrote. Upstream has no counterpart.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

OUTCOMES = ('passed', 'skipped', 'failed', 'error', 'crashed', 'timeout', 'not run')
"""From good to bad; the outcome of a test is the worst of its ranks'."""

STOCK, OURS = 'stock', 'ours'
ARMS = (STOCK, OURS)


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    outcome: str
    """One of :data:`OUTCOMES`."""
    message: str = ''
    """First line of the error, or the reason of a skip."""
    seconds: float = 0.0


@dataclass(kw_only=True)
class FileResult:
    """One file in one arm."""

    tests: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    """By pytest's node id; a file that cannot be collected counts as one test, with its path as id."""
    seconds: float = 0.0
    starts: int = 0
    """How often the ranks were started: once, and once more after each time they had to be stopped."""

    def count(self, *outcomes: str) -> int:
        """How many tests ended in one of these ways."""
        return sum(test.outcome in outcomes for test in self.tests.values())

    def as_json(self) -> dict[str, Any]:
        """For ``--json`` and for resuming."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileResult:
        """The reverse of :meth:`as_json`."""
        tests = {nodeid: Outcome(**test) for nodeid, test in data['tests'].items()}
        return cls(tests=tests, seconds=data['seconds'], starts=data['starts'])


@dataclass(kw_only=True)
class RankRecord:
    """What one rank wrote during one start."""

    collected: list[str] | None = None
    """Ids in the order in which they run; None if the rank did not come so far."""
    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    running: str | None = None
    """The test that was started and not finished."""


def read_record(path: Path) -> RankRecord:
    """Reads ``rank<N>.jsonl``; a last line that is cut off is left out."""
    record = RankRecord()
    text = path.read_text(encoding='utf-8') if path.exists() else ''
    for line in text.splitlines(keepends=True):
        if not line.endswith('\n'):
            break
        fields = json.loads(line)
        if 'collected' in fields:
            record.collected = fields['collected']
        elif 'started' in fields:
            record.running = fields['started']
        else:
            nodeid = fields.pop('id')
            record.outcomes[nodeid] = Outcome(**fields)
            record.running = None
    return record


def merge_ranks(records: Sequence[RankRecord], ended: str) -> dict[str, Outcome]:
    """The outcomes of one start: a test passed only if it passed on all ranks.

    Args:
        records: One per rank.
        ended: What to say of a test that was running when the ranks ended: ``crashed`` or ``timeout``.

    Returns:
        The tests that were started on any rank, and those that could not be collected.
    """
    merged: dict[str, Outcome] = {}
    for nodeid in _ids(records):
        of_ranks: list[tuple[int, Outcome]] = []
        for rank, record in enumerate(records):
            outcome = record.outcomes.get(nodeid)
            if outcome is None and record.running == nodeid:
                outcome = Outcome(ended)
            if outcome is None:
                outcome = Outcome('not run')
            of_ranks.append((rank, outcome))
        rank, worst = max(of_ranks, key=lambda pair: OUTCOMES.index(pair[1].outcome))
        failed = [(r, o) for r, o in of_ranks if o.outcome in ('failed', 'error')]
        if failed:  # the others' hanging or crashing follows from it
            rank, worst = failed[0]
        elif worst.outcome == 'not run':
            worst = Outcome(ended)  # running elsewhere, and this rank never came to it
        message = worst.message or {
            'crashed': 'a rank ended in the middle of it',
            'timeout': f'rank {rank} did not finish it in time',
        }.get(worst.outcome, '')
        alike = {o.outcome for _, o in of_ranks} == {worst.outcome}
        if len(records) > 1 and worst.outcome in ('failed', 'error') and not alike:
            message = f'rank {rank}: {message}'
        merged[nodeid] = Outcome(worst.outcome, message, max(o.seconds for _, o in of_ranks))
    return merged


def _ids(records: Iterable[RankRecord]) -> list[str]:
    ids: dict[str, None] = {}
    for record in records:
        ids.update(dict.fromkeys(record.outcomes))
        if record.running is not None:
            ids[record.running] = None
    return list(ids)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One test that ended differently."""

    nodeid: str
    stock: Outcome
    ours: Outcome

    @property
    def is_regression(self) -> bool:
        """Passes on stock, and neither passes nor is skipped on ours."""
        return self.stock.outcome == 'passed' and self.ours.outcome not in ('passed', 'skipped')


def compare(stock: FileResult, ours: FileResult) -> list[Difference]:
    """Every test whose outcome differs between the arms, in the order of the file."""
    missing = Outcome('not run')
    pairs = [
        (nodeid, stock.tests.get(nodeid, missing), ours.tests.get(nodeid, missing))
        for nodeid in dict.fromkeys([*stock.tests, *ours.tests])
    ]
    return [
        Difference(nodeid=nodeid, stock=a, ours=b)
        for nodeid, a, b in pairs
        if a.outcome != b.outcome
    ]


def show(console: Console, results: Mapping[str, Mapping[str, FileResult]]) -> None:
    """Prints the table, and below it every test whose outcome differs.

    Args:
        console: Where to.
        results: By path of the file, then by arm.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="upstream's own unit tests: stock Megatron-Core | with our buffer")
    table.add_column('file', overflow='fold')
    for column in ('passed', 'failed', 'skipped', 'errors, crashes, timeouts', 'seconds'):
        table.add_column(column, justify='right')
    total = {arm: Counter[str]() for arm in ARMS}
    for file, arms in results.items():
        cells = {arm: _cells(arms[arm]) for arm in ARMS}
        for arm in ARMS:
            total[arm].update(cells[arm])
        table.add_row(escape(file.removeprefix('tests/unit_tests/')), *_columns(cells))
    table.add_section()
    table.add_row('total', *_columns(total))
    console.print(table)
    differences = [d for arms in results.values() for d in compare(arms[STOCK], arms[OURS])]
    if not differences:
        console.print('No test ends differently.')
    for difference in differences:
        color = 'red' if difference.is_regression else 'yellow'
        console.print(f'[{color}]{escape(difference.nodeid)}[/]', soft_wrap=True)
        for arm, test in ((STOCK, difference.stock), (OURS, difference.ours)):
            text = f'    {arm}: {test.outcome}' + (f': {test.message}' if test.message else '')
            console.print(escape(text), soft_wrap=True)


def _cells(result: FileResult) -> dict[str, int]:
    return {
        'passed': result.count('passed'),
        'failed': result.count('failed'),
        'skipped': result.count('skipped'),
        'broken': result.count('error', 'crashed', 'timeout', 'not run'),
        'seconds': round(result.seconds),
    }


def _columns(cells: Mapping[str, Mapping[str, int]]) -> list[str]:
    columns: list[str] = []
    for key in ('passed', 'failed', 'skipped', 'broken', 'seconds'):
        stock, ours = cells[STOCK][key], cells[OURS][key]
        text = f'{stock} | {ours}'
        columns.append(text if stock == ours or key == 'seconds' else f'[bold]{text}[/]')
    return columns

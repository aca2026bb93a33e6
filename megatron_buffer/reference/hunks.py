"""Rows of a comparison gathered into hunks, one per difference; long stretches of them folded. Pure.

Upstream has no counterpart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from megatron_buffer.reference.align import Row
from megatron_buffer.reference.mapping import Difference, Entry
from megatron_buffer.reference.upstream_source import Line

_MAX_QUIET_LINES = 12
_HEAD_LINES, _TAIL_LINES = 5, 3
_QUIET = ('runs', 'doc')


@dataclass(kw_only=True)
class Hunk:
    """Consecutive rows of one difference, or of none.

    Attributes:
        label: Index of the difference.
        where: Which function of ours begins, for the head of one.
        rows: The rows.
        is_piece: True for the head of another function of ours.
    """

    label: int | None = None
    where: str = ''
    rows: list[Row] = field(default_factory=list[Row])
    is_piece: bool = False

    @property
    def is_quiet(self) -> bool:
        """Whether nothing in it is ours but a call: such a stretch may be folded."""
        return all(row.change in _QUIET for row in self.rows)


def hunks_of(rows: Sequence[Row]) -> list[Hunk]:
    """Gathers rows; unlabelled ones that only run, or are docstrings, are kept apart from others."""
    hunks: list[Hunk] = []
    for row in rows:
        if row.change == 'piece':
            hunks.append(Hunk(where=row.where, is_piece=True))
            continue
        last = hunks[-1] if hunks and not hunks[-1].is_piece else None
        quiet = row.change in _QUIET
        if last is None or (last.label, last.is_quiet) != (row.label, quiet):
            last = Hunk(label=row.label)
            hunks.append(last)
        last.rows.append(row)
    return hunks


def title(hunk: Hunk, entry: Entry, *, in_short: bool = False) -> str:
    """What stands above a hunk; '' above one that needs no words.

    Args:
        hunk: The hunk.
        entry: Its symbol.
        in_short: Leave out the reason, which was given before.
    """
    if hunk.is_piece:
        return f'also ours: {hunk.where}'
    if hunk.label is None:
        return ''
    difference = entry.differences[hunk.label]
    why = '' if in_short else f': {difference.why}'
    return f'{hunk.label + 1} {difference.tag}{why}'


def kind_of(hunk: Hunk, differences: Sequence[Difference]) -> str:
    """The kind of the hunk's difference, or ''."""
    return '' if hunk.label is None else differences[hunk.label].kind


def is_long(hunk: Hunk) -> bool:
    """Whether the hunk is quiet and worth folding."""
    return hunk.is_quiet and sum(_height(row) for row in hunk.rows) > _MAX_QUIET_LINES


def _height(row: Row) -> int:
    return max(len(row.left), len(row.right))


type Pair = tuple[str, Line | None, Line | None]
"""Change, line on the left, line on the right."""


def pairs_of(hunk: Hunk) -> list[Pair]:
    """The hunk line by line; comments above a statement stand above it on both sides."""
    pairs: list[Pair] = []
    for row in hunk.rows:
        left: list[Line | None] = list(row.left)
        right: list[Line | None] = list(row.right)
        if row.change == 'moved':
            right.insert(0, (0, f'# in {row.where}'))
        missing = _fillers(left) - _fillers(right)
        if left and right:
            (right if missing > 0 else left)[:0] = [None] * abs(missing)
        pairs += [(row.change, a, b) for a, b in zip_longest(left, right)]
    return pairs


def _fillers(lines: Sequence[Line | None]) -> int:
    """How many empty lines and comments a statement begins with."""
    texts = [line[1].strip() if line else '' for line in lines]
    return next((i for i, text in enumerate(texts) if text and not text.startswith('#')), 0)


def fold(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Splits a long hunk into what is shown above, what is folded away, and what is shown below."""
    return (
        list(pairs[:_HEAD_LINES]),
        list(pairs[_HEAD_LINES:-_TAIL_LINES]),
        list(pairs[-_TAIL_LINES:]),
    )

"""Two sources side by side, statement by statement: what has a counterpart, moved, is gone, is new.

A body that is written anew seldom shares a line with the one it stands for, so lines are no use: both
are cut into statements, a compound one into its head and what is in it, and statements are matched by the
names that they use. Pure. Upstream has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_buffer.reference.mapping import Difference, Entry
from megatron_buffer.reference.statements import Chunk, chunks_of, likeness
from megatron_buffer.reference.upstream_source import Line, Piece

type Change = Literal['piece', 'doc', 'same', 'like', 'moved', 'gone', 'new', 'runs']

CHANGES: dict[str, tuple[str, str]] = {
    'piece': (' ', 'another function of ours'),
    'doc': (' ', 'docstring'),
    'same': ('=', 'the same statement on both sides'),
    'like': ('~', 'a counterpart'),
    'moved': ('>', 'moved into another function of ours'),
    'gone': ('-', 'only upstream'),
    'new': ('+', 'only ours'),
    'runs': ('|', "upstream's own code, which ours calls"),
}
"""Sign and meaning of each change."""

_ALIKE = 0.5
_ALIKE_ELSEWHERE = 0.6


@dataclass(frozen=True, kw_only=True)
class Row:
    """Statements that stand side by side.

    Attributes:
        change: What became of them.
        left: Upstream's lines.
        right: Our lines.
        label: Index of the difference that they belong to, in the entry's.
        where: For ``moved`` and ``piece``, where ours is.
    """

    change: Change
    left: tuple[Line, ...] = ()
    right: tuple[Line, ...] = ()
    label: int | None = None
    where: str = ''


def align(entry: Entry, upstream: Piece, ours: Sequence[Piece]) -> list[Row]:
    """The rows of a comparison, in the order of both sources.

    Args:
        entry: Its relation decides how, its differences label the rows.
        upstream: Upstream's source.
        ours: Ours, the main one first; may be empty.
    """
    left = chunks_of(upstream)
    if not ours:
        return list(_labelled(entry.differences, 'runs', left))
    main, others = chunks_of(ours[0]), [(piece, chunks_of(piece)) for piece in ours[1:]]
    anchor = _anchor(entry, main)
    if anchor is not None:
        rows = _around(entry, left, main, anchor)
    else:
        rows = _matched(entry, left, main, others)
    for piece, chunks in others:
        rows.append(Row(change='piece', where=f'{short_name(piece.symbol)} ({piece.where})'))
        rows += _labelled(entry.differences, 'new', chunks)
    return rows


def _anchor(entry: Entry, main: Sequence[Chunk]) -> int | None:
    """The statement of ours that runs upstream's; None where the body is written anew."""
    if entry.relation not in ('extends', 'wraps', 'calls') or entry.symbol.endswith('.<class>'):
        return None
    runs: Callable[[str], bool] = {
        'extends': lambda call: call == 'super',
        'wraps': lambda call: call in ('original', 'state_dict', 'load_state_dict'),
        'calls': lambda call: call.rpartition('.')[2] in (entry.name.rpartition('.')[2], 'reduce'),
    }[entry.relation]
    named = [i for i, chunk in enumerate(main) if any(runs(call) for call in chunk.calls)]
    if named:
        return named[0]
    name = entry.name.rpartition('.')[2]
    return next((i for i, chunk in enumerate(main) if name in chunk.tokens), None)


def _around(entry: Entry, left: Sequence[Chunk], main: Sequence[Chunk], anchor: int) -> list[Row]:
    """Ours, with all of upstream's body where ours calls it."""
    heads = next((i for i, c in enumerate(left) if c.node not in ('FunctionDef', 'doc')), len(left))
    own = list(_labelled(entry.differences, 'new', main))
    rows: list[Row] = []
    taken = 0
    for index, row in enumerate(own):
        chunk = main[index]
        if index == anchor:
            rest = list(_labelled(entry.differences, 'runs', left, skip=heads))
            rows += [Row(change=c, left=x.lines) for c, x in _rest_of_head(left[taken:heads])]
            first = rest[0] if rest else Row(change='runs')
            rows.append(
                Row(change='runs', left=first.left, right=row.right, label=row.label or first.label)
            )
            rows += rest[1:]
        elif (
            taken < heads
            and chunk.node == left[taken].node
            and chunk.node in ('FunctionDef', 'doc')
        ):
            change: Change = 'doc' if chunk.node == 'doc' else _equality(left[taken], chunk)
            rows.append(Row(change=change, left=left[taken].lines, right=row.right))
            taken += 1
        elif chunk.node == 'doc':
            rows.append(Row(change='doc', right=row.right))
        else:
            rows.append(row)
    return rows


def _rest_of_head(chunks: Sequence[Chunk]) -> Iterator[tuple[Change, Chunk]]:
    for chunk in chunks:
        yield ('doc' if chunk.node == 'doc' else 'runs'), chunk


def _equality(a: Chunk, b: Chunk) -> Change:
    return 'same' if a.normal == b.normal and a.node == b.node else 'like'


def _matched(
    entry: Entry,
    left: Sequence[Chunk],
    main: Sequence[Chunk],
    others: Sequence[tuple[Piece, Sequence[Chunk]]],
) -> list[Row]:
    """Both bodies, matched statement by statement."""
    pairs = dict(match(left, main))
    labels_left = labels_of(entry.differences, left, 'upstream')
    labels_right = labels_of(entry.differences, main, 'ours')
    rows: list[Row] = []
    gone: list[Row] = []
    cursor = 0

    def close_gap(until: int) -> None:
        """Puts what only upstream has before what only ours has, difference by difference."""
        new = [
            Row(
                change='doc' if main[i].node == 'doc' else 'new',
                right=main[i].lines,
                label=labels_right[i],
            )
            for i in range(cursor, until)
        ]
        for index, row in enumerate(gone):
            rows.append(row)
            following = {later.label for later in gone[index + 1 :]}
            while new and new[0].label is not None and new[0].label not in following:
                if all(earlier.label != new[0].label for earlier in gone[: index + 1]):
                    break
                rows.append(new.pop(0))
        rows.extend(new)
        gone.clear()

    for index, chunk in enumerate(left):
        if index not in pairs:
            gone.append(_lonely(chunk, labels_left[index], others))
            continue
        partner = pairs[index]
        close_gap(partner)
        cursor = partner + 1
        other = main[partner]
        same = _equality(chunk, other)
        label = labels_left[index] if labels_right[partner] is None else labels_right[partner]
        rows.append(
            Row(
                change='doc' if chunk.node == 'doc' else same,
                left=chunk.lines,
                right=other.lines,
                label=None if same == 'same' else label,
            )
        )
    close_gap(len(main))
    return rows


def _lonely(
    chunk: Chunk, label: int | None, others: Sequence[tuple[Piece, Sequence[Chunk]]]
) -> Row:
    """A statement of upstream's that has no counterpart in our main function."""
    if chunk.node == 'doc':
        return Row(change='doc', left=chunk.lines)
    found = _elsewhere(chunk, others)
    if found is None:
        return Row(change='gone', left=chunk.lines, label=label)
    return Row(change='moved', left=chunk.lines, right=found[1].lines, label=label, where=found[0])


def _elsewhere(
    chunk: Chunk, others: Sequence[tuple[Piece, Sequence[Chunk]]]
) -> tuple[str, Chunk] | None:
    """The statement of another function of ours that is most like this one."""
    best, place = _ALIKE_ELSEWHERE, None
    if chunk.node == 'For' or len(chunk.tokens) < 3:  # loops over buckets are everywhere
        return None
    for piece, chunks in others:
        for other in chunks:
            if other.node in ('doc', 'FunctionDef', 'ClassDef', 'For') or len(other.tokens) < 3:
                continue
            value = likeness(chunk, other)
            if value > best:
                best, place = value, (f'{short_name(piece.symbol)}', other)
    return place


def short_name(symbol: str) -> str:
    """``module:name`` of ours without the package."""
    return symbol.removeprefix('megatron_buffer.')


def match(left: Sequence[Chunk], right: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Pairs of statements in the order of both sides whose likeness adds up to the most."""
    best = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]
    value = [[likeness(a, b) for b in right] for a in left]
    for i in reversed(range(len(left))):
        for j in reversed(range(len(right))):
            best[i][j] = max(best[i + 1][j], best[i][j + 1])
            if value[i][j] > _ALIKE:
                best[i][j] = max(best[i][j], best[i + 1][j + 1] + value[i][j])
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        if value[i][j] > _ALIKE and best[i][j] == best[i + 1][j + 1] + value[i][j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def labels_of(
    differences: Sequence[Difference], chunks: Sequence[Chunk], side: Literal['upstream', 'ours']
) -> list[int | None]:
    """The difference that each statement belongs to: by its own names, else its block's, else by what is
    in it."""
    labels: list[int | None] = []
    for chunk in chunks:
        hits = [
            sum(marker in chunk.tokens for marker in getattr(difference, side))
            for difference in differences
        ]
        is_head = chunk.parent is None and chunk.node in ('FunctionDef', 'ClassDef')
        if is_head or chunk.node == 'doc':
            labels.append(None)
        elif any(hits):
            labels.append(hits.index(max(hits)))
        else:
            labels.append(None if chunk.parent is None else labels[chunk.parent])
    for index in reversed(range(len(chunks))):
        parent = chunks[index].parent
        if parent is not None and chunks[parent].parent is not None and labels[parent] is None:
            labels[parent] = labels[index]
    return labels


def _labelled(
    differences: Sequence[Difference],
    change: Literal['new', 'runs'],
    chunks: Sequence[Chunk],
    skip: int = 0,
) -> Iterator[Row]:
    side: Literal['upstream', 'ours'] = 'ours' if change == 'new' else 'upstream'
    labels = labels_of(differences, chunks, side)
    for chunk, label in list(zip(chunks, labels, strict=True))[skip:]:
        if change == 'new':
            yield Row(
                change='doc' if chunk.node == 'doc' else change, right=chunk.lines, label=label
            )
        else:
            yield Row(
                change='doc' if chunk.node == 'doc' else change, left=chunk.lines, label=label
            )

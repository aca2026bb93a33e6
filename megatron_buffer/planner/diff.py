"""What two configs lay out differently, for the same model and job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_buffer.planner.as_json import SCHEMA_VERSION
from megatron_buffer.planner.fold import Item, Repeat, fold, lines, shorten
from megatron_buffer.planner.render import common_prefix, pattern_of, ranges, repeat_text, squeeze
from megatron_buffer.planner.view import LayoutView

_MAX_LINES = 34
_MAX_CUTS = 8
_NAME_WIDTH = 42


class Place(NamedTuple):
    """Where a parameter lies: label of its buffer, bucket, first element."""

    buffer: str
    bucket: int
    start_elems: int


class Move(NamedTuple):
    """A parameter that lies elsewhere; ``change`` is what differs first: buffer, bucket or offset."""

    name: str
    change: str
    a: Place
    b: Place


class Cut(NamedTuple):
    """A border between two buckets: the parameters on its two sides."""

    buffer: str
    before: str
    behind: str


@dataclasses.dataclass(frozen=True)
class Diff:
    """The comparison of two layouts; everything is ordered as in ``a``."""

    a: LayoutView
    b: LayoutView
    moves: tuple[Move, ...]
    cuts_only_a: tuple[Cut, ...]
    cuts_only_b: tuple[Cut, ...]
    groups_differ: bool
    """Other sets of parameters are communicated together."""
    dispatch_differs: bool
    """The groups are the same and are reduced in another order."""
    gather_differs: bool
    """The groups are the same and are gathered in another order."""

    @cached_property
    def same(self) -> bool:
        """True if nothing moved: no parameter, no cut, no padding, no group, no order."""
        return not (
            self.moves
            or self.cuts_only_a
            or self.cuts_only_b
            or self.groups_differ
            or self.dispatch_differs
            or self.gather_differs
            or _buffer_rows(self.a) != _buffer_rows(self.b)
        )


def compare(a: LayoutView, b: LayoutView) -> Diff:
    """Compares two layouts of one model chunk."""
    places_a, places_b = _places(a), _places(b)
    moves = [
        Move(name, _change(place, places_b[name]), place, places_b[name])
        for name, place in places_a.items()
        if place != places_b[name]
    ]
    cuts_a, cuts_b = _cuts(a), _cuts(b)
    groups_a, groups_b = _groups(a), _groups(b)
    same_groups = set(groups_a) == set(groups_b)
    return Diff(
        a=a,
        b=b,
        moves=tuple(moves),
        cuts_only_a=tuple(cut for cut in cuts_a if cut not in cuts_b),
        cuts_only_b=tuple(cut for cut in cuts_b if cut not in cuts_a),
        groups_differ=not same_groups,
        dispatch_differs=same_groups
        and _ordered(groups_a, a.dispatch_order) != _ordered(groups_b, b.dispatch_order),
        gather_differs=same_groups
        and any(
            _ordered(groups_a, a.gather_order(kind)) != _ordered(groups_b, b.gather_order(kind))
            for kind in (False, True)
        ),
    )


def diff_as_dict(diff: Diff) -> dict[str, Any]:
    """The comparison as JSON.

    Returns:
        ``schema_version``; ``same``; ``a`` and ``b`` (``config``, ``buffers``, ``num_groups``); ``moved``
        (per parameter ``change``: buffer, bucket or offset, and both places); ``cuts`` (``only_a``,
        ``only_b``: the parameters around each); ``groups_differ``, ``dispatch_order_differs`` and
        ``gather_order_differs``.
    """
    return {
        'schema_version': SCHEMA_VERSION,
        'same': diff.same,
        'a': _side(diff.a),
        'b': _side(diff.b),
        'moved': [
            {'name': m.name, 'change': m.change, 'a': m.a._asdict(), 'b': m.b._asdict()}
            for m in diff.moves
        ],
        'cuts': {
            'only_a': [cut._asdict() for cut in diff.cuts_only_a],
            'only_b': [cut._asdict() for cut in diff.cuts_only_b],
        },
        'groups_differ': diff.groups_differ,
        'dispatch_order_differs': diff.dispatch_differs,
        'gather_order_differs': diff.gather_differs,
    }


def render_diff(diff: Diff, console: Console) -> None:
    """Prints the comparison, folded to a screen."""
    a, b = diff.a, diff.b
    prefix = common_prefix(list(_places(a)))
    for side, view in (('a', a), ('b', b)):
        config = view.runtime.config
        console.print(
            Text.assemble(
                (side, 'bold'), f': {config.source} ({view.runtime.hash}): {config.short_str()}'
            )
        )
        for note in view.notes:
            console.print(Text(f'note: {note}', 'yellow'))
    if diff.same:
        console.print(f'the same layout of {a.num_params:,} parameters of {a.model}')
        return
    console.print(_totals(diff))
    if diff.moves:
        console.print()
        console.print(_moves_table(diff, prefix))
    for what, cuts in (('only in a', diff.cuts_only_a), ('only in b', diff.cuts_only_b)):
        if cuts:
            console.print(_cuts_text(what, cuts, prefix))
    if diff.groups_differ:
        console.print(f'groups: other buckets go together ({len(a.groups)}, then {len(b.groups)})')
    for what, differs, order in (
        ('reduce', diff.dispatch_differs, lambda view: view.dispatch_order),
        ('gather', diff.gather_differs, lambda v: v.gather_order(False) + v.gather_order(True)),
    ):
        if differs:
            console.print(f'{what}: {ranges(order(a))} becomes {ranges(order(b))}')


def _places(view: LayoutView) -> dict[str, Place]:
    return {
        buffer.params[slot.param].name: Place(buffer.label, slot.bucket, slot.start_elems)
        for buffer in view.buffers
        for slot in buffer.layout.slots
    }


def _change(a: Place, b: Place) -> str:
    if a.buffer != b.buffer:
        return 'buffer'
    return 'bucket' if a.bucket != b.bucket else 'offset'


def _cuts(view: LayoutView) -> dict[Cut, None]:
    """Ordered, and fast to look up."""
    return {
        Cut(
            buffer.label, buffer.params[before[-1].param].name, buffer.params[behind[0].param].name
        ): None
        for buffer in view.buffers
        for before, behind in zip(buffer.slots_by_bucket, buffer.slots_by_bucket[1:], strict=False)
    }


def _groups(view: LayoutView) -> list[frozenset[str]]:
    """The parameters of each group."""
    return [
        frozenset(
            view.buffers[ref.buffer].params[slot.param].name
            for ref in group.buckets
            for slot in view.buffers[ref.buffer].slots_by_bucket[ref.bucket]
        )
        for group in view.groups
    ]


def _ordered(groups: Sequence[frozenset[str]], order: Sequence[int]) -> list[frozenset[str]]:
    return [groups[index] for index in order]


def _buffer_rows(view: LayoutView) -> dict[str, tuple[int, ...]]:
    """Per buffer: parameters, buckets, elements, padding, shards and all bucket ends."""
    return {
        buffer.label: (
            len(buffer.params),
            len(buffer.layout.buckets),
            buffer.layout.numel_elems,
            buffer.layout.padding_elems,
            buffer.num_shards,
            *(span.end_elems for span in buffer.layout.buckets),
        )
        for buffer in view.buffers
    }


def _side(view: LayoutView) -> dict[str, Any]:
    names = ('num_params', 'num_buckets', 'numel_elems', 'padding_elems', 'num_shards')
    return {
        'config': view.runtime.config.source,
        'hash': view.runtime.hash,
        'short': view.runtime.config.short_str(),
        'buffers': {
            label: dict(zip(names, row, strict=False)) for label, row in _buffer_rows(view).items()
        },
        'num_groups': len(view.groups),
        'numel_elems': view.numel_elems,
        'padding_elems': view.numel_elems - view.numel_params_elems,
    }


def _totals(diff: Diff) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column('buffer (parameters/gradients)')
    for name in ('params', 'buckets', 'elements', 'padding'):
        table.add_column(name, justify='right')
    rows_a, rows_b = _buffer_rows(diff.a), _buffer_rows(diff.b)
    for label in dict.fromkeys([*rows_a, *rows_b]):
        cells = [
            _from_to(rows_a.get(label, (0,) * 4)[i], rows_b.get(label, (0,) * 4)[i])
            for i in range(4)
        ]
        table.add_row(label, *cells)
    if len(table.rows) > 1:
        views = (diff.a, diff.b)
        table.add_row(
            'all',
            _from_to(*(view.num_params for view in views)),
            _from_to(*(sum(len(b.layout.buckets) for b in view.buffers) for view in views)),
            _from_to(*(view.numel_elems for view in views)),
            _from_to(*(view.numel_elems - view.numel_params_elems for view in views)),
        )
    return table


def _from_to(a: int, b: int) -> str:
    return f'{a:,}' if a == b else f'{a:,} -> {b:,}'


def _moves_table(diff: Diff, prefix: str) -> Table:
    """Runs of neighbours that changed alike, in the order of ``a``, repetitions folded."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column('moved', justify='right')
    table.add_column('parameters')
    table.add_column('changed')
    for name in ('bucket', 'start moves by'):
        table.add_column(name, justify='right')
    runs, items = _fold_moves(diff.moves)
    for row in _move_rows(runs, items, prefix):
        table.add_row(*row)
    return table


def _fold_moves(moves: Sequence[Move]) -> tuple[list[list[Move]], list[Item]]:
    """Runs of moves by the same number of elements, or, if that is too much, of the same kind."""

    def kind(move: Move) -> tuple[str, ...]:
        return (move.change, move.a.buffer, move.b.buffer)

    def kind_and_shift(move: Move) -> tuple[str | int, ...]:
        return (*kind(move), move.b.start_elems - move.a.start_elems)

    runs: list[list[Move]] = []
    items: list[Item] = []
    for key in (kind_and_shift, kind):
        runs = [list(run) for _, run in groupby(moves, key=key)]
        ends = [(pattern_of(run[0].name), pattern_of(run[-1].name)) for run in runs]
        items = fold([(*kind(run[0]), len(run), *end) for run, end in zip(runs, ends, strict=True)])
        if lines(items, lambda index: 2) <= _MAX_LINES:
            break
    return runs, shorten(items, _MAX_LINES, lambda index: 2)


def _move_rows(
    runs: Sequence[Sequence[Move]], items: Sequence[Item], prefix: str
) -> Iterator[Sequence[str | Text]]:
    for item in items:
        if isinstance(item, int):
            yield _move_row(runs[item], prefix)
            continue
        start, end = item.start, item.start
        if isinstance(item, Repeat):
            yield from _move_rows(runs, item.items, prefix)
            start, end = start + item.period, start + item.period * item.times
            text = repeat_text(item, [runs[start][0].name, runs[end - 1][-1].name])
        else:
            end, text = item.end, '... (--json has all)'
        count = sum(len(run) for run in runs[start:end])
        shifts = [m.b.start_elems - m.a.start_elems for run in runs[start:end] for m in run]
        yield Text(f'{count:,}', 'dim'), Text(text, 'dim'), '', '', Text(_shift_text(shifts), 'dim')


def _move_row(run: Sequence[Move], prefix: str) -> Sequence[str | Text]:
    names = [squeeze(m.name.removeprefix(prefix), _NAME_WIDTH) for m in (run[0], run[-1])]
    buckets = [
        ranges(list(dict.fromkeys(place.bucket for place in places)), 2)
        for places in ([m.a for m in run], [m.b for m in run])
    ]
    change = run[0].change
    if change == 'buffer':
        change = f'{run[0].a.buffer} -> {run[0].b.buffer}'
    return (
        f'{len(run):,}',
        Text(names[0] if len(run) == 1 else f'{names[0]}\n{names[1]}'),
        change,
        buckets[0] if buckets[0] == buckets[1] else f'{buckets[0]} -> {buckets[1]}',
        _shift_text([m.b.start_elems - m.a.start_elems for m in run]),
    )


def _shift_text(shifts: Sequence[int]) -> str:
    low, high = min(shifts), max(shifts)
    return f'{low:+,}' if low == high else f'{low:+,} .. {high:+,}'


def _cuts_text(what: str, cuts: Sequence[Cut], prefix: str) -> Text:
    text = Text(f'{len(cuts)} cut{"s" * (len(cuts) != 1)} {what}, behind ')
    names = [squeeze(cut.before.removeprefix(prefix), _NAME_WIDTH) for cut in cuts[:_MAX_CUTS]]
    text.append(', '.join(names))
    if len(cuts) > _MAX_CUTS:
        text.append(f', ... ({len(cuts) - _MAX_CUTS:,} more)')
    return text

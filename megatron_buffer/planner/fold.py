"""Folds a long list of rows where it repeats itself, and leaves out its middle where it does not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

Row = TypeVar('Row')

_MAX_PERIOD = 256


class Repeat(NamedTuple):
    """A pattern of rows that comes several times in a row.

    Attributes:
        items: The pattern, folded itself.
        period: Its rows.
        times: How often it comes, this time included.
        start: Index of the first row.
    """

    items: list[Item]
    period: int
    times: int
    start: int


class Skipped(NamedTuple):
    """Rows that are left out: from ``start`` to ``end``, exclusive."""

    start: int
    end: int


Item = int | Repeat | Skipped


def fold(signatures: Sequence[Hashable], start: int = 0) -> list[Item]:
    """Finds the repetitions.

    Args:
        signatures: One per row; rows that show the same have equal ones.
        start: Index of the first of them.

    Returns:
        Rows by index and repetitions, in order, at each place the one that covers most. A repetition is one
        of at least three rows alike, or of a pattern of several rows that comes at least twice more.
    """
    items: list[Item] = []
    position, count = 0, len(signatures)
    while position < count:
        best_period, best_cover = 0, 0
        for period in range(1, min(_MAX_PERIOD, (count - position) // 2) + 1):
            if signatures[position] != signatures[position + period]:
                continue
            end = position + period
            while end < count and signatures[end] == signatures[end - period]:
                end += 1
            times = (end - position) // period
            if times >= 3 and times * period > best_cover:
                best_period, best_cover = period, times * period
        if best_cover:
            pattern = signatures[position : position + best_period]
            inner: list[Item] = [start + position]
            if best_period > 1:
                inner = fold(pattern, start + position)
            times = best_cover // best_period
            items.append(Repeat(inner, best_period, times, start + position))
            position += best_cover
        else:
            items.append(start + position)
            position += 1
    return items


def shorten(items: list[Item], max_lines: int, height: Callable[[int], int]) -> list[Item]:
    """Leaves out the middle of a list that is too long; of long patterns too.

    Args:
        items: What :func:`fold` made.
        max_lines: Lines that there is room for.
        height: Lines of a row, by its index.

    Returns:
        ``items``, or its beginning, a :class:`Skipped` and its end.
    """
    if lines(items, height) <= max_lines:
        return items
    items = [
        (
            item._replace(items=shorten(item.items, max_lines // 2, height))
            if isinstance(item, Repeat)
            else item
        )
        for item in items
    ]
    head: list[Item] = []
    tail: list[Item] = []
    room = max_lines - 1
    while len(head) + len(tail) < len(items):
        at_head = len(head) <= len(tail)
        item = items[len(head)] if at_head else items[-1 - len(tail)]
        room -= lines([item], height)
        if room < 0:
            break
        if at_head:
            head.append(item)
        else:
            tail.insert(0, item)
    if len(head) + len(tail) == len(items):
        return items
    first, behind = items[len(head)], items[len(items) - len(tail) - 1]
    return [*head, Skipped(_start(first), _end(behind)), *tail]


def lines(items: Sequence[Item], height: Callable[[int], int]) -> int:
    """Lines that ``items`` take: a repetition has one that says so."""
    total = 0
    for item in items:
        if isinstance(item, Repeat):
            total += lines(item.items, height) + 1
        else:
            total += height(item) if isinstance(item, int) else 1
    return total


def _start(item: Item) -> int:
    return item if isinstance(item, int) else item.start


def _end(item: Item) -> int:
    if isinstance(item, Repeat):
        return item.start + item.period * item.times
    return item + 1 if isinstance(item, int) else item.end

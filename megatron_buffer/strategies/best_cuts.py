"""The cuts of a row that ``bucketing: time_optimal`` takes.

Stands for nothing upstream. What can be solved exactly is: the reductions where nothing is gathered
(:mod:`megatron_buffer.strategies.timed_cuts`), both together where parameters are read in the reverse order
of the layout (:mod:`megatron_buffer.strategies.gathered_cuts`). Where it cannot, because gradients arrive out
of the layout's order or the row is too long, what was found is held against fixed sizes.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from megatron_buffer.strategies.gathered_cuts import least_exposed_cuts
from megatron_buffer.strategies.timed_cuts import PS, Costs, Row, earliest_cuts, first_of_run

_MOST_PLACES = 1000
"""Places to cut that are all searched."""
_SOME_PLACES = 500
"""About so many are of a row that has more."""
_SIZES = 80
_MOST_STEPS = 50_000
"""Parameters x buckets, up to which every fixed size is tried."""


def best_cuts(row: Row) -> list[int]:
    """The cuts that expose least.

    Exactly, if the row is in order and has at most 1,000 parameters. Otherwise no more than any fixed size
    does that makes few buckets, or is one of 80 in equal steps of their logarithm; a longer row is searched
    at some of its places.

    Returns:
        The positions of the last parameters of all buckets but the last.
    """
    count = len(row.ready_s)
    if count < 2:
        return []
    exposed, sizes = Exposed(row), FixedSizes(row)
    best = earliest_cuts(row)[0]
    if not row.gather_lines and exposed.in_order:
        return best
    best = min(best, *(sizes.cuts(size) for size in sizes.spread()), key=exposed.key)
    is_exact = exposed.in_order
    if row.gather_lines:
        for _ in range(1 if count <= _MOST_PLACES else 2):
            places = _places(row, best)
            found = least_exposed_cuts(_thinned(row, places), exposed(best))
            is_exact = is_exact and found.is_exact
            if found.cuts is not None:
                best = min([places[cut] for cut in found.cuts], best, key=exposed.key)
    if not is_exact and count <= _MOST_PLACES:
        best = min(best, *sizes.every(), key=exposed.key)
    return best


class Exposed:
    """What cuts of a row expose in an iteration, as ``megatron-buffer simulate`` has it.

    Args:
        row: The row.

    Attributes:
        in_order: Whether gradients arrive in the order of the layout, and forward reads in the reverse one.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        self._reductions = Costs(row, row.lines)
        self._gathers = Costs(row, row.gather_lines) if row.gather_lines else None
        self._ready = [round(time * PS) for time in row.ready_s]
        self._used = [round(min(time, row.forward_s) * PS) for time in row.first_use_s]
        self._end = max(round(row.backward_end_s * PS), max(self._ready))
        self.in_order = all(a <= b for a, b in pairwise(self._ready)) and all(
            a >= b for a, b in pairwise(self._used)
        )

    def __call__(self, cuts: Sequence[int]) -> float:
        """Seconds."""
        borders = [-1, *cuts, len(self._ready) - 1]
        return (self._reduced(borders) + self._gathered(borders)) / PS

    def key(self, cuts: Sequence[int]) -> tuple[float, int]:
        """Less is better: what is exposed, then the number of buckets."""
        return self(cuts), len(cuts)

    def _reduced(self, borders: Sequence[int]) -> int:
        costs = self._reductions.between(borders)
        if self.in_order:
            ready = [self._ready[last] for last in borders[1:]]
        else:
            ready = [max(self._ready[a + 1 : b + 1]) for a, b in pairwise(borders)]
        free = 0
        for at, index in sorted(zip(ready, range(len(ready)), strict=True)):
            free = max(free, at) + costs[index]
        return max(free, self._end) - self._end

    def _gathered(self, borders: Sequence[int]) -> int:
        """Gathers go from the end of the row to its start: each is started by the one before, or asked for."""
        if self._gathers is None:
            return 0
        costs = self._gathers.between(borders)
        if self.in_order:
            used = [self._used[last] for last in borders[1:]]
        else:
            used = [min(self._used[a + 1 : b + 1]) for a, b in pairwise(borders)]
        ends: dict[int, int] = {}
        waited = free = 0
        for at, place in sorted((used[i], -i) for i in range(len(costs))):
            index, now = -place, at + waited
            if index not in ends:
                ends[index] = free = max(free, now) + costs[index]
            if ends[index] > now:
                waited, now = waited + ends[index] - now, ends[index]
            if index and index - 1 not in ends:
                ends[index - 1] = free = max(free, now) + costs[index - 1]
        return waited


class FixedSizes:
    """The cuts of ``bucketing: fixed_size``, without its sums.

    Args:
        row: The row.
    """

    def __init__(self, row: Row) -> None:
        self._starts = row.starts_elems
        self._ends = row.ends_elems
        count = len(self._ends)
        first = first_of_run(row.alone)
        self._run_end = [count - 1] * count
        for place in range(count - 2, -1, -1):
            new_run = first[place + 1] == place + 1
            self._run_end[place] = place if new_run else self._run_end[place + 1]

    def cuts(self, size_elems: int) -> list[int]:
        """The positions of the last parameters of all buckets but the last."""
        return self._cut(size_elems)[0]

    def _cut(self, size_elems: int) -> tuple[list[int], int]:
        """The cuts, and the least of the sizes that made one; 0 if none did."""
        cuts: list[int] = []
        least = 0
        start, count = 0, len(self._ends)
        while True:
            full = bisect.bisect_left(self._ends, self._starts[start] + size_elems, start)
            last = min(full, self._run_end[start])
            if full < count and full == last:
                elems = self._ends[last] - self._starts[start]
                least = min(least, elems) if least else elems
            if last >= count - 1:
                return cuts, least
            cuts.append(last)
            start = last + 1

    def spread(self) -> list[int]:
        """Sizes from that of an average parameter to the whole row."""
        total = max(1, self._ends[-1] - self._starts[0])
        low = max(1.0, total / len(self._ends))
        steps = (low * (total / low) ** (step / (_SIZES - 1)) for step in range(_SIZES))
        return sorted({math.ceil(size) for size in steps})

    def every(self) -> Iterator[list[int]]:
        """The cuts of all sizes that make at most so many buckets, each once."""
        total = self._ends[-1] - self._starts[0]
        size = max(1, total * len(self._ends) // _MOST_STEPS)
        while True:
            cuts, least = self._cut(size)
            yield cuts
            if not least:
                return
            size = least + 1


def _places(row: Row, cuts: Sequence[int]) -> list[int]:
    """The last parameters of buckets that a search considers: all, or those near ``cuts`` and some between."""
    count = len(row.ready_s)
    if count <= _MOST_PLACES:
        return list(range(count))
    part = _SOME_PLACES // 4
    kept = {i for i in range(count - 1) if row.alone[i] or row.alone[i + 1]} | {count - 1}
    # Most is to be gained where backward ends and forward begins.
    last = [*cuts, count - 1][-part:]
    near = max(1, part // len(last))
    for cut in last:
        kept.update(range(max(0, cut - near), min(count, cut + near)))
    kept.update(range(0, count, -(-count // part)))
    elems = max(1, row.ends_elems[-1] // part)
    kept.update(
        bisect.bisect_left(row.ends_elems, at) for at in range(0, row.ends_elems[-1], elems)
    )
    return sorted(kept)


def _thinned(row: Row, places: Sequence[int]) -> Row:
    """A row that can be cut at some places only: what lies between is one parameter."""
    if len(places) == len(row.ready_s):
        return row
    spans = [(a + 1, b + 1) for a, b in pairwise((-1, *places))]
    return dataclasses.replace(
        row,
        ready_s=[max(row.ready_s[a:b]) for a, b in spans],
        starts_elems=[row.starts_elems[a] for a, _ in spans],
        ends_elems=[row.ends_elems[b - 1] for _, b in spans],
        alone=[row.alone[a] for a, _ in spans],
        first_use_s=[min(row.first_use_s[a:b]) for a, b in spans],
    )

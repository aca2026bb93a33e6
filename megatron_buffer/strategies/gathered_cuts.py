"""Cuts that expose the least of reductions and gathers together.

Stands for nothing upstream. Reductions are those of :mod:`megatron_buffer.strategies.timed_cuts`. Forward
reads the buckets from the end of the row on; it waits for the whole gather of the first one, which then
starts the next one's, and of each further gather for what takes longer than the bucket before it computes.
So a bucket costs three things: how late the reductions are, what has been waited for in gathers, and the
last gather, of which the bucket that follows hides a part. The search goes through the row from its start
and keeps, for each place to cut, the ways to cut what lies before it that no other way is as good as.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from megatron_buffer.strategies.timed_cuts import (
    PS,
    Costs,
    Ints,
    Row,
    earliest_ends,
    first_of_run,
    latest_ready,
)

_LABELS = 60_000
"""Ways to cut that are kept at most, over all places."""

_NEVER = np.iinfo(np.int64).max // 4


class Searched(NamedTuple):
    """What a search found.

    Attributes:
        cuts: The positions of the last parameters of all buckets but the last; None: nothing as good as the
            bound.
        is_exact: Whether nothing better can exist.
    """

    cuts: list[int] | None
    is_exact: bool


def least_exposed_cuts(row: Row, bound_s: float) -> Searched:
    """The cuts of a row with gathers for which the sum of exposed reductions and gathers is least.

    Of all such cuts those with large buckets are taken, from the end of the row on.

    Args:
        row: The row.
        bound_s: What some other cuts expose.
    """
    # A picosecond for each collective: the bound was added up in floating point.
    return _Search(row, round(bound_s * PS) + len(row.ready_s)).run()


class _Search:
    """One search; times are picoseconds, and ``before`` is the number of parameters before a bucket."""

    def __init__(self, row: Row, bound: int) -> None:
        self.count = len(row.ready_s)
        self.ready = latest_ready(row)
        self.first = first_of_run(row.alone)
        self.reductions = Costs(row, row.lines)
        self.gathers = Costs(row, row.gather_lines)
        self.rest = self.reductions.rest()
        self.backward_end = max(round(row.backward_end_s * PS), int(self.ready[-1]))
        self.earliest = max(int(earliest_ends(row)[-1]), self.backward_end)
        self.used = first_uses(row)
        self.bound = bound
        self.most = max(4, _LABELS // self.count)
        self.later = [self._no_more()] * self.count

    def run(self) -> Searched:
        self._gathers_to_come()
        labels = _Labels(self.count)
        is_exact = True
        for last in range(self.count):
            found, whole = self._ending(labels, last)
            is_exact = is_exact and whole
            labels.add(last, found)
        lates, waited, pending = labels.of(self.count - 1)
        if not len(lates):
            return Searched(None, is_exact)
        totals = np.maximum(lates, self.backward_end) + waited + pending
        return Searched(self._large(labels, int(totals.min())), is_exact)

    # What gathers will at least expose ------------------------------------------------------------

    @staticmethod
    def _no_more() -> tuple[Ints, Ints, Ints]:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty

    def _gathers_to_come(self) -> None:
        """For each last parameter of a bucket, what the gathers from it on expose at least, by its gather.

        A function of three pieces: how much of it each possible next bucket hides, the least of the rest for
        those that hide all of it, and for those that do not.
        """
        count = self.count
        rest = np.full((count, count), _NEVER, dtype=np.int64)  # [place, last of the next bucket]
        for last in range(count - 1, -1, -1):
            if last < count - 1:
                hidden = self.used[last] - self.used[last + 1 :]
                each = rest[last, last + 1 :]
                whole = np.minimum.accumulate(each[::-1])[::-1]
                partly = np.minimum.accumulate(each - hidden)
                self.later[last] = (hidden, whole, partly)
            low = self.first[last]
            if low == 0:
                low = 1
            if low <= last:
                gathers = self.gathers.ending(last, low)
                rest[low - 1 : last, last] = self.to_come(last, gathers)

    def to_come(self, last: int, gathers: Ints) -> Ints:
        """What is exposed at least from a bucket's gather on, if the bucket ends with ``last``."""
        if last == self.count - 1:
            return gathers
        hidden, whole, partly = self.later[last]
        place = hidden.searchsorted(gathers)
        result = np.full(len(gathers), _NEVER, dtype=np.int64)
        hides = place < len(hidden)
        result[hides] = whole[place[hides]]
        partial = place > 0
        result[partial] = np.minimum(result[partial], gathers[partial] + partly[place[partial] - 1])
        return result

    # The ways to cut what lies before a place -----------------------------------------------------

    def _extended(self, labels: _Labels, last: int) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """All kept ways with a bucket behind them that ends with ``last``; the least places first.

        Returns:
            The number of parameters before the bucket, its costs, and the sums with it.
        """
        before, lates, waited, pending = labels.since(self.first[last], last)
        low = self.first[last]
        offsets = before - low
        reduction = self.reductions.ending(last, low)[offsets]
        gather = self.gathers.ending(last, low)[offsets]
        hides = np.zeros(len(before), dtype=np.int64)
        inner = before > 0
        hides[inner] = self.used[before[inner] - 1] - self.used[last]
        late = np.maximum(lates, self.ready[last]) + reduction
        return before, reduction, gather, late, waited + np.maximum(0, pending - hides), hides

    def _ending(self, labels: _Labels, last: int) -> tuple[tuple[Ints, Ints, Ints], bool]:
        """The ways worth keeping with a bucket that ends with ``last``, and whether these are all."""
        _, _, gather, late, waited, _ = self._extended(labels, last)
        least = np.maximum(late + self.rest[last], self.earliest) - self.backward_end
        least += waited + self.to_come(last, gather)
        kept = np.flatnonzero(least <= self.bound)
        late, waited, gather, least = late[kept], waited[kept], gather[kept], least[kept]
        floor_late, floor_gather = self.backward_end, 0
        if last < self.count - 1:
            # What cannot make a difference any more.
            floor_late = int(self.ready[last + 1])
            floor_gather = int(self.used[last] - self.used[last + 1])
        lates, pending = np.maximum(late, floor_late), np.maximum(gather, floor_gather)
        order = np.lexsort((waited + lates + pending, least))
        left = np.array([lates[order], waited[order], pending[order]])
        chosen: list[Any] = []
        while left.shape[1]:
            if len(chosen) == self.most:
                break
            best = left[:, :1]
            chosen.append(best)
            # One that is behind in reductions or gathers is no better if that is made up for elsewhere.
            behind = np.maximum(0, best[[0, 2]] - left[[0, 2]]).sum(axis=0)
            left = left[:, best[1] + behind > left[1]]
        found = np.concatenate(chosen, axis=1) if chosen else left
        return (found[0], found[1], found[2]), not left.shape[1]

    # The cuts -------------------------------------------------------------------------------------

    def _large(self, labels: _Labels, total: int) -> list[int]:
        """Walks back from the end: each bucket as large as the total allows."""
        cuts: list[int] = []
        last, hidden = self.count - 1, 0
        # Of the buckets behind: costs of reductions, the earliest end, exposed gathers.
        behind = least_end = exposed = 0
        while True:
            before, reduction, gather, late, waited, hides = self._extended(labels, last)
            ends = np.maximum(np.maximum(late + behind, least_end), self.backward_end)
            waits = np.maximum(0, gather - hidden) + exposed
            chosen = int(np.argmax(ends + waited + waits <= total))
            if before[chosen] == 0:
                return cuts[::-1]
            behind += int(reduction[chosen])
            least_end = max(least_end, int(self.ready[last]) + behind)
            exposed, hidden = int(waits[chosen]), int(hides[chosen])
            last = int(before[chosen]) - 1
            cuts.append(last)


class _Labels:
    """Ways to cut, by the number of parameters that they cut: one to cut none, then those of each place.

    Of each: when its reductions have ended, what its gathers expose without the last one, and that one.
    """

    def __init__(self, count: int) -> None:
        self._from = [0, 1]
        self._all = np.zeros((4, 1024), dtype=np.int64)
        self._count = count

    def add(self, last: int, found: tuple[Ints, Ints, Ints]) -> None:
        """Those whose last bucket ends with ``last``."""
        begin, end = self._from[-1], self._from[-1] + len(found[0])
        while end > self._all.shape[1]:
            self._all = np.concatenate([self._all, np.zeros_like(self._all)], axis=1)
        self._all[0, begin:end] = last + 1
        for row, values in enumerate(found, 1):
            self._all[row, begin:end] = values
        self._from.append(end)

    def of(self, last: int) -> tuple[Ints, Ints, Ints]:
        """Those whose last bucket ends with ``last``."""
        chosen = self._all[:, self._from[last + 1] : self._from[last + 2]]
        return chosen[1], chosen[2], chosen[3]

    def since(self, low: int, last: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Those that cut from ``low`` to ``last`` parameters: how many each cuts, and its times."""
        chosen = self._all[:, self._from[low] : self._from[last + 1]]
        return chosen[0], chosen[1], chosen[2], chosen[3]


def first_uses(row: Row) -> Ints:
    """Picoseconds at which forward has first read one of the parameters up to each."""
    times = [min(time, row.forward_s) for time in row.first_use_s]
    earliest = accumulate((round(time * PS) for time in times), min)
    return np.array(list(earliest), dtype=np.int64)

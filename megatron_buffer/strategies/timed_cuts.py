"""Cuts for which the last reduction ends first: dynamic programming over the places to cut.

Stands for nothing upstream. The model is that of merged-gradient scheduling (MG-WFBP, Shi et al., 2019):
a gradient is ready at a known time, a bucket when its last gradient is, buckets are reduced one after the
other in the order of the layout, and a reduction takes a startup time plus its bytes over a rate. Then the
best cuts of a prefix of the parameters are part of the best cuts of all of it, because a prefix that is
done earlier never makes the rest later.

Times are whole picoseconds, so that every rank comes to the same cuts and no sum is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

PS = 1e12
"""Picoseconds in a second."""

Ints = np.ndarray[Any, np.dtype[np.int64]]
"""Positions or picoseconds."""

Lines = Sequence[tuple[float, float]]
"""Startup seconds and seconds per element of a collective, of which the least counts."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The parameters of a buffer in layout order, laid out as one bucket from offset 0.

    Attributes:
        ready_s: When each gradient is ready, in seconds.
        starts_elems: Where each parameter starts.
        ends_elems: Where it ends.
        alone: Whether it has a bucket of its own.
        divisor_elems: What the size of a bucket is rounded up to; starts of buckets are aligned to it.
        lines: Of a reduction.
        gather_lines: Of a gather; empty: nothing is gathered.
        first_use_s: When forward first reads each parameter, in seconds from its start, inf: never; empty
            where nothing is gathered.
        backward_end_s: When backward ends, if that is later than the last of these gradients.
        forward_s: How long forward takes, for a bucket that it never reads.
    """

    ready_s: Sequence[float]
    starts_elems: Sequence[int]
    ends_elems: Sequence[int]
    alone: Sequence[bool]
    divisor_elems: int
    lines: Lines
    gather_lines: Lines = ()
    first_use_s: Sequence[float] = ()
    backward_end_s: float = 0.0
    forward_s: float = 0.0


def earliest_cuts(row: Row) -> tuple[list[int], float]:
    """The cuts for which the last reduction ends first.

    Of all such cuts those with large buckets are taken: from the end of the row on each bucket is as large as
    the end allows, and the backward that its reduction can hide behind.

    Returns:
        The positions of the last parameters of all buckets but the last, and the end in seconds.
    """
    count = len(row.ready_s)
    if not count:
        return [], 0.0
    ready, first = latest_ready(row), first_of_run(row.alone)
    done = earliest_ends(row)
    return _large(row, first, ready, done), float(done[count]) / PS


def earliest_ends(row: Row) -> Ints:
    """Picoseconds at which the reductions of the first parameters can have ended, for each number of them."""
    count = len(row.ready_s)
    ready, first = latest_ready(row), first_of_run(row.alone)
    done = np.zeros(count + 1, dtype=np.int64)
    costs = Costs(row, row.lines)
    for last in range(count):
        # Where the one before is done in time, a smaller bucket can only be better.
        in_time = int(done[: last + 1].searchsorted(int(ready[last]), side='right')) - 1
        low = max(first[last], in_time)
        ended = np.maximum(done[low : last + 1], ready[last])
        done[last + 1] = int((ended + costs.ending(last, low)).min())
    return done


def _large(row: Row, first: Sequence[int], ready: Ints, done: Ints) -> list[int]:
    """Walks back from the end: what may end at a deadline is taken as large as it can be."""
    cuts: list[int] = []
    reductions = Costs(row, row.lines)
    last, deadline = len(first) - 1, int(done[-1])
    while True:
        low = first[last]
        costs = reductions.ending(last, low)
        in_time = np.maximum(done[low : last + 1], ready[last]) + costs <= deadline
        chosen = int(np.argmax(in_time))
        deadline -= int(costs[chosen])
        if done[low + chosen] <= ready[last]:
            # Nor larger than what is hidden behind the next one's backward: forward hides its gather too.
            deadline = min(deadline, int(ready[last]))
        if low + chosen == 0:
            return cuts[::-1]
        last = low + chosen - 1
        cuts.append(last)


class Costs:
    """How long a collective over a bucket of a row takes.

    Args:
        row: The row.
        lines: Of the collective.
    """

    def __init__(self, row: Row, lines: Lines) -> None:
        self._starts = np.array(row.starts_elems, dtype=np.int64)
        self._ends = np.array(row.ends_elems, dtype=np.int64)
        self._divisor = row.divisor_elems
        self._lines = [(alpha * PS, beta * PS) for alpha, beta in lines]

    def ending(self, last: int, low: int) -> Ints:
        """Picoseconds for a bucket that ends with ``last``, for each first parameter from ``low`` on."""
        return self._of(int(self._ends[last]) - self._starts[low : last + 1])

    def rest(self) -> Ints:
        """Picoseconds for one bucket of all that follows each parameter; 0 behind the last."""
        result = np.zeros(len(self._ends), dtype=np.int64)
        result[:-1] = self._of(self._ends[-1] - self._starts[1:])
        return result

    def between(self, borders: Sequence[int]) -> list[int]:
        """Picoseconds for the bucket between each two borders, which are last parameters of buckets."""
        at = np.array(borders, dtype=np.int64)
        return self._of(self._ends[at[1:]] - self._starts[at[:-1] + 1]).tolist()

    def _of(self, elems: Ints) -> Ints:
        divisor = self._divisor
        sizes = elems + (divisor - 1)
        if divisor & (divisor - 1):
            sizes -= sizes % divisor
        else:
            sizes &= -divisor
        alpha, beta = self._lines[0]
        costs = sizes * beta + alpha
        for alpha, beta in self._lines[1:]:
            costs = np.minimum(costs, sizes * beta + alpha)
        return np.rint(costs).astype(np.int64)


def latest_ready(row: Row) -> Ints:
    """Picoseconds at which each gradient and all before it are ready."""
    latest = accumulate((round(time * PS) for time in row.ready_s), max)
    return np.array(list(latest), dtype=np.int64)


def first_of_run(alone: Sequence[bool]) -> list[int]:
    """For each parameter the first one that may share a bucket with it."""
    result: list[int] = []
    for position, is_alone in enumerate(alone):
        fresh = position == 0 or is_alone or alone[position - 1]
        result.append(position if fresh else result[-1])
    return result

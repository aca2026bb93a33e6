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

_PS = 1e12

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The parameters of a buffer in layout order, laid out as one bucket from offset 0.

    Attributes:
        ready_s: When each gradient is ready, in seconds.
        starts_elems: Where each parameter starts.
        ends_elems: Where it ends.
        alone: Whether it has a bucket of its own.
        divisor_elems: What the size of a bucket is rounded up to; starts of buckets are aligned to it.
        lines: Startup seconds and seconds per element of a reduction, of which the least counts.
    """

    ready_s: Sequence[float]
    starts_elems: Sequence[int]
    ends_elems: Sequence[int]
    alone: Sequence[bool]
    divisor_elems: int
    lines: Sequence[tuple[float, float]]


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
    latest = accumulate((round(time * _PS) for time in row.ready_s), max)
    ready = np.array(list(latest), dtype=np.int64)
    starts = np.array(row.starts_elems, dtype=np.int64)
    ends = np.array(row.ends_elems, dtype=np.int64)
    first = _first_of_run(row.alone)
    done = np.zeros(count + 1, dtype=np.int64)
    for last in range(count):
        # Where the one before is done in time, a smaller bucket can only be better.
        in_time = int(done[: last + 1].searchsorted(int(ready[last]), side='right')) - 1
        low = max(first[last], in_time)
        ended = np.maximum(done[low : last + 1], ready[last])
        done[last + 1] = int((ended + _costs(row, starts, ends, low, last)).min())
    return _large(row, starts, ends, first, ready, done), float(done[count]) / _PS


def _large(
    row: Row, starts: _Ints, ends: _Ints, first: Sequence[int], ready: _Ints, done: _Ints
) -> list[int]:
    """Walks back from the end: what may end at a deadline is taken as large as it can be."""
    cuts: list[int] = []
    last, deadline = len(first) - 1, int(done[-1])
    while True:
        low = first[last]
        costs = _costs(row, starts, ends, low, last)
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


def _costs(row: Row, starts: _Ints, ends: _Ints, low: int, last: int) -> _Ints:
    """Picoseconds to reduce a bucket that ends with ``last``, for each first parameter from ``low`` on."""
    divisor = row.divisor_elems
    sizes = int(ends[last]) + divisor - 1 - starts[low : last + 1]
    if divisor & (divisor - 1):
        sizes -= sizes % divisor
    else:
        sizes &= -divisor
    costs = sizes * (row.lines[0][1] * _PS) + row.lines[0][0] * _PS
    for alpha, beta in row.lines[1:]:
        costs = np.minimum(costs, sizes * (beta * _PS) + alpha * _PS)
    return np.rint(costs).astype(np.int64)


def _first_of_run(alone: Sequence[bool]) -> list[int]:
    """For each parameter the first one that may share a bucket with it."""
    result: list[int] = []
    for position, is_alone in enumerate(alone):
        fresh = position == 0 or is_alone or alone[position - 1]
        result.append(position if fresh else result[-1])
    return result

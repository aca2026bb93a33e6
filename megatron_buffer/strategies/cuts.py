"""Planning of cuts: where a row of parameters is divided, from their sizes alone.

Upstream has no counterpart: it decides with each parameter, and never looks ahead. A *run* is a row of
consecutive parameters that are not alone in their bucket; no bucket crosses the border of a run. A *cut*
is the position of the last parameter of a bucket. Sizes are parameter elements: alignment gaps are not
known yet, so a planned bucket is a little larger in the buffer than here.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise


def runs_of(alone: Sequence[bool]) -> list[range]:
    """The runs between the parameters that are alone, as ranges of positions; none is empty."""
    borders = [-1, *(i for i, is_alone in enumerate(alone) if is_alone), len(alone)]
    runs = [range(left + 1, right) for left, right in pairwise(borders)]
    return [run for run in runs if run]


def by_size(numels_elems: Sequence[int], size_elems: int) -> list[int]:
    """Cuts at each parameter that brings its bucket to ``size_elems``, but not behind the last one."""
    cuts: list[int] = []
    filled_elems = 0
    for position, numel_elems in enumerate(numels_elems[:-1]):
        filled_elems += numel_elems
        if filled_elems >= size_elems:
            cuts.append(position)
            filled_elems = 0
    return cuts


def shortest_suffix(numels_elems: Sequence[int], size_elems: int) -> int:
    """Position at which the shortest suffix of at least ``size_elems`` starts; 0 if all is too small."""
    filled_elems = 0
    for position in range(len(numels_elems) - 1, -1, -1):
        filled_elems += numels_elems[position]
        if filled_elems >= size_elems:
            return position
    return 0


def behind_changes(labels: Sequence[Hashable], every: int) -> list[int]:
    """Cuts behind every ``every``-th stretch of equal labels, but not behind the last one."""
    ends = [i for i in range(len(labels) - 1) if labels[i] != labels[i + 1]]
    return ends[every - 1 :: every]


def apportion(totals_elems: Sequence[int], most: Sequence[int], parts: int) -> list[int]:
    """Shares out ``parts`` among rows: each next one to the row whose parts are the largest so far.

    Args:
        totals_elems: Elements of each row.
        most: Parts that each row can take, at least 1.
        parts: Parts to share out.

    Returns:
        Parts of each row, at least 1; together ``parts``, as far as the rows' limits allow.
    """
    shares = [1] * len(totals_elems)
    queue = [(-Fraction(total), row) for row, total in enumerate(totals_elems) if most[row] > 1]
    heapq.heapify(queue)
    for _ in range(parts - len(shares)):
        if not queue:
            break
        _, row = heapq.heappop(queue)
        shares[row] += 1
        if shares[row] < most[row]:
            heapq.heappush(queue, (-Fraction(totals_elems[row], shares[row]), row))
    return shares


def near_equal(
    numels_elems: Sequence[int], parts: int, limit_elems: int | None = None
) -> list[int]:
    """Cuts a row into exactly ``parts`` buckets, each cut as near as can be to its equal share.

    From left to right; of two positions that are equally near, the earlier.

    Args:
        numels_elems: Sizes of the row's parameters, in order.
        parts: Buckets, from 1 to the number of parameters.
        limit_elems: No bucket may be larger; it has to be possible (see :func:`smallest_limit`).

    Returns:
        The cuts, ``parts - 1`` of them.
    """
    ends = [0, *accumulate(numels_elems)]
    count, total = len(numels_elems), ends[-1]
    limit = total if limit_elems is None else limit_elems
    earliest = _earliest_starts(ends, parts, limit)
    borders = [0]
    for part in range(1, parts):
        low = max(borders[-1] + 1, earliest[part])
        high = min(bisect_right(ends, ends[borders[-1]] + limit) - 1, count - (parts - part))
        borders.append(_nearest(ends, low, high, part * total, parts))
    return [border - 1 for border in borders[1:]]


def _nearest(ends: Sequence[int], low: int, high: int, numerator: int, parts: int) -> int:
    """The first position from ``low`` to ``high`` whose end is nearest to ``numerator / parts``."""
    at = bisect_left(ends, -(-numerator // parts), low, high)
    candidates = range(max(low, at - 1), at + 1)
    nearest = min(candidates, key=lambda position: abs(parts * ends[position] - numerator))
    return bisect_left(ends, ends[nearest], low, nearest)


def smallest_limit(numels_elems: Sequence[int], parts: int) -> int:
    """Size in elements of the largest bucket when a row is cut into ``parts`` so that it is smallest."""
    ends = [0, *accumulate(numels_elems)]
    low, high = max(max(numels_elems), -(-ends[-1] // parts)), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(ends, parts, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(ends: Sequence[int], parts: int, limit: int) -> bool:
    """Whether buckets filled to ``limit`` one after the other are at most ``parts``."""
    position = 0
    for _ in range(parts):
        position = bisect_right(ends, ends[position] + limit) - 1
        if position == len(ends) - 1:
            return True
    return False


def _earliest_starts(ends: Sequence[int], parts: int, limit: int) -> list[int]:
    """For each part the first position from which the rest fits into what parts are left."""
    starts = [0] * parts
    position = len(ends) - 1
    for part in range(parts - 1, 0, -1):
        position = bisect_left(ends, ends[position] - limit)
        starts[part] = position
    return starts

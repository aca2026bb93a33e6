"""Rows of parameters to cut, and the ways to cut them, for the tests of `time_optimal`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from megatron_buffer.strategies.timed_cuts import Row


def buckets(row: Row, cuts: Sequence[int]) -> Iterator[tuple[range, int]]:
    """The parameters of each bucket, and its elements with padding; checks what has to be alone."""
    for before, last in itertools.pairwise([-1, *cuts, len(row.ready_s) - 1]):
        members = range(before + 1, last + 1)
        assert all(len(members) == 1 for i in members if row.alone[i])
        elems = row.ends_elems[last] - row.starts_elems[before + 1]
        yield members, math.ceil(elems / row.divisor_elems) * row.divisor_elems


def every_cut(row: Row) -> Iterator[list[int]]:
    """Every way to cut that leaves alone what is alone."""
    places = range(len(row.ready_s) - 1)
    forced = {i for i in places if row.alone[i] or row.alone[i + 1]}
    free = [i for i in places if i not in forced]
    for size in range(len(free) + 1):
        for chosen in itertools.combinations(free, size):
            yield sorted({*forced, *chosen})


def fixed(row: Row, size: int) -> list[int]:
    """The cuts of a bucket size, straight from the rule."""
    cuts, start = [], 0
    for i in range(len(row.ready_s) - 1):
        full = row.ends_elems[i] - row.starts_elems[start] >= size
        if full or row.alone[i] or row.alone[i + 1]:
            cuts.append(i)
            start = i + 1
    return cuts


@st.composite
def rows(
    draw: Any, most: int = 7, in_order: bool = True, gathered: bool = True, least_elems: int = 1
) -> Row:
    """Gaps between parameters, one or two lines, norms that take no time, parameters alone or never read."""
    count = draw(st.integers(1, most))
    ready = [draw(st.integers(0, 40)) * 1e-3 for _ in range(count)]
    used = [draw(st.sampled_from([*range(0, 41, 2), math.inf])) * 1e-3 for _ in range(count)]
    if in_order:
        ready.sort()
        used.sort(reverse=True)
    align, divisor = draw(st.sampled_from([(1, 1), (1, 3), (4, 8), (4, 12)]))
    starts, ends, cursor = [], [], 0
    for _ in range(count):
        starts.append(-(-cursor // align) * align)
        cursor = starts[-1] + draw(st.integers(least_elems, 30))
        ends.append(cursor)

    def lines() -> list[tuple[float, float]]:
        found = [(draw(st.integers(0, 9)) * 1e-3, draw(st.integers(0, 4)) * 1e-4)]
        if draw(st.booleans()):
            found.append((found[0][0] / 3, found[0][1] * 2))
        return found

    return Row(
        ready_s=ready,
        starts_elems=starts,
        ends_elems=ends,
        alone=[draw(st.integers(0, 6)) == 0 for _ in range(count)],
        divisor_elems=divisor,
        lines=lines(),
        gather_lines=lines() if gathered else (),
        first_use_s=used if gathered else (),
        backward_end_s=max(ready) + draw(st.integers(0, 1)) * 0.01,
        forward_s=0.05,
    )

"""The cuts of `time_optimal` where parameters are gathered too, held against the simulation itself."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer.planner.simulation import simulate
from megatron_buffer.planner.timeline import ChunkWork, GroupWork, Iteration
from megatron_buffer.strategies.best_cuts import Exposed, best_cuts
from megatron_buffer.strategies.timed_cuts import Row, earliest_cuts
from tests.cut_rows import buckets, every_cut, fixed, rows


def simulated(row: Row, cuts: Sequence[int], in_order: bool = False) -> float:
    """Exposed seconds of an iteration whose groups are the buckets, as the planner plays it."""
    groups = []
    for place, (members, elems) in enumerate(buckets(row, cuts)):

        def took(lines: Any, elems: int = elems) -> float:
            return min((alpha + beta * elems for alpha, beta in lines), default=0.0)

        read = [row.first_use_s[i] for i in members if row.first_use_s] or [0.0]
        groups.append(
            GroupWork(
                name=f'bucket {place}',
                params=len(members),
                bytes=elems,
                ready_s=max(row.ready_s[i] for i in members),
                last_gradient='',
                reduce_s=took(row.lines),
                dispatch_position=place,
                first_use_s=min(*read, row.forward_s),
                first_used='',
                gather_s=took(row.gather_lines),
                gather_position=-place if row.gather_lines else None,
            )
        )
    backward = max(row.backward_end_s, *row.ready_s)
    chunk = ChunkWork(forward_s=row.forward_s, backward_s=backward, groups=tuple(groups))
    return simulate(Iteration(chunks=(chunk,), optimizer_s=0, in_order=in_order)).exposed_s


@given(rows(in_order=False), st.data())
@settings(deadline=None)
def test_the_sum_is_that_of_the_simulation(row: Row, data: Any) -> None:
    cuts = data.draw(st.sampled_from(list(every_cut(row))))
    assert Exposed(row)(cuts) == pytest.approx(simulated(row, cuts), abs=1e-9)


@given(rows())
@settings(deadline=None, max_examples=120)
def test_no_cuts_expose_less(row: Row) -> None:
    least = min(simulated(row, cuts) for cuts in every_cut(row))
    assert simulated(row, best_cuts(row)) == pytest.approx(least, abs=1e-9)


@given(rows(most=40), st.integers(1, 700))
@settings(deadline=None)
def test_no_fixed_size_exposes_less(row: Row, size: int) -> None:
    assert simulated(row, best_cuts(row)) <= simulated(row, fixed(row, size)) + 1e-9


@given(st.booleans().flatmap(lambda g: rows(most=15, in_order=False, gathered=g)))
@settings(deadline=None, max_examples=40)
def test_nor_where_gradients_arrive_in_another_order(row: Row) -> None:
    least = min(simulated(row, fixed(row, size)) for size in range(1, row.ends_elems[-1] + 2, 2))
    assert simulated(row, best_cuts(row)) <= least + 1e-9


def transformer(layers: int, slower: float, seed: int = 0) -> Row:
    """An embedding, layers whose modules take uneven times, an output layer; about 64 H100 ranks."""
    draw = random.Random(seed)
    wide, high = 4096, 14336
    elems = [
        32000 * wide,
        *[high * wide, 2 * high * wide, wide, wide * wide, 3 * wide * wide // 2, wide] * layers,
        32000 * wide,
    ]
    forward = [0.0 if e == wide else e * 4e-11 * draw.uniform(0.5, 2) for e in elems]
    forward[-1] = 0.0
    ends = list(itertools.accumulate(elems))
    read = list(itertools.accumulate(forward[::-1]))
    return Row(
        ready_s=list(itertools.accumulate(2 * t for t in forward)),
        starts_elems=[0, *ends[:-1]],
        ends_elems=ends,
        alone=[False] * len(elems),
        divisor_elems=64 * 128,
        lines=[(2e-4, 8e-11 * slower)],
        gather_lines=[(2e-4, 4e-11 * slower)],
        first_use_s=[0.0, *read[:-1]][::-1],
        forward_s=read[-1],
    )


@pytest.mark.parametrize('slower', [0.3, 1.0, 3.0])
def test_a_transformer(slower: float) -> None:
    row = transformer(20, slower)
    found = simulated(row, best_cuts(row))
    sizes = [int(1.09**step) for step in range(140, 280)]
    best = min(simulated(row, fixed(row, size)) for size in sizes)
    assert found <= best + 1e-9
    assert found <= simulated(row, earliest_cuts(row)[0]) + 1e-9
    if slower == 1.0:  # where as much is sent as is computed there is something to gain
        assert found < 0.95 * best


def test_large_buckets_are_preferred() -> None:
    """With nothing exposed but the end, what is hidden anyway is not cut for its own sake."""
    cuts = best_cuts(transformer(20, 0.3))
    assert 1 <= len(cuts) <= 12


@pytest.mark.slow
@pytest.mark.parametrize('slower', [0.3, 1.0, 3.0])
def test_a_long_row(slower: float) -> None:
    """10,000 parameters: a second or so on an idle core; the bound only keeps it from being cubic."""
    row = transformer(1670, slower)
    assert len(row.ready_s) > 10_000
    begin = time.process_time()
    cuts = best_cuts(row)
    assert time.process_time() - begin < 30
    sizes = [int(1.1**step) for step in range(200, 275)]
    assert simulated(row, cuts) <= min(simulated(row, fixed(row, s)) for s in sizes) + 1e-9


@pytest.mark.slow
@given(rows(most=10))
@settings(deadline=None, max_examples=400)
def test_no_cuts_of_longer_rows_expose_less(row: Row) -> None:
    exposed = Exposed(row)
    least = min(exposed(cuts) for cuts in every_cut(row))
    assert exposed(best_cuts(row)) == pytest.approx(least, abs=1e-9)

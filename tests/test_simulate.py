"""The timeline of an iteration, against closed forms and what must hold of any timeline."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer.planner.simulation import simulate
from megatron_buffer.planner.timeline import ChunkWork, Event, GroupWork, Iteration
from megatron_buffer.planner.trace import waits, write_trace


def group(
    ready: float, reduce: float, *, at: int, gather: float = 0.0, use: float = 0.0, **more: Any
) -> GroupWork:
    """Group ``at`` in the order of the reductions, which is the reverse of that of the gathers."""
    return GroupWork(
        name=f'bucket {at}',
        params=1,
        bytes=100,
        ready_s=ready,
        last_gradient=f'p{at}',
        reduce_s=reduce,
        dispatch_position=at,
        first_use_s=use,
        first_used=f'p{at}',
        gather_s=gather,
        gather_position=more.pop('gather_position', -at),
        **more,
    )


def chunk(*groups: GroupWork, forward: float = 0.0, backward: float = 0.0) -> ChunkWork:
    return ChunkWork(forward_s=forward, backward_s=backward, groups=groups)


# Reductions ---------------------------------------------------------------------------------------


def test_reductions_run_beside_backward_and_the_optimizer_waits_for_the_last() -> None:
    of_chunk = chunk(group(1, 3, at=0), group(2, 3, at=1), group(8, 2, at=2), backward=8)
    found = simulate(Iteration(chunks=(of_chunk,), optimizer_s=5))
    spans = [(e.start_s, e.end_s) for e in found.events if e.kind == 'reduce']
    assert spans == [(1, 4), (4, 7), (8, 10)]
    assert (found.backward_end_s, found.reduce_end_s, found.optimizer_end_s) == (8, 10, 15)
    assert (found.exposed_grad_s, found.exposed_param_s, found.reduce_s) == (2, 0, 8)
    assert found.hidden_share == pytest.approx(6 / 8)
    assert [e.name for e in found.critical_path()] == [
        'until the gradient of p0',
        'until the gradient of p1',
        'until the gradient of p2',
        'reduce bucket 2',
        'optimizer step',
    ]


def test_order_of_the_reductions() -> None:
    # The first of the sequence is ready last.
    of_chunk = chunk(group(5, 1, at=0), group(1, 3, at=1), backward=5)
    one = Iteration(chunks=(of_chunk,), optimizer_s=0)
    arrival = simulate(one)
    assert arrival.exposed_grad_s == 1
    in_order = simulate(Iteration(chunks=(of_chunk,), optimizer_s=0, in_order=True))
    assert in_order.exposed_grad_s == 4
    deferred = simulate(Iteration(chunks=(of_chunk,), optimizer_s=0, overlap_reduce=False))
    assert deferred.exposed_grad_s == 4
    names = [e.name for e in deferred.events if e.kind == 'reduce']
    assert names == ['reduce bucket 0', 'reduce bucket 1']


# Gathers ------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(0, 9),
)
def test_each_gather_starts_the_next(loads: list[tuple[int, int]], optimizer: int) -> None:
    """Forward waits for the first one, then for what a gather takes longer than the group before computes."""
    count, groups, use = len(loads), [], 0
    for place, (gather, compute) in enumerate(loads):
        groups.append(group(0, 0, at=count - 1 - place, gather=gather, use=use))
        use += compute
    of_chunk = chunk(*groups[::-1], forward=use)
    found = simulate(Iteration(chunks=(of_chunk,), optimizer_s=optimizer))
    exposed = loads[0][0]
    for (_, compute), (gather, _) in itertools.pairwise(loads):
        exposed += max(0, gather - compute)
    assert found.exposed_param_s == pytest.approx(exposed)
    assert found.end_s == pytest.approx(optimizer + use + exposed)
    together = simulate(Iteration(chunks=(of_chunk,), optimizer_s=optimizer, overlap_gather=False))
    assert together.exposed_param_s == pytest.approx(sum(gather for gather, _ in loads))


def test_of_groups_that_are_read_at_once_the_first_of_the_chain_is_waited_for_first() -> None:
    """An embedding takes no time, so that the bucket behind it is read at the same moment."""
    groups = [
        group(0, 0, at=0, gather=7, use=5),
        group(0, 0, at=1, gather=3, use=0),
        group(0, 0, at=2, gather=2, use=0),
    ]
    found = simulate(Iteration(chunks=(chunk(*groups, forward=9),), optimizer_s=0))
    gathers = [(e.name, e.start_s, e.end_s) for e in found.events if e.kind == 'gather']
    assert gathers == [
        ('gather bucket 2', 0, 2),
        ('gather bucket 1', 2, 5),
        ('gather bucket 0', 5, 12),
    ]
    assert found.exposed_param_s == 2 + 3 + (7 - 5)


def test_without_gathers_forward_waits_for_nothing() -> None:
    of_chunk = chunk(group(1, 1, at=0, gather_position=None), forward=3, backward=1)
    found = simulate(Iteration(chunks=(of_chunk,), optimizer_s=1))
    assert (found.exposed_param_s, found.gather_s, found.end_s) == (0, 0, 1 + 1 + 1 + 3)


# Micro-batches and chunks -------------------------------------------------------------------------


def test_other_microbatches_and_the_bubble_come_first() -> None:
    of_chunk = chunk(group(2, 3, at=0), forward=1, backward=2)
    found = simulate(Iteration(chunks=(of_chunk,), optimizer_s=1, microbatches=4, bubble_s=7))
    assert found.compute_s == 12
    assert found.end_s == 12 + 7 + 1 + 3
    assert found.utilisation == pytest.approx(12 / 23)


def test_chunks_reduce_while_those_before_them_are_in_backward() -> None:
    first = chunk(group(1, 1, at=0, gather=1), forward=1, backward=1)
    second = chunk(group(1, 5, at=0, gather=4), forward=1, backward=1)
    found = simulate(Iteration(chunks=(first, second), optimizer_s=0, microbatches=4, waves=2))
    # Backward: 2 x 2 of other micro-batches, then chunk 1 twice, then chunk 0 twice.
    reductions = {e.chunk: (e.start_s, e.end_s) for e in found.events if e.kind == 'reduce'}
    assert found.backward_end_s == 8 + 4
    assert reductions[1] == (10, 15)
    assert reductions[0] == (15, 16)
    assert found.exposed_grad_s == 4
    # Forward: the schedule starts both gathers at once.
    gathers = {e.chunk: (e.start_s, e.end_s) for e in found.events if e.kind == 'gather'}
    assert gathers == {0: (16, 17), 1: (17, 21)}
    assert found.exposed_param_s == 1 + 2
    assert found.compute_s == 16


# Any timeline -------------------------------------------------------------------------------------


@st.composite
def iterations(draw: Any) -> Iteration:
    chunks = []
    for _ in range(draw(st.integers(1, 3))):
        backward, forward = draw(st.integers(0, 30)), draw(st.integers(0, 30))
        count = draw(st.integers(0, 5))
        places = draw(st.permutations(range(count)))
        gathered = draw(st.booleans())
        groups = [
            group(
                draw(st.integers(0, backward)),
                draw(st.integers(0, 9)),
                at=places[i],
                gather=draw(st.integers(0, 9)),
                use=draw(st.integers(0, forward)),
                gather_position=i if gathered else None,
                is_expert_parallel=draw(st.booleans()),
            )
            for i in range(count)
        ]
        chunks.append(chunk(*groups, forward=forward, backward=backward))
    waves = draw(st.integers(1, 3)) if len(chunks) > 1 else 1
    return Iteration(
        chunks=tuple(chunks),
        optimizer_s=draw(st.integers(0, 5)),
        microbatches=waves + draw(st.integers(0, 3)),
        waves=waves,
        bubble_s=draw(st.integers(0, 5)),
        overlap_reduce=draw(st.booleans()),
        overlap_gather=draw(st.booleans()),
        in_order=draw(st.booleans()),
    )


def lane(events: Sequence[Event], *kinds: str) -> list[Event]:
    return sorted((e for e in events if e.kind in kinds), key=lambda e: (e.start_s, e.end_s))


@given(iterations())
@settings(max_examples=200)
def test_what_holds_of_any_timeline(iteration: Iteration) -> None:
    found = simulate(iteration)
    for kinds in (('other', 'backward', 'optimizer', 'forward'), ('reduce', 'gather')):
        for before, after in itertools.pairwise(lane(found.events, *kinds)):
            assert before.end_s <= after.start_s
    spent = sum(e.duration_s for e in found.events if e.kind in ('other', 'backward', 'forward'))
    assert spent == pytest.approx(iteration.compute_s + iteration.bubble_s)
    assert found.end_s == pytest.approx(
        iteration.compute_s + iteration.bubble_s + iteration.optimizer_s + found.exposed_s
    )
    assert found.exposed_s <= found.reduce_s + found.gather_s
    path = found.critical_path()
    for before, after in itertools.pairwise(path):
        assert before.end_s == pytest.approx(after.start_s)
    if path:
        assert path[0].start_s == 0
        assert path[-1].end_s == pytest.approx(found.end_s)
    shown = sum(end - start for _, start, end in waits(found))
    assert shown == pytest.approx(found.exposed_s)


def test_a_trace_holds_every_event(tmp_path: Path) -> None:
    of_chunk = chunk(
        group(1, 3, at=0, gather=2, use=1), group(2, 3, at=1, gather=2), forward=3, backward=2
    )
    found = simulate(Iteration(chunks=(of_chunk,), optimizer_s=1))
    path = tmp_path / 'trace.json'
    write_trace(str(path), found, 'a model')
    events = json.loads(path.read_text())['traceEvents']
    stretches = [e for e in events if e['ph'] == 'X']
    assert len([e for e in stretches if e['cat'] != 'exposed']) == len(found.events)
    assert max(e['ts'] + e['dur'] for e in stretches) == pytest.approx(1e6 * found.end_s)
    exposed = sum(e['dur'] for e in stretches if e['cat'] == 'exposed')
    assert exposed == pytest.approx(1e6 * found.exposed_s)
    names = {e['args']['name'] for e in events if e['name'] == 'thread_name'}
    assert names == {'compute', 'reductions', 'gathers', 'exposed'}


def test_chunks_whose_collectives_the_schedule_does_not_start() -> None:
    """Without align_grad_reduce and align_param_gather gradients and forward start them, chunk by chunk."""
    first = chunk(
        group(1, 2, at=0, gather=3, use=1), group(4, 2, at=1, gather=1), forward=2, backward=4
    )
    second = chunk(group(1, 3, at=0, gather=2), forward=1, backward=1)
    found = simulate(
        Iteration(chunks=(first, second), optimizer_s=0, align_reduce=False, align_gather=False)
    )
    # Chunk 1 in backward until 1, chunk 0 until 5: its gradients are there at 2 and 5.
    spans = [(e.chunk, e.start_s, e.end_s) for e in found.events if e.kind == 'reduce']
    assert spans == [(1, 1, 4), (0, 4, 6), (0, 6, 8)]
    # From 8 on: the group that is read first, 1 s of forward, the rest of the next gather, 1 s; chunk 1.
    spans = [(e.chunk, e.start_s, e.end_s) for e in found.events if e.kind == 'gather']
    assert spans == [(0, 8, 9), (0, 9, 12), (1, 13, 15)]
    assert (found.exposed_grad_s, found.exposed_param_s) == (3, 1 + 2 + 2)


def test_of_several_chunks_the_schedule_starts_the_collectives() -> None:
    """All reductions of a chunk when its backward has ended; gathers in the order of the list."""
    first = chunk(
        group(1, 2, at=0, gather=3, use=1), group(4, 2, at=1, gather=1), forward=2, backward=4
    )
    second = chunk(forward=1, backward=1)
    found = simulate(Iteration(chunks=(first, second), optimizer_s=0))
    spans = [(e.start_s, e.end_s) for e in found.events if e.kind == 'reduce']
    assert spans == [(5, 7), (7, 9)]
    spans = [(e.start_s, e.end_s) for e in found.events if e.kind == 'gather']
    assert spans == [(9, 12), (12, 13)]
    # Forward begins with the group that is gathered last.
    assert found.exposed_param_s == 4

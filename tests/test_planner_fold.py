"""Folding of long lists: nothing is lost, and what repeats is found."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_buffer.planner.fold import Item, Repeat, Skipped, fold, lines, shorten


def unfolded(items: list[Item], rows: list[int]) -> list[int]:
    """The rows that a folded list stands for."""
    result: list[int] = []
    for item in items:
        if isinstance(item, Repeat):
            result += unfolded(item.items, rows) * item.times
        elif isinstance(item, Skipped):
            result += rows[item.start : item.end]
        else:
            result.append(rows[item])
    return result


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.integers(4, 30),
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 8)),
        max_size=4,
    ),
)
def test_folding_loses_nothing(
    rows: list[int], room: int, blocks: list[tuple[list[int], int]]
) -> None:
    rows = rows + [row for pattern, times in blocks for row in pattern * times]
    folded = fold(rows)
    assert unfolded(folded, rows) == rows
    assert lines(folded, lambda index: 1) <= len(rows)
    short = shorten(folded, room, lambda index: 1)
    assert lines(short, lambda index: 1) <= max(room, 4)
    if not any(isinstance(i, Repeat) for i in folded):
        assert unfolded(short, rows) == rows


def test_folding_finds_patterns_within_patterns() -> None:
    expert = ['fc2', 'fc1'] * 8
    rows = ['head', *([*expert, 'attention'] * 32), 'embedding']
    first, layers, last = fold(rows)
    assert (first, last) == (0, len(rows) - 1)
    assert isinstance(layers, Repeat)
    assert (layers.period, layers.times) == (17, 32)
    experts = layers.items[0]
    assert isinstance(experts, Repeat)
    assert (experts.period, experts.times, experts.items) == (2, 8, [1, 2])

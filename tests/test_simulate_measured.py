"""The simulator against real runs on a slowed network: `benchmarks/overlap.py`."""

from __future__ import annotations

import pytest

from benchmarks import overlap


@pytest.mark.slow
def test_bucketings_rank_as_simulated() -> None:
    result = overlap.run(overlap.FEWEST_ROUNDS)
    assert len(result['cases']) >= 8
    if result['reliability'] < overlap.RELIABLE:
        pytest.skip(
            f'no verdict: {result["rounds"]} rounds on this machine do not rank the bucketings alike'
        )
    assert result['spearman'] >= 0.9, result['cases']


def test_spearman() -> None:
    assert overlap.spearman([1, 2, 3, 4], [10, 20, 30, 45]) == pytest.approx(1)
    assert overlap.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # One of four pairs of neighbours exchanged: 1 - 6 * 2 / (4 * 15).
    assert overlap.spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert overlap.spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert overlap.spearman([1, 1], [1, 2]) == 0

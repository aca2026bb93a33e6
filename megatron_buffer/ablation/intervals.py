"""Paired intervals: what the runs of two arms, taken side by side, say about their difference.

Runs are interleaved, so each is paired with the run of the other arm in the same round with the same seed; what the
machine did meanwhile touches both. Student's t with so few pairs is wide, and rightly so. Upstream has no
counterpart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95

# Two-sided 95 % quantiles of Student's t by degrees of freedom; for those between, the next smaller.
_T = dict(
    zip(
        [*range(1, 31), 40, 60, 120, 1000],
        [
            *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
            *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
            *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
            *(2.021, 2.000, 1.980, 1.962),
        ],
        strict=True,
    )
)


class Interval(NamedTuple):
    """A mean of paired values with its 95 % interval.

    Attributes:
        value: The mean; of ratios the geometric one.
        low: Lower end; None if one pair says nothing about spread.
        high: Upper end.
        pairs: How many pairs it rests on.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int

    def side_of(self, neutral: float) -> int:
        """-1 if the whole interval is below ``neutral``, 1 if above, 0 if that cannot be told."""
        if self.low is None or self.high is None:
            return 0
        return -1 if self.high < neutral else 1 if self.low > neutral else 0


def paired_ratio(own: Sequence[float], base: Sequence[float]) -> Interval | None:
    """``own / base`` over pairs; None where there is none, or a value is not positive."""
    if not own or min(*own, *base) <= 0:
        return None
    logs = [math.log(a / b) for a, b in zip(own, base, strict=True)]
    mean = _interval(logs)
    low, high = (None if end is None else math.exp(end) for end in (mean.low, mean.high))
    return Interval(math.exp(mean.value), low, high, mean.pairs)


def paired_difference(own: Sequence[float], base: Sequence[float]) -> Interval | None:
    """``own - base`` over pairs; None where there is none."""
    return _interval([a - b for a, b in zip(own, base, strict=True)]) if own else None


def _interval(values: Sequence[float]) -> Interval:
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, None, None, count)
    half = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def t_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t."""
    return _T[max(df for df in _T if df <= freedom)]

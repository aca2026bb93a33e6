"""One arm beside the arm that it is compared with: losses, times, memory, collectives.

Works on the lines of ``results.jsonl``. Upstream has no counterpart.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_buffer.ablation.intervals import Interval, paired_difference, paired_ratio

Row = Mapping[str, Any]
COUNTS = ('collectives', 'bytes', 'buckets', 'bucket_groups', 'padding')
"""What is counted rather than measured, per step or per rank."""


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """How the losses (and gradient norms) of two arms differ, step by step, over all pairs.

    Attributes:
        is_bit_equal: Every loss and gradient norm of every pair has the same bits.
        is_known: There were losses to compare, all of them finite.
        largest: Largest relative difference of a loss.
        at_step: Where that is, from 1; 0 if there is none.
        grad_norm: Largest relative difference of a gradient norm.
        last: Relative difference in the last step, over pairs; None if there is none.
        curve: Mean difference per step, of the first loss.
        repeats_differ: Largest relative difference between two repeats of one arm with one seed: what this
            workload does by itself; None if no arm of the two has repeats.
        seeds_differ: Relative difference of the last loss between seeds of the other arm; None for one seed.
    """

    is_bit_equal: bool
    is_known: bool
    largest: float
    at_step: int
    grad_norm: float
    last: Interval | None
    curve: list[float | None]
    repeats_differ: float | None
    seeds_differ: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One arm beside another.

    Attributes:
        arm: The arm.
        than: The other one.
        pairs: Runs that both have, by repeat and seed.
        loss: Their losses; None without a pair.
        time: Ratio of the medians of their step times.
        exposed: Difference of the medians of their waiting times, in seconds.
        memory: Ratio of their peaks.
        counts: By name of :data:`COUNTS`: the arm's and the other's.
    """

    arm: str
    than: str
    pairs: int
    loss: LossDifference | None
    time: Interval | None
    exposed: Interval | None
    memory: Interval | None
    counts: Mapping[str, tuple[float, float]]


def compare(arm: str, than: str, rows: Sequence[Row]) -> Comparison:
    """Compares two arms over the runs that both have finished.

    Args:
        arm: Name of the arm.
        than: Name of the other one.
        rows: All results of the sweep.
    """
    own, base = _ok(rows, arm), _ok(rows, than)
    keys = [key for key in own if key in base]
    mine, theirs = [own[key] for key in keys], [base[key] for key in keys]
    return Comparison(
        arm=arm,
        than=than,
        pairs=len(keys),
        loss=_loss(mine, theirs, [*own.values()], [*base.values()]) if keys else None,
        time=_measured(mine, theirs, step_time_s, paired_ratio),
        exposed=_measured(mine, theirs, exposed_s, paired_difference),
        memory=_measured(mine, theirs, lambda row: row['peak_memory_bytes'] or None, paired_ratio),
        counts=(
            {name: (counted(mine[0], name), counted(theirs[0], name)) for name in COUNTS}
            if keys
            else {}
        ),
    )


def _ok(rows: Sequence[Row], arm: str) -> dict[tuple[int, int], Row]:
    return {
        (row['repeat'], row['seed']): row
        for row in rows
        if row['arm'] == arm and row['status'] == 'ok'
    }


def _measured(mine: Sequence[Row], theirs: Sequence[Row], get: Any, how: Any) -> Interval | None:
    pairs = [(get(a), get(b)) for a, b in zip(mine, theirs, strict=True)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return how([a for a, _ in known], [b for _, b in known])


def step_time_s(row: Row) -> float | None:
    """Median time of a run's steps after the first ones."""
    return median_of(row, 'step_time_s')


def exposed_s(row: Row) -> float | None:
    """Median time per step, after the first ones, that the run waited for collectives."""
    return median_of(row, 'exposed_s')


def median_of(row: Row, key: str) -> float | None:
    """Median of a series of a run's steps after the first ones."""
    values = [value for value in row[key][row['warmup_steps'] :] if value is not None]
    return statistics.median(values) if values else None


def counted(row: Row, name: str) -> float:
    """One of :data:`COUNTS` of a run; per step after the first ones, where it is per step."""
    if name in ('collectives', 'bytes'):
        key = 'count' if name == 'collectives' else name
        series = [kind[key][row['warmup_steps'] :] for kind in row['collectives'].values()]
        return statistics.median([sum(step) for step in zip(*series, strict=True)] or [0])
    return row['layout'].get('padding_elems' if name == 'padding' else name, 0)


def _loss(
    mine: Sequence[Row], theirs: Sequence[Row], own: Sequence[Row], base: Sequence[Row]
) -> LossDifference:
    names = sorted({*mine[0]['loss'], *theirs[0]['loss']})
    largest, at_step, norm = 0.0, 0, 0.0
    last: list[float] = []
    is_equal, is_known = True, bool(names)
    curves: list[list[float | None]] = []
    for a, b in zip(mine, theirs, strict=True):
        for name in names:
            one, other = a['loss'].get(name) or [], b['loss'].get(name) or []
            if None in one or None in other or len(one) != len(other) or not one:
                is_known = is_equal = False
                continue
            is_equal = is_equal and one == other
            for step, (x, y) in enumerate(zip(one, other, strict=True), start=1):
                if _relative(x, y) > largest:
                    largest, at_step = _relative(x, y), step
            if name == names[0]:
                curves.append([x - y for x, y in zip(one, other, strict=True)])
                last.append((one[-1] - other[-1]) / abs(other[-1]) if other[-1] else 0.0)
        norms = list(zip(a['grad_norm'], b['grad_norm'], strict=True))
        is_equal = is_equal and a['grad_norm'] == b['grad_norm']
        known = [_relative(x, y) for x, y in norms if x is not None and y is not None]
        norm = max([norm, *known])
    return LossDifference(
        is_bit_equal=is_equal and is_known,
        is_known=is_known,
        largest=largest,
        at_step=at_step,
        grad_norm=norm,
        last=paired_difference(last, [0.0] * len(last)),
        curve=mean_per_step(curves),
        repeats_differ=_largest(_repeats_differ(own), _repeats_differ(base)),
        seeds_differ=_seeds_differ(base),
    )


def _relative(x: float, y: float) -> float:
    """Difference relative to ``y``; absolute where that is 0."""
    return abs(x - y) / (abs(y) or 1.0)


def mean_per_step(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean of several curves in each step; None where one of them has no value."""
    return [
        None if None in values else statistics.fmean(v for v in values if v is not None)
        for values in zip(*curves, strict=True)
    ]


def _largest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _repeats_differ(rows: Sequence[Row]) -> float | None:
    """The widest range of a loss in one step over the repeats of one seed, relative."""
    result: float | None = None
    for seed in {row['seed'] for row in rows}:
        own = [row['loss'] for row in rows if row['seed'] == seed]
        for name in own[0] if len(own) > 1 else ():
            for values in zip(*(losses.get(name, ()) for losses in own), strict=False):
                if None not in values:
                    result = _largest(result, _relative(max(values), min(values)))
    return result


def _seeds_differ(rows: Sequence[Row]) -> float | None:
    last: dict[int, float] = {}
    for row in rows:
        series = next(iter(row['loss'].values()), None)
        if series and series[-1] is not None:
            last.setdefault(row['seed'], series[-1])
    if len(last) < 2:
        return None
    return statistics.stdev(last.values()) / abs(statistics.fmean(last.values()) or 1.0)

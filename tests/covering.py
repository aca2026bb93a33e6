"""Rows of choices that meet in every possible pair: a covering array, made greedily from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

Choice = tuple[str, str]
"""A factor and one of its values."""
Row = dict[str, str]
"""A value for each factor."""
Allowed = Callable[[Choice, Choice], bool]
"""Whether two choices can be in one row."""


def possible_pairs(
    factors: Mapping[str, Sequence[str]], allowed: Allowed
) -> set[frozenset[Choice]]:
    """All pairs of values of two factors that may meet."""
    return {
        frozenset((one, other))
        for a, b in itertools.combinations(factors, 2)
        for one in ((a, value) for value in factors[a])
        for other in ((b, value) for value in factors[b])
        if allowed(one, other)
    }


def pairs_of(rows: Iterable[Row]) -> set[frozenset[Choice]]:
    """All pairs of values that meet in some row."""
    return {
        frozenset(pair) for row in rows for pair in itertools.combinations(sorted(row.items()), 2)
    }


def covering_rows(
    factors: Mapping[str, Sequence[str]],
    allowed: Allowed,
    *,
    at_least: int = 0,
    seed: int = 0,
    tries: int = 6,
) -> list[Row]:
    """Rows in which every possible pair meets, then random ones until there are ``at_least``."""
    rng = random.Random(seed)
    left = possible_pairs(factors, allowed)
    rows: list[Row] = []
    while left:
        # Sorted: the order of a set is another one in every process.
        start = rng.choice(sorted(map(sorted, left)))
        made = [_fill(dict(start), factors, allowed, left, rng) for _ in range(tries)]
        row = max((row for row in made if row), key=lambda row: len(pairs_of([row]) & left))
        left -= pairs_of([row])
        rows.append(row)
    while len(rows) < at_least:
        row = _fill({}, factors, allowed, set(), rng)
        if row and row not in rows:
            rows.append(row)
    return rows


def _fill(
    row: Row,
    factors: Mapping[str, Sequence[str]],
    allowed: Allowed,
    left: set[frozenset[Choice]],
    rng: random.Random,
) -> Row:
    """Completes a row so that many pairs of ``left`` meet; {} where choices lead into a dead end."""
    row = dict(row)
    others = [factor for factor in factors if factor not in row]
    rng.shuffle(others)
    for factor in others:
        values = [
            value
            for value in factors[factor]
            if all(allowed((factor, value), chosen) for chosen in row.items())
        ]
        if not values:
            return {}
        rng.shuffle(values)
        row[factor] = max(
            values,
            key=lambda value: sum(
                frozenset(((factor, value), chosen)) in left for chosen in row.items()
            ),
        )
    return {factor: row[factor] for factor in factors}

"""What a comparison means: a sentence for people, and whether what was expected came true.

Upstream has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_buffer.ablation.compare import Comparison, Row
from megatron_buffer.ablation.intervals import Interval
from megatron_buffer.ablation.sweep import KINDS

CONFIRMED, NOT_CONFIRMED, UNDECIDED = 'confirmed', 'not confirmed', 'undecided'

_COUNTS = {
    'collectives': 'collectives',
    'bytes': 'bytes',
    'buckets': 'buckets',
    'padding': 'padding',
}
_SIDES = {'fewer': -1, 'less': -1, 'same': 0, 'more': 1}
_ROUNDING = 1e-9


class Verdict(NamedTuple):
    """Whether an expectation came true.

    Attributes:
        kind: What was expected.
        text: The same in words.
        outcome: One of :data:`CONFIRMED`, :data:`NOT_CONFIRMED`, :data:`UNDECIDED`.
        why: The figures that say so.
    """

    kind: str
    text: str
    outcome: str
    why: str


def judge(
    expected: Mapping[str, Any],
    arm: str,
    than: str,
    rows: Sequence[Row],
    comparison: Callable[[str, str], Comparison],
) -> Verdict:
    """Says whether one expectation of an arm came true.

    Args:
        expected: ``kind``, ``than``, ``tolerance``, ``error``, as in ``sweep.json``.
        arm: The arm.
        than: What it is compared with, unless the expectation names another.
        rows: All results of the sweep.
        comparison: Compares two arms.
    """
    kind = expected['kind']
    than = expected['than'] or than
    text = KINDS[kind].text
    if kind in ('runs', 'fails'):
        if expected['error']:
            text += f' {expected["error"]}'
        return Verdict(kind, text, *_fate(kind, expected['error'], arm, rows))
    tolerance = expected['tolerance']
    if tolerance is not None and kind != 'same_bytes':
        text = text.replace('a relative tolerance', f'{tolerance:g}').replace(
            'a tolerance', f'{tolerance:g}'
        )
    text += f', beside {than}'
    found = comparison(arm, than)
    if not found.pairs:
        return Verdict(kind, text, UNDECIDED, f'no run of both {arm} and {than} has finished')
    side, _, what = kind.partition('_')
    if kind in ('bit_equal', 'loss_close', 'loss_differs'):
        outcome = _loss(kind, tolerance, found)
    elif what in _COUNTS:
        outcome = _count(_SIDES[side], tolerance or 0.0, *found.counts[what])
    elif what == 'memory':
        outcome = _ratio(_SIDES[side], 0.0, found.memory, 'peak memory')
    elif what == 'exposed':
        outcome = _exposed(_SIDES[side], found.exposed)
    else:
        wanted = {'faster': -1, 'slower': 1}.get(kind, 0)
        outcome = _ratio(wanted, tolerance or 0.0, found.time, 'step time')
    return Verdict(kind, text, *outcome)


def _fate(kind: str, error: str, arm: str, rows: Sequence[Row]) -> tuple[str, str]:
    own = [row for row in rows if row['arm'] == arm]
    failed = [row for row in own if row['status'] != 'ok']
    if not own:
        return UNDECIDED, 'no run of it has ended'
    if kind == 'runs':
        why = f'{len(own) - len(failed)} of {len(own)} runs ended well'
        return (NOT_CONFIRMED if failed else CONFIRMED), why
    right = [row for row in failed if not error or row['error']['class'] == error]
    seen = ', '.join(sorted({row['error']['class'] or 'an unknown error' for row in failed}))
    why = f'{len(failed)} of {len(own)} runs failed{" with " + seen if seen else ""}'
    return (CONFIRMED if len(right) == len(own) else NOT_CONFIRMED), why


def _loss(kind: str, tolerance: float | None, found: Comparison) -> tuple[str, str]:
    loss = found.loss
    if loss is None or not loss.is_known:
        return UNDECIDED, 'there are no losses to compare, or they are not finite'
    if kind == 'bit_equal':
        if loss.is_bit_equal:
            return CONFIRMED, f'in {_pairs(found)}'
        why = f'they differ, by up to {loss.largest:.2g} (grad norm: {loss.grad_norm:.2g})'
        return NOT_CONFIRMED, why
    is_close = loss.largest <= (tolerance or 0.0)
    why = f'largest difference {loss.largest:.2g}'
    return (CONFIRMED if is_close == (kind == 'loss_close') else NOT_CONFIRMED), why


def _count(wanted: int, tolerance: float, own: float, base: float) -> tuple[str, str]:
    margin = tolerance * abs(base) + _ROUNDING
    side = -1 if own < base - margin else 1 if own > base + margin else 0
    return (CONFIRMED if side == wanted else NOT_CONFIRMED), f'{own:,.0f} beside {base:,.0f}'


def _ratio(wanted: int, tolerance: float, ratio: Interval | None, what: str) -> tuple[str, str]:
    if ratio is None:
        return UNDECIDED, f'no {what} was measured'
    why = f'{what} x {shown(ratio)}'
    if ratio.low is None or ratio.high is None:
        return UNDECIDED, f'{why}: one pair of runs has no spread; repeat it'
    if wanted:
        side = ratio.side_of(1.0)
        return (UNDECIDED if not side else CONFIRMED if side == wanted else NOT_CONFIRMED), why
    within = 1 - tolerance <= ratio.low and ratio.high <= 1 + tolerance
    beyond = ratio.high < 1 - tolerance or ratio.low > 1 + tolerance
    return (CONFIRMED if within else NOT_CONFIRMED if beyond else UNDECIDED), why


def _exposed(wanted: int, found: Interval | None) -> tuple[str, str]:
    if found is None:
        return UNDECIDED, 'no waiting was measured'
    why = f'{shown(found, 1e3, sign="+")} ms a step'
    side = found.side_of(0.0)
    return (UNDECIDED if not side else CONFIRMED if side == wanted else NOT_CONFIRMED), why


def shown(found: Interval, factor: float = 1.0, sign: str = '') -> str:
    """An interval in text: ``1.02 (0.99 to 1.05)``."""
    values = (found.value, found.low, found.high)
    value, low, high = (None if v is None else f'{factor * v:{sign}.3f}' for v in values)
    return f'{value} ({low} to {high})' if low is not None else f'{value} (one pair)'


def _pairs(found: Comparison) -> str:
    return f'{found.pairs} pair{"s" * (found.pairs > 1)} of runs'


def sentence(found: Comparison) -> str:
    """What is different between two arms, and whether that is more than noise."""
    if not found.pairs:
        return f'Nothing can be said: no run of both this arm and {found.than} has finished.'
    return f'{_about_loss(found)} {_about_time(found)}'


def _about_loss(found: Comparison) -> str:
    loss, than = found.loss, found.than
    if loss is None or not loss.is_known:
        return (
            'The runs reported no losses, or some that are not finite, so these are not compared.'
        )
    if loss.is_bit_equal:
        return (
            f'Every loss and gradient norm equals that of {than}, bit for bit, in '
            f'{_pairs(found)}.'
        )
    if loss.largest == 0:
        return (
            f'The losses equal those of {than}, but gradient norms differ by up to {loss.grad_norm:.2g} '
            '(relative).'
        )
    text = f'Losses differ from {than} by up to {loss.largest:.2g} (relative, step {loss.at_step})'
    if loss.repeats_differ is None:
        return f'{text}. Without repeats nothing says whether that is more than noise.'
    if loss.repeats_differ > 0:
        text += f'; repeats of one arm by {loss.repeats_differ:.2g}'
        if loss.last is None or loss.last.low is None:
            return f'{text}. One pair of runs cannot tell that from noise.'
        side = 'more than noise' if loss.last.side_of(0.0) else 'no more than noise'
        return f'{text}. In the last step the difference is {side}: {shown(loss.last, sign="+")}.'
    text += ', a real difference: repeats of one arm are equal'
    if loss.seeds_differ is None:
        return f'{text}. With one seed nothing says how it compares with the luck of a seed.'
    size = 'less' if loss.largest < loss.seeds_differ else 'more'
    return f'{text}; it is {size} than seeds differ among themselves ({loss.seeds_differ:.2g}).'


def _about_time(found: Comparison) -> str:
    time = found.time
    if time is None:
        return 'No step time was measured.'
    if time.low is None:
        return f'Its steps took {time.value:.3f} times as long, once: one pair of runs cannot tell that from noise.'
    percent = 100 * abs(time.value - 1)
    how = 'longer' if time.value > 1 else 'shorter'
    if time.side_of(1.0):
        return f'Its steps are {percent:.1f} % {how}, more than noise: ratio {shown(time)}.'
    return f'A difference in step time cannot be told from noise: ratio {shown(time)}.'

"""Small figures as SVG, to be written into a page: dots with intervals, lines, stacked bars.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; shapes and dashes say the same, for
print. Text takes the colour of the page. Upstream has no counterpart.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#666666')
DASHES = ('', '7 3', '2 3', '9 3 2 3', '12 4', '4 2 1 2', '1 4')
_SHAPES = ('circle', 'square', 'triangle', 'diamond', 'plus', 'cross', 'circle')
_WIDTH = 760
_ROW = 26
_FONT = 13
_CHAR = 7.2  # of the font above, on average


class Dot(NamedTuple):
    """A value with its interval, in a row of its own."""

    label: str
    value: float
    low: float | None
    high: float | None
    text: str


class Line(NamedTuple):
    """A curve: a value per step, from step 1; None leaves a gap."""

    label: str
    values: Sequence[float | None]


class Bar(NamedTuple):
    """A row of parts, one behind the other, and what to write behind them."""

    label: str
    parts: Sequence[float]
    text: str


def dots(title: str, rows: Sequence[Dot], *, neutral: float, unit: str) -> str:
    """A row per value; the vertical line is where there is no difference."""
    left, right, top = _label_width([row.label for row in rows]), 210, 8
    height = top + _ROW * len(rows) + 40
    ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None]
    scale = _Scale([*ends, neutral], left, _WIDTH - right, pad=0.08)
    parts = _bottom_axis(scale, top, height - 40, unit)
    x = scale(neutral)
    parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{height - 40}" class="neutral"/>')
    for index, row in enumerate(rows):
        y = top + _ROW * (index + 0.5)
        parts.append(_text(left - 10, y, row.label, 'end'))
        if row.low is not None and row.high is not None:
            low, high = scale(row.low), scale(row.high)
            parts.append(
                f'<path d="M{low:.1f} {y - 5:.1f}v10M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 5:.1f}v10" '
                f'stroke="{COLORS[0]}" stroke-width="2" fill="none"/>'
            )
        hollow = row.low is None
        parts.append(_marker(scale(row.value), y, 0, hollow=hollow))
        parts.append(_text(_WIDTH - right + 14, y, row.text))
    return _svg(title, height, parts)


def lines(
    title: str, series: Sequence[Line], *, unit: str, below: str = 'step', with_zero: bool = False
) -> str:
    """Curves over steps, with a legend."""
    left, top, plot = 84, 10, 240
    legend = _legend([line.label for line in series], left, top + plot + 46, dashed=True)
    height = top + plot + 46 + legend[1]
    values = [v for line in series for v in line.values if v is not None]
    steps = max((len(line.values) for line in series), default=1)
    across = _Scale([1, max(2, steps)], left, _WIDTH - 12, pad=0.01)
    up = _Scale([*values, 0.0] if with_zero or not values else values, top + plot, top, pad=0.06)
    parts: list[str] = []
    for tick in up.ticks(5):
        y = up(tick)
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{_WIDTH - 12}" y2="{y:.1f}" class="grid"/>'
        )
        parts.append(_text(left - 8, y, up.label(tick), 'end'))
    for tick in across.ticks(8):
        if tick == int(tick) and 1 <= tick <= steps:
            parts.append(_text(across(tick), top + plot + 14, str(int(tick)), 'middle'))
    parts.append(_text((left + _WIDTH) / 2, top + plot + 32, below, 'middle', 'unit'))
    parts.append(
        f'<text transform="translate(14 {top + plot / 2:.0f}) rotate(-90)" text-anchor="middle" '
        f'class="unit">{_escape(unit)}</text>'
    )
    for index, line in enumerate(series):
        style = _style(index)
        for piece in _pieces(line.values):
            points = ' '.join(f'{across(step):.1f},{up(value):.1f}' for step, value in piece)
            parts.append(f'<polyline points="{points}" fill="none" stroke-width="2" {style}/>')
            marked = piece if len(piece) <= 12 else piece[:: max(1, len(piece) // 8)]
            parts += [_marker(across(step), up(value), index, size=3.5) for step, value in marked]
    return _svg(title, height, [*parts, *legend[0]])


def bars(title: str, rows: Sequence[Bar], *, names: Sequence[str], unit: str) -> str:
    """Rows of stacked bars, with a legend of the parts."""
    left, right, top = _label_width([row.label for row in rows]), 190, 8
    bottom = top + _ROW * len(rows)
    legend = _legend(names, left, bottom + 46, dashed=False)
    longest = max((sum(row.parts) for row in rows), default=0.0)
    scale = _Scale([0.0, longest or 1.0], left, _WIDTH - right, pad=0.0)
    parts = _bottom_axis(scale, top, bottom, unit)
    for index, row in enumerate(rows):
        y, at = top + _ROW * index, 0.0
        parts.append(_text(left - 10, y + _ROW / 2, row.label, 'end'))
        for number, part in enumerate(row.parts):
            width = scale(at + part) - scale(at)
            parts.append(
                f'<rect x="{scale(at):.1f}" y="{y + 5}" width="{max(width, 0):.1f}" height="{_ROW - 10}" '
                f'fill="{_color(number)}" stroke="currentColor" stroke-width=".5"/>'
            )
            at += part
        parts.append(_text(scale(at) + 8, y + _ROW / 2, row.text))
    return _svg(title, bottom + 46 + legend[1], [*parts, *legend[0]])


class _Scale:
    """Values to places on the page, and round values to write beside it."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, pad: float) -> None:
        low, high = min(values), max(values)
        room = (high - low) * pad or (abs(high) * 0.1 or 1.0) * (high == low)
        self._low, self._high = low - room, high + room
        self._start, self._end = start, end
        self._step = 1.0

    def __call__(self, value: float) -> float:
        share = (value - self._low) / ((self._high - self._low) or 1.0)
        return self._start + share * (self._end - self._start)

    def ticks(self, wanted: int) -> list[float]:
        """Round values, about as many as wanted."""
        rough = (self._high - self._low) / wanted or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        self._step = power * next(n for n in (1, 2, 5, 10) if n * power >= rough * 0.999)
        first, last = math.ceil(self._low / self._step), math.floor(self._high / self._step)
        return [number * self._step for number in range(first, last + 1)]

    def label(self, value: float) -> str:
        """A tick in text, with the digits that tell it from its neighbours."""
        if value and not 1e-3 <= abs(value) < 1e6:
            return f'{value:.2g}'
        digits = max(0, -math.floor(math.log10(self._step) + 1e-9))
        return (
            (f'{value:,.{digits}f}' if digits < 6 else f'{value:.3g}')
            if abs(value) > self._step / 1e6
            else '0'
        )


def _bottom_axis(scale: _Scale, top: float, bottom: float, unit: str) -> list[str]:
    parts: list[str] = []
    for tick in scale.ticks(5):
        x = scale(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(_text(x, bottom + 13, scale.label(tick), 'middle'))
    middle = (scale(scale._low) + scale(scale._high)) / 2
    parts.append(_text(middle, bottom + 31, unit, 'middle', 'unit'))
    return parts


def _pieces(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in enumerate(values, start=1):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    return [piece for piece in pieces if piece]


def _legend(
    labels: Sequence[str], left: float, top: float, *, dashed: bool
) -> tuple[list[str], float]:
    """The legend's parts and its height."""
    parts: list[str] = []
    x, y = left, top + 10
    for index, label in enumerate(labels):
        width = 44 + _CHAR * len(label)
        if x > left and x + width > _WIDTH:
            x, y = left, y + 20
        if dashed:
            style = _style(index)
            parts.append(
                f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" stroke-width="2" {style}/>'
            )
            parts.append(_marker(x + 13, y, index, size=3.5))
        else:
            parts.append(
                f'<rect x="{x + 8}" y="{y - 6}" width="14" height="12" fill="{_color(index)}" '
                'stroke="currentColor" stroke-width=".5"/>'
            )
        parts.append(_text(x + 32, y, label))
        x += width
    return parts, y - top + 14


def _marker(x: float, y: float, index: int, size: float = 5.0, *, hollow: bool = False) -> str:
    color = _color(index)
    paint = f'fill="none" stroke="{color}" stroke-width="2"' if hollow else f'fill="{color}"'
    shape = _SHAPES[index % len(_SHAPES)]
    s = size
    if shape == 'circle':
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{s}" {paint}/>'
    paths = {
        'square': f'M{-s} {-s}H{s}V{s}H{-s}Z',
        'triangle': f'M0 {-1.2 * s:.1f}L{s} {s}H{-s}Z',
        'diamond': f'M0 {-1.3 * s:.1f}L{s} 0L0 {1.3 * s:.1f}L{-s} 0Z',
        'plus': f'M{-s} -1H-1V{-s}H1V-1H{s}V1H1V{s}H-1V1H{-s}Z',
        'cross': f'M{-s} {-s}L{s} {s}M{s} {-s}L{-s} {s}',
    }
    if shape == 'cross':
        paint = f'fill="none" stroke="{color}" stroke-width="2"'
    return f'<path d="{paths[shape]}" transform="translate({x:.1f} {y:.1f})" {paint}/>'


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _style(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ''
    return f'stroke="{_color(index)}"{dashes}'


def _label_width(labels: Sequence[str]) -> float:
    return min(260.0, 20 + _CHAR * max((len(label) for label in labels), default=0))


def _text(x: float, y: float, text: str, anchor: str = 'start', style: str = '') -> str:
    text = text if len(text) <= 40 else f'{text[:24]}…{text[-14:]}'
    kind = f' class="{style}"' if style else ''
    return (
        f'<text x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="{anchor}"{kind}>{_escape(text)}</text>'
    )


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    inner = '\n'.join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'font-size="{_FONT}" aria-label="{_escape(title)}">\n<title>{_escape(title)}</title>\n{inner}\n</svg>'
    )


def _escape(text: str) -> str:
    return html.escape(text, quote=True)

"""The figures of a report: which there are, and what they show. Upstream has no counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_buffer.ablation import compare, svg
from megatron_buffer.ablation.judge import shown
from megatron_buffer.ablation.report import ArmReport, Report

_MOST_CURVES = len(svg.DASHES)


class Figure(NamedTuple):
    """A figure.

    Attributes:
        key: For the page's anchors.
        title: Above it.
        caption: Below it.
        drawing: SVG.
    """

    key: str
    title: str
    caption: str
    drawing: str


def figures(report: Report) -> list[Figure]:
    """Every figure that there are values for."""
    made = (
        _times(report),
        _losses(report),
        _differences(report),
        _order(report),
        _waiting(report),
        _bytes(report),
    )
    return [figure for figure in made if figure is not None]


def _times(report: Report) -> Figure | None:
    rows = [
        svg.Dot(arm.name, ratio.value, ratio.low, ratio.high, shown(ratio))
        for arm in report.arms
        if arm.comparison is not None and (ratio := arm.comparison.time) is not None
    ]
    if not rows:
        return None
    title = 'Step time, as a ratio'
    caption = (
        'Step time of each arm divided by that of the arm it is compared with (dashed: no difference). The bar is '
        'the 95 % interval over interleaved pairs of runs; a hollow dot has one pair only.'
    )
    drawing = svg.dots(title, rows, neutral=1.0, unit='ratio of step times; left is faster')
    return Figure('figure-times', title, caption, drawing)


def _losses(report: Report) -> Figure | None:
    """Curves that are equal are drawn once."""
    shown_arms: dict[tuple[float | None, ...], list[str]] = {}
    for arm in report.arms:
        if arm.loss:
            shown_arms.setdefault(tuple(arm.loss), []).append(arm.name)
    if not shown_arms:
        return None
    lines = [
        svg.Line(_names(names), values) for values, names in list(shown_arms.items())[:_MOST_CURVES]
    ]
    caption = 'Mean over runs. Arms whose curves are equal, bit for bit, are drawn as one.'
    caption += _left_out(len(shown_arms))
    return Figure('figure-losses', 'Loss', caption, svg.lines('Loss', lines, unit='loss'))


def _differences(report: Report) -> Figure | None:
    lines = [
        svg.Line(f'{arm.name} - {arm.than}', arm.comparison.loss.curve)
        for arm in report.arms
        if arm.comparison is not None
        and arm.comparison.loss is not None
        and arm.comparison.loss.is_known
        and arm.comparison.loss.largest > 0
    ]
    if not lines:
        return None
    title = 'Difference of losses'
    caption = 'Mean over pairs of runs with one seed; arms that are bit-equal are not drawn.'
    caption += _left_out(len(lines))
    drawing = svg.lines(title, lines[:_MOST_CURVES], unit='difference of losses', with_zero=True)
    return Figure('figure-differences', title, caption, drawing)


def _order(report: Report) -> Figure | None:
    """Every run in the order in which it started: a drift of the machine shows."""
    good = [row for row in report.rows if row['status'] == 'ok']
    places = {row['run']: index for index, row in enumerate(good)}
    lines: list[svg.Line] = []
    for arm in report.arms[:_MOST_CURVES]:
        values: list[float | None] = [None] * len(good)
        for row in arm.rows:
            seconds = compare.step_time_s(row)
            values[places[row['run']]] = None if seconds is None else 1e3 * seconds
        if any(value is not None for value in values):
            lines.append(svg.Line(arm.name, values))
    if not lines or len(good) < 2:
        return None
    title = 'Step time of every run'
    caption = 'In the order in which the runs started. A slope that all arms share is the machine, not the arms.'
    caption += _left_out(len(report.arms))
    drawing = svg.lines(title, lines, unit='ms a step', below='run')
    return Figure('figure-order', title, caption, drawing)


def _waiting(report: Report) -> Figure | None:
    rows: list[svg.Bar] = []
    for arm in report.arms:
        if None not in arm.exposed_s:
            parts = [1e3 * (part or 0.0) for part in arm.exposed_s]
            rows.append(svg.Bar(arm.name, parts, f'{sum(parts):,.2f} ms'))
    if not rows:
        return None
    title = 'Time waited for collectives'
    caption = 'Per step, of the rank that waited longest; median over steps, then over runs.'
    drawing = svg.bars(
        title, rows, names=('reducing gradients', 'gathering parameters'), unit='ms a step'
    )
    return Figure('figure-waiting', title, caption, drawing)


def _bytes(report: Report) -> Figure | None:
    kinds = list(dict.fromkeys(kind for arm in report.arms for kind in arm.collectives))
    rows = [_bytes_row(arm, kinds) for arm in report.arms if arm.rows]
    if not kinds or not rows:
        return None
    title = 'Bytes on the wire'
    caption = "Of the buffer's collectives, per rank and step; how many collectives stands behind each bar."
    names = [kind.replace('_', '-') for kind in kinds]
    drawing = svg.bars(title, rows, names=names, unit='MiB a step')
    return Figure('figure-bytes', title, caption, drawing)


def _bytes_row(arm: ArmReport, kinds: Sequence[str]) -> svg.Bar:
    cells = [arm.collectives.get(kind, (0.0, 0.0)) for kind in kinds]
    count, size = sum(count for count, _ in cells), sum(size for _, size in cells) / 2**20
    return svg.Bar(arm.name, [size / 2**20 for _, size in cells], f'{count:,.0f}, {size:,.2f} MiB')


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f'{names[0]} and {len(names) - 1} equal to it'


def _left_out(count: int) -> str:
    more = count - _MOST_CURVES
    return f' Not drawn, for lack of room: {more} more.' if more > 0 else ''

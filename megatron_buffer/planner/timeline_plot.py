"""A simulated iteration as a figure: what the rank computes, what is on the wire, what it waits for."""

from __future__ import annotations

from typing import Any

from megatron_buffer.planner import figures
from megatron_buffer.planner.plan_render import sizes_of
from megatron_buffer.planner.scene import Outcome, Scene
from megatron_buffer.planner.timeline import Event, Timeline
from megatron_buffer.planner.trace import waits
from megatron_buffer.planner.units import duration, size

_LANES = ('compute', 'reductions', 'gathers', 'exposed')
_LANE_OF = {'reduce': 1, 'gather': 2}
_COLOURS = {
    'other': '#D9D9D9',
    'backward': figures.SKY,
    'forward': figures.BLUE,
    'optimizer': figures.GREEN,
    'reduce': figures.ORANGE,
    'gather': figures.PINK,
}
_LABELS = {
    'backward': 'backward of the last micro-batch',
    'reduce': 'reduction of a bucket group',
    'optimizer': 'optimizer step',
    'gather': 'gather of a bucket group',
    'forward': 'forward of the next micro-batch',
}
_WIDE_ENOUGH = 0.035  # of the axis, for a label inside
_THIN = 0.002  # of the axis, so that black edges would hide the colour


def plot_timeline(outcome: Outcome, scene: Scene, path: str) -> None:
    """Draws from the last backward pass on to the end of the first forward pass, and writes it."""
    timeline = outcome.timeline
    title = f'{scene.model}, {sizes_of(scene.job)}; {scene.network_name}; config '
    title += outcome.ask.runtime.config.source
    begin = max((e.end_s for e in timeline.events if e.kind == 'other'), default=0.0)
    spans = [(begin, timeline.end_s)]
    exposed = [(start, end) for _, start, end in waits(timeline)]
    first, last = timeline.backward_end_s, timeline.optimizer_end_s
    if exposed:
        last = max(last, min(exposed[-1][1], exposed[0][1] + 3 * (last - first)))
        room = 1.5 * (last - first)
        if 2 * room + last - first < 0.4 * (timeline.end_s - begin):
            spans.append((first - room, last + room))
    with figures.figure(path, 13.0, 1.2 + 2.6 * len(spans), title) as figure:
        for axes, span in zip(
            figure.subplots(len(spans), 1, squeeze=False)[:, 0], spans, strict=True
        ):
            _draw(axes, timeline, begin, span)
        _say_sums(figure.axes[0], timeline)
        figure.axes[-1].set_xlabel(
            f'{_unit(timeline, begin)[1]} from the start of the last backward pass'
        )
        if len(spans) > 1:
            figure.axes[1].set_title('the same, enlarged', loc='left', fontsize=9, pad=14)
        _legend(figure)


def _unit(timeline: Timeline, begin: float) -> tuple[float, str]:
    return (1.0, 's') if timeline.end_s - begin >= 2.0 else (1e3, 'ms')


def _draw(axes: Any, timeline: Timeline, begin: float, span: tuple[float, float]) -> None:
    """One stretch of the timeline; times count from ``begin``."""
    scale, _ = _unit(timeline, begin)
    length = (span[1] - span[0]) * scale or 1.0
    numbers = {'reduce': 0, 'gather': 0}
    for event in timeline.events:
        if event.kind in numbers:
            numbers[event.kind] += 1
        if event.kind == 'other' or event.end_s < span[0] or event.start_s > span[1]:
            continue
        lane, alpha = _LANE_OF.get(event.kind, 0), 1.0
        if event.kind in numbers:
            alpha = 1.0 if numbers[event.kind] % 2 else 0.55
        left, width = (event.start_s - begin) * scale, event.duration_s * scale
        edge = 'none' if event.kind in ('backward', 'forward') else 'black'
        if width / length < _THIN:
            edge = _COLOURS[event.kind]
        axes.broken_barh(
            [(left, width)],
            (lane - 0.36, 0.72),
            facecolor=_COLOURS[event.kind],
            alpha=alpha,
            edgecolor=edge,
            lw=0.4,
        )
        label = _label(event)
        if label and width / length > _WIDE_ENOUGH:
            axes.text(
                left + width / 2, lane, label, ha='center', va='center', fontsize=7, clip_on=True
            )
    for _, start, end in waits(timeline):
        left, width = (start - begin) * scale, (end - start) * scale
        axes.broken_barh(
            [(left, width)],
            (2.64, 0.72),
            facecolor='white',
            edgecolor=figures.RED,
            hatch='////',
            lw=0.8,
        )
        if width / length > _WIDE_ENOUGH:
            axes.text(
                left + width / 2,
                3,
                duration(end - start),
                ha='center',
                va='center',
                fontsize=8,
                weight='bold',
                backgroundcolor='white',
                clip_on=True,
            )
    for at, text in (
        (timeline.backward_end_s, 'backward ends'),
        (timeline.optimizer_end_s, 'forward begins'),
    ):
        axes.axvline((at - begin) * scale, color='black', lw=0.8, ls=':')
        axes.annotate(
            text,
            ((at - begin) * scale, -0.5),
            ha='right' if text.startswith('backward') else 'left',
            va='bottom',
            fontsize=8,
            annotation_clip=False,
        )
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.set_xlim((span[0] - begin) * scale, (span[1] - begin) * scale)
    axes.grid(axis='x', lw=0.4, color='#DDDDDD')
    figures.bare(axes)


def _say_sums(axes: Any, timeline: Timeline) -> None:
    axes.set_title(
        f'exposed: {duration(timeline.exposed_grad_s)} reductions, '
        f'{duration(timeline.exposed_param_s)} gathers; '
        f'{100 * timeline.hidden_share:.0f} % of communication hidden',
        loc='right',
        fontsize=9,
        pad=14,
    )


def _label(event: Event) -> str:
    if event.kind == 'reduce':
        return size(event.bytes)
    return 'optimizer' if event.kind == 'optimizer' else ''


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=_COLOURS[kind], edgecolor='black', lw=0.4, label=label)
        for kind, label in _LABELS.items()
    ]
    handles.append(
        Patch(facecolor='white', edgecolor=figures.RED, hatch='////', label='the rank waits')
    )
    figure.legend(handles=handles, loc='outside lower left', ncols=6, fontsize=8, frameon=False)

"""Exposed communication over bucket size as a figure, with the best that was found."""

from __future__ import annotations

from typing import Any

from megatron_buffer.planner import figures
from megatron_buffer.planner.plan_render import sizes_of
from megatron_buffer.planner.scene import Scene
from megatron_buffer.planner.tune import Candidate, Found
from megatron_buffer.planner.tune_output import sweep_points
from megatron_buffer.planner.units import amount, duration


def plot_sweep(scene: Scene, found: Found, path: str) -> None:
    """Draws the sweep over fixed sizes and writes it."""
    title = f'{scene.model}, {sizes_of(scene.job)}; {scene.network_name}'
    with figures.figure(path, 9.0, 5.0, title) as figure:
        _draw(figure.subplots(), found)


def _draw(axes: Any, found: Found) -> None:
    points = sweep_points(found)
    sizes = [size for size, _, _ in points]
    most = max((grad + param for _, grad, param in points), default=0.0)
    scale, unit = (1.0, 's') if most >= 2.0 else (1e3, 'ms')
    both = [(grad + param) * scale for _, grad, param in points]
    for column, label, colour, marker in (
        (1, 'reductions alone', figures.ORANGE, 's'),
        (2, 'gathers alone', figures.PINK, '^'),
    ):
        values = [point[column] * scale or float('nan') for point in points]
        axes.plot(sizes, values, color=colour, lw=1.2, marker=marker, ms=3.5, label=label)
    axes.plot(sizes, both, color='black', lw=1.6, marker='o', ms=4, label='fixed_size, both')
    asked, best = found.asked, found.ranking[0]
    _level(axes, asked, scale, f'{asked.config.source} as given', figures.BLUE, '--')
    if asked.outcome.timeline.exposed_s != best.outcome.timeline.exposed_s:
        _level(axes, best, scale, f'best: {best.what}', figures.GREEN, '-')
    axes.set_xscale('log')
    if most > 0:
        axes.set_yscale('log')
        axes.yaxis.set_major_formatter(lambda value, place: f'{value:g}')
        axes.yaxis.set_minor_formatter(
            lambda value, place: f'{value:g}' if f'{value:.0e}'[0] in '25' else ''
        )
    axes.xaxis.set_major_formatter(lambda value, place: amount(round(value)))
    axes.set_xlabel('bucket size in elements')
    axes.set_ylabel(f'exposed in an iteration, {unit}')
    axes.grid(axis='both', which='both', lw=0.4, color='#E4E4E4')
    figures.bare(axes)
    axes.figure.legend(loc='outside lower left', ncols=3, fontsize=8, frameon=False)


def _level(
    axes: Any, candidate: Candidate, scale: float, label: str, colour: str, style: str
) -> None:
    """A line across; with the number of groups, as the size may be no single one."""
    text = f'{label}: {duration(candidate.exposed_s)}, {candidate.num_groups} groups'
    axes.axhline(candidate.exposed_s * scale, color=colour, ls=style, lw=1.6, label=text)

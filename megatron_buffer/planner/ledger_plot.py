"""The memory ledger as a figure: a stacked bar per pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_buffer.planner import figures
from megatron_buffer.planner.ledger import Memory
from megatron_buffer.planner.plan_render import sizes_of
from megatron_buffer.planner.stages import Ask, StageLedger
from megatron_buffer.planner.units import size

PARTS: Sequence[tuple[str, str, str]] = (
    ('grad_data', 'grad_data', figures.ORANGE),
    ('param_data', 'param_data', figures.SKY),
    ('module_param', 'parameters of modules', figures.YELLOW),
    ('te_rowwise', "Transformer Engine's rowwise storage", figures.PINK),
    ('te_columnwise', 'its columnwise copy', figures.RED),
    ('optimizer', 'main parameters and optimizer state', figures.GREEN),
    ('temporary', 'temporaries, at most (not resident)', 'white'),
)
"""What a bar is made of: the field of :class:`Memory` without ``_bytes``, what it is called, its colour."""

_FEW_STAGES = 24


def parts_of(memory: Memory) -> list[int]:
    """Bytes of each of :data:`PARTS`."""
    return [getattr(memory, f'{field}_bytes') for field, _, _ in PARTS]


def plot_ledger(stages: Sequence[StageLedger], ask: Ask, path: str) -> None:
    """Draws the heaviest rank of each stage, and writes the figure.

    Args:
        stages: Every pipeline stage.
        ask: What the plan was made for.
        path: The file.
    """
    width = min(16.0, max(7.0, 2.0 + 0.62 * len(stages)))
    recipe = f', {ask.recipe.name} weights' if ask.recipe else ''
    title = f'{ask.model}, {sizes_of(stages[0].job)}{recipe}\n'
    title += f"the heaviest rank of each stage; config {ask.runtime.config.source}"
    with figures.figure(path, width, 5.2, title) as figure:
        _draw(figure.subplots(), stages)


def _draw(axes: Any, stages: Sequence[StageLedger]) -> None:
    places = list(range(len(stages)))
    bottoms = [0.0] * len(stages)
    columns = [parts_of(stage.memory) for stage in stages]
    for part, (field, label, colour) in enumerate(PARTS):
        heights = [column[part] / 1e9 for column in columns]
        if not any(heights):
            continue
        axes.bar(
            places,
            heights,
            width=0.72,
            bottom=bottoms,
            label=label,
            color=colour,
            edgecolor='black',
            lw=0.5,
            hatch='////' if field == 'temporary' else None,
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    top = max(bottoms) or 1.0
    if len(stages) <= _FEW_STAGES:
        for place, stage, bottom in zip(places, stages, bottoms, strict=True):
            text = size(stage.memory.resident_bytes).replace(' ', '\n' if len(stages) > 12 else ' ')
            axes.text(
                place,
                bottom + top * 0.012,
                text,
                ha='center',
                va='bottom',
                fontsize=8,
                bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.5},
            )
    axes.set_ylim(0, top * 1.1)
    axes.set_xlim(-0.6, len(stages) - 0.4)
    step = max(1, len(stages) // 16)
    axes.set_xticks(places[::step], [str(stage.job.pp_rank) for stage in stages[::step]])
    axes.set_xlabel('pipeline stage; above a bar: what is resident')
    axes.set_ylabel('GB (10^9 bytes)')
    axes.set_axisbelow(True)
    axes.grid(axis='y', lw=0.4, color='#DDDDDD')
    figures.bare(axes)
    axes.figure.legend(loc='outside lower left', ncols=3, fontsize=8, frameon=False)

"""A plan as one HTML page that needs nothing else: stages as bars, then buffers and buckets.

The style is in ``plan.css`` beside this file, and is written into the page.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_buffer.planner.ledger_plot import PARTS, parts_of
from megatron_buffer.planner.plan_json import classes
from megatron_buffer.planner.plan_render import sizes_of
from megatron_buffer.planner.stages import Ask, BufferLedger, ChunkLedger, StageLedger
from megatron_buffer.planner.units import amount, size

_STYLE = Path(__file__).parent / 'plan.css'


def write_page(path: str, stages: Sequence[StageLedger], ask: Ask, notes: Sequence[str]) -> None:
    """Writes the page.

    Args:
        path: The file; its folder exists.
        stages: Every pipeline stage.
        ask: What the plan was made for.
        notes: What else should be known.
    """
    text = '\n'.join(_page(stages, ask, notes)) + '\n'
    Path(path).write_text(text, encoding='utf-8')


def _page(stages: Sequence[StageLedger], ask: Ask, notes: Sequence[str]) -> Iterator[str]:
    job, config = stages[0].job, ask.runtime.config
    heaviest = max(stages, key=lambda stage: stage.memory.resident_bytes)
    yield '<!doctype html>'
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<title>{_text(ask.model)}: plan of the buffers</title>'
    yield f'<style>{_STYLE.read_text(encoding="utf-8")}</style></head><body>'
    yield f'<h1>{_text(ask.model)}</h1>'
    recipe = f', {ask.recipe.name} weights' if ask.recipe else ''
    optimizer = 'distributed optimizer' if ask.ddp.use_distributed_optimizer else 'plain DDP'
    yield f'<p>{_text(sizes_of(job) + recipe)}; {optimizer}; config {_text(config.source)}</p>'
    yield f'<p>Buckets of stage 0: {_text(stages[0].chunks[0].view.bucket_size.reason)}</p>'
    resident = sum(stage.resident_bytes_of_all for stage in stages)
    sent = sum(sum(stage.wire) for stage in stages) * job.stage_size
    yield (
        f'<p>Heaviest: rank {heaviest.heaviest_rank} (stage {heaviest.job.pp_rank}), '
        f'{size(heaviest.memory.resident_bytes)} resident. All {job.world_size:,} ranks: '
        f'{resident / 1e12:,.3f} TB resident, {sent / 1e12:,.3f} TB sent per iteration.</p>'
    )
    for note in notes:
        yield f'<p>Note: {_text(note)}</p>'
    yield '<h2>Memory of the heaviest rank of each stage</h2>'
    yield from _bars(stages)
    yield '<h2>Stages</h2>'
    yield from _stage_table(stages, heaviest)
    for members in classes(stages):
        yield from _class(members)
    yield '</body></html>'


def _bars(stages: Sequence[StageLedger]) -> Iterator[str]:
    columns = [parts_of(stage.memory) for stage in stages]
    most = max(sum(column) for column in columns) or 1
    used = [i for i in range(len(PARTS)) if any(column[i] for column in columns)]
    yield '<div class="legend">'
    for index in used:
        yield f'<span><i {_look(index)}></i>{_text(PARTS[index][1])}</span>'
    yield '</div><div class="bars">'
    for stage, column in zip(stages, columns, strict=True):
        spans = ''.join(
            f'<span {_look(i, 100 * column[i] / most)} title="{_text(PARTS[i][1])}: '
            f'{size(column[i])}"></span>'
            for i in used
            if column[i]
        )
        yield (
            f'<div>stage {stage.job.pp_rank}</div><div class="bar">{spans}</div>'
            f'<div>{size(stage.memory.resident_bytes)}</div>'
        )
    yield '</div>'


def _look(part: int, width_percent: float | None = None) -> str:
    field, _, colour = PARTS[part]
    style = '' if width_percent is None else f'width:{width_percent:.3f}%;'
    if field == 'temporary':
        return f'class="temporary" style="{style}"'
    return f'style="{style}background:{colour}"'


def _stage_table(stages: Sequence[StageLedger], heaviest: StageLedger) -> Iterator[str]:
    yield from _head(
        *('stage', 'parameters', 'grad_data', 'param_data', 'apart', 'optimizer', 'resident'),
        *('temporaries', 'reduced', 'gathered', 'launches'),
    )
    for stage in stages:
        memory, wire = stage.memory, stage.wire
        apart = memory.module_param_bytes + memory.te_rowwise_bytes + memory.te_columnwise_bytes
        reductions = sum(chunk.num_reductions for chunk in stage.chunks)
        gathers = sum(chunk.num_gathers for chunk in stage.chunks)
        yield _row(
            f'{stage.job.pp_rank} {stage.kind}',
            amount(sum(b.sizes.params_elems for b in stage.buffers)),
            *map(size, (memory.grad_data_bytes, memory.param_data_bytes, apart)),
            *map(size, (memory.optimizer_bytes, memory.resident_bytes, memory.temporary_bytes)),
            size(wire.grad_wire_bytes + wire.instance_wire_bytes),
            size(wire.param_wire_bytes),
            f'{reductions} + {gathers}',
            style='heaviest' if stage is heaviest else '',
        )
    yield '</tbody></table></div>'


def _class(members: Sequence[StageLedger]) -> Iterator[str]:
    numbers = ', '.join(str(stage.job.pp_rank) for stage in members)
    yield f'<h2>Buffers of a rank, stage{"s" if len(members) > 1 else ""} {numbers}</h2>'
    for chunk in members[0].chunks:
        for buffer in chunk.buffers:
            yield from _buffer(chunk, buffer)


def _buffer(chunk: ChunkLedger, buffer: BufferLedger) -> Iterator[str]:
    view, memory = buffer.view, buffer.memory
    layout = view.layout
    yield (
        f'<p><b>Chunk {chunk.view.job.chunk}, buffer {view.index} ({_text(view.label)})</b>: '
        f'{len(view.params)} parameters, {layout.numel_elems:,} elements, of them '
        f'{layout.padding_elems:,} padding; {view.num_shards} shards; grad_data '
        f'{size(memory.grad_data_bytes)}, param_data {size(memory.param_data_bytes)}, optimizer '
        f'{size(memory.optimizer_bytes)}</p>'
    )
    count = len(layout.buckets)
    yield f'<details{" open" if count <= 8 else ""}>'
    yield f'<summary>{count} bucket{"s" if count > 1 else ""}</summary>'
    yield from _head(
        *(
            'bucket',
            'group',
            'parameters',
            'elements',
            'padding',
            'gradients',
            'reduced',
            'gathered',
        ),
        'first parameter',
    )
    for index, span in enumerate(layout.buckets):
        wire, slots = buffer.bucket_wires[index], view.slots_by_bucket[index]
        yield _row(
            str(index),
            str(chunk.view.group_of(view.index, index).index),
            str(len(slots)),
            f'{span.numel_elems:,}',
            f'{view.bucket_padding_elems(index):,}',
            size(span.numel_elems * buffer.sizes.grad_bytes),
            size(wire.grad_wire_bytes + wire.instance_wire_bytes),
            size(wire.param_wire_bytes),
            view.params[slots[0].param].name,
        )
    yield '</tbody></table></div></details>'


def _head(*names: str) -> Iterator[str]:
    cells = ''.join(f'<th>{_text(name)}</th>' for name in names)
    yield f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>'


def _row(*cells: str, style: str = '') -> str:
    marked = f' class="{style}"' if style else ''
    return f'<tr{marked}>' + ''.join(f'<td>{_text(cell)}</td>' for cell in cells) + '</tr>'


def _text(text: str) -> str:
    return html.escape(text, quote=True)

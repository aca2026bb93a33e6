"""A plan for humans: stages, buffers of each class of stages, and what the numbers mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_buffer.planner.averages import Averages, variants
from megatron_buffer.planner.job import Job
from megatron_buffer.planner.units import amount, size

if TYPE_CHECKING:
    from megatron_buffer.planner.stages import Ask, BufferLedger, StageLedger


def sizes_of(job: Job) -> str:
    """The parallelism in words."""
    text = f'world {job.world_size:,}: tp {job.tp}, pp {job.pp}'
    text += f', vpp {job.vpp}' if job.vpp > 1 else ''
    text += f', dp {job.dp}'
    text += f', cp {job.cp}' if job.cp > 1 else ''
    text += f', ep {job.ep}, etp {job.expert_tp}' if job.ep > 1 else ''
    return text + (f', {job.instances} optimizer instances' if job.instances > 1 else '')


def render_averages(found: Averages, params: int, job: Job, console: Console) -> None:
    """Prints the ledger of a job of which only the number of parameters is known."""
    memory, sizes = found.memory, found.sizes
    _say(
        console,
        f'{params:,} parameters, {sizes_of(job)}; averages, {found.params_elems:,} per rank',
    )
    table = _table('', 'size', 'of', left=('', 'of'))
    state = found.unsharded_bytes // found.params_elems
    rows = [
        ('grad_data', memory.grad_data_bytes, f'{sizes.grad_bytes} bytes per parameter'),
        ('param_data', memory.param_data_bytes, ''),
        ('shared with gathers', memory.shared_buffer_bytes, 'part of grad_data'),
        ('parameters of modules', memory.module_param_bytes, 'no param_data'),
        ('TE rowwise', memory.te_rowwise_bytes, "Transformer Engine's own storage, with scales"),
        ('TE columnwise', memory.te_columnwise_bytes, 'its transposed copy, with scales'),
        (
            'optimizer shard',
            memory.optimizer_bytes,
            f'{state} bytes per parameter; {size(found.unsharded_bytes)} unsharded',
        ),
        ('resident', memory.resident_bytes, 'all of these'),
        ('temporaries', memory.temporary_bytes, 'fp32 copy of the shard of gradients in the step'),
        (
            'full bucket',
            found.bucket_bytes,
            f'{found.full_buckets} of {found.bucket_size_elems:,} elements, and a tail of '
            f'{found.tail_bucket_elems:,}; {size(found.bucket_wire.grad_wire_bytes)} on the wire',
        ),
        ('reduced', found.wire.grad_wire_bytes, 'sent by a rank per iteration'),
        ('between instances', found.wire.instance_wire_bytes, 'sent by a rank per iteration'),
        ('gathered', found.wire.param_wire_bytes, 'sent by a rank per iteration'),
        (
            'padding, at most',
            found.padding_bound_elems * sizes.grad_bytes,
            f'{found.padding_bound_elems:,} elements, with pad_buckets_for_high_nccl_busbw',
        ),
    ]
    for name, value, about in rows:
        if value:
            table.add_row(name, size(value), about)
    console.print(table)
    console.print()
    _say(console, 'The same job otherwise:')
    table = _table('', 'grad_data', 'param_data', 'optimizer', 'TE or modules', 'resident')
    for name, _, other in variants(params, job):
        apart = other.te_rowwise_bytes + other.te_columnwise_bytes + other.module_param_bytes
        values = (other.grad_data_bytes, other.param_data_bytes, other.optimizer_bytes, apart)
        table.add_row(name, *map(size, values), size(other.resident_bytes))
    console.print(table)


def render_plan(
    stages: Sequence[StageLedger],
    of_class: Sequence[Sequence[StageLedger]],
    ask: Ask,
    notes: Sequence[str],
    console: Console,
) -> None:
    """Prints a plan: a row per class of stages, then the buffers of each class.

    Args:
        stages: Every pipeline stage.
        of_class: The same, those that are alike together.
        ask: What the plan was made for.
        notes: What else should be known.
        console: Where to.
    """
    job = stages[0].job
    recipe = f', {ask.recipe.name} weights' if ask.recipe else ''
    optimizer = 'distributed optimizer' if ask.ddp.use_distributed_optimizer else 'plain DDP'
    _say(
        console,
        f'{ask.model}, {sizes_of(job)}{recipe}; {optimizer}; config {ask.runtime.config.source}',
    )
    _say(console, f'buckets of stage 0: {stages[0].chunks[0].view.bucket_size.reason}')
    console.print()
    table = _table('stages', 'params', 'grad_data', 'param_data', 'apart', 'optimizer')
    for name in ('resident', 'temp', 'reduced', 'gathered', 'launches'):
        table.add_column(name, justify='right')
    for members in of_class:
        stage, memory = members[0], members[0].memory
        apart = memory.module_param_bytes + memory.te_rowwise_bytes + memory.te_columnwise_bytes
        launches = [
            sum(chunk.num_reductions for chunk in stage.chunks),
            sum(chunk.num_gathers for chunk in stage.chunks),
        ]
        table.add_row(
            _title(members),
            amount(sum(b.sizes.params_elems for b in stage.buffers)),
            size(memory.grad_data_bytes),
            size(memory.param_data_bytes),
            size(apart),
            size(memory.optimizer_bytes),
            size(memory.resident_bytes),
            size(memory.temporary_bytes),
            size(stage.wire.grad_wire_bytes + stage.wire.instance_wire_bytes),
            size(stage.wire.param_wire_bytes),
            f'{launches[0]} + {launches[1]}',
        )
    console.print(table)
    for members in of_class:
        _render_buffers(members, console)
    heaviest = max(stages, key=lambda stage: stage.memory.resident_bytes)
    console.print()
    _say(
        console,
        f'heaviest: rank {heaviest.heaviest_rank} (stage {heaviest.job.pp_rank}), '
        f'{size(heaviest.memory.resident_bytes)} resident',
    )
    everything = sum(stage.resident_bytes_of_all for stage in stages)
    wire = sum(sum(stage.wire) for stage in stages) * job.stage_size
    _say(
        console,
        f'all {job.world_size:,} ranks: {everything / 1e12:,.3f} TB resident, {wire / 1e12:,.3f} TB sent '
        'per iteration',
    )
    for note in notes:
        _say(console, f'note: {note}')


def _render_buffers(members: Sequence[StageLedger], console: Console) -> None:
    console.print()
    plural = 's' if len(members) > 1 else ''
    _say(console, f'Buffers of a rank, stage{plural} {_title(members)}:', 'bold')
    table = _table('chunk, buffer', 'buckets', 'elements', 'padding', 'grad_data', 'param_data')
    for name in ('apart', 'optimizer', 'reduced', 'gathered'):
        table.add_column(name, justify='right')
    for chunk in members[0].chunks:
        for buffer in chunk.buffers:
            memory = buffer.memory
            apart = memory.module_param_bytes + memory.te_rowwise_bytes + memory.te_columnwise_bytes
            shared = ' (shared)' if memory.shared_buffer_bytes else ''
            table.add_row(
                f'{chunk.view.job.chunk}, {buffer.view.label}',
                _bucket_sizes(buffer),
                amount(buffer.sizes.numel_elems),
                f'{buffer.view.layout.padding_elems:,}',
                size(memory.grad_data_bytes) + shared,
                size(memory.param_data_bytes),
                size(apart),
                size(memory.optimizer_bytes),
                size(buffer.wire.grad_wire_bytes + buffer.wire.instance_wire_bytes),
                size(buffer.wire.param_wire_bytes),
            )
    console.print(table)


def _bucket_sizes(buffer: BufferLedger) -> str:
    """``31: 41.9 M to 525.3 M``."""
    elems = [bucket.numel_elems for bucket in buffer.view.layout.buckets]
    low, high = min(elems), max(elems)
    return f'{len(elems)}: {amount(low)}' + (f' to {amount(high)}' if high != low else '')


def _title(members: Sequence[StageLedger]) -> str:
    """``1-14 middle``, with a mark for experts."""
    return f'{_stage_numbers(members)} {members[0].kind.replace(", with experts", " +experts")}'


def _stage_numbers(members: Sequence[StageLedger]) -> str:
    """``0``, ``1-14`` or ``0, 2, 4``."""
    numbers = [stage.job.pp_rank for stage in members]
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f'{numbers[0]}-{numbers[-1]}'
    return ', '.join(map(str, numbers))


def _table(*names: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(names):
        is_left = index == 0 or name in left
        # Names of stages and buffers stay on one line as long as the screen allows it.
        table.add_column(
            name, no_wrap=index == 0, justify='left' if is_left else 'right', overflow='ellipsis'
        )
    return table


def _say(console: Console, text: str, style: str = '') -> None:
    console.print(Text(text, style), soft_wrap=True)

"""A layout for humans: one screen, or every bucket, or every parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from megatron_buffer.planner.fold import Item, Repeat, Skipped, fold, lines, shorten
from megatron_buffer.planner.params import short_dtype
from megatron_buffer.planner.units import amount
from megatron_buffer.planner.view import BufferView, LayoutView

_SCREEN_LINES = 58
_HEAD_LINES = 4  # of a table: an empty line above it, two of column heads, a rule
_MIN_TABLE_LINES = 8
_MB = 1e6
_UNLIMITED = 1000


def render(view: LayoutView, console: Console, *, every_bucket: bool = False) -> None:
    """Prints the layout as tables of buckets.

    Args:
        view: The layout.
        console: Where to.
        every_bucket: A row for each bucket; otherwise repetitions are folded, and what does not fit on a
            screen is left out.
    """
    head, foot = _head(view), _foot(view)
    prefix = common_prefix([p.name for buffer in view.buffers for p in buffer.params])
    folded = {buffer.index: _folded(buffer, every_bucket) for buffer in view.buffers}
    if not every_bucket:
        around = [*head, *foot, *map(_buffer_title, view.buffers)]
        taken = sum(-(-len(text) // console.width) for text in around)
        _share(view, folded, _SCREEN_LINES - taken - _HEAD_LINES * len(view.buffers))
    for line in head:
        console.print(line)
    for buffer in view.buffers:
        console.print()
        console.print(_buffer_title(buffer))
        console.print(_bucket_table(view, buffer, folded[buffer.index], prefix, console.width))
    for line in foot:
        console.print(line)


def render_params(view: LayoutView, console: Console) -> None:
    """Prints every parameter with its place."""
    for line in _head(view):
        console.print(line)
    for buffer in view.buffers:
        console.print()
        console.print(_buffer_title(buffer))
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column('bucket', justify='right')
        table.add_column('parameter', no_wrap=True)
        table.add_column('shape')
        for name in ('start', 'end', 'elements', 'gap before', 'forward'):
            table.add_column(name, justify='right')
        end = 0
        for slot in buffer.layout.slots:
            param = buffer.params[slot.param]
            table.add_row(
                str(slot.bucket),
                Text(param.name + (' (tied embedding)' if param.shared_embedding else '')),
                '' if param.shape is None else ' x '.join(str(size) for size in param.shape),
                f'{slot.start_elems:,}',
                f'{slot.end_elems:,}',
                f'{param.numel_elems:,}',
                f'{slot.start_elems - end:,}' if slot.start_elems > end else '',
                str(buffer.forward[slot.param]),
            )
            end = slot.end_elems
        if buffer.layout.numel_elems > end:
            table.add_row(
                '',
                Text('(end of the buffer)', 'dim'),
                '',
                '',
                f'{buffer.layout.numel_elems:,}',
                '',
                f'{buffer.layout.numel_elems - end:,}',
                '',
            )
        # Full names, to be copied into a config: lines may be longer than the screen is wide.
        wide = console.options.update(max_width=_UNLIMITED)
        width = Measurement.get(console, wide, table).maximum
        console.print(table, width=width, soft_wrap=True)
    for line in _foot(view):
        console.print(line)


def _head(view: LayoutView) -> list[Text]:
    job, ddp, config = view.job, view.ddp, view.runtime.config
    where = f'stage {job.pp_rank} of {job.pp}'
    where += f', chunk {job.chunk} of {job.vpp}' if job.vpp > 1 else ''
    sizes = f'tp {job.tp}, pp {job.pp}'
    sizes += f', vpp {job.vpp}' if job.vpp > 1 else ''
    sizes += f', dp {job.dp}'
    sizes += f', cp {job.cp}' if job.cp > 1 else ''
    sizes += f', ep {job.ep}, etp {job.expert_tp}' if job.ep > 1 else ''
    sizes += f', {job.instances} optimizer instances' if job.instances > 1 else ''
    short = config.short_str()
    about = '' if short == config.source else f': {short}'
    size = view.bucket_size
    size_text = size.reason
    if size.elems is not None:
        size_text = f'bucket size {size.elems:,} elements ({size.reason})'
    result = [
        Text.assemble(
            (view.model, 'bold'),
            f': {where}, {view.num_params:,} parameters of {amount(view.numel_params_elems)} elements; '
            f'{sizes}: {job.world_size:,} ranks',
        ),
        Text(f'config {config.source} ({view.runtime.hash}){about}'),
        Text(
            f'{"distributed optimizer" if ddp.use_distributed_optimizer else "no distributed optimizer"}, '
            f'{"overlap" if ddp.overlap else "no overlap"}; {size_text}'
        ),
    ]
    result += [Text(f'note: {note}', 'yellow') for note in view.notes]
    return result


def _foot(view: LayoutView) -> list[Text]:
    dense, expert = view.gather_order(False), view.gather_order(True)
    gathers = f'gather {ranges(dense)}' + (f', expert {ranges(expert)}' if expert else '')
    return [
        Text(f'groups: {len(view.groups)}, {_groups_text(view)}'),
        Text(f'reduce {ranges(view.dispatch_order)}: {view.dispatch}'),
        Text(f'{gathers.strip()}: {view.gather}'),
        Text('every bucket: --buckets-only; every parameter: --all-params; both: --json', 'dim'),
    ]


def _groups_text(view: LayoutView) -> str:
    shared = [group for group in view.groups if len(group.buckets) > 1]
    if not shared:
        return 'one per bucket'
    if len(view.groups) == 1:
        return 'with all buckets'
    largest = max(shared, key=lambda group: len(group.buckets))
    return (
        f'one per bucket, except {len(shared)} with several; group {largest.index} has '
        f'{len(largest.buckets)} buckets'
    )


def _buffer_title(buffer: BufferView) -> Text:
    layout, key = buffer.layout, buffer.key
    padding = 100 * layout.padding_elems / (layout.numel_elems or 1)
    kind = 'expert ' if key.is_expert_parallel else ''
    if buffer.num_shards > 1:
        where = f'{buffer.num_shards} shards of {amount(layout.numel_elems // buffer.num_shards)}'
    elif buffer.num_ranks > 1:
        where = f'all-reduced over {buffer.num_ranks} ranks'
    else:
        where = 'on one rank only'
    count = len(layout.buckets)
    return Text.assemble(
        (f'buffer {buffer.index}', 'bold'),
        f': {kind}{short_dtype(key.param_dtype)} parameters, {short_dtype(key.grad_dtype)} gradients; '
        f'{count} bucket{"s" * (count != 1)}, {layout.numel_elems:,} elements, '
        f'{layout.padding_elems:,} padding ({padding:.2g} %); {where}',
    )


def _bucket_table(
    view: LayoutView, buffer: BufferView, items: list[Item], prefix: str, width: int
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    last = f'last (after {prefix!r})' if prefix else 'last'
    table.add_column('bucket\ngroup', justify='right', no_wrap=True)
    table.add_column('params', justify='right')
    table.add_column(f'first parameter\n{last}', no_wrap=True)
    for name in ('start\nend', 'elements\nMB', 'padding', 'shard\nMB', 'reduce\ngather'):
        table.add_column(name, justify='right', no_wrap=True)
    numel = buffer.layout.numel_elems
    # What the columns of numbers leave of the line; sizes of single buckets are hardly longer than this.
    name_width = max(20, min(width, 132) - len(f'{numel:,}') - 66)
    for row in _rows(view, buffer, items, prefix, name_width):
        table.add_row(*row)
    return table


def _rows(
    view: LayoutView, buffer: BufferView, items: Sequence[Item], prefix: str, width: int
) -> Iterator[Sequence[Text]]:
    for item in items:
        if isinstance(item, int):
            yield _bucket_row(view, buffer, item, prefix, width)
        elif isinstance(item, Skipped):
            sizes = [b.numel_elems for b in buffer.layout.buckets[item.start : item.end]]
            text = f'... {item.end - item.start} of {amount(min(sizes))}'
            text += f' to {amount(max(sizes))}' if min(sizes) != max(sizes) else ''
            yield _summary(item.start, item.end, f'{text} elements')
        else:
            yield from _rows(view, buffer, item.items, prefix, width)
            first = item.start + item.period
            end = item.start + item.period * item.times
            slots = buffer.slots_by_bucket
            names = [buffer.params[s.param].name for s in (slots[first][0], slots[end - 1][-1])]
            yield _summary(first, end, repeat_text(item, names))


def _summary(start: int, end: int, text: str) -> Sequence[Text]:
    index = str(start) if end == start + 1 else f'{start}-{end - 1}'
    return Text(index, 'dim'), Text(), Text(text, 'dim')


def repeat_text(repeat: Repeat, names: Sequence[str]) -> str:
    """What stands for the further times of a pattern; ``names`` are its first and last parameter."""
    what = 'more like it' if repeat.period == 1 else f'x the last {repeat.period}'
    numbers = [re.findall(r'layers\.(\d+)\.', name) for name in names]
    layers = ''
    if all(numbers):
        first, last = numbers[0][0], numbers[1][0]
        layers = f', layer {first}' if first == last else f', layers {first}-{last}'
    return f'... {repeat.times - 1} {what}{layers}'


def _bucket_row(
    view: LayoutView, buffer: BufferView, index: int, prefix: str, width: int
) -> Sequence[Text]:
    span, slots = buffer.layout.buckets[index], buffer.slots_by_bucket[index]
    group = view.group_of(buffer.index, index)
    names = [buffer.params[slot.param].name.removeprefix(prefix) for slot in (slots[0], slots[-1])]
    if len(slots) == 1:
        names[1] = ''
    padding = buffer.bucket_padding_elems(index)
    shard = span.numel_elems // buffer.num_shards
    sharded = view.ddp.use_distributed_optimizer
    grad_bytes = buffer.key.grad_dtype.itemsize
    gather = '-' if group.gather_position is None else str(group.gather_position)
    return (
        Text(f'{index}\n{group.index}'),
        Text(f'{len(slots)}'),
        Text('\n'.join(squeeze(name, width) for name in names)),
        Text(f'{span.start_elems:,}\n{span.end_elems:,}'),
        Text(f'{span.numel_elems:,}\n{span.numel_elems * grad_bytes / _MB:,.1f}'),
        Text(f'{padding:,}' if padding else ''),
        Text(f'{shard:,}\n{shard * grad_bytes / _MB:,.1f}' if sharded else '-'),
        Text(f'{group.dispatch_position}\n{gather}'),
    )


def _signature(buffer: BufferView, index: int) -> tuple[object, ...]:
    """Equal for buckets that look the same, whatever layer they are in."""
    span, slots = buffer.layout.buckets[index], buffer.slots_by_bucket[index]
    names = [buffer.params[slot.param].name for slot in (slots[0], slots[-1])]
    return (
        *map(pattern_of, names),
        len(slots),
        span.numel_elems,
        buffer.bucket_padding_elems(index),
    )


def _folded(buffer: BufferView, every_bucket: bool) -> list[Item]:
    buckets = range(len(buffer.layout.buckets))
    return list(buckets) if every_bucket else fold([_signature(buffer, i) for i in buckets])


def _share(view: LayoutView, folded: dict[int, list[Item]], room: int) -> None:
    """Shortens the tables until they fit on the screen together; small ones are left alone."""
    height = lambda index: 2
    wanted = sorted(view.buffers, key=lambda buffer: lines(folded[buffer.index], height))
    for left, buffer in zip(range(len(wanted), 0, -1), wanted, strict=True):
        part = max(_MIN_TABLE_LINES, room // left)
        folded[buffer.index] = shorten(folded[buffer.index], part, height)
        room -= lines(folded[buffer.index], height)


def ranges(numbers: Sequence[int], most: int = 8) -> str:
    """``0-30, 32, 31`` for a long list of numbers; runs may go down: ``30-0``."""
    parts: list[list[int]] = []
    for number in numbers:
        last = parts[-1] if parts else []
        if len(last) == 1 and abs(number - last[0]) == 1:
            last.append(number)
        elif len(last) == 2 and number - last[1] == (1 if last[1] > last[0] else -1):
            last[1] = number
        else:
            parts.append([number])
    texts = ['-'.join(str(number) for number in part) for part in parts]
    return ', '.join(texts[:most]) + (', ...' if len(texts) > most else '')


def pattern_of(name: str) -> str:
    """A name without the numbers of layers and experts."""
    return re.sub(r'(?<=\.)\d+(?=\.)', '#', name)


def squeeze(name: str, width: int) -> str:
    """``name`` without some of its parts if it is too long, such as ``...layers.3...fc2.weight``.

    What is kept, if it can be, is the number of the layer, then the last two parts.
    """
    if len(name) <= width:
        return name
    parts = name.split('.')
    layer = next((i for i, part in enumerate(parts) if part.isdecimal()), -1)
    best = (False, False, 0, f'{name[: width - 3]}...')
    for first in range(len(parts)):
        for gap in range(first, len(parts)):
            for tail in range(gap + 1, len(parts)):
                front = '...' if 0 < first < gap else ''
                text = f'{front}{".".join(parts[first:gap])}...{".".join(parts[tail:])}'
                if len(text) <= width:
                    has_layer = first <= layer < gap or tail <= layer
                    best = max(best, (has_layer, len(parts) - tail > 1, len(text), text))
    return best[-1]


def common_prefix(names: Sequence[str]) -> str:
    """Modules that all names start with, such as ``module.``."""
    if len(names) < 2:
        return ''
    common: list[str] = []
    for parts in zip(*(name.split('.')[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ''.join(f'{part}.' for part in common)

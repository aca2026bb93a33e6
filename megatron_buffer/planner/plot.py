"""A layout as a figure: each buffer a strip to scale, wrapped like text."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.units import amount
from megatron_buffer.planner.view import BufferView, LayoutView

# Of Okabe and Ito's palette, which any colour vision can tell apart, those that black text is legible on.
_COLOURS = ('#56B4E9', '#E69F00', '#009E73', '#CC79A7', '#F0E442', '#D55E00')
_PADDING = '#FFFFFF'
_TITLE_CHARACTERS = 150
_WIDTH_IN = 13.0
_ROW_IN = 0.42
_BUCKETS_PER_ROW = 8
_MAX_ROWS = 24
_MAX_SHARD_LINES = 64  # more of them would be a grey area
_CHARS_PER_ROW = 150
_MIN_WIDTH = 0.0004  # of a row; what is narrower cannot be seen
_SUFFIXES = ('.svg', '.png', '.pdf')


def check_target(path: str) -> None:
    """Says beforehand what would keep a figure from being written.

    Raises:
        ConfigError: If matplotlib is missing, the folder does not exist, or the suffix is unknown.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not path.endswith(_SUFFIXES):
        raise ConfigError(f'--plot {path}: the name must end in {", ".join(_SUFFIXES)}')
    if not os.path.isdir(folder):
        raise ConfigError(f'--plot {path}: there is no folder {folder}')
    if find_spec('matplotlib') is None:
        raise ConfigError(
            '--plot needs matplotlib: pip install "megatron-buffer[plot]" (or pip install matplotlib)'
        )


def plot(view: LayoutView, path: str) -> None:
    """Draws the buffers of a layout and writes them to ``path``.

    In an SVG, text is text, and the patches of a bucket carry its id: ``buffer-0-bucket-3`` for the bucket,
    ``...-padding`` for its padding.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [_num_rows(buffer) for buffer in view.buffers]
    height = sum(rows) * _ROW_IN + 0.75 * len(rows) + 0.9
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'megatron-buffer'}):
        figure = Figure(figsize=(_WIDTH_IN, height), layout='constrained')
        all_axes: Any = figure.subplots(
            len(rows), 1, squeeze=False, gridspec_kw={'height_ratios': [r + 1 for r in rows]}
        )
        for buffer, axes, count in zip(view.buffers, all_axes[:, 0], rows, strict=True):
            _draw_buffer(axes, view, buffer, count)
        job, config = view.job, view.runtime.config
        short = config.short_str()
        about = config.source if short == config.source else f'{config.source}: {short}'
        title = (
            f'{view.model}, stage {job.pp_rank} of {job.pp}, chunk {job.chunk} of {job.vpp}: tp {job.tp}, '
            f'dp {job.dp}, cp {job.cp}, ep {job.ep}; {about}'
        )
        figure.suptitle(textwrap.fill(title, _TITLE_CHARACTERS), fontsize=11, x=0.01, ha='left')
        _legend(figure)
        figure.savefig(path, metadata={'Date': None} if path.endswith('.svg') else None)


def _num_rows(buffer: BufferView) -> int:
    wanted = -(-len(buffer.layout.buckets) // _BUCKETS_PER_ROW)
    return max(1, min(_MAX_ROWS, wanted))


def _draw_buffer(axes: Any, view: LayoutView, buffer: BufferView, rows: int) -> None:
    layout = buffer.layout
    row_elems = max(1, -(-layout.numel_elems // rows))
    for index, span in enumerate(layout.buckets):
        gid = f'buffer-{buffer.index}-bucket-{index}'
        colour = _COLOURS[index % len(_COLOURS)]
        _bar(axes, row_elems, span.start_elems, span.end_elems, gid, facecolor=colour, lw=0)
        for number, slot in enumerate(buffer.slots_by_bucket[index]):
            if number % 2:  # neighbours in a bucket differ in shade
                _bar(
                    axes,
                    row_elems,
                    slot.start_elems,
                    slot.end_elems,
                    None,
                    facecolor='white',
                    alpha=0.35,
                    lw=0,
                )
            name = buffer.params[slot.param].name
            _name(axes, row_elems, slot.start_elems, slot.end_elems, name)
        for number, (start, end) in enumerate(_gaps(buffer, index)):
            _bar(
                axes,
                row_elems,
                start,
                end,
                f'{gid}-padding-{number}',
                facecolor=_PADDING,
                edgecolor='black',
                hatch='////',
                lw=0.3,
            )
        _shards(axes, buffer, row_elems, span.start_elems, span.end_elems)
        _bar(
            axes,
            row_elems,
            span.start_elems,
            span.end_elems,
            None,
            facecolor='none',
            edgecolor='black',
            lw=0.8,
        )
        row, x = divmod(span.start_elems, row_elems)
        if span.numel_elems * _CHARS_PER_ROW > row_elems * 2:
            group = view.group_of(buffer.index, index)
            number = str(index) if group.index == index else f'{index} (group {group.index})'
            axes.text(
                x / row_elems + 0.002,
                row - 0.36,
                number,
                fontsize=6.5,
                weight='bold',
                va='center',
                clip_on=True,
            )
    axes.set_xlim(0, 1)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks(range(rows), [amount(row * row_elems) for row in range(rows)], fontsize=7)
    axes.set_ylabel('first element', fontsize=7)
    axes.set_xticks([])
    for side in ('top', 'right', 'bottom', 'left'):
        axes.spines[side].set_visible(False)
    padding = 100 * layout.padding_elems / (layout.numel_elems or 1)
    axes.set_title(
        f'buffer {buffer.index} ({buffer.label}): {len(layout.buckets)} buckets, '
        f'{amount(layout.numel_elems)} elements, {padding:.2g} % padding, {buffer.num_shards} shards; '
        f'a row is {amount(row_elems)} elements',
        fontsize=9,
        loc='left',
    )


def _gaps(buffer: BufferView, bucket: int) -> Iterator[tuple[int, int]]:
    """The stretches of a bucket that belong to no parameter."""
    span = buffer.layout.buckets[bucket]
    end = span.start_elems
    for slot in buffer.slots_by_bucket[bucket]:
        if slot.start_elems > end:
            yield end, slot.start_elems
        end = slot.end_elems
    if span.end_elems > end:
        yield end, span.end_elems


def _pieces(row_elems: int, start: int, end: int) -> Iterator[tuple[int, float, float]]:
    """Row, left and width of the parts that a stretch falls into; lefts and widths are fractions."""
    while start < end:
        row = start // row_elems
        stop = min(end, (row + 1) * row_elems)
        yield row, start / row_elems - row, (stop - start) / row_elems
        start = stop


def _bar(axes: Any, row_elems: int, start: int, end: int, gid: str | None, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    if end - start < _MIN_WIDTH * row_elems:
        return
    for row, left, width in _pieces(row_elems, start, end):
        axes.add_patch(Rectangle((left, row - 0.25), width, 0.62, gid=gid, **style))


def _name(axes: Any, row_elems: int, start: int, end: int, name: str) -> None:
    """Writes a parameter's name where there is room for it."""
    row, left, width = max(
        _pieces(row_elems, start, end), key=lambda piece: piece[2], default=(0, 0, 0)
    )
    room = int(width * _CHARS_PER_ROW * 1.4)
    label = short_label(name)
    if len(label) > room:
        label = label.rpartition('.')[2].rpartition('_')[2]
    if len(label) <= room:
        axes.text(
            left + width / 2, row + 0.06, label, fontsize=6, ha='center', va='center', clip_on=True
        )


def short_label(name: str) -> str:
    """Numbers of layer and expert, and the name of the module: ``31 linear_fc1``, ``0.7 linear_fc2``."""
    parts = name.split('.')
    numbers = '.'.join(part for part in parts if part.isdecimal())
    words = [part for part in parts if not part.isdecimal()]
    kept = words[-2:-1] if words[-1] == 'weight' and len(words) > 1 else words[-2:]
    return f'{numbers} {".".join(kept)}'.strip()


def _shards(axes: Any, buffer: BufferView, row_elems: int, start: int, end: int) -> None:
    """Marks where one rank's shard ends and the next one's begins."""
    count = buffer.num_shards
    narrow = (end - start) / row_elems / count < 0.002
    if count == 1 or count > _MAX_SHARD_LINES or narrow:
        return
    shard = (end - start) // count
    for number in range(1, count):
        row, x = divmod(start + number * shard, row_elems)
        axes.plot([x / row_elems] * 2, [row + 0.2, row + 0.37], color='black', lw=0.6)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(facecolor=_COLOURS[0], edgecolor='black', label='bucket, with its number'),
            Patch(facecolor='#ABD9F4', label='every other parameter in it'),
            Patch(facecolor=_PADDING, edgecolor='black', hatch='////', label='padding'),
            Line2D(
                [], [], color='black', lw=0.6, marker='|', ls='', label="border of a rank's shard"
            ),
        ],
        loc='outside lower left',
        ncols=4,
        fontsize=7,
        frameon=False,
    )

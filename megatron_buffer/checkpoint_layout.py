"""What optimizer state in a checkpoint depends on, compared; pure.

Upstream has no counterpart: ``DistributedOptimizer`` (``megatron/core/optimizer/distrib_optimizer.py``)
writes some formats in the order of its buffers, and notices another order only by the number of elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_buffer.checkpoint_record import Placed, SavedBucket, SavedBuffer, StateLayout
from megatron_buffer.strategies.padding import round_up

DP_RESHARDABLE = 'dp_reshardable'
DP_ZERO = 'dp_zero_gather_scatter'
LAYOUT_FORMATS: Mapping[str, str] = {
    DP_RESHARDABLE: 'holds every bucket as it lies in memory: the order of the parameters, the cuts and '
    'the pads before parameters (not the pads at bucket ends, nor the number of ranks)',
    DP_ZERO: 'holds every buffer as it lies in memory, without the pads at bucket ends: the order of the '
    'parameters and the pads before them (not the number of ranks)',
}
"""Formats that depend on the layout, and how; every other one holds whole parameters by name."""

_STOCK_START_ELEMS = 64
_WRAPPERS = 'module.'
_QUANTIZED = 'torch.uint8'


class Comparison(NamedTuple):
    """Outcome of comparing the layout of a checkpoint with this run's.

    Attributes:
        difference: The first thing that differs and that the format depends on; '' if nothing.
        renamed: Parameters that are matched by position because neither side knows the other's name,
            as 'saved -> here'.
    """

    difference: str = ''
    renamed: tuple[str, ...] = ()


class _Spot(NamedTuple):
    """A parameter with all that a format may depend on."""

    name: str
    numel_elems: int
    bucket: int
    start_elems: int
    offset_elems: int
    """From the start of the buffer, bucket-end pads left out."""


def _spots(buffer: SavedBuffer) -> list[_Spot]:
    """Parameters in layout order; empty ones hold no state and are left out."""
    spots: list[_Spot] = []
    base = 0
    for index, bucket in enumerate(buffer.buckets):
        spots.extend(
            _Spot(_bare(p.name), p.numel_elems, index, p.start_elems, base + p.start_elems)
            for p in bucket.params
            if p.numel_elems
        )
        base += bucket.unpadded_elems
    return spots


def _bare(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.removeprefix(_WRAPPERS)
    return name


def compare(format_name: str, saved: StateLayout, current: StateLayout) -> Comparison:
    """Compares what the format depends on, and nothing else.

    Args:
        format_name: Megatron's name of the checkpoint format.
        saved: Layout that the state was saved under.
        current: Layout of this run.

    Returns:
        The first difference, buffer by buffer: order, then cuts, then pads before parameters.
    """
    if format_name not in LAYOUT_FORMATS:
        return Comparison()
    if len(saved.buffers) != len(current.buffers):
        kinds = [', '.join(b.dtypes for b in side.buffers) for side in (saved, current)]
        return Comparison(
            f'saved {len(saved.buffers)} buffers ({kinds[0]}), here {len(current.buffers)} ({kinds[1]})'
        )
    renamed: list[str] = []
    for index, (theirs, ours) in enumerate(zip(saved.buffers, current.buffers, strict=True)):
        where = f'buffer {index} {ours.dtypes}'
        if theirs.dtypes != ours.dtypes:
            return Comparison(
                f'buffer {index} has (parameter dtype, gradient dtype) {theirs.dtypes} in the '
                f'checkpoint and {ours.dtypes} here'
            )
        found = _compare_order(_spots(theirs), _spots(ours), renamed)
        if not found and format_name == DP_RESHARDABLE:
            found = _compare_buckets(theirs, ours)
        elif not found:
            found = _compare_offsets(theirs, ours)
        if found:
            return Comparison(f'{where}: {found}')
    return Comparison(renamed=tuple(renamed))


def _compare_order(saved: list[_Spot], current: list[_Spot], renamed: list[str]) -> str:
    """Position by position; a name that the other side has elsewhere is another parameter."""
    saved_names = {spot.name for spot in saved}
    current_names = {spot.name for spot in current}
    for position, (theirs, ours) in enumerate(itertools.zip_longest(saved, current)):
        if ours is None:
            return f'only the checkpoint has parameter {position}, {_described(theirs)}'
        if theirs is None:
            return f'only this run has parameter {position}, {_described(ours)}'
        same_name = theirs.name == ours.name
        known = theirs.name in current_names or ours.name in saved_names
        if theirs.numel_elems != ours.numel_elems or (not same_name and known):
            return (
                f'parameter {position} in layout order is {_described(theirs)} in the checkpoint and '
                f'{_described(ours)} here'
            )
        if not same_name:
            renamed.append(f'{theirs.name} -> {ours.name}')
    return ''


def _described(spot: _Spot) -> str:
    return f'{spot.name} ({spot.numel_elems} elements)'


def _compare_buckets(saved: SavedBuffer, current: SavedBuffer) -> str:
    """Cuts, then starts within buckets, then the sizes that upstream checks."""
    before = None
    for theirs, ours in zip(_spots(saved), _spots(current), strict=True):
        if theirs.bucket != ours.bucket:
            cutting = 'the checkpoint' if theirs.bucket > ours.bucket else 'this run'
            return (
                f'only {cutting} cuts between {before} and {ours.name} '
                f'({len(saved.buckets)} buckets in the checkpoint, {len(current.buckets)} here)'
            )
        if theirs.start_elems != ours.start_elems:
            return (
                f'{ours.name} starts at element {theirs.start_elems} of bucket {ours.bucket} in the '
                f'checkpoint and at {ours.start_elems} here'
            )
        before = ours.name
    sizes = [[b.unpadded_elems for b in side.buckets] for side in (saved, current)]
    for index, (theirs_elems, ours_elems) in enumerate(zip(*sizes, strict=True)):
        if theirs_elems != ours_elems:
            return (
                f'bucket {index} has {theirs_elems} elements without its end pad in the checkpoint and '
                f'{ours_elems} here'
            )
    return ''


def _compare_offsets(saved: SavedBuffer, current: SavedBuffer) -> str:
    for theirs, ours in zip(_spots(saved), _spots(current), strict=True):
        if theirs.offset_elems != ours.offset_elems:
            return (
                f'{ours.name} starts at element {theirs.offset_elems} in the checkpoint and at '
                f'{ours.offset_elems} here (pads at bucket ends not counted)'
            )
    totals = [sum(b.unpadded_elems for b in side.buckets) for side in (saved, current)]
    if totals[0] != totals[1]:
        return (
            f'{totals[0]} elements without pads at bucket ends in the checkpoint, {totals[1]} here'
        )
    return ''


def place_as_stock(params: Sequence[tuple[str, int]], sizes: Sequence[int]) -> SavedBuffer | None:
    """The layout that stock must have had, given the bucket sizes that it wrote into the checkpoint.

    Args:
        params: Name and number of elements of each parameter, in stock's layout order (registration
            order reversed).
        sizes: ``per_bucket_numel_unpadded`` of the buffer, from the checkpoint, in elements.

    Returns:
        The buffer (its dtypes are left ''), or None when these parameters can't fill such buckets.
    """
    buckets: list[SavedBucket] = []
    placed: list[Placed] = []
    cursor = 0
    for name, numel_elems in params:
        if not numel_elems:
            continue
        if len(buckets) == len(sizes):
            return None
        start = round_up(cursor, _STOCK_START_ELEMS)
        cursor = start + numel_elems
        placed.append(Placed(name, start, numel_elems))
        size = sizes[len(buckets)]
        # The aligned end is recorded where a tied embedding follows.
        if size in (cursor, round_up(cursor, _STOCK_START_ELEMS)):
            buckets.append(SavedBucket(size, tuple(placed)))
            placed, cursor = [], 0
        elif cursor > size:
            return None
    if placed or len(buckets) != len(sizes):
        return None
    return SavedBuffer('', tuple(buckets))


class IndexedBuffer(NamedTuple):
    """A buffer of this run, for the conversion from bf16 to quantized parameters.

    Attributes:
        dtypes: As in :class:`SavedBuffer`.
        logical_dtypes: Key of the buffer that held the parameters before they were quantized.
        indices: Upstream's ``param_indices``, in layout order.
    """

    dtypes: str
    logical_dtypes: str
    indices: tuple[int, ...]

    @property
    def quantized(self) -> bool:
        """Whether the parameters own quantized bytes."""
        return _QUANTIZED in self.dtypes


def merge_quantized(
    current: StateLayout, indexed: Sequence[IndexedBuffer]
) -> tuple[StateLayout | None, str]:
    """The layout that state of unquantized parameters must have so that upstream can split it.

    Upstream: ``DistributedOptimizer.split_state_dict_if_needed`` walks the parameters by falling index
    and assumes that nothing lies between them.

    Args:
        current: Layout of this run, with quantized buffers.
        indexed: One entry per buffer of ``current``.

    Returns:
        That layout, and why it can't be split, '' if it can.
    """
    merged: dict[str, list[tuple[int, Placed]]] = {}
    for buffer, meta in zip(current.buffers, indexed, strict=True):
        if list(meta.indices) != sorted(meta.indices, reverse=True):
            return None, (
                'state of unquantized parameters is split by parameter index, which needs '
                f'param_order: reverse, and the parameters of buffer {meta.dtypes} lie in another order'
            )
        key = meta.logical_dtypes if meta.quantized else meta.dtypes
        spots = [p for bucket in buffer.buckets for p in bucket.params]
        merged.setdefault(key, []).extend(zip(meta.indices, spots, strict=True))
    buffers: list[SavedBuffer] = []
    for dtypes, members in merged.items():
        params: list[Placed] = []
        cursor = 0
        for _, param in sorted(members, key=lambda member: -member[0]):
            params.append(Placed(param.name, cursor, param.numel_elems))
            cursor += param.numel_elems
        buffers.append(SavedBuffer(dtypes, (SavedBucket(cursor, tuple(params)),)))
    return (
        StateLayout(
            config=current.config,
            config_hash=current.config_hash,
            choices=current.choices,
            buffers=tuple(sorted(buffers)),
        ),
        '',
    )


def refusal(format_name: str, difference: str, saved: StateLayout, current: StateLayout) -> str:
    """The message of a refused load.

    Args:
        format_name: Megatron's name of the checkpoint format.
        difference: The first thing that differs.
        saved: Layout that the state was saved under; its config is named.
        current: Layout of this run.
    """
    return (
        'the optimizer state in this checkpoint was saved under another buffer layout, and would be '
        f'loaded into the wrong parameters. Format {format_name} {LAYOUT_FORMATS[format_name]}.\n'
        f'  first difference: {difference}\n'
        f'  saved under: {saved.who}\n'
        f'  this run: {current.who}\n'
        '  what to do: load it under the config (and bucket size) that it was saved with; to change '
        'the layout, save once more from there in format fully_reshardable '
        '(--dist-ckpt-optim-fully-reshardable), which every layout can load. '
        'checkpoint.layout_guard: false loads it as it is.'
    )

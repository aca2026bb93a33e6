"""What Megatron-Core relies on in the layout of a buffer, checked; pure.

Stands for assertions that upstream spreads over ``_ParamAndGradBuffer.__init__``
(``megatron/core/distributed/param_and_grad_buffer.py``), ``DistributedOptimizer._build_model_gbuf_range``
(``megatron/core/optimizer/distrib_optimizer.py``) and its checkpoint formats, or takes for granted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_buffer.errors import LayoutError
from megatron_buffer.strategies.padding import Alignment, round_up
from megatron_buffer.strategies.specs import ParamSpec

if TYPE_CHECKING:
    from megatron_buffer.layout import BufferLayout, ParamSlot


def bucket_end_divisor(alignment: Alignment) -> int:
    """What bucket ends are multiples of: a parameter may start there too.

    The next bucket then starts with its first parameter, whatever lies before it; a gap there would
    depend on the pipeline stage, and shard a tied embedding differently on the two stages that hold it.
    """
    return math.lcm(alignment.param_start_elems, alignment.bucket_end_elems)


def check_invariants(
    layout: BufferLayout, specs: Sequence[ParamSpec], *, isolate: bool = False
) -> None:
    """Checks one layout.

    Every element of every parameter lies in exactly one place, at an aligned start; none overlap; bucket
    ids rise by one, no bucket is empty, buckets touch each other and start with a parameter; starts, ends
    and sizes divide by ``dp_size``, so that shards are equal; each bucket records its size without
    padding as the checkpoint formats need it.

    Args:
        layout: The layout.
        specs: The parameters that were laid out.
        isolate: The distributed optimizer is on: tied embeddings must be alone in their bucket, and
            sharded as on any other pipeline stage.

    Raises:
        LayoutError: Naming the first parameter or bucket that breaks one.
    """
    if sorted(slot.param for slot in layout.slots) != list(range(len(specs))):
        raise LayoutError(
            f'layout: {len(layout.slots)} slots for {len(specs)} parameters; each parameter must be '
            'laid out exactly once'
        )
    _check_buckets(layout)
    _check_slots(layout, specs)
    by_bucket = layout.slots_by_bucket()
    for index, slots in enumerate(by_bucket):
        following = by_bucket[index + 1][0] if index + 1 < len(by_bucket) else None
        before_tied = following is not None and specs[following.param].shared_embedding
        _check_contents(layout, index, slots, before_tied=isolate and before_tied)
        if isolate:
            _check_isolation(layout, index, slots, specs)


def _check_buckets(layout: BufferLayout) -> None:
    """Buckets touch each other, and their ends divide by ``dp_size`` and the alignment."""
    start, divisor = 0, math.lcm(layout.dp_size, layout.alignment.bucket_end_elems)
    for index, span in enumerate(layout.buckets):
        if span.start_elems != start or span.end_elems < start or span.end_elems % divisor:
            raise LayoutError(
                f'layout: bucket {index} is [{span.start_elems}, {span.end_elems}); it must start '
                f'at {start} and its end must divide by {divisor}'
            )
        start = span.end_elems


def _check_slots(layout: BufferLayout, specs: Sequence[ParamSpec]) -> None:
    """Parameters lie whole in their bucket, in order, aligned and apart."""
    cursor, bucket = 0, -1
    for slot in layout.slots:
        name = _name(specs, slot)
        if slot.bucket not in (bucket, bucket + 1) or not 0 <= slot.bucket < len(layout.buckets):
            raise LayoutError(
                f'layout: {name} is in bucket {slot.bucket} of {len(layout.buckets)}, after bucket '
                f'{bucket}; bucket ids must rise by one'
            )
        span = layout.buckets[slot.bucket]
        if slot.start_elems < max(cursor, span.start_elems):
            raise LayoutError(
                f'layout: {name} starts at {slot.start_elems}, inside what precedes it'
            )
        if slot.start_elems % layout.alignment.param_start_elems:
            raise LayoutError(
                f'layout: {name} starts at {slot.start_elems}, which is no multiple of '
                f'{layout.alignment.param_start_elems}'
            )
        if slot.end_elems - slot.start_elems != specs[slot.param].numel_elems:
            raise LayoutError(
                f'layout: {name} has {slot.end_elems - slot.start_elems} elements of its '
                f'{specs[slot.param].numel_elems}'
            )
        if slot.end_elems > span.end_elems:
            raise LayoutError(f'layout: {name} ends behind bucket {slot.bucket}')
        cursor, bucket = slot.end_elems, slot.bucket
    if bucket != len(layout.buckets) - 1:
        raise LayoutError(f'layout: bucket {bucket + 1} holds no parameter')


def _check_contents(
    layout: BufferLayout, index: int, slots: Sequence[ParamSlot], *, before_tied: bool
) -> None:
    """A bucket starts with its first parameter and records where its last one ends."""
    span = layout.buckets[index]
    if slots[0].start_elems != span.start_elems:
        raise LayoutError(
            f'layout: bucket {index} starts at {span.start_elems}, and its first parameter at '
            f'{slots[0].start_elems}; they must start together'
        )
    ends = {slots[-1].end_elems}
    if before_tied:  # upstream records the aligned end there
        ends.add(round_up(slots[-1].end_elems, layout.alignment.param_start_elems))
    if span.start_elems + span.numel_unpadded not in ends:
        raise LayoutError(
            f'layout: bucket {index} records {span.numel_unpadded} unpadded elements; its last '
            f'parameter ends {slots[-1].end_elems - span.start_elems} elements behind its start'
        )


def _check_isolation(
    layout: BufferLayout, index: int, slots: Sequence[ParamSlot], specs: Sequence[ParamSpec]
) -> None:
    """A tied embedding has no company and no more padding than its size asks for."""
    tied = next((slot for slot in slots if specs[slot.param].shared_embedding), None)
    if tied is None:
        return
    name, numel_elems = _name(specs, tied), specs[tied.param].numel_elems
    if len(slots) > 1:
        raise LayoutError(
            f'layout: {name} is a tied embedding and shares bucket {index} with {len(slots) - 1} other '
            'parameters; it must be alone, because the first and the last pipeline stage sum its '
            'gradients after each has sharded them'
        )
    span = layout.buckets[index]
    expected = round_up(numel_elems, bucket_end_divisor(layout.alignment))
    if span.numel_elems != expected:
        raise LayoutError(
            f'layout: bucket {index} has {span.numel_elems} elements for {name}, a tied embedding of '
            f'{numel_elems}; it must have {expected}, as on the other pipeline stage'
        )


def _name(specs: Sequence[ParamSpec], slot: ParamSlot) -> str:
    return specs[slot.param].name or f'parameter {slot.param}'

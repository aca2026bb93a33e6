"""The invariants of a layout, each checked from the offsets alone.

They are worked out here once more, independently of :meth:`megatron_buffer.layout.BufferLayout.check`,
which is asked too. Stands for the assertions in ``_ParamAndGradBuffer.__init__`` and ``_new_bucket``
(``megatron/core/distributed/param_and_grad_buffer.py``) and ``DistributedOptimizer._build_model_gbuf_range``
(``megatron/core/optimizer/distrib_optimizer.py``), and for what upstream relies on without asserting it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_buffer.errors import LayoutError
from megatron_buffer.layout import BufferLayout, LayoutStrategies, ParamSlot, compute_buffer_layout
from megatron_buffer.testing.examples import Example, last_stage_of

Plain = tuple[tuple[tuple[int, int, int, int], ...], tuple[tuple[int, int, int], ...]]
"""A layout as plain numbers: (parameter, start, end, bucket) and (start, end, unpadded) of each bucket."""


class Fault(NamedTuple):
    """A broken invariant: its name, and what was found."""

    what: str
    detail: str


def lay_out(example: Example, strategies: LayoutStrategies) -> BufferLayout:
    """The layout of an example, unchecked."""
    return compute_buffer_layout(
        example.params,
        strategies,
        bucket_size_elems=example.bucket_size_elems,
        dist_opt=example.dist_opt,
        buffer=example.traits,
    )


def plain(layout: BufferLayout) -> Plain:
    """The layout as numbers that can be compared and sent to another process."""
    return (
        tuple((s.param, s.start_elems, s.end_elems, s.bucket) for s in layout.slots),
        tuple((b.start_elems, b.end_elems, b.numel_unpadded) for b in layout.buckets),
    )


def replay(strategies: LayoutStrategies, examples: Sequence[Example]) -> list[Plain | str]:
    """The layout of each example, or the error in place of one; for comparing processes."""
    found: list[Plain | str] = []
    for example in examples:
        try:
            found.append(plain(lay_out(example, strategies)))
        except Exception as error:
            found.append(f'{type(error).__name__}: {error}')
    return found


def faults(example: Example, strategies: LayoutStrategies) -> list[Fault]:
    """Everything that is wrong with how ``strategies`` lay out an example.

    Raises:
        MegatronBufferError: If a strategy refuses the example.
    """
    found = list(_order_faults(example, strategies))
    if found:
        return found
    layout = lay_out(example, strategies)
    found = list(_layout_faults(example, layout))
    if plain(lay_out(example, strategies)) != plain(layout):
        found.append(Fault('same input, same layout', 'a second call gave another layout'))
    if example.bucket_size_elems is None:
        found += _one_bucket_faults(example, strategies, layout)
    found += _stage_faults(example, strategies, layout)
    if not found:
        try:
            layout.check(example.params, isolate=example.dist_opt)
        except LayoutError as error:
            found.append(Fault('BufferLayout.check', str(error)))
    return found


def _order_faults(example: Example, strategies: LayoutStrategies) -> Iterator[Fault]:
    """An order is a permutation, and does not look at what is decided after it."""
    order = list(strategies.param_order.layout_order(example.params, example.traits))
    count = len(example.params)
    if sorted(order) != list(range(count)):
        missing = sorted(set(range(count)) - set(order))
        twice = sorted({index for index in order if order.count(index) > 1})
        yield Fault(
            'an order is a permutation',
            f'{count} parameters, and layout_order returned {len(order)} positions; missing: '
            f'{_names(example, missing)}; more than once: {twice or "none"}',
        )
        return
    other = example.traits._replace(
        dp_size=example.traits.dp_size + 1, high_busbw=not example.traits.high_busbw
    )
    if list(strategies.param_order.layout_order(example.params, other)) != order:
        yield Fault(
            'an order looks at the parameters only',
            'layout_order gave another order for another dp_size or high_busbw; those are not known '
            'when group_params_for_buffers asks for the order',
        )


def _layout_faults(example: Example, layout: BufferLayout) -> Iterator[Fault]:
    specs, slots = example.params, layout.slots
    name = lambda slot: _name(example, slot.param)
    if sorted(slot.param for slot in slots) != list(range(len(specs))):
        yield Fault(
            'every parameter exactly once', f'{len(slots)} places for {len(specs)} parameters'
        )
        return
    for slot in slots:
        if slot.end_elems - slot.start_elems != specs[slot.param].numel_elems:
            yield Fault(
                'every element exactly once',
                f'{name(slot)} has {specs[slot.param].numel_elems} elements, and '
                f'[{slot.start_elems}, {slot.end_elems}) in the buffer',
            )
    by_start = sorted(slots, key=lambda slot: (slot.start_elems, slot.end_elems))
    for before, after in itertools.pairwise(by_start):
        if after.start_elems < before.end_elems:
            yield Fault(
                'parameters do not overlap',
                f'{name(before)} is at [{before.start_elems}, {before.end_elems}) and {name(after)} '
                f'at [{after.start_elems}, {after.end_elems})',
            )
            break
    yield from _bucket_faults(example, layout)
    yield from _membership_faults(example, layout)


def _bucket_faults(example: Example, layout: BufferLayout) -> Iterator[Fault]:
    """Buckets touch, and every shard is as large as the others."""
    start = 0
    dp_size = example.traits.dp_size if example.dist_opt else 1
    for index, span in enumerate(layout.buckets):
        if span.start_elems != start or span.end_elems <= span.start_elems:
            yield Fault(
                'buckets are contiguous',
                f'bucket {index} is [{span.start_elems}, {span.end_elems}); it must start at {start} '
                'and hold something',
            )
            return
        start = span.end_elems
        odd = [n for n in (span.start_elems, span.end_elems, span.numel_elems) if n % dp_size]
        if odd:
            yield Fault(
                'shards are equal',
                f'bucket {index} is [{span.start_elems}, {span.end_elems}) with {span.numel_elems} '
                f'elements; {odd[0]} does not divide by the {dp_size} data-parallel ranks',
            )
            return
        if not example.dist_opt and span.numel_unpadded != span.numel_elems:
            yield Fault(
                'no padding without the distributed optimizer',
                f'bucket {index} has {span.numel_elems} elements and {span.numel_unpadded} without '
                'padding; upstream asserts that they are equal',
            )
            return


def _membership_faults(example: Example, layout: BufferLayout) -> Iterator[Fault]:
    """Which parameter is in which bucket, and what the checkpoint formats read from it."""
    slots_of: dict[int, list[ParamSlot]] = {}
    previous = -1
    for slot in layout.slots:
        if slot.bucket not in (previous, previous + 1) or slot.bucket >= len(layout.buckets):
            yield Fault(
                'bucket numbers rise by one',
                f'{_name(example, slot.param)} is in bucket {slot.bucket}, after bucket {previous}; '
                'upstream asserts this while it walks the parameters',
            )
            return
        previous = slot.bucket
        slots_of.setdefault(slot.bucket, []).append(slot)
    for index, span in enumerate(layout.buckets):
        slots = slots_of.get(index)
        if not slots:
            yield Fault('every bucket holds a parameter', f'bucket {index} holds none')
            return
        outside = [
            slot
            for slot in slots
            if slot.start_elems < span.start_elems or slot.end_elems > span.end_elems
        ]
        if outside:
            yield Fault(
                'a parameter lies in its bucket',
                f'{_name(example, outside[0].param)} is at [{outside[0].start_elems}, '
                f'{outside[0].end_elems}), and its bucket is [{span.start_elems}, {span.end_elems})',
            )
            return
        last = max(slot.end_elems for slot in slots)
        following = slots_of.get(index + 1)
        aligned = last + (-last % max(1, layout.alignment.param_start_elems))
        before_tied = following and example.params[following[0].param].shared_embedding
        recorded = span.start_elems + span.numel_unpadded
        if recorded != last and not (before_tied and example.dist_opt and recorded == aligned):
            yield Fault(
                'a bucket records its size without padding',
                f'bucket {index} starts at {span.start_elems} and its last parameter ends at {last}, '
                f'but it records {span.numel_unpadded} elements; checkpoints are cut there',
            )
        tied = [slot for slot in slots if example.params[slot.param].shared_embedding]
        if example.dist_opt and tied and len(slots) > 1:
            others = [slot.param for slot in slots if slot is not tied[0]]
            yield Fault(
                'a tied embedding is alone in its bucket',
                f'{_name(example, tied[0].param)} shares bucket {index} with '
                f'{_names(example, others)}. Finalize sums its gradient over the first and the last '
                'pipeline stage after both have sharded it, so both must shard it alike',
            )


def _one_bucket_faults(
    example: Example, strategies: LayoutStrategies, layout: BufferLayout
) -> Iterator[Fault]:
    """Where Megatron wants one bucket, only parameters that are alone divide it."""
    is_alone = strategies.bucket_isolation.is_alone
    runs, open_run = 0, False
    for slot in layout.slots:
        spec = example.params[slot.param]
        alone = is_alone(spec.name, example.dist_opt and spec.shared_embedding)
        runs += alone or not open_run
        open_run = not alone
    if len(layout.buckets) > runs:
        yield Fault(
            'one bucket where Megatron wants one',
            f'bucket_size_elems is None (no overlap, or a later pipeline stage or chunk), and there '
            f'are {len(layout.buckets)} buckets instead of {runs}',
        )


def _stage_faults(
    example: Example, strategies: LayoutStrategies, layout: BufferLayout
) -> Iterator[Fault]:
    """A tied embedding lies in its bucket as on the other pipeline stage that holds it."""
    other = last_stage_of(example)
    if other is None:
        return
    places = [_tied_place(example, layout), _tied_place(other, lay_out(other, strategies))]
    if places[0] != places[1]:
        (start, size), (other_start, other_size) = places
        yield Fault(
            'both pipeline stages shard a tied embedding alike',
            f'on the first stage it starts {start} elements into a bucket of {size}, on the last one '
            f'{other_start} elements into a bucket of {other_size}; dp_size {example.traits.dp_size}',
        )


def _tied_place(example: Example, layout: BufferLayout) -> tuple[int, int]:
    """Offset of the first tied embedding in its bucket, and the size of that bucket."""
    param = next(i for i, spec in enumerate(example.params) if spec.shared_embedding)
    slot = next(slot for slot in layout.slots if slot.param == param)
    span = layout.buckets[slot.bucket]
    return slot.start_elems - span.start_elems, span.numel_elems


def padding_only_shards(layout: BufferLayout) -> Iterator[tuple[int, int]]:
    """Bucket and rank wherever a rank's shard of a bucket holds no element of any parameter."""
    by_bucket = layout.slots_by_bucket()
    for index, span in enumerate(layout.buckets):
        shard = span.numel_elems // layout.dp_size
        covered = {
            rank
            for slot in by_bucket[index]
            for rank in range(
                (slot.start_elems - span.start_elems) // shard,
                (slot.end_elems - 1 - span.start_elems) // shard + 1,
            )
        }
        for rank in range(layout.dp_size):
            if rank not in covered:
                yield index, rank
                break


def _name(example: Example, param: int) -> str:
    return example.params[param].name or f'parameter {param}'


def _names(example: Example, params: list[int], limit: int = 4) -> str:
    names = [_name(example, param) for param in params[:limit]]
    more = f' and {len(params) - limit} more' if len(params) > limit else ''
    return (', '.join(names) + more) if names else 'none'

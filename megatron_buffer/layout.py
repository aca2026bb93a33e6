"""From parameter specs and strategies to the layout of one buffer; pure.

Stands for ``DistributedOptimizer._compute_per_buffer_param_layout``
(``megatron/core/optimizer/distrib_optimizer.py``), ``_compute_default_per_buffer_param_layout``
(``megatron/core/distributed/param_and_grad_buffer.py``) and the dataclasses of
``megatron/core/optimizer/param_layout.py``. No process group, no storage, no tensors: the runtime, the
planner and the tests all call :func:`compute_buffer_layout`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_buffer.config import BufferConfig, load_config
from megatron_buffer.errors import LayoutError
from megatron_buffer.strategies.bucketing import Bucketing, OpenBucket
from megatron_buffer.strategies.isolation import BucketIsolation
from megatron_buffer.strategies.order import ParamOrder
from megatron_buffer.strategies.padding import UNPADDED, Alignment, Padding, round_up
from megatron_buffer.strategies.registry import make_strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """A parameter, as far as a layout is concerned."""

    numel_elems: int
    """Elements of the parameter (logical ones: an fp4 parameter counts each value)."""
    name: str = ''
    """Name in the wrapped module; '' where upstream hands over bare parameters."""
    shared_embedding: bool = False
    """Megatron's mark on embeddings tied across pipeline stages."""


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """Where a parameter lies. Offsets are elements from the start of the buffer."""

    param: int
    """Index in the list of specs (registration order)."""
    start_elems: int
    end_elems: int
    bucket: int


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """A bucket. Offsets are elements from the start of the buffer."""

    start_elems: int
    end_elems: int
    """End, with the pad that makes shards equal."""
    numel_unpadded: int
    """As upstream records it for checkpoints: start to the last parameter's end; where the next
    parameter asked for a bucket of its own, to that parameter's aligned start."""

    @property
    def numel_elems(self) -> int:
        """Size with padding."""
        return self.end_elems - self.start_elems


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutStrategies:
    """The strategies that shape one buffer."""

    bucketing: Bucketing
    bucket_isolation: BucketIsolation
    padding: Padding
    param_order: ParamOrder

    @classmethod
    def from_config(cls, config: BufferConfig) -> LayoutStrategies:
        """Resolves the four axes that shape a buffer."""
        return cls(
            bucketing=make_strategy('bucketing', config.bucketing),
            bucket_isolation=make_strategy('bucket_isolation', config.bucket_isolation),
            padding=make_strategy('padding', config.padding),
            param_order=make_strategy('param_order', config.param_order),
        )


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """Layout of one buffer."""

    slots: tuple[ParamSlot, ...]
    """In layout order: the first one starts at offset 0."""
    buckets: tuple[BucketSpan, ...]
    dp_size: int
    """Ranks that each bucket is sharded over; 1 when nothing is sharded."""
    alignment: Alignment
    names: tuple[str, ...] = field(default=(), compare=False)
    """Names by spec index, for messages."""

    @property
    def numel_elems(self) -> int:
        """Size of the buffer with padding."""
        return self.buckets[-1].end_elems if self.buckets else 0

    @property
    def numel_params_elems(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.end_elems - slot.start_elems for slot in self.slots)

    @property
    def padding_elems(self) -> int:
        """Elements that belong to no parameter: alignment gaps and end pads."""
        return self.numel_elems - self.numel_params_elems

    def slots_by_bucket(self) -> list[list[ParamSlot]]:
        """The slots of each bucket, in layout order."""
        result: list[list[ParamSlot]] = [[] for _ in self.buckets]
        for slot in self.slots:
            result[slot.bucket].append(slot)
        return result

    def fingerprint(self) -> str:
        """Hash of everything that two ranks must agree on: names, offsets, cuts."""
        named = [
            (
                (self.names[s.param] if self.names else '') or s.param,
                s.start_elems,
                s.end_elems,
                s.bucket,
            )
            for s in self.slots
        ]
        spans = [(b.start_elems, b.end_elems, b.numel_unpadded) for b in self.buckets]
        text = json.dumps([named, spans, self.dp_size], separators=(',', ':'))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(self, specs: Sequence[ParamSpec]) -> None:
        """Checks the invariants that Megatron-Core relies on.

        Every parameter lies in exactly one bucket at an aligned start, none overlap, bucket ids rise by
        one, no bucket is empty, buckets touch each other, and their ends divide by ``dp_size``.

        Raises:
            LayoutError: Naming the first parameter or bucket that breaks one.
        """
        if sorted(slot.param for slot in self.slots) != list(range(len(specs))):
            raise LayoutError(
                f'layout: {len(self.slots)} slots for {len(specs)} parameters; each parameter must be '
                'laid out exactly once'
            )
        self._check_buckets()
        cursor, bucket = 0, -1
        last_end = [0] * len(self.buckets)
        for slot in self.slots:
            name = specs[slot.param].name or f'parameter {slot.param}'
            if slot.bucket not in (bucket, bucket + 1) or not 0 <= slot.bucket < len(self.buckets):
                raise LayoutError(
                    f'layout: {name} is in bucket {slot.bucket} of {len(self.buckets)}, after bucket '
                    f'{bucket}; bucket ids must rise by one'
                )
            span = self.buckets[slot.bucket]
            if slot.start_elems < max(cursor, span.start_elems):
                raise LayoutError(
                    f'layout: {name} starts at {slot.start_elems}, inside what precedes it'
                )
            if slot.start_elems % self.alignment.param_start_elems:
                raise LayoutError(
                    f'layout: {name} starts at {slot.start_elems}, which is no multiple of '
                    f'{self.alignment.param_start_elems}'
                )
            if slot.end_elems - slot.start_elems != specs[slot.param].numel_elems:
                raise LayoutError(
                    f'layout: {name} has {slot.end_elems - slot.start_elems} elements of its '
                    f'{specs[slot.param].numel_elems}'
                )
            if slot.end_elems > span.end_elems:
                raise LayoutError(f'layout: {name} ends behind bucket {slot.bucket}')
            cursor, bucket = slot.end_elems, slot.bucket
            last_end[bucket] = cursor
        if bucket != len(self.buckets) - 1:
            raise LayoutError(f'layout: bucket {bucket + 1} holds no parameter')
        for index, (span, end) in enumerate(zip(self.buckets, last_end, strict=True)):
            unpadded_end = span.start_elems + span.numel_unpadded
            if not end <= unpadded_end <= span.end_elems:
                raise LayoutError(
                    f'layout: bucket {index} records {span.numel_unpadded} unpadded elements; they must '
                    f'reach from {span.start_elems} to between {end} and {span.end_elems}'
                )

    def _check_buckets(self) -> None:
        """Buckets touch each other, and their ends divide by ``dp_size``."""
        start = 0
        for index, span in enumerate(self.buckets):
            if span.start_elems != start or span.end_elems < start or span.end_elems % self.dp_size:
                raise LayoutError(
                    f'layout: bucket {index} is [{span.start_elems}, {span.end_elems}); it must start '
                    f'at {start} and its end must divide by {self.dp_size}'
                )
            start = span.end_elems


def compute_buffer_layout(
    specs: Sequence[ParamSpec],
    strategies: LayoutStrategies,
    *,
    bucket_size_elems: int | None,
    dp_size: int,
    dist_opt: bool,
    high_busbw: bool = False,
) -> BufferLayout:
    """Lays out one buffer.

    Args:
        specs: The buffer's parameters in registration (forward) order.
        strategies: Order, bucketing, isolation and padding.
        bucket_size_elems: Resolved bucket size; None asks for one bucket.
        dp_size: Ranks that each bucket is sharded over.
        dist_opt: Under the distributed optimizer parameters are aligned, bucket ends padded and tied
            embeddings isolated; without it none of that applies.
        high_busbw: ``ddp_config.pad_buckets_for_high_nccl_busbw``.

    Returns:
        The layout.
    """
    order = strategies.param_order.layout_order([spec.name for spec in specs])
    return _place(
        [(index, specs[index]) for index in order],
        strategies,
        bucket_size_elems=bucket_size_elems,
        dp_size=dp_size if dist_opt else 1,
        alignment=strategies.padding.alignment(dp_size, high_busbw) if dist_opt else UNPADDED,
        isolate=dist_opt,
        names=tuple(spec.name for spec in specs),
    )


def _place(
    ordered: Sequence[tuple[int, ParamSpec]],
    strategies: LayoutStrategies,
    *,
    bucket_size_elems: int | None,
    dp_size: int,
    alignment: Alignment,
    isolate: bool,
    names: tuple[str, ...],
) -> BufferLayout:
    """Walks the parameters in layout order with one cursor."""
    closes = strategies.bucketing.cutter(
        [spec.numel_elems for _, spec in ordered], bucket_size_elems
    )
    slots: list[ParamSlot] = []
    buckets: list[BucketSpan] = []
    cursor = bucket_start = 0
    is_open = False

    def close(at: int) -> int:
        end = round_up(at, alignment.bucket_end_elems)
        buckets.append(BucketSpan(bucket_start, end, at - bucket_start))
        return end

    for position, (index, spec) in enumerate(ordered):
        alone = isolate and strategies.bucket_isolation.is_alone(spec.name, spec.shared_embedding)
        start = round_up(cursor, alignment.param_start_elems)
        if alone and is_open:
            bucket_start = close(start)
            start = round_up(bucket_start, alignment.param_start_elems)
        cursor = start + spec.numel_elems
        slots.append(ParamSlot(index, start, cursor, len(buckets)))
        is_open = True
        if alone or closes(OpenBucket(position, bucket_start, cursor)):
            cursor = bucket_start = close(cursor)
            is_open = False
    if is_open:
        close(cursor)
    return BufferLayout(
        slots=tuple(slots),
        buckets=tuple(buckets),
        dp_size=dp_size,
        alignment=alignment,
        names=names,
    )


def plan_layout(
    params: Sequence[ParamSpec] | Sequence[int],
    *,
    config: BufferConfig | str | None = None,
    bucket_size_elems: int | None = None,
    dp_size: int = 1,
    dist_opt: bool = True,
    high_busbw: bool = False,
) -> BufferLayout:
    """Layout of one buffer, from a config and sizes; allocates nothing.

    Args:
        params: Specs, or bare sizes in elements, in registration (forward) order.
        config: Config, shipped name or path; None is ``upstream``.
        bucket_size_elems: Resolved bucket size; None asks for one bucket. ``max(40_000_000, 1_000_000 *
            dp)`` is Megatron's default (see :func:`megatron_buffer.bucket_size.default_bucket_size`).
        dp_size: Ranks that each bucket is sharded over.
        dist_opt: Whether the distributed optimizer is used.
        high_busbw: ``ddp_config.pad_buckets_for_high_nccl_busbw``.

    Returns:
        The checked layout.

    Raises:
        ConfigError: If the config is wrong.
        LayoutError: If its strategies produce a layout that Megatron-Core could not use.
    """
    specs = [p if isinstance(p, ParamSpec) else ParamSpec(numel_elems=p) for p in params]
    if dp_size < 1:
        raise LayoutError(f'plan_layout: dp_size is {dp_size}; it must be at least 1')
    for index, spec in enumerate(specs):
        if spec.numel_elems < 0:
            raise LayoutError(
                f'plan_layout: {spec.name or f"parameter {index}"} has {spec.numel_elems} elements'
            )
    strategies = LayoutStrategies.from_config(load_config(config))
    layout = compute_buffer_layout(
        specs,
        strategies,
        bucket_size_elems=bucket_size_elems,
        dp_size=dp_size,
        dist_opt=dist_opt,
        high_busbw=high_busbw,
    )
    layout.check(specs)
    return layout

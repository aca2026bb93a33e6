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
from megatron_buffer.layout_invariants import bucket_end_divisor, check_invariants
from megatron_buffer.strategies.bucketing import Bucketing, OpenBucket
from megatron_buffer.strategies.isolation import BucketIsolation
from megatron_buffer.strategies.order import ParamOrder
from megatron_buffer.strategies.padding import (
    UNPADDED,
    Alignment,
    Padding,
    in_whole_bytes,
    keeps_whole_bytes,
    round_up,
)
from megatron_buffer.strategies.registry import make_strategy
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec

__all__ = [
    'BucketSpan',
    'BufferLayout',
    'LayoutStrategies',
    'ParamSlot',
    'ParamSpec',
    'compute_buffer_layout',
    'layout_order',
    'plan_layout',
]


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
    """As upstream records it for checkpoints: start to the last parameter's end; where a tied embedding
    with a bucket of its own comes next, to where that parameter would have started."""

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

    def check(self, specs: Sequence[ParamSpec], *, isolate: bool = False) -> None:
        """Checks the invariants that Megatron-Core relies on.

        Args:
            specs: The parameters that were laid out.
            isolate: The distributed optimizer is on: tied embeddings must be alone in their bucket, and
                sharded as on any other pipeline stage.

        Raises:
            LayoutError: Naming the first parameter or bucket that breaks one.
        """
        check_invariants(self, specs, isolate=isolate)


def layout_order(
    specs: Sequence[ParamSpec], param_order: ParamOrder, buffer: BufferTraits
) -> list[int]:
    """Asks an order for the order of one buffer, and checks that it is one.

    Returns:
        Indices into ``specs``, first in the buffer first.

    Raises:
        LayoutError: If a parameter is missing or comes twice.
    """
    order = list(param_order.layout_order(specs, buffer))
    if sorted(order) != list(range(len(specs))):
        name = getattr(getattr(param_order, 'params', None), 'name', type(param_order).__name__)
        raise LayoutError(
            f'param_order: {name} returned {len(order)} positions for {len(specs)} parameters; it must '
            'return each of their indices exactly once'
        )
    return order


def compute_buffer_layout(
    specs: Sequence[ParamSpec],
    strategies: LayoutStrategies,
    *,
    bucket_size_elems: int | None,
    dist_opt: bool,
    buffer: BufferTraits,
) -> BufferLayout:
    """Lays out one buffer.

    Args:
        specs: The buffer's parameters in registration (forward) order.
        strategies: Order, bucketing, isolation and padding.
        bucket_size_elems: Resolved bucket size; None asks for one bucket.
        dist_opt: Under the distributed optimizer parameters are aligned, bucket ends padded and tied
            embeddings isolated; without it none of that applies, and nothing is sharded.
        buffer: Number of shards, bytes per element, pipeline stage.

    Returns:
        The layout.

    Raises:
        LayoutError: If the order is no permutation.
    """
    order = layout_order(specs, strategies.param_order, buffer)
    is_alone = strategies.bucket_isolation.is_alone
    with_synced = getattr(strategies.bucket_isolation, 'pipeline_synced', False)
    alignment = UNPADDED
    if dist_opt:
        alignment = strategies.padding.alignment(buffer)
        if keeps_whole_bytes(strategies.padding):
            alignment = in_whole_bytes(alignment, buffer)
    bucketing = strategies.bucketing
    for_buffer = getattr(bucketing, 'for_buffer', None)
    if for_buffer is not None:
        bucketing = for_buffer(buffer, alignment, dist_opt)
    return _place(
        [(index, specs[index]) for index in order],
        [
            is_alone(
                specs[i].name,
                dist_opt
                and (specs[i].shared_embedding or (with_synced and specs[i].pipeline_synced)),
            )
            for i in order
        ],
        bucketing,
        bucket_size_elems=bucket_size_elems,
        dp_size=buffer.dp_size if dist_opt else 1,
        alignment=alignment,
        names=tuple(spec.name for spec in specs),
    )


def _place(
    ordered: Sequence[tuple[int, ParamSpec]],
    alone: Sequence[bool],
    bucketing: Bucketing,
    *,
    bucket_size_elems: int | None,
    dp_size: int,
    alignment: Alignment,
    names: tuple[str, ...],
) -> BufferLayout:
    """Walks the parameters in layout order with one cursor."""
    closes = bucketing.cutter([spec for _, spec in ordered], alone, bucket_size_elems)
    divisor = bucket_end_divisor(alignment)
    slots: list[ParamSlot] = []
    buckets: list[BucketSpan] = []
    cursor = bucket_start = 0
    is_open = False

    def close(at: int) -> int:
        end = round_up(at, divisor)
        buckets.append(BucketSpan(bucket_start, end, at - bucket_start))
        return end

    for position, (index, spec) in enumerate(ordered):
        start = round_up(cursor, alignment.param_start_elems)
        if alone[position] and is_open:
            # Before a tied embedding upstream records the aligned end; elsewhere that would be wrong.
            start = bucket_start = close(start if spec.shared_embedding else cursor)
        cursor = start + spec.numel_elems
        slots.append(ParamSlot(index, start, cursor, len(buckets)))
        is_open = True
        if alone[position] or closes(OpenBucket(position, bucket_start, cursor)):
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
    param_bytes: int = 2,
    grad_bytes: int = 4,
    pp_rank: int = 0,
    vp_stage: int = 0,
    values_per_byte: int = 1,
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
        param_bytes: Bytes per element of the parameters (1 for quantized ones).
        grad_bytes: Bytes per element of the gradients.
        pp_rank: Pipeline stage, for strategies that read profiles.
        vp_stage: Which of the stage's model chunks it is.
        values_per_byte: Elements that share a byte of ``param_data``: 2 for NVFP4 parameters.

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
        dist_opt=dist_opt,
        buffer=BufferTraits(
            dp_size=dp_size,
            high_busbw=high_busbw,
            param_bytes=param_bytes,
            grad_bytes=grad_bytes,
            pp_rank=pp_rank,
            vp_stage=vp_stage,
            values_per_byte=values_per_byte,
        ),
    )
    layout.check(specs, isolate=dist_opt)
    return layout

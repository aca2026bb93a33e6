"""The layout of one model chunk as plain values: buffers, buckets, parameters, groups and their orders.

:mod:`megatron_buffer.planner.collect` fills it in. Stands for the attributes of
``DistributedDataParallel`` (``megatron/core/distributed/distributed_data_parallel.py``): ``buffers``,
``expert_parallel_buffers``, ``bucket_groups`` and ``expert_parallel_bucket_groups``.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch

from megatron_buffer.bucket_size import BucketSize
from megatron_buffer.layout import BufferLayout, ParamSlot
from megatron_buffer.planner.job import DdpOptions, Job
from megatron_buffer.planner.params import PlannedParam, short_dtype
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.bucket_groups import BucketRef
from megatron_buffer.strategies.grouping import GroupKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferView:
    """One buffer."""

    index: int
    """Place in the list of the chunk's buffers: dense ones first, as DDP keeps them."""
    key: GroupKey
    params: tuple[PlannedParam, ...]
    """In layout order; ``layout.slots[i]`` is where ``params[i]`` lies."""
    forward: tuple[int, ...]
    """For each of ``params`` its place in the chunk's registration order."""
    layout: BufferLayout
    num_ranks: int
    """Ranks that its gradients are reduced over."""

    @property
    def label(self) -> str:
        """What tells the buffers of a chunk apart, such as ``bf16/fp32 expert``."""
        kind = ' expert' if self.key.is_expert_parallel else ''
        kind += ' layer-wise' if self.key.is_managed_by_layer_wise_optimizer else ''
        return f'{short_dtype(self.key.param_dtype)}/{short_dtype(self.key.grad_dtype)}{kind}'

    @property
    def num_shards(self) -> int:
        """Ranks that each bucket is sharded over; 1 without the distributed optimizer."""
        return self.layout.dp_size

    @cached_property
    def slots_by_bucket(self) -> list[list[ParamSlot]]:
        """The slots of each bucket; ``slot.param`` indexes ``params``."""
        return self.layout.slots_by_bucket()

    def bucket_padding_elems(self, bucket: int) -> int:
        """Elements of a bucket that belong to no parameter."""
        slots = self.slots_by_bucket[bucket]
        used = sum(slot.end_elems - slot.start_elems for slot in slots)
        return self.layout.buckets[bucket].numel_elems - used

    def ready_at(self, bucket: int) -> int:
        """Lowest forward index in a bucket: where backward completes it."""
        return min(self.forward[slot.param] for slot in self.slots_by_bucket[bucket])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupView:
    """One bucket group; positions count from 0."""

    index: int
    """Place in the list of groups: dense ones first, as DDP keeps them."""
    is_expert_parallel: bool
    buckets: tuple[BucketRef, ...]
    """``BucketRef(buffer, bucket)``, with the index of the buffer view."""
    ready_at: int
    """Lowest forward index among its parameters."""
    dispatch_position: int
    """When its gradients are reduced, among all groups of the chunk."""
    gather_position: int | None
    """When its parameters are gathered, among the groups of its chain; None where nothing is sharded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutView:
    """The layout of one model chunk."""

    model: str
    """Name of the model or of the parameter file."""
    runtime: Runtime
    job: Job
    ddp: DdpOptions
    param_dtype: torch.dtype
    bucket_size: BucketSize
    buffers: tuple[BufferView, ...]
    groups: tuple[GroupView, ...]
    dispatch: str
    """In which order gradients are reduced, as a sentence."""
    gather: str
    """In which order parameters are gathered, as a sentence."""
    notes: tuple[str, ...]

    def num_ranks(self, group: GroupView) -> int:
        """Ranks that a group communicates with, itself among them."""
        return self.buffers[group.buckets[0].buffer].num_ranks

    @property
    def numel_elems(self) -> int:
        """Elements of all buffers, with padding."""
        return sum(buffer.layout.numel_elems for buffer in self.buffers)

    @property
    def numel_params_elems(self) -> int:
        """Elements of all parameters."""
        return sum(buffer.layout.numel_params_elems for buffer in self.buffers)

    @property
    def num_params(self) -> int:
        """How many parameters there are."""
        return sum(len(buffer.params) for buffer in self.buffers)

    def group_of(self, buffer: int, bucket: int) -> GroupView:
        """The group that a bucket belongs to."""
        return self._groups[buffer, bucket]

    @cached_property
    def _groups(self) -> dict[tuple[int, int], GroupView]:
        return {(ref.buffer, ref.bucket): group for group in self.groups for ref in group.buckets}

    @property
    def dispatch_order(self) -> list[int]:
        """Indices of the groups in the order in which they are reduced."""
        ordered = sorted(self.groups, key=lambda group: group.dispatch_position)
        return [group.index for group in ordered]

    def gather_order(self, is_expert_parallel: bool) -> list[int]:
        """Indices of the groups of a chain in the order in which they are gathered."""
        chain = [g for g in self.groups if g.is_expert_parallel == is_expert_parallel]
        if not self.ddp.use_distributed_optimizer:
            return []
        return [
            group.index for group in sorted(chain, key=lambda group: group.gather_position or 0)
        ]

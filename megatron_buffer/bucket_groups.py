"""Bucket groups: which buckets go together, and the state machine that reduces and gathers them.

Stands for ``partition_buckets`` and ``_ParamAndGradBucketGroup``
(``megatron/core/distributed/param_and_grad_buffer.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from megatron_buffer import runtime as runtime_module
from megatron_buffer.collectives import (
    launch_grad_reduce,
    launch_param_gather,
    reduce_scatter_global_preserved,
    shard,
)
from megatron_buffer.errors import LayoutError, ReadinessError
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.bucket_groups import BufferBuckets
from megatron_buffer.strategies.reduce import ReduceKind
from megatron_buffer.strategies.unused import WindowState

_pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')
_REDUCE_OPS = {False: dist.ReduceOp.SUM, True: dist.ReduceOp.AVG}


class ParamAndGradBucketGroup(_pgb._ParamAndGradBucketGroup):
    """``_ParamAndGradBucketGroup`` whose readiness, dispatch and collectives follow the config.

    Args:
        buckets: Buckets that are communicated together.
        ddp_config: The DDP config.
        collective_group: Data-parallel group within the optimizer instance.
        collective_group_size: Its size.
        runtime: The config to follow; None takes the one in force.

    Attributes:
        readiness: Counts the gradients of this window.
        param_to_name: Names for messages; DDP fills it in.
        grad_reduce_dispatched: True once the reduction was started in this window.
    """

    def __init__(
        self,
        buckets: list[Any],
        ddp_config: Any,
        collective_group: Any,
        collective_group_size: int,
        runtime: Runtime | None = None,
    ) -> None:
        self.runtime = runtime or runtime_module.current()
        self.readiness = self.runtime.readiness.tracker(
            [param for bucket in buckets for param in bucket.params_list]
        )
        self.param_to_name: dict[torch.nn.Parameter, str] = {}
        self.grad_reduce_dispatched = False
        with reduce_scatter_global_preserved():
            super().__init__(buckets, ddp_config, collective_group, collective_group_size)
        self.reduce_kind: ReduceKind = self.runtime.grad_reduce.kind(
            dist_opt=ddp_config.use_distributed_optimizer,
            fp32_accumulation=ddp_config.reduce_scatter_with_fp32_accumulation,
        )

    # Upstream's names for the readiness state, which its constructor and its tests use.

    @property
    def per_param_grad_ready_counts(self) -> dict[Any, int]:
        """How often each parameter was registered in this window."""
        return self.readiness.counts

    @per_param_grad_ready_counts.setter
    def per_param_grad_ready_counts(self, counts: dict[Any, int]) -> None:
        self.readiness.counts = counts

    @property
    def golden_per_param_grad_ready_counts(self) -> dict[Any, int]:
        """How often each parameter has to be registered."""
        return self.readiness.golden

    @golden_per_param_grad_ready_counts.setter
    def golden_per_param_grad_ready_counts(self, counts: dict[Any, int]) -> None:
        self.readiness.golden = counts

    @property
    def is_first_batch(self) -> bool:
        """True until the golden counts are known."""
        return self.readiness.is_first_batch

    @is_first_batch.setter
    def is_first_batch(self, value: bool) -> None:
        self.readiness.is_first_batch = value

    @property
    def communication_group(self) -> Any:
        """Process group of the reduction and of the gather."""
        if self.ddp_config.use_distributed_optimizer:
            return self.intra_distributed_optimizer_instance_group
        return self.data_parallel_group

    @cached_property
    def param_gather_launches(self) -> list[list[int]]:
        """Which buckets are gathered together; dtypes and backend do not change over a run."""
        return self.runtime.param_gather.launches(
            [bucket.param_data.dtype for bucket in self.buckets],
            dist.get_backend(self.communication_group),
        )

    def owned_grad_shard(self, index: int) -> torch.Tensor:
        """View of the gradients of bucket ``index`` that this rank owns."""
        return shard(
            self.cached_grad_buffer_shard_list,
            index,
            self.buckets[index].grad_data,
            self.intra_distributed_optimizer_instance_size,
            self.intra_distributed_optimizer_instance_rank,
        )

    def owned_param_shard(self, index: int) -> torch.Tensor:
        """View of the parameters of bucket ``index`` that this rank owns."""
        return shard(
            self.cached_param_buffer_shard_list,
            index,
            self.buckets[index].param_data,
            self.intra_distributed_optimizer_instance_size,
            self.intra_distributed_optimizer_instance_rank,
        )

    def reset(self) -> None:
        """Ends the window; upstream: ``_ParamAndGradBucketGroup.reset``."""
        if self.readiness.is_first_batch or self.grad_reduce_dispatched:
            self._check_window()
        self.readiness.reset()
        self.is_last_microbatch = True
        self.grad_reduce_finished = False
        self.grad_reduce_dispatched = False

    def register_grad_ready(
        self, param: torch.nn.Parameter, force_all_reduce: bool | None = False
    ) -> None:
        """Counts a gradient of the last micro-batch; the group's last one lets it be dispatched.

        Upstream: ``_ParamAndGradBucketGroup.register_grad_ready``.
        """
        assert self.ddp_config.overlap_grad_reduce, 'the backward hook registers under overlap only'
        if not self.is_last_microbatch:
            return
        if param not in self.param_to_bucket:
            raise ReadinessError(
                f'a parameter of shape {tuple(param.shape)} registered its gradient with a bucket '
                'group that it does not belong to'
            )
        if self.readiness.register(param):
            self.runtime.dispatch_order.group_ready(self, bool(force_all_reduce))

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Scales and starts to reduce the gradients of all buckets.

        Upstream: ``_ParamAndGradBucketGroup.start_grad_sync``.

        Args:
            force_all_reduce: Reduce whole buckets even under the distributed optimizer.
        """
        if self._already_started():
            return
        self._drain_predecessor(force_all_reduce)
        if self.grad_reduce_handle is not None:
            raise ReadinessError(
                'the reduction of a bucket group was started twice in one iteration; it holds '
                f'{self._some_names()}'
            )
        self._wait_for_captured_wgrads()
        self._copy_in_extra_main_grads()
        if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
            self.check_grads(
                self.ddp_config.check_for_nan_in_grad, self.ddp_config.check_for_large_grads
            )
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.gradient_scaling_factor != 1.0:
                    bucket.grad_data.mul_(bucket.gradient_scaling_factor)
        self.grad_reduce_handle = launch_grad_reduce(
            self,
            kind='all_reduce' if force_all_reduce else self.reduce_kind,
            op=_REDUCE_OPS[self.ddp_config.average_in_collective],
        )
        self.grad_reduce_dispatched = True

    def _already_started(self) -> bool:
        """In the first iteration finish starts what nobody has: once, with streams as with handles."""
        if not self.is_first_batch:
            return False
        if self.grad_reduce_handle is not None:
            return True
        by_stream = self.ddp_config.num_distributed_optimizer_instances > 1
        return by_stream and self.ddp_config.overlap_grad_reduce and self.grad_reduce_dispatched

    def _drain_predecessor(self, force_all_reduce: bool | None) -> None:
        """Frees the predecessor's temporary before this group allocates its own."""
        predecessor = self.previous_grad_reduce_bucket_group
        if predecessor is not None and predecessor.grad_reduce_handle is not None:
            predecessor.finish_grad_sync(force_all_reduce=force_all_reduce)

    def _wait_for_captured_wgrads(self) -> None:
        """Replayed CUDA graphs leave an event on each parameter whose gradient they wrote."""
        events = {
            id(event): event
            for param in self.param_to_bucket
            if (event := getattr(param, '_cudagraph_wgrad_ready_event', None)) is not None
        }
        for event in events.values():
            torch.cuda.current_stream().wait_event(event)

    def _copy_in_extra_main_grads(self) -> None:
        """Gradients accumulated in fp32 beside the buffer go into it; finish copies them back."""
        for bucket in self.buckets:
            for param in bucket.params_with_extra_main_grads:
                in_buffer = getattr(param, 'main_grad_copy_in_grad_buffer', None)
                if in_buffer is not None:
                    in_buffer.copy_(param.main_grad)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Waits for the reduction; without overlap, or in the first iteration, starts it here.

        Upstream: ``_ParamAndGradBucketGroup.finish_grad_sync``.

        Raises:
            ReadinessError: If gradients are missing where stock would assert, by name.
        """
        if not self.grad_reduce_finished:
            self._check_window()
        super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gathers the parameters from their owners.

        Upstream: ``_ParamAndGradBucketGroup.start_param_sync``, whose LayerWise path is used as it is.

        Args:
            force_sync: Wait here, whatever ddp_config says.
        """
        if not self.ddp_config.use_distributed_optimizer:
            super().start_param_sync(force_sync=force_sync)
            return
        overlap = self.ddp_config.overlap_param_gather
        if self.param_gather_handle is not None:
            assert force_sync, 'a gather is in flight; only force_sync may ask for another one'
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            self._post_param_sync()
            return
        self.param_gather_handle = launch_param_gather(self, async_op=overlap and not force_sync)
        if force_sync and overlap:
            self._post_param_sync()
        self.param_gather_dispatched = True

    def _check_window(self) -> None:
        """Lets the unused_params strategy judge a window that is not as it should be."""
        tracker = self.readiness
        if not self.ddp_config.overlap_grad_reduce or tracker.is_regular():
            return
        self.runtime.unused_params.check(
            WindowState(
                missing=self._names(tracker.missing()),
                surplus=self._names(tracker.surplus()),
                num_registered=len(tracker.counts),
                num_params=len(self.params),
                is_first_batch=tracker.is_first_batch,
                dispatched=self.grad_reduce_dispatched,
                has_handle=self.ddp_config.num_distributed_optimizer_instances == 1,
            )
        )

    def _names(self, params: Sequence[Any]) -> list[str]:
        return [
            self.param_to_name.get(param, f'a parameter of shape {tuple(param.shape)}')
            for param in params
        ]

    def _some_names(self) -> str:
        names = self._names([param for bucket in self.buckets for param in bucket.params_list])
        return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')


def partition_buckets(
    buffers: Sequence[Any],
    force_single_bucket_group: bool = False,
    reduce_scatter_with_fp32_accumulation: bool = False,
) -> list[ParamAndGradBucketGroup]:
    """Groups the buckets of ``buffers`` as the config's ``bucket_groups`` strategy has it.

    Upstream: ``param_and_grad_buffer.py: partition_buckets``.

    Args:
        buffers: Buffers of one model chunk that share a process group.
        force_single_bucket_group: Bucketing is off for this chunk.
        reduce_scatter_with_fp32_accumulation: The collective takes one bucket at a time.

    Returns:
        The groups, buffer by buffer; within one, from the end of the model to its start.

    Raises:
        LayoutError: If the buffers cannot be grouped.
    """
    if not buffers:
        return []
    runtime = getattr(buffers[0], 'runtime', None) or runtime_module.current()
    groups = runtime.bucket_groups.partition(
        [BufferBuckets(b.param_dtype == torch.uint8, len(b.buckets)) for b in buffers],
        single_group=force_single_bucket_group,
        one_bucket_per_group=reduce_scatter_with_fp32_accumulation,
    )
    made: list[ParamAndGradBucketGroup] = []
    for refs in groups:
        owners = [buffers[ref.buffer] for ref in refs]
        first = owners[0]
        if any(owner.data_parallel_group is not first.data_parallel_group for owner in owners):
            raise LayoutError(
                'bucket_groups: a group holds buckets of different data-parallel groups; buckets of '
                'expert and dense buffers cannot be communicated together'
            )
        made.append(
            ParamAndGradBucketGroup(
                [buffers[ref.buffer].buckets[ref.bucket] for ref in refs],
                first.ddp_config,
                first.data_parallel_group,
                first.data_parallel_world_size,
                runtime=runtime,
            )
        )
    return made

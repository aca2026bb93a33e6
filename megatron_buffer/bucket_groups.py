"""Bucket groups: which buckets go together, and the state machine that reduces and gathers them.

Stands for ``partition_buckets`` and ``_ParamAndGradBucketGroup``
(``megatron/core/distributed/param_and_grad_buffer.py``).
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from megatron_buffer.grad_values import check_local_grads, check_reduced_grads
from megatron_buffer.grad_writes import GradWrites
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.bucket_groups import BufferBuckets
from megatron_buffer.strategies.dispatch import Dispatcher
from megatron_buffer.strategies.gather import by_dtype
from megatron_buffer.strategies.readiness import OnLate
from megatron_buffer.strategies.reduce import ALL_REDUCE
from megatron_buffer.strategies.scaling import ScalingPlan
from megatron_buffer.window import GroupWindow

_pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')


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
        dispatcher: Starts the reduction when its turn comes; DDP sets the chunk's.
        on_late: What a gradient means that comes after the reduction was started.
        scaling_plan: How gradients become averages; DDP sets it.
        intake: What backward hooks look at for every gradient.
        late_grads: Gradients of this window that are kept aside, per parameter, shaped like main_grad.
        late_params: Parameters whose late gradient was added all the same, in order.
        graphs_write: Whether CUDA graphs may have written gradients; DDP knows.
        grad_writes: Where the accumulation strategy overwrites: who watches each bucket's writes, and which
            part of its flags is the bucket's. DDP fills it in.
        params_stale: True from an optimizer step until the gather of its values is started.
        gathers: How many groups of the chunk are not gathered; DDP sets the chunk's.
        gathered: True when the parameters are gathered: started, and not in flight.
    """

    # Upstream's groups and ours together have more attributes than an object of Python's stores in one
    # piece; what is looked at for every gradient and every window lies in slots.
    __slots__ = (
        '_gather_dispatched',
        '_gather_handle',
        '_judged',
        'dispatcher',
        'drain',
        'gathered',
        'gathers',
        'grad_reduce_finished',
        'grad_reduce_handle',
        'grad_writes',
        'graphs_write',
        'intake',
        'late_grads',
        'late_params',
        'on_late',
        'param_to_name',
        'params_stale',
        'readiness',
        'reduce_choice',
        'reduces_once',
        'runtime',
        'scaling_plan',
        'warned_of_export',
    )

    def __init__(
        self,
        buckets: list[Any],
        ddp_config: Any,
        collective_group: Any,
        collective_group_size: int,
        runtime: Runtime | None = None,
    ) -> None:
        self.runtime = runtime or runtime_module.current()
        self.on_late: OnLate = self.runtime.on_late
        self.readiness = self.runtime.readiness.tracker(
            [param for bucket in buckets for param in bucket.params_list],
            adapts=getattr(self.runtime.unused_params, 'on_late', 'warn') != 'warn',
        )
        self.intake = Intake(self)
        if ddp_config.overlap_grad_reduce:
            tracker: Any = self.readiness
            self.intake.count = tracker.register_at if self._counts_by_place else tracker.register
        self.param_to_name: dict[torch.nn.Parameter, str] = {}
        self.graphs_write = True
        self.dispatcher: Dispatcher | None = None
        self.drain: Drain | None = None
        self.late_grads: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.late_params: dict[torch.nn.Parameter, None] = {}
        self.reduces_once = False
        self.params_stale = False
        self.warned_of_export = False
        self.grad_writes: list[tuple[GradWrites, int, int]] = []
        self.gathers = Gathers()
        self.gathered = False
        self._gather_handle: Any = None
        self._gather_dispatched = False
        self._judged = False
        with reduce_scatter_global_preserved():
            super().__init__(buckets, ddp_config, collective_group, collective_group_size)
        self.reduce_choice = self.runtime.grad_reduce.choice(
            dist_opt=ddp_config.use_distributed_optimizer,
            fp32_accumulation=ddp_config.reduce_scatter_with_fp32_accumulation,
        )
        factors = {bucket.gradient_scaling_factor for bucket in buckets}
        self.scaling_plan = ScalingPlan(
            factors.pop() if len(factors) == 1 else 1.0,
            'avg' if ddp_config.average_in_collective else 'sum',
        )

    # Upstream's names for the state of the gather, which several of its methods change.

    @property
    def param_gather_handle(self) -> Any:
        """What to wait for while the gather is in flight."""
        return self._gather_handle

    @param_gather_handle.setter
    def param_gather_handle(self, handle: Any) -> None:
        self._gather_handle = handle
        self._note_gathered()

    @property
    def param_gather_dispatched(self) -> bool:
        """True once the gather was started, since the last reduction."""
        return self._gather_dispatched

    @param_gather_dispatched.setter
    def param_gather_dispatched(self, dispatched: bool) -> None:
        self._gather_dispatched = dispatched
        self._note_gathered()

    def _note_gathered(self) -> None:
        gathered = self._gather_dispatched and self._gather_handle is None
        if gathered is not self.gathered:
            self.gathered = gathered
            self.gathers.waiting += -1 if gathered else 1

    # Names for the state of the reduction, which lies where hooks look.

    @property
    def is_last_microbatch(self) -> bool:
        """True unless in no_sync()."""
        return self.intake.is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, is_last: bool) -> None:
        self.intake.is_last_microbatch = is_last

    @property
    def grad_reduce_dispatched(self) -> bool:
        """True once the reduction was started in this window."""
        return self.intake.closed

    @grad_reduce_dispatched.setter
    def grad_reduce_dispatched(self, dispatched: bool) -> None:
        self.intake.closed = dispatched

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

    @cached_property
    def grad_reduce_launches(self) -> list[list[int]]:
        """Which buckets are reduced together: a mixture of dtypes is refused by torch."""
        return by_dtype([bucket.grad_data.dtype for bucket in self.buckets])

    @property
    def awaits_gather(self) -> bool:
        """True while other ranks' shards hold last step's values: not gathered yet, or not finished."""
        return self.params_stale or self.param_gather_handle is not None

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
        on_its_own = self.dispatcher is None and self.intake.closed
        if on_its_own and self.ddp_config.overlap_grad_reduce:  # not judged as a chunk
            self._judge_alone()
        self.readiness.reset(finished=self.grad_reduce_finished)
        intake = self.intake
        intake.is_last_microbatch = True
        intake.closed = False
        self.grad_reduce_finished = False
        self._judged = False
        if self.late_params or self.late_grads:
            self.late_grads.clear()
            self.late_params.clear()

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
        complete = self.readiness.register(param)
        if self.grad_reduce_dispatched:
            if param not in self.late_grads:
                self.late_params.setdefault(param)
        elif complete:
            self.grads_complete(force_all_reduce)

    def counted_as(self, param: torch.nn.Parameter) -> Any:
        """What ``intake.count`` takes for ``param``: its place, or with another kind of tracker itself."""
        tracker: Any = self.readiness
        return tracker.place(param) if self._counts_by_place else param

    @property
    def _counts_by_place(self) -> bool:
        return getattr(self.readiness, 'counts_by_place', False)

    def grads_complete(self, force_all_reduce: bool | None) -> None:
        """The group's last gradient of this window is in: its reduction starts when its turn comes."""
        if self.dispatcher is not None:
            self.dispatcher.group_ready(self, bool(force_all_reduce))
        else:
            self.start_grad_sync(force_all_reduce=force_all_reduce)

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Scales and starts to reduce the gradients of all buckets.

        Upstream: ``_ParamAndGradBucketGroup.start_grad_sync``. In one window it does so once: stock
        scales and reduces again what was reduced already.

        Args:
            force_all_reduce: Reduce whole buckets even under the distributed optimizer; over several optimizer
                instances too, unless ``checks.export`` leaves them as stock does.

        Raises:
            ReadinessError: If the reduction is in flight already.
        """
        if self.grad_reduce_dispatched:
            if self.grad_reduce_handle is not None and not self.is_first_batch:
                raise ReadinessError(
                    'the reduction of a bucket group was started twice in one iteration; it holds '
                    f'{self._some_names()}'
                )
            return
        if self.drain is not None:
            self.drain.start(self, force_all_reduce)
        if self.graphs_write:
            self._wait_for_captured_wgrads()
        self.settle_grads()
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
            choice=ALL_REDUCE if force_all_reduce else self.reduce_choice,
            plan=self.scaling_plan,
            whole=bool(force_all_reduce) and self.runtime.config.checks.export != 'warn',
        )
        self.grad_reduce_dispatched = True

    def settle_grads(self) -> None:
        """Zeroes what nobody has written in this window, where it was not zeroed before."""
        for writes, first, last in self.grad_writes:
            writes.settle(first, last)

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
        """Waits for the reduction; starts it here if nobody has. For a chunk that is finished as a whole
        once in a window: stock without overlap scales and reduces again what was reduced.

        Upstream: ``_ParamAndGradBucketGroup.finish_grad_sync``.

        Raises:
            ReadinessError: If gradients are missing where stock would assert, by name.
        """
        if not self.ddp_config.overlap_grad_reduce:
            if self.grad_reduce_dispatched and self.reduces_once:
                self.param_gather_dispatched = False
                return
            self.grad_reduce_dispatched = (
                False  # called on the group itself, it reduces as stock does
            )
        elif not self.grad_reduce_finished:
            if not self.grad_reduce_dispatched and not self.reduces_once:
                self._judge_alone()
            if not self._stock_leaves_it():
                self.start_unless_started(force_all_reduce)
        super().finish_grad_sync(force_all_reduce=force_all_reduce)
        self.grad_reduce_finished = True
        if self.runtime.config.checks.nan_in_grad:
            check_reduced_grads(self)

    def _stock_leaves_it(self) -> bool:
        """Several optimizer instances, gradients missing, and called on the group itself: stock reduces
        nothing then, and a later gradient may still complete the group. Its chunk would reduce it.
        """
        return (
            self.ddp_config.num_distributed_optimizer_instances > 1
            and not self.reduces_once
            and not self.is_first_batch
            and self.runtime.config.unused_params.name == 'upstream'
            and bool(self.irregular)
        )

    def start_unless_started(self, force_all_reduce: bool | None) -> None:
        """Starts the reduction if that has not happened in this window."""
        if not self.grad_reduce_dispatched:
            self.start_grad_sync(force_all_reduce=force_all_reduce)

    def check_grads(self, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        """Looks at this rank's gradients before they are reduced, and names the parameters.

        Upstream: ``_ParamAndGradBucketGroup.check_grads``.

        Raises:
            GradientValueError: On NaN or Inf.
        """
        check_local_grads(self, nan_or_inf=check_for_nan_or_inf, large=check_for_large)

    def abandon(self) -> None:
        """Ends a window that was broken off: waits for what is in flight."""
        self.start_unless_started(False)
        if self.grad_reduce_handle is not None:
            self.grad_reduce_handle.wait()
            self.grad_reduce_handle = None

    def holds_gradients(self) -> bool:
        """True if gradients of this window are in the buffer and not reduced yet; the host waits."""
        if self.grad_reduce_handle is not None or self.late_grads:
            return True
        if self.grad_reduce_finished or self.grad_reduce_dispatched:
            return False
        there = [b.grad_data for b in self.buckets if b.grad_data.untyped_storage().size() > 0]
        if there:
            self.settle_grads()
        return any(bool(grads.any()) for grads in there)

    def _judge_alone(self) -> None:
        """Lets the unused_params strategy judge this group, where its chunk is not judged as a whole."""
        if self._judged:
            return
        if self.irregular:
            self.runtime.unused_params.check([GroupWindow(self)])
        self._judged = True

    @property
    def num_counted(self) -> int:
        """How many parameters have registered a gradient in this window."""
        counted = getattr(self.readiness, 'num_counted', None)
        return len(self.readiness.counts) if counted is None else counted

    @property
    def irregular(self) -> bool:
        """True if a parameter has no gradient, or other than the expected ones; or one came late."""
        return bool(
            not self.readiness.is_regular()
            or self.late_params
            or 0 < self.num_counted < len(self.params)
        )

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
        self.params_stale = False
        if self.param_gather_handle is not None:
            if not force_sync:
                raise ReadinessError(
                    'the gather of a bucket group was started while the one before was in flight; it '
                    f'holds {self._some_names()}'
                )
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            self._post_param_sync()
            return
        self.param_gather_handle = launch_param_gather(self, async_op=overlap and not force_sync)
        if force_sync and overlap:
            self._post_param_sync()
        self.param_gather_dispatched = True

    def names(self, params: Iterable[Any]) -> list[str]:
        """Names of parameters, for messages; those in the wrapped module where a DDP gave them."""
        return [
            self.param_to_name.get(param, f'a parameter of shape {tuple(param.shape)}')
            for param in params
        ]

    def _some_names(self) -> str:
        names = self.names(self.param_to_bucket)
        return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')


class Intake:
    """What the backward hooks of a group's parameters look at for every gradient.

    With thousands of parameters each object that a hook touches is one that the processor's caches have forgotten
    since the last call, so all of it is in one small object. It holds nothing of the model, for autograd may
    keep it: see :class:`~megatron_buffer.hooks.ParamSlot`.

    Args:
        group: The group. When it is gone the intake is closed.

    Attributes:
        closed: The reduction was started in this window.
        count: Counts a gradient; True when the group became complete with it. Counts nothing where gradients are
            not reduced while backward runs.
        is_last_microbatch: True unless in no_sync().
    """

    __slots__ = ('_group', 'closed', 'count', 'is_last_microbatch')

    def __init__(self, group: ParamAndGradBucketGroup) -> None:
        self.closed = False
        self.count: Callable[[Any], bool] = _count_nothing
        self.is_last_microbatch = True
        self._group = weakref.ref(group, self._close)

    def _close(self, _group: Any) -> None:
        self.closed = True


def _count_nothing(_place: Any) -> bool:
    return False


class Gathers:
    """How many bucket groups of a chunk are not gathered; what forward pre-hooks look at first.

    Attributes:
        waiting: The number.
    """

    __slots__ = ('waiting',)

    def __init__(self) -> None:
        self.waiting = 0

    def take_over(self, groups: Sequence[ParamAndGradBucketGroup]) -> None:
        """From now on the groups are counted here."""
        for group in groups:
            group.gathers = self
            self.waiting += not group.gathered


class Drain:
    """Groups whose reductions hold temporaries: each frees the one before it, in order of dispatch.

    Upstream links them in list order (``previous_grad_reduce_bucket_group``), which is not always the
    order in which backward completes them.
    """

    def __init__(self) -> None:
        self._last: Callable[[], ParamAndGradBucketGroup | None] = lambda: None

    def start(self, group: ParamAndGradBucketGroup, force_all_reduce: bool | None) -> None:
        """``group`` is about to allocate its temporaries."""
        before, self._last = self._last(), weakref.ref(group)
        if before is not None and before.grad_reduce_handle is not None:
            before.finish_grad_sync(force_all_reduce=force_all_reduce)


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
    choice = runtime.grad_reduce.choice(
        dist_opt=getattr(buffers[0].ddp_config, 'use_distributed_optimizer', False),
        fp32_accumulation=reduce_scatter_with_fp32_accumulation,
    )
    # Ours holds temporaries for one bucket at a time, also where bucketing is off for the chunk.
    ours = choice.kind == 'a2a'
    groups = runtime.bucket_groups.partition(
        [_described(buffer) for buffer in buffers],
        single_group=force_single_bucket_group and not ours,
        one_bucket_per_group=reduce_scatter_with_fp32_accumulation or ours,
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


def _described(buffer: Any) -> BufferBuckets:
    """A buffer as the grouping strategies see it."""
    index = forward_index(getattr(buffer, 'param_to_name', {}))
    return BufferBuckets(
        is_fp8=buffer.param_dtype == torch.uint8,
        ready_at=[ready_at(bucket.params_list, index) for bucket in buffer.buckets],
        is_layer_wise=any(
            getattr(param, 'is_managed_by_layer_wise_optimizer', False)
            for bucket in buffer.buckets[:1]
            for param in bucket.params_list[:1]
        ),
    )


def forward_index(param_to_name: Mapping[Any, str]) -> dict[Any, int]:
    """Position of each parameter in registration order, which DDP's map of names has."""
    return {param: position for position, param in enumerate(param_to_name)}


def ready_at(params: Iterable[Any], index: Mapping[Any, int]) -> int:
    """Lowest forward index among ``params``: where backward completes them."""
    return min((index.get(param, 0) for param in params), default=0)

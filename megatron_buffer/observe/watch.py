"""Watches the bucket groups of one wrapped model chunk through the names that upstream calls.

Stands for nothing upstream: ``zero_grad_buffer``, ``finish_grad_sync``, ``start_grad_sync``,
``start_param_sync`` and the handles that they leave are wrapped on the instances, in stock Megatron's classes
and in ours alike.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_buffer.observe.collectives import Collective, SeenCollectives
from megatron_buffer.observe.marks import Clock, Mark

Phase = Literal['grad', 'param']

_HANDLES: dict[Phase, str] = {'grad': 'grad_reduce_handle', 'param': 'param_gather_handle'}


class StepEnd(NamedTuple):
    """The end of an iteration.

    Attributes:
        number: From 1 on.
        begin: Where the optimizer's step began.
        end: Where it ended.
        update_successful: Whether parameters were updated; None where the optimizer does not say.
        grad_norm: As the optimizer returned it.
    """

    number: int
    begin: Mark
    end: Mark
    update_successful: bool | None
    grad_norm: Any


class Window(NamedTuple):
    """What a chunk's ``finish_grad_sync`` leaves.

    Attributes:
        unused_params: Parameters without a gradient; None where gradients are not counted.
        late_params: Parameters whose gradient came after its group was reduced.
    """

    unused_params: int | None
    late_params: int


class Observer:
    """Is told what happens; does nothing by itself."""

    def wrapped(self, chunk: ChunkWatch, ddp: Any) -> None:
        """A model chunk was wrapped."""

    def zeroed(self, chunk: ChunkWatch, begin: Mark, end: Mark) -> None:
        """``zero_grad_buffer``: an iteration begins."""

    def finished(self, chunk: ChunkWatch, begin: Mark, end: Mark, window: Window) -> None:
        """``finish_grad_sync``: the chunk's backward passes are over."""

    def launched(
        self, group: GroupWatch, phase: Phase, begin: Mark, end: Mark, calls: Sequence[Collective]
    ) -> None:
        """A group has started its collectives."""

    def waited(self, group: GroupWatch, phase: Phase, begin: Mark, end: Mark) -> None:
        """Compute has waited for a group's collectives, which are done now."""

    def step_begins(self, number: int) -> None:
        """The optimizer's step begins, in iteration ``number``."""

    def step_ended(self, step: StepEnd) -> None:
        """An iteration is over."""

    def loss(self, losses: dict[str, Any], *, of_ended_step: bool) -> None:
        """Losses of the iteration that has just ended, or of the one that goes on."""

    def close(self, *, complete: bool) -> None:
        """The process ends."""


class GroupWatch:
    """One bucket group.

    Args:
        chunk: The chunk that it belongs to.
        index: Its number there, dense groups first.
        group: The group; it owns the watch, which must not keep the model alive.

    Attributes:
        name: Unique in the process.
        is_expert: Expert or dense parameters.
        ranks: Of the data-parallel group.
        num_ranks: Its size.
        bucket_elems: Of each bucket.
        payload_bytes: Of each phase: what is reduced, what is gathered (0 without the distributed optimizer).
    """

    def __init__(self, chunk: ChunkWatch, index: int, group: Any, *, is_expert: bool) -> None:
        self.chunk = chunk
        self.index = index
        self.name = f'{chunk.key}/group{index}'
        self.is_expert = is_expert
        self.ranks: list[int] = dist.get_process_group_ranks(_process_group(group))
        self.num_ranks = len(self.ranks)
        self.bucket_elems = [bucket.grad_data.numel() for bucket in group.buckets]
        self.payload_bytes: dict[Phase, int] = {
            'grad': sum(bucket.grad_data.nbytes for bucket in group.buckets),
            'param': sum(
                bucket.param_data.nbytes
                for bucket in group.buckets
                if bucket.param_data is not None
            ),
        }
        self._launch_end: Mark = None
        self._clock = chunk.clock
        self._tell = chunk.observers
        group.start_grad_sync = self._launcher('grad', group.start_grad_sync)
        group.start_param_sync = self._launcher('param', group.start_param_sync)
        config = group.ddp_config
        if config.num_distributed_optimizer_instances > 1 and config.overlap_grad_reduce:
            group.finish_grad_sync = self._stream_waiter(group.finish_grad_sync)

    def _launcher(self, phase: Phase, start: Callable[..., Any]) -> Callable[..., Any]:
        """Of a method that starts collectives, and waits for them where they do not overlap."""
        handle_name = _HANDLES[phase]

        @functools.wraps(start)
        def launch(*args: Any, **kwargs: Any) -> Any:
            group = start.__self__  # type: ignore[attr-defined]
            seen = SeenCollectives(self._clock.mark)
            begin = self._clock.mark()
            with _range(f'megatron_buffer/{phase}_dispatch/{self.name}', self._clock.on_cuda), seen:
                result = start(*args, **kwargs)
            if not seen.calls:  # it waits for what was started before, or there is nothing to do
                return result
            end = self._launch_end = self._clock.mark()
            for observer in self._tell:
                observer.launched(self, phase, begin, end, seen.calls)
            handle = getattr(group, handle_name)
            if handle is None:
                self.waited(phase, seen.first, end)
            else:
                setattr(group, handle_name, WatchedHandle(handle, self, phase))
            return result

        return launch

    def _stream_waiter(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        """Several optimizer instances leave no handle: finish waits for their stream."""

        @functools.wraps(finish)
        def finish_grad_sync(*args: Any, **kwargs: Any) -> Any:
            self._launch_end = None
            begin = self._clock.mark()
            result = finish(*args, **kwargs)
            self.waited('grad', self._launch_end or begin, self._clock.mark())
            return result

        return finish_grad_sync

    def waited(self, phase: Phase, begin: Mark, end: Mark) -> None:
        """Tells the observers of a wait."""
        for observer in self._tell:
            observer.waited(self, phase, begin, end)


class WatchedHandle:
    """A handle whose ``wait`` is timed; everything else is the handle's own.

    Args:
        handle: What a group has left in ``grad_reduce_handle`` or ``param_gather_handle``.
        watch: The group.
        phase: Which of the two.
    """

    def __init__(self, handle: Any, watch: GroupWatch, phase: Phase) -> None:
        self._handle = handle
        self._watch: GroupWatch | None = watch
        self._phase: Phase = phase

    def wait(self) -> Any:
        """Waits; the first time counts."""
        watch, self._watch = self._watch, None
        if watch is None:
            return self._handle.wait()
        clock = watch.chunk.clock
        begin = clock.mark()
        with _range(f'megatron_buffer/{self._phase}_wait/{watch.name}', clock.on_cuda):
            result = self._handle.wait()
        watch.waited(self._phase, begin, clock.mark())
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class ChunkWatch:
    """One wrapped model chunk.

    Args:
        ddp: The chunk; it owns the watch.
        key: ``pp<stage>/vp<chunk>``, unique in the process.
        clock: Makes marks.
        observers: Are told.
    """

    def __init__(self, ddp: Any, key: str, clock: Clock, observers: Sequence[Observer]) -> None:
        self.key = key
        self.clock = clock
        self.observers = observers
        self._ddp = weakref.ref(ddp)
        lists = ((ddp.bucket_groups, False), (ddp.expert_parallel_bucket_groups, True))
        pairs = [(group, is_expert) for groups, is_expert in lists for group in groups]
        self.groups = [
            GroupWatch(self, index, group, is_expert=is_expert)
            for index, (group, is_expert) in enumerate(pairs)
        ]
        ddp.zero_grad_buffer = self._zeroer(ddp.zero_grad_buffer)
        ddp.finish_grad_sync = self._finisher(ddp.finish_grad_sync)
        for observer in observers:
            observer.wrapped(self, ddp)

    def _zeroer(self, zero: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(zero)
        def zero_grad_buffer(*args: Any, **kwargs: Any) -> Any:
            begin = self.clock.mark()
            with _range(f'megatron_buffer/zero/{self.key}', self.clock.on_cuda):
                result = zero(*args, **kwargs)
            end = self.clock.mark()
            for observer in self.observers:
                observer.zeroed(self, begin, end)
            return result

        return zero_grad_buffer

    def _finisher(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(finish)
        def finish_grad_sync(*args: Any, **kwargs: Any) -> Any:
            begin = self.clock.mark()
            with _range(f'megatron_buffer/finish/{self.key}', self.clock.on_cuda):
                result = finish(*args, **kwargs)
            end = self.clock.mark()
            window = self._window()
            for observer in self.observers:
                observer.finished(self, begin, end, window)
            return result

        return finish_grad_sync

    def _window(self) -> Window:
        ddp = self._ddp()
        groups = [] if ddp is None else [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        counted = sum(map(_num_counted, groups))
        unused = sum(len(group.params) for group in groups) - counted if counted else None
        late = sum(
            len(getattr(group, 'late_params', ())) + len(getattr(group, 'late_grads', ()))
            for group in groups
        )
        return Window(unused, late)


def _process_group(group: Any) -> Any:
    """Of the reduction and of the gather."""
    if group.ddp_config.use_distributed_optimizer:
        return group.intra_distributed_optimizer_instance_group
    return group.data_parallel_group


def _num_counted(group: Any) -> int:
    """Parameters that have registered a gradient in this window."""
    return int(getattr(group, 'num_counted', len(group.per_param_grad_ready_counts)))


@contextmanager
def _range(name: str, on_cuda: bool) -> Iterator[None]:
    """A range for torch.profiler, and for Nsight Systems on a GPU."""
    with torch.profiler.record_function(name):
        if not on_cuda:
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


def key_of(module: torch.nn.Module) -> str:
    """``pp<stage>/vp<chunk>`` of a model chunk that is not wrapped, or of the wrapper."""
    inner: Any = module
    while isinstance(getattr(inner, 'module', None), torch.nn.Module):
        inner = inner.module
    stage = 0
    if parallel_state.model_parallel_is_initialized():
        stage = parallel_state.get_pipeline_model_parallel_rank()
    return f'pp{stage}/vp{getattr(inner, "vp_stage", None) or 0}'

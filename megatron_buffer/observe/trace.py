"""Traces the life of the buffers, in the format of Chrome and Perfetto: a file per rank.

Upstream has no counterpart.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megatron_buffer.hook_identity import as_upstreams
from megatron_buffer.observe.align import Offset, offset_to_first
from megatron_buffer.observe.collectives import Collective
from megatron_buffer.observe.marks import Clock, Mark
from megatron_buffer.observe.trace_file import (
    COMPUTE_TRACK,
    SCHEMA,
    SUFFIX,
    TraceEvent,
    write_trace,
)
from megatron_buffer.observe.watch import ChunkWatch, GroupWatch, Observer, Phase, StepEnd, Window
from megatron_buffer.recording import hook_gradient

logger = logging.getLogger(__name__)

_PHASE_NAMES: dict[Phase, str] = {'grad': 'reduce', 'param': 'gather'}


class _TracedGroup:
    """What is known of a group in this window.

    Attributes:
        gradients: Of each parameter that has one, the last.
        launches: What was started and not waited for yet.
        used: It was seen in this iteration's forward.
    """

    def __init__(self, watch: GroupWatch, track: int, group: Any, names: Mapping[Any, str]) -> None:
        self.name = watch.name
        self.track = track
        self.gradients: dict[int, Mark] = {}
        self.launches: dict[Phase, tuple[Mark, dict[str, Any]]] = {}
        self.used = False
        params = [(b, p) for b, bucket in enumerate(group.buckets) for p in bucket.params_list]
        self.bucket_of = [bucket for bucket, _ in params]
        self.names = [names.get(param, '?') for _, param in params]
        config = group.ddp_config
        self.header = {
            'name': watch.name,
            'track': track,
            'chunk': watch.chunk.key,
            'is_expert': watch.is_expert,
            'ranks': watch.ranks,
            'gathers': bool(
                config.use_distributed_optimizer
                or (config.overlap_param_gather and watch.num_ranks > 1)
            ),
            'overlap_grad_reduce': bool(config.overlap_grad_reduce),
            'overlap_param_gather': bool(config.overlap_param_gather),
            'grad_bytes': watch.payload_bytes['grad'],
            'param_bytes': watch.payload_bytes['param'],
            'buckets': [
                {
                    'elems': elems,
                    'params': [
                        n for n, b in zip(self.names, self.bucket_of, strict=True) if b == i
                    ],
                }
                for i, elems in enumerate(watch.bucket_elems)
            ],
        }


class TraceWriter(Observer):
    """Traces the first iterations, then takes its hooks away and writes ``rank-<r>.trace.json``.

    Args:
        folder: Where to.
        num_steps: Iterations to trace.
        clock: Makes marks.
    """

    def __init__(self, folder: str, num_steps: int, clock: Clock) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.path = Path(folder, f'rank-{self._rank}{SUFFIX}')
        self.path.unlink(missing_ok=True)  # an earlier run's, which must not pass for this one's
        self._num_steps = num_steps
        self._clock = clock
        self._events: list[TraceEvent] = []
        self._groups: dict[str, _TracedGroup] = {}
        self._windows: dict[str, int] = {}
        self._handles: list[Any] = []
        self._step = 1
        self._num_ended = 0
        self._values = 0
        self._is_tracing = True
        self._is_written = False
        self._anchored = False
        self._offset = Offset(0, 0)

    def wrapped(self, chunk: ChunkWatch, ddp: Any) -> None:
        """Hooks into the chunk's forward and backward."""
        if not self._is_tracing:
            return
        names = {param: name for name, param in ddp.module.named_parameters()}
        groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        place: dict[int, tuple[_TracedGroup, int]] = {}
        for watch, group in zip(chunk.groups, groups, strict=True):
            traced = _TracedGroup(watch, len(self._groups) + 1, group, names)
            self._groups[watch.name] = traced
            params = [param for bucket in group.buckets for param in bucket.params_list]
            for index, param in enumerate(params):
                place[id(param)] = traced, index
                handle = hook_gradient(ddp, param, self._gradient_hook(traced, index), before=True)
                self._handles += [] if handle is None else [handle]
        for module in ddp.module.modules():
            used = [place.get(id(param)) for param in module.parameters(recurse=False)]
            if any(used):
                hook = self._use_hook([found for found in used if found is not None])
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        begins: list[Mark] = []
        self._handles += [
            ddp.register_forward_pre_hook(
                as_upstreams(lambda *unused: begins.append(self._clock.mark())), prepend=True
            ),
            ddp.register_forward_hook(self._forward_hook(chunk.key, begins)),
        ]

    def zeroed(self, chunk: ChunkWatch, begin: Mark, end: Mark) -> None:
        """A window begins."""
        if not self._is_tracing:
            self._write_if_past()
            return
        if not self._anchored:
            self._anchored = True
            self._clock.anchor()
            begin = end = self._clock.mark()
        self._windows[chunk.key] = self._windows.get(chunk.key, 0) + 1
        for traced in self._groups_of(chunk):
            traced.gradients.clear()
            traced.used = False
        self._span('phase', 'zero', begin, end, chunk=chunk.key)

    def finished(self, chunk: ChunkWatch, begin: Mark, end: Mark, window: Window) -> None:
        """A window ends: which gradients were the first and the last of each bucket is known."""
        if not self._is_tracing:
            return
        for traced in self._groups_of(chunk):
            self._note_gradients(traced)
        self._span(
            'phase',
            'finish',
            begin,
            end,
            chunk=chunk.key,
            window=self._windows.get(chunk.key, 0),
            unused_params=window.unused_params,
            late_params=window.late_params,
        )

    def launched(
        self, group: GroupWatch, phase: Phase, begin: Mark, end: Mark, calls: Sequence[Collective]
    ) -> None:
        """A collective is in flight until it is waited for."""
        if not self._is_tracing:
            return
        traced = self._groups[group.name]
        args = {
            'group': group.name,
            'kinds': [call.kind for call in calls],
            'payload_bytes': sum(call.payload_bytes for call in calls),
            'wire_bytes': sum(call.wire_bytes for call in calls),
            'values_of_step': self._values,
            'window': self._windows.get(group.chunk.key, 0),
        }
        if phase == 'grad' and traced.gradients:
            last = next(reversed(traced.gradients))
            args['last_gradient'] = traced.names[last]
        name = _PHASE_NAMES[phase]
        self._span('dispatch', f'{name} dispatch', begin, end, traced.track, **args)
        traced.launches[phase] = begin, args | {'step': self._step}

    def waited(self, group: GroupWatch, phase: Phase, begin: Mark, end: Mark) -> None:
        """The collective is done."""
        if not self._is_tracing:
            return
        traced, name = self._groups[group.name], _PHASE_NAMES[phase]
        launched = traced.launches.pop(phase, None)
        if launched is not None:
            start, args = launched
            self._events.append(TraceEvent(name, name, traced.track, start, end, args))
        self._span('wait', f'wait for {name} of {group.name}', begin, end, group=group.name)

    def step_begins(self, number: int) -> None:
        """Gathers bring the values of this step from here on."""
        self._values = number

    def step_ended(self, step: StepEnd) -> None:
        """An iteration is over."""
        self._values = step.number
        if not self._is_tracing:
            self._write_if_past()
            return
        self._span(
            'phase',
            'optimizer step',
            step.begin,
            step.end,
            update_successful=step.update_successful,
        )
        self._num_ended = step.number
        if step.number == 1:
            self._offset = offset_to_first()
        if step.number == self._num_steps:
            self._stop()
            self._write_if_past()
        self._step = step.number + 1

    def close(self, *, complete: bool) -> None:
        """Writes what there is."""
        self._stop()
        if not self._is_written:
            self._write()

    def _groups_of(self, chunk: ChunkWatch) -> list[_TracedGroup]:
        return [self._groups[watch.name] for watch in chunk.groups]

    def _span(
        self,
        category: str,
        name: str,
        begin: Mark,
        end: Mark,
        track: int = COMPUTE_TRACK,
        **args: Any,
    ) -> None:
        self._events.append(
            TraceEvent(category, name, track, begin, end, args | {'step': self._step})
        )

    def _note_gradients(self, traced: _TracedGroup) -> None:
        """Instants: in each bucket the first parameter to have its last gradient, and the last one."""
        in_order = list(traced.gradients)
        for bucket in range(max(traced.bucket_of, default=-1) + 1):
            indices = [i for i in in_order if traced.bucket_of[i] == bucket]
            for name, index in zip(('first', 'last'), (indices[:1] + indices[-1:]), strict=False):
                self._span(
                    'gradient',
                    f'{name} gradient',
                    traced.gradients[index],
                    None,
                    traced.track,
                    group=traced.name,
                    bucket=bucket,
                    param=traced.names[index],
                )

    def _gradient_hook(self, traced: _TracedGroup, index: int) -> Callable[..., None]:
        gradients, clock = traced.gradients, self._clock

        def hook(*unused: Any) -> None:
            gradients.pop(index, None)  # so that the order of the dictionary is that of the marks
            gradients[index] = clock.mark()

        return hook

    def _use_hook(self, used: Sequence[tuple[_TracedGroup, int]]) -> Callable[..., None]:
        def hook(*unused: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for traced, index in used:
                if not traced.used:
                    traced.used = True
                    self._span(
                        'use',
                        'first use',
                        self._clock.mark(),
                        None,
                        traced.track,
                        group=traced.name,
                        param=traced.names[index],
                    )

        return as_upstreams(hook)

    def _forward_hook(self, key: str, begins: list[Mark]) -> Callable[..., None]:
        this: weakref.ref[TraceWriter] = weakref.ref(self)

        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if not begins:
                return
            begin, end = begins.pop(), self._clock.mark()
            name = 'forward' if torch.is_grad_enabled() else 'forward without gradients'
            self._span('phase', name, begin, end, chunk=key)
            backward = _Backward(this, key, self._clock)
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(backward)

        return hook

    def backward_ended(self, key: str, begin: Mark) -> None:
        """A backward pass through a chunk is over."""
        if self._is_tracing:
            self._span('phase', 'backward', begin, self._clock.mark(), chunk=key)

    def _stop(self) -> None:
        """Ends the tracing; what is in flight then is left out."""
        self._is_tracing = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _write_if_past(self) -> None:
        last = self._events[-1:]
        if not self._is_written and all(self._clock.is_past(event.end) for event in last):
            self._write()

    def _write(self) -> None:
        self._is_written = True
        header = {
            'schema': SCHEMA,
            'rank': self._rank,
            'world_size': self._world_size,
            'steps': self._num_ended,
            'clock': 'cuda' if self._clock.on_cuda else 'host',
            'offset_ns': self._offset.offset_ns,
            'offset_uncertainty_ns': self._offset.uncertainty_ns,
            'groups': [traced.header for traced in self._groups.values()],
        }
        write_trace(self.path, header, self._events, self._clock)
        self._events.clear()
        if self._rank == 0:
            logger.info(
                f'wrote the trace of {self._num_ended} iterations to {self.path.parent}; '
                f'"megatron-buffer trace {self.path.parent}" summarises it'
            )


class _Backward:
    """Tells the writer when a backward pass reaches a chunk, and when it is over."""

    def __init__(self, writer: weakref.ref[TraceWriter], key: str, clock: Clock) -> None:
        self._writer = writer
        self._key = key
        self._clock = clock
        self._begun = False

    def __call__(self, gradient: torch.Tensor) -> None:
        if self._begun:
            return
        self._begun = True
        begin = self._clock.mark()

        def ended() -> None:
            writer = self._writer()
            if writer is not None:
                writer.backward_ended(self._key, begin)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ended)

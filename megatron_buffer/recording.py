"""Records when gradients arrive and parameters are read, while a model trains.

Under ``--custom-buffer-record`` each wrapped model chunk gets a :class:`Recorder`. It watches some
iterations through hooks of its own and then leaves: ``recording_results`` averages over the ranks and
writes the file. Upstream has no counterpart.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch.utils._pytree import tree_leaves

from megatron_buffer.agreement import check_agreement
from megatron_buffer.errors import ConflictError
from megatron_buffer.profile import ChunkProfile, ParamProfile, chunk_key, dense_positions
from megatron_buffer.record_request import WARMUP_STEPS, RecordRequest, check_writable, requested
from megatron_buffer.recording_results import Order, hand_in, over_ranks
from megatron_buffer.runtime import ModelChunk

logger = logging.getLogger(__name__)

_recorders: list[Recorder] = []
"""Of the recording that this process is in."""


class _Mark(NamedTuple):
    """When something happened.

    Attributes:
        place: Its number among all that this recorder saw.
        time: Seconds on the host's clock, or a CUDA event.
    """

    place: int
    time: Any


class _Window:
    """One iteration, by index of the parameter.

    Attributes:
        num_gradients: In all micro-batches together.
        last_gradients: Each parameter's last one.
        reads: The first one in the last micro-batch's forward.
        num_backwards: Backward passes, as far as they go through an output of the module's forward.
        last_backward: Place of the beginning of the last one.
        is_reading: False during an evaluation.
    """

    def __init__(self, num_params: int) -> None:
        self.num_gradients = [0] * num_params
        self.last_gradients: list[_Mark | None] = [None] * num_params
        self.reads: dict[int, _Mark] = {}
        self.num_backwards = 0
        self.last_backward = 0
        self.is_reading = True

    def gradients(self) -> dict[int, _Mark]:
        """The gradients of the last micro-batch: a parameter may take part in some micro-batches only."""
        marks = enumerate(self.last_gradients)
        return {i: m for i, m in marks if m is not None and m.place >= self.last_backward}

    def gradients_per_backward(self, index: int) -> float:
        """Mean over the micro-batches, of which there are as many as most parameters got gradients."""
        got = [count for count in self.num_gradients if count]
        num_backwards = self.num_backwards or max(got, key=got.count, default=1)
        return self.num_gradients[index] / num_backwards


class Recorder:
    """Records one model chunk; its hooks are there only while iterations are recorded.

    Nothing in here keeps the model alive: autograd's nodes hold the hooks, hence this object, and a
    cycle through them could never be collected.

    Args:
        ddp: The wrapped chunk.
        chunk: Its pipeline stage and chunk number.
        request: How many iterations, and where to.

    Attributes:
        key: The chunk's key in the profile.
        steps_seen: Iterations since the chunk was wrapped.
        result: What was recorded; None before the end.
    """

    def __init__(self, ddp: Any, chunk: ModelChunk, request: RecordRequest) -> None:
        params = trainable(ddp.module)
        self.key = chunk_key(chunk.pp_rank, chunk.vp_stage)
        self.request = request
        self.steps_seen = 0
        self.result: ChunkProfile | None = None
        self._chunk = ModelChunk(pp_rank=chunk.pp_rank, vp_stage=chunk.vp_stage)
        self._ddp = weakref.ref(ddp)
        self._names = list(params)
        self._index_of_id = {id(param): index for index, param in enumerate(params.values())}
        self._on_cuda = any(param.is_cuda for param in params.values())
        self._next_place = itertools.count()
        self._window: _Window | None = None
        self._recorded: list[_Window] = []
        self._handles: list[Any] = []

    @property
    def is_pending(self) -> bool:
        """True while a result is still to be expected."""
        return self.result is None and self._ddp() is not None

    def window_finished(self) -> None:
        """Ends an iteration; called by every rank at the end of ``finish_grad_sync``."""
        ddp = self._ddp()
        if ddp is None or self.result is not None:
            return
        self.steps_seen += 1
        if self._window is not None:
            self._recorded.append(self._window)
            self._window = None
        if self.steps_seen == WARMUP_STEPS:
            self._add_hooks(ddp)
        if self.steps_seen == self.request.steps_needed:
            self._remove_hooks()
            self.result = self._summarize(ddp)
            _chunk_done(ddp, self.request, self._chunk)
        elif self.steps_seen >= WARMUP_STEPS:
            self._window = _Window(len(self._names))

    def _add_hooks(self, ddp: Any) -> None:
        """Beside DDP's own hooks, on the same events; nothing depends on whose comes first."""
        for param in trainable(ddp.module).values():
            hook = functools.partial(self._on_gradient, self._index_of_id[id(param)])
            handle = hook_gradient(ddp, param, hook)
            if handle is not None:
                self._handles.append(handle)
        for module in ddp.module.modules():
            own = [self._index_of_id.get(id(p)) for p in module.parameters(recurse=False)]
            hook = functools.partial(self._on_call, [index for index in own if index is not None])
            # In front, because DDP's own hook waits for the gather.
            self._handles.append(
                module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            )
        self._handles.append(ddp.module.register_forward_pre_hook(self._on_forward, prepend=True))
        self._handles.append(ddp.module.register_forward_hook(self._on_output))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _mark(self) -> _Mark:
        if not self._on_cuda:
            return _Mark(next(self._next_place), time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _Mark(next(self._next_place), event)

    def _on_gradient(self, index: int, *unused: Any) -> None:
        window = self._window
        if window is not None and not is_graph_capturing():
            window.num_gradients[index] += 1
            window.last_gradients[index] = self._mark()

    def _on_forward(self, *unused: Any) -> None:
        """A micro-batch begins, or an evaluation, which is not recorded."""
        window = self._window
        if window is None or is_graph_capturing():
            return
        window.is_reading = torch.is_grad_enabled()
        if window.is_reading:
            window.reads.clear()

    def _on_output(self, module: Any, args: Any, output: Any) -> None:
        """Marks where the backward pass of this micro-batch begins."""
        window = self._window
        if window is None or not torch.is_grad_enabled() or is_graph_capturing():
            return
        begun = False

        def backward_begins(gradient: torch.Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                window.num_backwards += 1
                window.last_backward = next(self._next_place)

        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(backward_begins)

    def _on_call(
        self, own: Sequence[int], module: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """A module is called that reads its own parameters, or a tied weight that it is given."""
        window = self._window
        if window is None or not window.is_reading or is_graph_capturing():
            return
        given = [
            self._index_of_id[id(value)]
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.nn.Parameter) and id(value) in self._index_of_id
        ]
        for index in (*own, *given):
            if index not in window.reads:
                window.reads[index] = self._mark()

    def _summarize(self, ddp: Any) -> ChunkProfile:
        """The median over the iterations, then the mean over the ranks: a collective of both kinds."""
        params = list(trainable(ddp.module).values())
        check_agreement(
            'the recorded model chunk',
            ddp.dp_cp_group,
            'data-parallel',
            lambda: [self.key, *self._names],
        )
        if self._on_cuda:
            torch.cuda.synchronize()
        per_backward = [
            statistics.mean(window.gradients_per_backward(index) for window in self._recorded)
            for index in range(len(params))
        ]
        orders = (
            _over_steps([window.gradients() for window in self._recorded], self._names),
            _over_steps([window.reads for window in self._recorded], self._names),
        )
        self._recorded.clear()
        device = params[0].device if params else torch.device('cpu')
        (arrival, differing_arrivals), (use, differing_uses) = (
            over_ranks(order, self._names, ddp.dp_cp_group, device) for order in orders
        )
        return ChunkProfile(
            params=tuple(
                ParamProfile(
                    name=name,
                    numel_elems=params[i].numel(),
                    dtype=str(params[i].dtype).removeprefix('torch.'),
                    grad_arrival=arrival.places[i],
                    grad_time_s=arrival.seconds[i],
                    forward_use=use.places[i],
                    forward_time_s=use.seconds[i],
                    gradients_per_backward=per_backward[i],
                )
                for i, name in enumerate(self._names)
            ),
            steps=self.request.steps,
            ranks=ddp.dp_cp_group.size(),
            clock='cuda' if self._on_cuda else 'host',
            agreed=differing_arrivals == differing_uses == 0,
            differing_grad_arrivals=differing_arrivals,
            differing_forward_uses=differing_uses,
        )


def attach_if_wanted(ddp: Any, chunk: ModelChunk) -> Recorder | None:
    """Gives a model chunk that has just been wrapped a recorder, if the environment asks for a profile.

    Args:
        ddp: The wrapped chunk.
        chunk: Its pipeline stage and chunk number.

    Returns:
        The recorder, or None. Until it has ended, the chunk's ``finish_grad_sync`` tells it of the end of
        each iteration.

    Raises:
        ConfigError: If the profile could not be written, or the number of steps is none.
        ConflictError: Under CUDA graphs, whose replays no hook can see.
    """
    request = requested()
    if request is None:
        return None
    graphs = getattr(ddp.config, 'cuda_graph_impl', 'none')
    if graphs != 'none':
        raise ConflictError(
            '--custom-buffer-record cannot see what CUDA graphs replay, and cuda_graph_impl is '
            f'{graphs!r}: record with cuda_graph_impl none; the profile can then be used with graphs'
        )
    _recorders[:] = [other for other in _recorders if other.is_pending or other.result is not None]
    recorder = Recorder(ddp, chunk, request)
    if any(other.key == recorder.key for other in _recorders):
        logger.warning(
            f'a second model is wrapped as chunk {recorder.key}; {request.path} will be about the first '
            'one only'
        )
        return None
    if not _recorders and dist.get_rank() == 0:
        _announce(request)
    _recorders.append(recorder)
    _tell_of_finish(ddp, recorder)
    return recorder


def _tell_of_finish(ddp: Any, recorder: Recorder) -> None:
    """On this chunk only; the recorder must not know of the wrapper, which holds the model."""
    finish = ddp.finish_grad_sync

    @functools.wraps(finish)
    def finish_grad_sync(*args: Any, **kwargs: Any) -> None:
        finish(*args, **kwargs)
        recorder.window_finished()
        if recorder.result is not None and vars(ddp).get('finish_grad_sync') is finish_grad_sync:
            del ddp.finish_grad_sync

    ddp.finish_grad_sync = finish_grad_sync


def _announce(request: RecordRequest) -> None:
    check_writable(request.path)
    exists = os.path.exists(request.path)
    logger.info(
        f'recording iterations {WARMUP_STEPS + 1} to {request.steps_needed} of this run; after that the '
        f'profile is written to {request.path}{", in place of the one there" if exists else ""}'
    )
    atexit.unregister(_warn_if_unfinished)
    atexit.register(_warn_if_unfinished)


def _chunk_done(ddp: Any, request: RecordRequest, chunk: ModelChunk) -> None:
    """The last chunk of this process to end hands all of them in."""
    if not any(other.is_pending for other in _recorders):
        chunks = {other.key: other.result for other in _recorders if other.result is not None}
        _recorders.clear()
        hand_in(ddp, chunks, chunk.pp_rank, request.path)


def _warn_if_unfinished() -> None:
    unfinished = [recorder for recorder in _recorders if recorder.result is None]
    if unfinished:
        request, seen = unfinished[0].request, unfinished[0].steps_seen
        logger.warning(
            f'the profile {request.path} was not written: the run ended after {seen} of the '
            f'{request.steps_needed} iterations that it takes'
        )


def _over_steps(steps: Sequence[Mapping[int, _Mark]], names: Sequence[str]) -> Order:
    """The order of the median places, with the median times."""
    places: list[list[int]] = [[] for _ in names]
    seconds: list[list[float]] = [[] for _ in names]
    for marks in steps:
        order = sorted(marks, key=lambda index: marks[index].place)
        for place, index in enumerate(order):
            places[index].append(place)
            seconds[index].append(_seconds(marks[order[0]].time, marks[index].time))
    medians = [statistics.median(of_param) if of_param else None for of_param in places]
    return Order(
        dense_positions(medians, names),
        [statistics.median(of_param) if of_param else None for of_param in seconds],
    )


def _seconds(first: Any, mark: Any) -> float:
    if isinstance(first, float):
        return mark - first
    return first.elapsed_time(mark) / 1000.0  # events count milliseconds


def hook_gradient(
    ddp: Any, param: torch.nn.Parameter, hook: Callable[..., None], *, before: bool = False
) -> Any:
    """Calls ``hook`` with every gradient of a parameter, beside DDP's own hook.

    Args:
        ddp: The wrapped chunk, which keeps autograd's node alive.
        param: One of its trainable parameters.
        hook: Called with whatever autograd passes; autograd's node holds it.
        before: Before DDP's own hook, where that can be had, instead of after it.

    Returns:
        A handle that takes the hook away; None for a delayed weight gradient, whose hook stays.
    """
    if ddp.ddp_config.delay_wgrad_compute and _is_delayed(param):
        _owner(ddp.module, param).register_wgrad_accumulation_and_reduce_hooks(hook)
        return None
    node = torch.autograd.graph.get_gradient_edge(param).node
    return node.register_prehook(hook) if before else node.register_hook(hook)


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that take part in training, by name."""
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _is_delayed(param: Any) -> bool:
    """Transformer Engine's delayed weight gradients; upstream knows them by the same mark."""
    return getattr(param, 'skip_backward_post_hook', False)


def _owner(root: torch.nn.Module, param: Any) -> Any:
    return next(
        module
        for module in root.modules()
        if hasattr(module, 'register_wgrad_accumulation_and_reduce_hooks')
        and any(param is own for own in module.parameters())
    )

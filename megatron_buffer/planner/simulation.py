"""Simulates one iteration of one rank: backward, reductions, optimizer, gathers, forward; pure.

Stands for what happens between the last backward pass of an iteration and the first forward pass of the
next: ``register_grad_ready``, ``start_grad_sync`` and ``finish_grad_sync``, then ``start_param_sync`` and
``finish_param_sync`` of ``_ParamAndGradBucketGroup``
(``megatron/core/distributed/param_and_grad_buffer.py``). Imports neither torch nor megatron.

The link is one queue: a collective starts when the one before it has ended. Backward and forward take the
time that they are said to take, whatever the network does beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from megatron_buffer.planner.timeline import ChunkWork, Event, Iteration, Kind, Timeline


def simulate(iteration: Iteration) -> Timeline:
    """Runs one iteration.

    It begins with what micro-batches are left when the first ones of every chunk, which end it, are
    taken off: so iterations follow each other without a gap.
    """
    run = _Run(iteration)
    run.begin()
    backward_end = run.backward()
    reduce_end = run.reduce(backward_end)
    optimizer_end = run.optimize(backward_end, reduce_end)
    end = run.forward(optimizer_end)
    events = run.events
    return Timeline(
        events=tuple(events),
        backward_end_s=backward_end,
        reduce_end_s=reduce_end,
        optimizer_end_s=optimizer_end,
        end_s=end,
        exposed_grad_s=reduce_end - backward_end,
        exposed_param_s=run.waited_s,
        reduce_s=sum(e.duration_s for e in events if e.kind == 'reduce'),
        gather_s=sum(e.duration_s for e in events if e.kind == 'gather'),
        compute_s=iteration.compute_s,
        last=run.last,
    )


class _Ready(NamedTuple):
    """A group that may be reduced: from when on, after which event, and where it belongs."""

    at_s: float
    turn: tuple[int, int]
    cause: int | None
    chunk: int
    group: int


class _Run:
    """One simulation; its methods are called in the order in which they stand here."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self.events: list[Event] = []
        self.waited_s = 0.0
        self._now = 0.0
        self._ready: list[_Ready] = []
        self._last_compute: int | None = None
        self._last_reduction: int | None = None

    @property
    def last(self) -> int | None:
        """The event that the rank was busy with, or waited for, until now."""
        return self._last_compute

    def begin(self) -> None:
        """The micro-batches between the first ones and the last ones, and the bubble."""
        it = self.iteration
        rest = it.microbatches - it.waves
        seconds = rest * sum(chunk.forward_s + chunk.backward_s for chunk in it.chunks)
        if seconds > 0:
            self._compute('other', f'{rest} other micro-batches', seconds)
        if it.bubble_s > 0:
            self._compute('other', 'pipeline bubble', it.bubble_s)

    def backward(self) -> float:
        """The last backward pass of each chunk, from the last chunk to the first; returns the end."""
        it = self.iteration
        for number in range(len(it.chunks) - 1, -1, -1):
            chunk = it.chunks[number]
            if it.waves > 1 and chunk.backward_s > 0:
                seconds = (it.waves - 1) * chunk.backward_s
                self._compute('backward', f'chunk {number}: micro-batches before the last', seconds)
            begin, done = self._now, 0.0
            order = sorted(range(len(chunk.groups)), key=lambda g: chunk.groups[g].ready_s)
            for index in order:
                group = chunk.groups[index]
                if group.ready_s > done:
                    name = f'until the gradient of {group.last_gradient}'
                    self._compute('backward', name, group.ready_s - done, number)
                    done = group.ready_s
                turn = (len(it.chunks) - number, group.dispatch_position)
                at = begin + group.ready_s
                self._ready.append(_Ready(at, turn, self._last_compute, number, index))
            if chunk.backward_s > done:
                self._compute('backward', 'the rest', chunk.backward_s - done, number)
            if it.is_interleaved and it.align_reduce:
                # The schedule starts all of a chunk's reductions when its backward has ended.
                count = len(chunk.groups)
                self._ready[len(self._ready) - count :] = [
                    entry._replace(at_s=self._now, cause=self._last_compute)
                    for entry in self._ready[len(self._ready) - count :]
                ]
        return self._now

    def reduce(self, backward_end: float) -> float:
        """Every group's reduction, one after the other; returns the end of the last one."""
        it, ready = self.iteration, self._ready
        if not it.overlap_reduce:
            ready = [r._replace(at_s=backward_end, cause=self._last_compute) for r in ready]
            ready.sort(key=lambda r: r.turn)
        elif it.in_order:
            ready = self._held(sorted(ready, key=lambda r: r.turn))
        else:
            ready = sorted(ready, key=lambda r: (r.at_s, r.turn))
        free, before = 0.0, None
        for entry in ready:
            group = it.chunks[entry.chunk].groups[entry.group]
            if group.reduce_s <= 0:
                continue
            start, cause = entry.at_s, entry.cause
            why = 'waits for its last gradient'
            if not it.overlap_reduce:
                why = 'waits for the end of backward'
            if before is not None and free > start:
                start, cause, why = free, before, 'the link is busy'
            free = start + group.reduce_s
            event = Event(
                'reduce', f'reduce {group.name}', start, free, cause, why, entry.chunk, entry.group
            )
            before = self.add(event._replace(bytes=group.bytes))
        self._last_reduction = before
        return max(backward_end, free)

    def _held(self, ready: Sequence[_Ready]) -> list[_Ready]:
        """In order: nobody starts before those whose turn is earlier are ready too."""
        held: list[_Ready] = []
        for entry in ready:
            if held and held[-1].at_s > entry.at_s:
                entry = entry._replace(at_s=held[-1].at_s, cause=held[-1].cause)
            held.append(entry)
        return held

    def optimize(self, backward_end: float, reduce_end: float) -> float:
        """The optimizer step; returns its end."""
        late = reduce_end > backward_end
        cause = self._last_reduction if late else self._last_compute
        why = 'waits for the last reduction' if late else 'follows backward'
        self._now = reduce_end + self.iteration.optimizer_s
        self._last_compute = self.add(
            Event('optimizer', 'optimizer step', reduce_end, self._now, cause, why)
        )
        return self._now

    def forward(self, begin: float) -> float:
        """The first forward passes of every chunk, with the gathers that they wait for; returns the end."""
        it = self.iteration
        gathers = _Gathers(self, begin)
        if not it.overlap_gather:
            for number, chunk in enumerate(it.chunks):
                for index in gathers.chain(chunk, None):
                    gathers.launch(number, index, begin, self._last_compute, 'after the optimizer')
            if gathers.last is not None:
                self.waited_s = gathers.free - begin
                self._now, self._last_compute = gathers.free, gathers.last
        for number, chunk in enumerate(it.chunks):
            if it.overlap_gather and it.is_interleaved and it.align_gather:
                # The schedule starts those of two chunks at once, then each time those of the next.
                for later in (0, 1) if number == 0 else (number + 1,):
                    gathers.launch_chunk(later, self._now, self._last_compute)
            self._forward_chunk(number, chunk, gathers)
            if it.waves > 1 and chunk.forward_s > 0:
                seconds = (it.waves - 1) * chunk.forward_s
                self._compute('forward', f'chunk {number}: the next micro-batches', seconds)
        return self._now

    def _forward_chunk(self, number: int, chunk: ChunkWork, gathers: _Gathers) -> None:
        done = 0.0
        # Of groups that are read at the same time, for nothing is computed between, the chain's next is first.
        order = sorted(
            (group.first_use_s, group.gather_position, index)
            for index, group in enumerate(chunk.groups)
            if group.gather_position is not None
        )
        for _, _, index in order if self.iteration.overlap_gather else ():
            group = chunk.groups[index]
            if group.first_use_s > done:
                name = f'until {group.first_used}'
                self._compute('forward', name, group.first_use_s - done, number)
                done = group.first_use_s
            if (number, index) not in gathers.ends:
                why = 'forward asks for it'
                gathers.launch(number, index, self._now, self._last_compute, why)
            end, event = gathers.ends[number, index]
            if end > self._now:
                self.waited_s += end - self._now
                self._now, self._last_compute = end, event
            following = gathers.following(number, index)
            if following is not None and (number, following) not in gathers.ends:
                why = 'started by the gather before it'
                gathers.launch(number, following, self._now, self._last_compute, why)
        if chunk.forward_s > done:
            self._compute('forward', 'the rest', chunk.forward_s - done, number)

    def _compute(self, kind: Kind, name: str, seconds: float, chunk: int = -1) -> None:
        why = 'follows' if self.events else 'begins'
        end = self._now + seconds
        self._last_compute = self.add(
            Event(kind, name, self._now, end, self._last_compute, why, chunk)
        )
        self._now = end

    def add(self, event: Event) -> int:
        """Appends an event; returns its index."""
        self.events.append(event)
        return len(self.events) - 1


class _Gathers:
    """The gathers of one iteration.

    Attributes:
        ends: End and event of each that was started, by chunk and group.
        free: When the link is free again.
        last: The event of the last one.
    """

    def __init__(self, run: _Run, begin: float) -> None:
        self.ends: dict[tuple[int, int], tuple[float, int | None]] = {}
        self.free = begin
        self.last: int | None = None
        self._run = run
        self._following: dict[tuple[int, int], int] = {}
        for number, of_chunk in enumerate(run.iteration.chunks):
            for is_expert in (False, True):
                for one, other in itertools.pairwise(self.chain(of_chunk, is_expert)):
                    self._following[number, one] = other

    def chain(self, chunk: ChunkWork, is_expert: bool | None) -> list[int]:
        """Indices of the groups that are gathered, in their order; None: of both chains."""
        chosen = [
            (group.is_expert_parallel, group.gather_position, index)
            for index, group in enumerate(chunk.groups)
            if group.gather_position is not None and is_expert in (None, group.is_expert_parallel)
        ]
        return [index for _, _, index in sorted(chosen)]

    def following(self, number: int, index: int) -> int | None:
        """The group that the chain of a chunk's group goes on with."""
        return self._following.get((number, index))

    def launch_chunk(self, number: int, at: float, cause: int | None) -> None:
        """Starts all gathers of a chunk, if there is such a one, in the order of the list of its groups."""
        if number < len(self._run.iteration.chunks):
            for index, group in enumerate(self._run.iteration.chunks[number].groups):
                if group.gather_position is not None:
                    self.launch(number, index, at, cause, 'the schedule starts the whole chunk')

    def launch(self, chunk: int, index: int, at: float, cause: int | None, why: str) -> None:
        """Puts a gather into the queue."""
        group = self._run.iteration.chunks[chunk].groups[index]
        if group.gather_s <= 0:
            self.ends[chunk, index] = (at, cause)
            return
        start = at
        if self.last is not None and self.free > at:
            start, cause, why = self.free, self.last, 'the link is busy'
        self.free = start + group.gather_s
        self.last = self._run.add(
            Event('gather', f'gather {group.name}', start, self.free, cause, why, chunk, index)
        )
        self.ends[chunk, index] = (self.free, self.last)

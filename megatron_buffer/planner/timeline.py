"""What an iteration of one rank is made of, and the timeline that comes of it; plain values.

:mod:`megatron_buffer.planner.simulation` makes the one of the other. Imports neither torch nor megatron.
Upstream has no counterpart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal['other', 'backward', 'reduce', 'optimizer', 'gather', 'forward']
"""What a stretch of time is spent on."""


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """One bucket group: what it waits for and how long its collectives take. Times in seconds."""

    name: str
    """For people, such as ``bucket 3``."""
    params: int
    """How many parameters it holds."""
    bytes: int
    """Of its gradients, with padding."""
    ready_s: float
    """When its last gradient is there, from the start of the chunk's last backward pass."""
    last_gradient: str
    """The parameter whose gradient that is."""
    reduce_s: float
    dispatch_position: int
    """Place in the order in which the chunk's groups are expected to be reduced."""
    first_use_s: float
    """When forward first reads one of its parameters, from the start of the chunk's forward pass."""
    first_used: str
    """That parameter."""
    gather_s: float
    gather_position: int | None
    """Place in the chain of gathers; None: nothing is gathered."""
    is_expert_parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """One model chunk and one micro-batch."""

    forward_s: float
    backward_s: float
    groups: tuple[GroupWork, ...]


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What a rank has to do in one iteration."""

    chunks: tuple[ChunkWork, ...]
    optimizer_s: float
    microbatches: int = 1
    waves: int = 1
    """Micro-batches that run through a chunk before the next chunk's turn
    (``microbatch_group_size_per_vp_stage``): with several chunks by default the pipeline stages, else 1."""
    bubble_s: float = 0.0
    """What the rank waits for other pipeline stages."""
    overlap_reduce: bool = True
    """Whether groups are reduced as soon as they are ready."""
    overlap_gather: bool = True
    align_reduce: bool = True
    """Whether with several chunks the schedule starts a chunk's reductions (``align_grad_reduce``), not each
    group itself."""
    align_gather: bool = True
    """The same of gathers (``align_param_gather``)."""
    in_order: bool = False
    """Whether groups wait for those that are expected before them (``dispatch_order: in_order``)."""

    @property
    def is_interleaved(self) -> bool:
        """Whether there are several chunks."""
        return len(self.chunks) > 1

    @property
    def compute_s(self) -> float:
        """Forward and backward of all micro-batches."""
        return self.microbatches * sum(c.forward_s + c.backward_s for c in self.chunks)


class Event(NamedTuple):
    """A stretch of time.

    Attributes:
        kind: What it is spent on.
        name: On what exactly.
        start_s: From the start of the iteration.
        end_s: Likewise.
        cause: Index of the event whose end let it start; None for the first.
        why: Why it started no earlier.
        chunk: Model chunk; -1 if of none.
        group: Index of the group in its chunk; -1 if of none.
        bytes: What a collective is about.
    """

    kind: Kind
    name: str
    start_s: float
    end_s: float
    cause: int | None
    why: str
    chunk: int = -1
    group: int = -1
    bytes: int = 0

    @property
    def duration_s(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


class Timeline(NamedTuple):
    """A simulated iteration.

    Attributes:
        events: In the order in which they were found; ``Event.cause`` indexes it.
        backward_end_s: End of the last backward pass.
        reduce_end_s: End of the last reduction, or of backward.
        optimizer_end_s: Start of the next forward pass.
        end_s: End of the first forward pass of every chunk, which is where the timeline ends.
        exposed_grad_s: What the optimizer waits for reductions.
        exposed_param_s: What forward waits for gathers, all in all.
        reduce_s: All reductions together.
        gather_s: All gathers together.
        compute_s: Forward and backward of all micro-batches.
        last: Index of the event that the end follows.
    """

    events: tuple[Event, ...]
    backward_end_s: float
    reduce_end_s: float
    optimizer_end_s: float
    end_s: float
    exposed_grad_s: float
    exposed_param_s: float
    reduce_s: float
    gather_s: float
    compute_s: float
    last: int | None

    @property
    def exposed_s(self) -> float:
        """What a rank waits for communication in an iteration."""
        return self.exposed_grad_s + self.exposed_param_s

    @property
    def iteration_s(self) -> float:
        """From one iteration to the next; the timeline begins after the micro-batches that it ends with."""
        return self.end_s

    @property
    def utilisation(self) -> float:
        """Share of the iteration that the rank computes, without the optimizer."""
        return self.compute_s / self.end_s if self.end_s else 1.0

    @property
    def hidden_share(self) -> float:
        """Share of the communication that runs beside computation; 1 if there is none."""
        total = self.reduce_s + self.gather_s
        return 1.0 - self.exposed_s / total if total else 1.0

    def critical_path(self) -> list[Event]:
        """What the end had to wait for, from the start on."""
        path: list[Event] = []
        index = self.last
        while index is not None:
            path.append(self.events[index])
            index = self.events[index].cause
        return path[::-1]

"""Statistics of a run: a file per rank, a line of JSON per iteration, of stock Megatron and of ours alike.

Upstream has no counterpart.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core
import torch
import torch.distributed as dist

from megatron_buffer import __version__
from megatron_buffer.config import to_dict
from megatron_buffer.observe.collectives import Collective
from megatron_buffer.observe.marks import Clock, Fetched, Mark
from megatron_buffer.observe.watch import ChunkWatch, GroupWatch, Observer, Phase, StepEnd, Window

SCHEMA = 1


@dataclass(kw_only=True)
class Tally:
    """What an iteration adds up to; read it once its marks are past."""

    waits: dict[Phase, list[tuple[Mark, Mark]]] = field(
        default_factory=lambda: {'grad': [], 'param': []}
    )
    collectives: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    losses: dict[str, list[Fetched]] = field(default_factory=dict[str, list[Fetched]])
    unused_params: int | None = None
    late_params: int = 0

    def count(self, call: Collective) -> None:
        """Adds one launch."""
        of_kind = self.collectives.setdefault(
            call.kind, {'count': 0, 'tensors': 0, 'bytes': 0, 'payload_bytes': 0}
        )
        of_kind['count'] += 1
        of_kind['tensors'] += call.num_tensors
        of_kind['bytes'] += call.wire_bytes
        of_kind['payload_bytes'] += call.payload_bytes

    def exposed_s(self, phase: Phase, clock: Clock) -> float:
        """How long compute has waited."""
        return sum((clock.seconds(begin, end) for begin, end in self.waits[phase]), 0.0)

    def is_past(self, clock: Clock) -> bool:
        """Whether everything can be read without waiting for a GPU."""
        return all(clock.is_past(end) for waits in self.waits.values() for _, end in waits) and all(
            clock.is_past(value.arrived) for values in self.losses.values() for value in values
        )


class EndedStep(NamedTuple):
    """An iteration.

    Attributes:
        step: Its end.
        before: The end of the one before; None for the first.
        tally: What it adds up to.
        grad_norm: If the optimizer has returned one.
        peak_memory_bytes: Until now.
    """

    step: StepEnd
    before: Mark
    tally: Tally
    grad_norm: Fetched | None
    peak_memory_bytes: int

    def is_past(self, clock: Clock) -> bool:
        """Whether everything can be read without waiting for a GPU."""
        norm_is_there = self.grad_norm is None or clock.is_past(self.grad_norm.arrived)
        return norm_is_there and clock.is_past(self.step.end) and self.tally.is_past(clock)

    def time_s(self, clock: Clock) -> float | None:
        """From the end of the iteration before; None for the first one."""
        return None if self.before is None else clock.seconds(self.before, self.step.end)


class Tallying(Observer):
    """Adds up the iteration that goes on.

    Args:
        clock: Makes marks.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tally = Tally()
        self._last_end: Mark = None

    def launched(
        self, group: GroupWatch, phase: Phase, begin: Mark, end: Mark, calls: Sequence[Collective]
    ) -> None:
        """Counts."""
        for call in calls:
            self.tally.count(call)

    def waited(self, group: GroupWatch, phase: Phase, begin: Mark, end: Mark) -> None:
        """Adds a wait."""
        self.tally.waits[phase].append((begin, end))

    def finished(self, chunk: ChunkWatch, begin: Mark, end: Mark, window: Window) -> None:
        """Adds what a chunk's window has left."""
        if window.unused_params is not None:
            self.tally.unused_params = (self.tally.unused_params or 0) + window.unused_params
        self.tally.late_params += window.late_params

    def take(self, step: StepEnd) -> EndedStep:
        """The iteration that has just ended; the next one begins."""
        norm = None if step.grad_norm is None else Fetched(step.grad_norm, self.clock)
        peak = _peak_memory_bytes(self.clock.on_cuda)
        ended = EndedStep(step, self._last_end, self.tally, norm, peak)
        self.tally, self._last_end = Tally(), step.end
        return ended


class StatsWriter(Tallying):
    """Writes ``rank-<r>.jsonl``; a line is on disk once its iteration can be read and has its loss.

    Args:
        folder: Where to.
        clock: Makes marks.
    """

    def __init__(self, folder: str, clock: Clock) -> None:
        super().__init__(clock)
        self._file = open(Path(folder, f'rank-{dist.get_rank()}.jsonl'), 'w')  # noqa: SIM115
        self._ended: deque[EndedStep] = deque()
        self._num_steps = 0
        self._begun = False

    def wrapped(self, chunk: ChunkWatch, ddp: Any) -> None:
        """Writes what the run is, once, and the chunk's buffers."""
        if not self._begun:
            self._begun = True
            self._line(describe_run(ddp, self.clock.on_cuda))
        self._line(describe_layout(chunk, ddp))

    def loss(self, losses: dict[str, Any], *, of_ended_step: bool) -> None:
        """Adds losses."""
        ended = of_ended_step and bool(self._ended)
        tally = self._ended[-1].tally if ended else self.tally
        for name, value in losses.items():
            tally.losses.setdefault(name, []).append(Fetched(value, self.clock))

    def zeroed(self, chunk: ChunkWatch, begin: Mark, end: Mark) -> None:
        """The iteration before has its loss."""
        self._write(keep=0)

    def step_ended(self, step: StepEnd) -> None:
        """Closes an iteration, whose loss may still come."""
        self._ended.append(self.take(step))
        self._write(keep=1)

    def close(self, *, complete: bool) -> None:
        """Writes what is left, and the last line."""
        self._write(keep=0)
        if complete:
            self._line({'kind': 'end', 'steps': self._num_steps})
        self._file.close()

    def _write(self, keep: int) -> None:
        """Writes the iterations that can be read, but for the last ``keep``."""
        while len(self._ended) > keep and self._ended[0].is_past(self.clock):
            self._num_steps += 1
            self._line(describe_step(self._ended.popleft(), self.clock))

    def _line(self, data: dict[str, Any]) -> None:
        self._file.write(json.dumps(data) + '\n')
        self._file.flush()


def describe_run(ddp: Any, on_cuda: bool) -> dict[str, Any]:
    """The first line: who ran what where."""
    runtime = getattr(ddp, 'runtime', None)
    return {
        'kind': 'run',
        'schema': SCHEMA,
        'rank': dist.get_rank(),
        'world_size': dist.get_world_size(),
        'buffer': 'stock' if runtime is None else 'megatron_buffer',
        'config_hash': None if runtime is None else runtime.hash,
        'config_source': None if runtime is None else runtime.config.source,
        'config': None if runtime is None else to_dict(runtime.config),
        'versions': {
            'python': platform.python_version(),
            'torch': torch.__version__,
            'megatron_core': megatron.core.__version__.partition('+')[0],
            'megatron_buffer': __version__,
            'transformer_engine': _transformer_engine(),
        },
        'device': torch.cuda.get_device_name() if on_cuda else 'cpu',
    }


def describe_layout(chunk: ChunkWatch, ddp: Any) -> dict[str, Any]:
    """A chunk's buffers."""
    lists = ((ddp.buffers, False), (ddp.expert_parallel_buffers, True))
    return {
        'kind': 'layout',
        'chunk': chunk.key,
        'buffers': [
            {
                'param_dtype': _dtype(buffer.param_dtype),
                'grad_dtype': _dtype(buffer.grad_dtype),
                'is_expert': is_expert,
                'dp_size': buffer.data_parallel_world_size,
                'elems': buffer.numel,
                'padding_elems': buffer.numel - _param_elems(buffer),
                'buckets': len(buffer.buckets),
                'bucket_elems': [bucket.grad_data.numel() for bucket in buffer.buckets],
            }
            for buffers, is_expert in lists
            for buffer in buffers
        ],
        'bucket_groups': len(chunk.groups),
    }


def describe_step(ended: EndedStep, clock: Clock) -> dict[str, Any]:
    """An iteration."""
    tally, step = ended.tally, ended.step
    losses = {
        name: sum(value.value() for value in values) / len(values)
        for name, values in tally.losses.items()
    }
    return {
        'kind': 'step',
        'step': step.number,
        'time_s': ended.time_s(clock),
        'loss': losses or None,
        'grad_norm': None if ended.grad_norm is None else ended.grad_norm.value(),
        'update_successful': step.update_successful,
        'exposed_grad_s': tally.exposed_s('grad', clock),
        'exposed_param_s': tally.exposed_s('param', clock),
        'collectives': tally.collectives,
        'unused_params': tally.unused_params,
        'late_params': tally.late_params,
        'peak_memory_bytes': ended.peak_memory_bytes,
    }


def _param_elems(buffer: Any) -> int:
    return sum(end - start for start, end, _ in buffer.param_index_map.values())


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix('torch.')


def _transformer_engine() -> str | None:
    try:
        return importlib.metadata.version('transformer_engine')
    except importlib.metadata.PackageNotFoundError:
        return None


def _peak_memory_bytes(on_cuda: bool) -> int:
    if on_cuda:
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024

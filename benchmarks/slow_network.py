"""A network that is slow in a known way, for stock and ours alike, and a model whose computation takes a known time.

Every reduction and gather of a process group, whoever calls it, is put into one queue of the rank, as a network
card's stream would: it begins when those before it have ended, and takes a startup time and a time per byte that
travels. The real collective runs meanwhile, and ``wait`` returns when both are over. The queue goes by the rank's
own clock and nobody sleeps for it in the background: it costs no CPU. A rank that has to wait for a late peer
waits for the real collective, but the slowed transfer counts from its own launch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

# How many times the bytes travel (each (n - 1) / n of them), and which argument has the whole bucket.
_COLLECTIVES: dict[str, tuple[int, int]] = {
    'allreduce': (2, 0),
    'allreduce_coalesced': (2, 0),
    'reduce_scatter': (1, 1),
    'reduce_scatter_single': (1, 1),
    'reduce_scatter_single_coalesced': (1, 1),
    '_reduce_scatter_base': (1, 1),
    'reduce_scatter_tensor_coalesced': (1, 1),
    'allgather': (1, 0),
    'allgather_coalesced': (1, 0),
    'all_gather_single': (1, 0),
    'all_gather_single_coalesced': (1, 0),
    '_allgather_base': (1, 0),
    'allgather_into_tensor_coalesced': (1, 0),
    'all_to_all_single': (1, 1),
    'alltoall_base': (1, 1),
}


class SlowNetwork:
    """A context in which every process group's collectives are slow.

    The methods of ``torch.distributed.ProcessGroup`` are replaced: below Megatron's names for torch's functions,
    which were bound when it was imported, and below the coalescing manager.

    Args:
        startup_s: Of each launch, however many tensors are coalesced in it.
        s_per_byte: Of each byte that travels.

    Attributes:
        slowed: While False the real collectives are called as they are.
        launches: How many have been slowed.
        waited_s: How long their handles' ``wait`` took, all together: what was exposed.
    """

    def __init__(self, startup_s: float, s_per_byte: float) -> None:
        self._startup_s = startup_s
        self._s_per_byte = s_per_byte
        self._free_at = 0.0
        self._replaced: dict[str, Any] = {}
        self.slowed = True
        self.launches = 0
        self.waited_s = 0.0

    def as_file(self, path: str) -> str:
        """Writes it as a network of ``--network`` and of ``time_optimal``; returns the path."""
        fields = {
            'launch_us': self._startup_s * 1e6,
            'intra_latency_us': 0.0,
            'intra_gbyte_per_s': 1e-9 / self._s_per_byte,
            'efficiency': 1.0,
            'algorithm': 'ring',
        }
        with open(path, 'w') as file:
            json.dump(fields, file)
        return path

    def __enter__(self) -> SlowNetwork:
        import torch.distributed as dist

        for name, (times, whole) in _COLLECTIVES.items():
            if hasattr(dist.ProcessGroup, name):
                self._replaced[name] = vars(dist.ProcessGroup)[name]
                real = getattr(dist.ProcessGroup, name)
                setattr(dist.ProcessGroup, name, self._slow(real, times, whole))
        return self

    def __exit__(self, *unused: Any) -> None:
        import torch.distributed as dist

        for name, real in self._replaced.items():
            setattr(dist.ProcessGroup, name, real)
        self._replaced.clear()

    def _slow(self, real: Callable[..., Any], times: int, whole: int) -> Callable[..., Any]:
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = real(group, *args, **kwargs)
            ranks = group.size()
            if not self.slowed or ranks == 1:
                return work
            travels = times * (ranks - 1) / ranks * _nbytes(args[whole])
            self.launches += 1
            begin = max(self._free_at, time.perf_counter())
            self._free_at = begin + self._startup_s + self._s_per_byte * travels
            return _Delayed(self, work, self._free_at)

        return collective


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, Sequence):
        return sum(_nbytes(tensor) for tensor in tensors)
    return tensors.nbytes


class _Delayed:
    """Of a collective: waits for the real one, then for the slowed one's time."""

    def __init__(self, network: SlowNetwork, work: Any, done_at: float) -> None:
        self._network = network
        self._work = work
        self._done_at = done_at

    def wait(self, *args: Any) -> bool:
        """Returns when both are over."""
        begin = time.perf_counter()
        if self._work is not None:
            self._work.wait(*args)
        time.sleep(max(0.0, self._done_at - time.perf_counter()))
        self._network.waited_s += time.perf_counter() - begin
        return True

    def is_completed(self) -> bool:
        """Whether both are over."""
        return time.perf_counter() >= self._done_at and (
            self._work is None or self._work.is_completed()
        )


def asleep(forward_s: float, backward_s: float) -> Callable[..., Any]:
    """A function of ``(x, weight)`` that returns ``x`` and takes its times asleep, in backward before any gradient."""
    import torch

    class Asleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if forward_s:
                time.sleep(forward_s)
            ctx.like = weight
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if backward_s:
                time.sleep(backward_s)
            return grad, torch.full_like(ctx.like, 1e-3)

    return Asleep.apply


def sleeper(shape: Sequence[int], forward_s: float, backward_s: float, dtype: Any = None) -> Any:
    """A module with one weight, whose forward and backward take so long and next to no CPU."""
    import torch

    class Sleeper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(*shape, dtype=dtype))
            self._function = asleep(forward_s, backward_s)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._function(x, self.weight)

    return Sleeper()


def simulate_all(
    rank: int,
    world_size: int,
    folder: str,
    configs: Sequence[Any],
    arguments: Sequence[Sequence[str]],
) -> list[dict[str, Any]]:
    """What ``megatron-buffer simulate --json`` says of every config, each with its own arguments.

    Args:
        rank: Of the process this runs in; one is enough.
        world_size: Likewise.
        folder: Where the configs are written.
        configs: Names of shipped configs, or the fields of others.
        arguments: Of the command, besides ``--config`` and ``--json``.
    """
    import contextlib
    import io
    import os

    import yaml

    from megatron_buffer import cli

    found = []
    for number, (config, more) in enumerate(zip(configs, arguments, strict=True)):
        path = config
        if not isinstance(config, str):
            path = os.path.join(folder, f'{number}.yaml')
            with open(path, 'w') as file:
                yaml.safe_dump({'schema_version': 1, **config}, file)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(['simulate', '--json', *more, '--config', path]) == 0
        found.append(json.loads(out.getvalue()))
    return found

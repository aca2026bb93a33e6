"""On one GPU, or all of them: the gradients' way in GB/s, hooks inside a real backward pass, a whole step.

One process per device, over NCCL, with a time limit. Without CUDA it says so and measures nothing. The device's
own copy bandwidth is measured in the same run: the accumulate path is bound by memory, so GB/s near that mean
that nothing is left to gain but bytes. Times are of CUDA events, those of the backward pass of the wall clock
with the device waited for, since there the host is what is slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compare import interleave, quiet, ratio_case

HEADLINE = 'a whole step of a stack of linear layers in bf16, recommended.yaml'
LIMIT_S = 480
COPY_ELEMS = 1 << 28
CONFIGS: dict[str, Any] = {
    'upstream': {},
    'first_write, shard_postscale': {'accumulation': 'first_write', 'scaling': 'shard_postscale'},
    'first_write, premul_sum': {'accumulation': 'first_write', 'scaling': 'premul_sum'},
    'recommended': 'recommended',
}
# Parameters and their elements: few large ones for bandwidth, many small ones for hooks.
SIZES = {'accumulate': (64, 1 << 24), 'backward': (2_000, 64), 'step': (16, 2_048)}
SMALL_SIZES = {'accumulate': (4, 1 << 12), 'backward': (20, 8), 'step': (2, 16)}


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON; without CUDA only ``skipped``, the reason."""
    import torch

    devices = torch.cuda.device_count()
    if not devices:
        return {'ratio': None, 'headline': HEADLINE, 'cases': [], 'skipped': 'no CUDA device'}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / 'result.json'
        ranks = [_start(rank, devices, Path(folder), result, reps) for rank in range(devices)]
        deadline = time.monotonic() + LIMIT_S
        try:
            codes = [rank.wait(max(1.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [124]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            sys.exit(
                f'gpu: the ranks ended with {codes} (124: the limit of {LIMIT_S} s was reached)'
            )
        cases = json.loads(result.read_text())
    headline = next(case for case in cases if case['what'] == 'step: recommended')
    return {'ratio': headline['ratio'], 'headline': HEADLINE, 'cases': cases}


def _start(rank: int, world: int, folder: Path, result: Path, reps: int) -> subprocess.Popen[bytes]:
    arguments = [str(rank), str(world), str(folder / 'store'), str(result), str(reps)]
    return subprocess.Popen(
        [sys.executable, '-m', 'benchmarks.gpu', *arguments],
        env={**os.environ, 'CUDA_DEVICE_MAX_CONNECTIONS': '1', 'LOCAL_RANK': str(rank)},
    )


def _rank_main(rank: int, world: int, store: str, result: str, reps: int) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group('nccl', store=dist.FileStore(store, world), rank=rank, world_size=world)
    cases = measure(rank, world, reps, SIZES, 'cuda')
    if rank == 0:
        Path(result).write_text(json.dumps(cases))
    dist.barrier()
    dist.destroy_process_group()


def measure(
    rank: int, world_size: int, reps: int, sizes: dict[str, tuple[int, int]], device: str
) -> list[dict[str, Any]]:
    """All cases, on one rank of several.

    Args:
        rank: This rank.
        world_size: How many there are.
        reps: Turns of each case.
        sizes: Number of parameters and elements of each, per kind of case.
        device: ``cuda``, or ``cpu`` to see that it runs at all.
    """
    from megatron_buffer.testing import small_model

    quiet()
    small_model.init_parallel()
    copied = _copy_gbytes_per_s(device, reps, COPY_ELEMS if device == 'cuda' else 1 << 12)
    found = _accumulate(world_size, reps, *sizes['accumulate'], device, copied)
    found += _whole('backward', world_size, reps, *sizes['backward'], device)
    return found + _whole('step', world_size, reps, *sizes['step'], device)


def _synchronize(device: str) -> None:
    import torch

    if device == 'cuda':
        torch.cuda.synchronize()


def _device_timed(body: Callable[[], Any], device: str) -> Callable[[], float]:
    """Seconds between two events around ``body``; of the wall clock on a CPU."""
    import torch

    def arm() -> float:
        if device != 'cuda':
            begin = time.perf_counter()
            body()
            return time.perf_counter() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        body()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    return arm


def _waited_for(body: Callable[[], Any], device: str) -> Callable[[], float]:
    """Seconds of the wall clock until ``body`` is over on the device too."""

    def arm() -> float:
        _synchronize(device)
        begin = time.perf_counter()
        body()
        _synchronize(device)
        return time.perf_counter() - begin

    return arm


def _copy_gbytes_per_s(device: str, reps: int, elems: int) -> float:
    """What a copy within the device reads and writes in a second."""
    import torch

    source = torch.zeros(elems, device=device)
    target = torch.empty_like(source)
    arm = _device_timed(lambda: target.copy_(source), device)
    seconds = sorted(interleave({'copy': arm}, reps)['copy'])
    return 2 * source.element_size() * elems / seconds[len(seconds) // 2] / 1e9


def _accumulate(
    world_size: int, reps: int, num: int, elems: int, device: str, copied: float
) -> list[dict[str, Any]]:
    """Zeroing, adding and scaling of bf16 gradients in an fp32 buffer, as ``benchmarks accumulate``."""
    from benchmarks.accumulate import ARMS, DP_SIZE, arm, floor_bytes

    sizes = {'num_params': num, 'param_elems': elems, 'device': device}
    bodies = {name: arm(config, 'bf16', 1, **sizes) for name, config in ARMS.items()}
    bodies['stock'] = arm(None, 'bf16', 1, **sizes)
    times = interleave({name: _device_timed(b, device) for name, b in bodies.items()}, reps)

    def gbytes_per_s(name: str) -> float:
        seconds = sorted(times[name])[len(times[name]) // 2]
        return floor_bytes(name, 'bf16', 1, DP_SIZE) * num * elems / seconds / 1e9

    return [
        ratio_case(
            times[name],
            times['stock'],
            what=f'accumulate: {name}',
            size=f'{gbytes_per_s(name):.0f} of {copied:.0f} GB/s',
            gbytes_per_s=gbytes_per_s(name),
            stock_gbytes_per_s=gbytes_per_s('stock'),
            copy_gbytes_per_s=copied,
            world_size=world_size,
        )
        for name in ARMS
    ]


def _whole(
    what: str, world_size: int, reps: int, num: int, width: int, device: str
) -> list[dict[str, Any]]:
    """Backward passes of many small layers, or whole steps of some large ones."""
    arms = {'stock': None, **CONFIGS}
    if device != 'cuda':
        del arms['first_write, premul_sum']
    make = _backward_arm if what == 'backward' else _step_arm
    bodies = {name: make(config, num, width, device) for name, config in arms.items()}
    times = interleave(bodies, reps)
    return [
        ratio_case(
            times[name],
            times['stock'],
            what=f'{what}: {name}',
            size=f'{num} layers of {width}, {world_size} ranks',
        )
        for name in bodies
        if name != 'stock'
    ]


def _model(config: Any, num: int, width: int, device: str) -> Any:
    import torch

    import megatron_buffer
    from megatron_buffer.testing import small_model

    torch.manual_seed(7)
    layers = (torch.nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(num))
    more = {} if config is None else {'buffer_config': config}
    cls: Any = (
        small_model.ddp_class() if config is None else megatron_buffer.DistributedDataParallel
    )
    return small_model.wrap(
        torch.nn.Sequential(*layers).to(device),
        cls,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        grad_reduce_in_fp32=True,
        config={'bf16': True, 'params_dtype': torch.bfloat16},
        **more,
    )


def _backward_arm(config: Any, num: int, width: int, device: str) -> Callable[[], float]:
    """The backward pass alone, in a micro-batch that is not the last: hooks, and no collective."""
    import torch

    model = _model(config, num, width, device)
    x = torch.ones(1, width, dtype=torch.bfloat16, device=device)
    model.zero_grad_buffer()

    def arm() -> float:
        with model.no_sync():
            loss = model(x).float().sum()
            return _waited_for(loss.backward, device)()

    return arm


def _step_arm(config: Any, num: int, width: int, device: str) -> Callable[[], float]:
    """One micro-batch and the optimizer's step."""
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = _model(config, num, width, device)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer='adam',
            lr=1e-4,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [model],
    )
    for group in optimizer.param_groups:
        group['lr'] = 1e-4
    x = torch.ones(256, width, dtype=torch.bfloat16, device=device)

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()

    return _waited_for(step, device)


if __name__ == '__main__':
    _rank_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))

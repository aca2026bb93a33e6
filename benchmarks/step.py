"""A whole training step on gloo ranks: stock, ``upstream``, ``recommended``, and PyTorch's own DDP beside them.

Megatron's schedule, a tiny GPT and its optimizer, with the distributed optimizer and both overlaps; an
iteration from ``zero_grad_buffer`` to the optimizer's step. In each turn every arm installs its config, wraps the
model anew, and trains; the slowest rank's time counts, and beside it the CPU time of all ranks, of which what
others do on the machine is no part. PyTorch's DDP trains the same model with torch's AdamW, so
its optimizer is another one and holds all of its state on every rank. Peak memory is that of fresh processes, one
set for each arm: the resident set's growth from before the model was built.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

from benchmarks.compare import interleave, quiet, ratio_case

HEADLINE = 'one step of a tiny GPT, 2 ranks, recommended.yaml'
ARMS = ('upstream', 'recommended', 'recommended, zero_then_add')
CONFIGS: dict[str, Any] = {'upstream': 'upstream', 'recommended': 'recommended'}
TORCH = "PyTorch's DDP"
# The first step counts gradients, and the first three look for weights that are read early (checks.stale_read).
WARM_UP_STEPS = 4
# What is trained, on how many ranks, and how many steps a turn takes.
CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    'tiny GPT': (2, {}, 6),
    'small GPT': (2, {'hidden': 128, 'layers': 4, 'bucket_size': 100_000}, 4),
    'MoE': (2, {'moe': True, 'ep': 2}, 4),
}


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio``, ``cases`` and ``memory``."""
    from megatron_buffer.testing import run_ranks

    cases, memory = [], []
    for what, (ranks, fields, steps) in CASES.items():
        names = [*ARMS, *([TORCH] if 'moe' not in fields else [])]
        by_rank = run_ranks(measure, ranks, fields, names, steps, reps, timeout_s=3600)
        for kind, of_turn in (('', max), (', CPU', sum)):
            stock = _of_turns(by_rank, f'stock{kind}', of_turn)
            cases += [
                ratio_case(
                    _of_turns(by_rank, f'{arm}{kind}', of_turn),
                    stock,
                    what=f'{arm}: {what}{kind}',
                    size=f'{ranks} ranks',
                    steps_per_turn=steps,
                )
                for arm in names
            ]
        memory += [_memory(arm, what) for arm in ('stock', *names)]
    headline = next(case for case in cases if case['what'] == 'recommended: tiny GPT')
    return {'ratio': headline['ratio'], 'headline': HEADLINE, 'cases': cases, 'memory': memory}


def _of_turns(
    by_rank: list[dict[str, list[float]]], arm: str, of_turn: Callable[[Any], float]
) -> list[float]:
    """What ``of_turn`` makes of the times of all ranks, for each turn of an arm."""
    return [of_turn(turn) for turn in zip(*(of[arm] for of in by_rank), strict=True)]


def _memory(arm: str, what: str) -> dict[str, Any]:
    from megatron_buffer.testing import run_ranks

    ranks, fields, _ = CASES[what]
    grown = run_ranks(peak_memory, ranks, fields, arm, timeout_s=600)
    return {'what': f'{arm}: {what}', 'peak_growth_bytes': max(grown)}


def measure(
    rank: int, world_size: int, fields: dict[str, Any], names: list[str], steps: int, reps: int
) -> dict[str, list[float]]:
    """Per arm: this rank's seconds for ``steps`` steps, per turn; and of its CPU, under ``arm, CPU``."""
    from megatron_buffer.testing.tiny_gpt import init_parallel

    quiet()
    init_parallel(_case(fields))
    cpu: dict[str, list[float]] = {arm: [] for arm in ('stock', *names)}
    arms = {arm: _turn(arm, fields, steps, cpu[arm]) for arm in cpu}
    times = interleave(arms, reps, warm_up=1)
    return times | {f'{arm}, CPU': seconds[-reps:] for arm, seconds in cpu.items()}


def peak_memory(rank: int, world_size: int, fields: dict[str, Any], arm: str) -> int:
    """Bytes by which the resident set has grown at most while an arm was built and trained."""
    from megatron_buffer.testing.tiny_gpt import init_parallel

    quiet()
    init_parallel(_case(fields))
    before = _resident_bytes('VmRSS')
    _turn(arm, fields, 2, [])()
    return _resident_bytes('VmHWM') - before


def _resident_bytes(field: str) -> int:
    with open('/proc/self/status') as file:
        [line] = [line for line in file if line.startswith(field)]
    return int(line.split()[1]) * 1024


def _case(fields: dict[str, Any]) -> Any:
    from megatron_buffer.testing.tiny_gpt import TrainCase

    options = {
        'bucket_size': 2000,
        'dist_opt': True,
        'overlap_grad_reduce': True,
        'overlap_param_gather': True,
        'dtype': 'fp32',
    }
    return TrainCase(**{**options, **fields})


def config_of(arm: str) -> Any:
    """The config that an arm installs: a shipped one, or that with ``zero_then_add``."""
    if arm in CONFIGS:
        return CONFIGS[arm]
    from megatron_buffer.config import load_config, to_dict

    shipped = {k: v for k, v in to_dict(load_config('recommended')).items() if v is not None}
    return {**shipped, 'accumulation': 'zero_then_add'}


def _turn(arm: str, fields: dict[str, Any], steps: int, cpu: list[float]) -> Callable[[], float]:
    """One turn of an arm: a new model, some steps to warm up, the time of the others; their CPU goes to ``cpu``."""

    def turn() -> float:
        import megatron_buffer

        case = _case(fields)
        with contextlib.ExitStack() as scopes:
            if arm not in ('stock', TORCH):
                scopes.enter_context(megatron_buffer.activated(config_of(arm)))
            step = (_torch_step if arm == TORCH else _megatron_step)(case)
            seconds = _timed_steps(step, steps, cpu)
            del step
            gc.collect()  # activated() refuses to end while a model of ours lives
        return seconds

    return turn


def _timed_steps(step: Callable[[int], None], steps: int, cpu: list[float]) -> float:
    import torch.distributed as dist

    for number in range(WARM_UP_STEPS):
        step(number)
    dist.barrier()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for number in range(steps):
        step(WARM_UP_STEPS + number)
    dist.barrier()
    cpu.append(time.process_time() - begin_cpu)
    return time.perf_counter() - begin


def _megatron_step(case: Any) -> Callable[[int], None]:
    from megatron_buffer.testing.tiny_gpt import run_backward, seed_everything, wrap

    seed_everything(case)
    training = wrap(case)

    def step(number: int) -> None:
        run_backward(case, training, number)
        training.optimizer.step()

    return step


def _torch_step(case: Any) -> Callable[[int], None]:
    import torch
    import torch.distributed as dist

    from megatron_buffer.testing.tiny_gpt import seed_everything
    from megatron_buffer.testing.tiny_model import batch, build_model, call_model

    seed_everything(case)
    model = torch.nn.parallel.DistributedDataParallel(build_model(case))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def micro_batch(number: int, index: int) -> None:
        tokens, labels, counted = batch(case, number, index, dist.get_rank())
        losses = call_model(model, tokens, labels).float() * counted
        (losses.sum() / counted.sum() / case.micro_batches).backward()

    def step(number: int) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            for index in range(case.micro_batches - 1):
                micro_batch(number, index)
        micro_batch(number, case.micro_batches - 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()

    return step

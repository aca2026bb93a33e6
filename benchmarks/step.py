"""A whole training step on gloo ranks: stock, ``upstream``, ``recommended``, and PyTorch's own DDP beside them.

Megatron's schedule, a tiny GPT and its optimizer, with the distributed optimizer and both overlaps; an
iteration from ``zero_grad_buffer`` to the optimizer's step. Every arm has processes of its own, which train
one model throughout and hand the machine on: one arm trains a few steps while the others sleep, then the next
one, so that what slows the machine down for a second slows down all. Where a process's memory happens to lie
makes a difference of some percent for as long as it lives, so each repetition has new processes, and its medians
are one pair of the sample. The slowest rank's time counts, and beside it the CPU time of all ranks, of which what
others do on the machine is no part. PyTorch's DDP trains the same model with torch's AdamW, so its optimizer is
another one and holds all of its state on every rank. Peak memory is measured by :mod:`benchmarks.memory`.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.compare import quiet, ratio_case
from benchmarks.memory import peaks_of

HEADLINE = 'one step of a tiny GPT, {} ranks, recommended.yaml'
ARMS = ('upstream', 'recommended')
TORCH = "PyTorch's DDP"
# The first step counts gradients, and the first three look for weights that are read early (checks.stale_read).
WARM_UP_STEPS = 4
# Those that count, after one for what the other arms have taken from the processor's caches.
STEPS_OF_TURN = 3
TURNS = 4
_TIMEOUT_S = 1800
# What is trained.
CASES: dict[str, dict[str, Any]] = {
    'tiny GPT': {},
    'small GPT': {'hidden': 128, 'layers': 4, 'bucket_size': 100_000},
    'MoE': {'moe': True, 'ep': 2},
}


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio``, ``cases`` and ``memory``."""
    memory = [peaks_of(arm, what, CASES[what]) for what in CASES for arm in arms_of(what)]
    return {**run_on(2, reps), 'memory': memory}


def run_on(ranks: int, reps: int) -> dict[str, Any]:
    """Every model on so many ranks."""
    cases = [case for what in CASES for case in _cases(what, ranks, reps)]
    headline = next(case for case in cases if case['what'] == 'recommended: tiny GPT')
    return {'ratio': headline['ratio'], 'headline': HEADLINE.format(ranks), 'cases': cases}


def arms_of(what: str) -> list[str]:
    """Stock and what is held against it; PyTorch's DDP has no experts."""
    return ['stock', *ARMS, *([] if 'moe' in CASES[what] else [TORCH])]


def _cases(what: str, ranks: int, reps: int) -> list[dict[str, Any]]:
    arms = arms_of(what)
    found = [train_in_turn(CASES[what], arms, ranks, TURNS) for _ in range(reps)]

    def medians(arm: str, of_turn: Callable[[Any], float]) -> list[float]:
        per_step = [[of_turn(times) / STEPS_OF_TURN for times in of[arm]] for of in found]
        return [statistics.median(turns) for turns in per_step]

    return [
        ratio_case(
            medians(arm, of_turn),
            medians('stock', of_turn),
            what=f'{arm}: {what}{kind}',
            size=f'{ranks} ranks',
            turns=TURNS,
        )
        for kind, of_turn in (('', slowest), (', CPU', all_cpu))
        for arm in arms[1:]
    ]


class Times(NamedTuple):
    """One rank's seconds for the steps of a turn."""

    wall_s: float
    cpu_s: float


def slowest(times: tuple[Times, ...]) -> float:
    """The seconds of a turn: those of its slowest rank."""
    return max(of.wall_s for of in times)


def all_cpu(times: tuple[Times, ...]) -> float:
    """The CPU seconds of all ranks in a turn."""
    return sum(of.cpu_s for of in times)


def train_in_turn(
    fields: dict[str, Any], arms: list[str], ranks: int, turns: int
) -> dict[str, list[tuple[Times, ...]]]:
    """Trains a model under every arm, one arm at a time; per arm the times of all ranks, turn by turn."""
    import torch.distributed as dist

    from megatron_buffer.testing import run_ranks

    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    processes = ranks * len(arms)
    of_processes = run_ranks(
        measure, processes, store.port, fields, arms, turns, init=False, timeout_s=_TIMEOUT_S
    )
    of_arms = [of_processes[first : first + ranks] for first in range(0, processes, ranks)]
    return {arm: list(zip(*of, strict=True)) for arm, of in zip(arms, of_arms, strict=True)}


def measure(
    process: int, processes: int, port: int, fields: dict[str, Any], arms: list[str], turns: int
) -> list[Times]:
    """One rank of one arm: its times, turn by turn."""
    import torch.distributed as dist

    quiet()
    ranks = processes // len(arms)
    place, rank = divmod(process, ranks)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store = dist.TCPStore('127.0.0.1', port, is_master=False, timeout=timeout)
    of_arm = dist.PrefixStore(f'arm/{place}', store)
    dist.init_process_group('gloo', store=of_arm, rank=rank, world_size=ranks, timeout=timeout)
    step = start(arms[place], case_of(fields))
    number = WARM_UP_STEPS
    for warm_up in range(number):
        step(warm_up)
    if store.add('ready', 1) == processes:
        store.set('go/0', '')
    found: list[Times] = []
    for turn in range(turns):
        in_turn = place if turn % 2 == 0 else len(arms) - 1 - place
        slot = turn * len(arms) + in_turn
        store.wait([f'go/{slot}'])
        step(number)
        found.append(_timed([*range(number + 1, number + 1 + STEPS_OF_TURN)], step))
        number += 1 + STEPS_OF_TURN
        if store.add(f'done/{slot}', 1) == ranks:
            store.set(f'go/{slot + 1}', '')
    return found


def _timed(numbers: list[int], step: Callable[[int], None]) -> Times:
    import torch.distributed as dist

    dist.barrier()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for number in numbers:
        step(number)
    dist.barrier()
    return Times(time.perf_counter() - begin, time.process_time() - begin_cpu)


def case_of(fields: dict[str, Any]) -> Any:
    """What is trained: :class:`~megatron_buffer.testing.tiny_gpt.TrainCase` with these fields."""
    from megatron_buffer.testing.tiny_gpt import TrainCase

    options = {
        'bucket_size': 2000,
        'dist_opt': True,
        'overlap_grad_reduce': True,
        'overlap_param_gather': True,
        'dtype': 'fp32',
    }
    return TrainCase(**{**options, **fields})


def start(arm: str, case: Any) -> Callable[[int], None]:
    """Installs an arm's config, which is a shipped one, for good and wraps a model; returns its training step."""
    import megatron_buffer
    from megatron_buffer.testing.tiny_gpt import init_parallel

    init_parallel(case)
    if arm == TORCH:
        return torch_step(case)
    if arm != 'stock':
        megatron_buffer.install(arm)
    return megatron_step(case)


def megatron_step(case: Any) -> Callable[[int], None]:
    """A training step of whatever is installed."""
    from megatron_buffer.testing.tiny_gpt import run_backward, seed_everything, wrap

    seed_everything(case)
    training = wrap(case)

    def step(number: int) -> None:
        run_backward(case, training, number)
        training.optimizer.step()

    return step


def torch_step(case: Any) -> Callable[[int], None]:
    """A training step of the same model with PyTorch's DDP and AdamW."""
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

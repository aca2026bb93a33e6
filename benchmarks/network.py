"""Steps on a slowed network: bucketings of stock and of ours, measured, and what the simulator says of them.

The model is a GPT of 12 layers and 0.8 billion parameters made 1,024 times smaller, its buckets with it: stock's
40,000,000 elements become 39,062. Its matrices are plain weights whose forward and backward take a time in proportion
to their elements **asleep**, since computing on 4 ranks of a machine with 2 cores would measure how they get in each
other's way; gradients, buffers, Megatron's ``finalize_model_grads`` and its distributed Adam are real, and so are the
collectives, each of which then takes at least its time on the network of :mod:`benchmarks.slow_network`, the same
for stock and ours: a startup of 3 ms beside layers whose backward takes 8 ms, as a ring over some hundred ranks has
it. Weights are bf16 and gradients are reduced in fp32; both overlaps are on.

In each turn every arm is installed, wraps the model anew, and trains; the slowest rank's step counts. What is
**exposed** is how long a rank waits for collectives in a step, the mean of the ranks. The simulator knows no small
collectives (the norm of the gradients, the agreement on late ones), the measurement
does: each of them takes a startup time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import interleave, quiet, ratio_case
from benchmarks.overlap import spearman
from benchmarks.slow_network import SlowNetwork, simulate_all, sleeper

RANKS = (2, 4)
LAYERS = 12
LAYER = {'qkv': 12_288, 'proj': 4_096, 'fc1': 16_384, 'fc2': 16_384}
EMBEDDING_ELEMS = 102_400
BACKWARD_S_PER_ELEM = 0.008 / sum(LAYER.values())  # twice the time of forward
STARTUP_S, S_PER_BYTE = 0.003, 40e-9
DEFAULT_ELEMS = 39_062
FIXED_ELEMS = (DEFAULT_ELEMS // 2, 2 * DEFAULT_ELEMS, 4 * DEFAULT_ELEMS)
# As in `step`: by then first steps have been watched as long as they are.
WARM_UP_STEPS, STEPS = 4, 3
STOCK = 'stock, default size'
BEST = 'recommended, time_optimal'
HEADLINE = (
    "a step with recommended.yaml and bucketing time_optimal, of stock's with its default size; the worse of "
    'the numbers of ranks'
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is measured."""

    config: Any
    """What is installed; None: nothing, stock."""
    bucket_size_elems: int
    """``ddp_config.bucket_size``."""


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio``, ``ratio_to_best_fixed`` and ``cases``."""
    cases: list[dict[str, Any]] = []
    for ranks in RANKS:
        cases += _on(ranks, reps)
    best = [case for case in cases if case['what'] == BEST]
    return {
        'ratio': max(case['ratio'] for case in best),
        'ratio_to_best_fixed': max(case['ratio_to_best_fixed'] for case in best),
        'spearman': {case['size']: _agreement(cases, case['size']) for case in best},
        'headline': HEADLINE,
        'cases': cases,
    }


def _agreement(cases: Sequence[dict[str, Any]], size: str) -> float:
    """Spearman's coefficient of what is exposed, simulated and measured."""
    here = [case for case in cases if case['size'] == size]
    return spearman(
        [case['simulated_exposed_s'] for case in here], [case['exposed_s'] for case in here]
    )


def _on(ranks: int, reps: int) -> list[dict[str, Any]]:
    from megatron_buffer.testing import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        profile = os.path.join(folder, 'profile.json')
        network = slow_network().as_file(os.path.join(folder, 'network.yaml'))
        env = {'MEGATRON_BUFFER_RECORD': profile, 'MEGATRON_BUFFER_RECORD_STEPS': '5'}
        run_ranks(record, ranks, env=env, timeout_s=300)
        arms = arms_of(profile, network)
        given = ['--profile', profile, '--network', network]
        said = run_ranks(
            simulate_all,
            1,
            folder,
            [arm.config or 'upstream' for arm in arms.values()],
            [[*given, '--bucket-size', str(arm.bucket_size_elems)] for arm in arms.values()],
            init=False,
            timeout_s=300,
        )[0]
        groups = [len(one['groups']) for one in said]
        by_rank = run_ranks(measure, ranks, arms, groups, reps, timeout_s=3600)
    steps, waits = ([of[part] for of in by_rank] for part in (0, 1))
    slow = {name: _over_ranks(max, steps, name) for name in arms}
    exposed = {name: _over_ranks(statistics.mean, waits, name) for name in arms}
    fixed = [name for name, arm in arms.items() if arm.config is None]
    best_fixed = min(fixed, key=lambda name: statistics.median(slow[name]))
    return [
        ratio_case(
            slow[name],
            slow[STOCK],
            what=name,
            size=f'{ranks} ranks',
            groups=len(one['groups']),
            exposed_s=statistics.median(exposed[name]),
            simulated_exposed_s=one['times']['exposed_s'],
            simulated_exposed_grad_s=one['times']['exposed_grad_s'],
            best_fixed=best_fixed,
            ratio_to_best_fixed=ratio_case(slow[name], slow[best_fixed])['ratio'],
            steps_per_turn=STEPS,
        )
        for name, one in zip(arms, said, strict=True)
    ]


def _over_ranks(
    what: Callable[..., float], by_rank: Sequence[dict[str, list[float]]], name: str
) -> list[float]:
    """Of each turn of an arm the largest, or the mean, of the ranks' times."""
    return [what(turn) for turn in zip(*(of[name] for of in by_rank), strict=True)]


def slow_network() -> SlowNetwork:
    """Reductions over 4 ranks take nearly as long as backward, and gathers as forward."""
    return SlowNetwork(STARTUP_S, S_PER_BYTE)


def arms_of(profile: str, network: str) -> dict[str, Arm]:
    """The arms by name, stock's first.

    Args:
        profile: Path of what was recorded.
        network: Path of the slowed network.
    """
    quarter = DEFAULT_ELEMS // 4
    bucketings: dict[str, dict[str, Any]] = {
        'first_last': {'first_size_elems': quarter, 'last_size_elems': quarter},
        'balanced': {},
        'time_optimal': {'profile': profile, 'network': network},
    }
    arms = {STOCK: Arm(config=None, bucket_size_elems=DEFAULT_ELEMS)}
    for elems in FIXED_ELEMS:
        arms[f'stock, {elems:,}'] = Arm(config=None, bucket_size_elems=elems)
    arms['upstream, default size'] = Arm(config='upstream', bucket_size_elems=DEFAULT_ELEMS)
    arms['recommended, default size'] = Arm(config='recommended', bucket_size_elems=DEFAULT_ELEMS)
    for elems in FIXED_ELEMS:
        arms[f'recommended, {elems:,}'] = Arm(config='recommended', bucket_size_elems=elems)
    for name, fields in bucketings.items():
        config = recommended(bucketing={'name': name, **fields})
        arms[f'recommended, {name}'] = Arm(config=config, bucket_size_elems=DEFAULT_ELEMS)
    return arms


def recommended(**changes: Any) -> dict[str, Any]:
    """The fields of recommended.yaml, some of them others."""
    from megatron_buffer.config import load_config, to_dict

    shipped = {k: v for k, v in to_dict(load_config('recommended')).items() if v is not None}
    return {**shipped, **changes}


# In the ranks -------------------------------------------------------------------------------------


def model() -> Any:
    """The small GPT's weights, as modules that sleep in the order of a GPT's."""
    import torch

    def weight(elems: int, computes: bool = True) -> Any:
        backward_s = BACKWARD_S_PER_ELEM * elems if computes else 0.0
        return sleeper((elems,), backward_s / 2, backward_s, torch.bfloat16)

    net = torch.nn.Sequential()
    net.add_module('embedding', weight(EMBEDDING_ELEMS, computes=False))
    for number in range(LAYERS):
        layer = torch.nn.Sequential()
        for name, elems in LAYER.items():
            layer.add_module(name, weight(elems))
        net.add_module(f'layer{number}', layer)
    net.add_module('head', weight(EMBEDDING_ELEMS))
    return net


def wrap(cls: Any = None, **flags: Any) -> Any:
    """The model under a DDP class, that of the moment by default, with the overlap of reductions."""
    from megatron_buffer.testing import small_model

    return small_model.wrap(
        model(),
        cls,
        config={'bf16': True},
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        **flags,
    )


def backward(net: Any) -> None:
    """Forward and backward of one micro-batch; the embedding's gradient comes last."""
    import torch

    net.zero_grad_buffer()
    net(torch.ones(1)).sum().backward()


def record(rank: int, world_size: int) -> None:
    """A run whose times are recorded; with the reductions at the end, which disturb nothing."""
    import megatron_buffer

    quiet()
    net = wrap(megatron_buffer.DistributedDataParallel, buffer_config={'readiness': 'deferred'})
    for _ in range(8):
        backward(net)
        net.finish_grad_sync()


def measure(
    rank: int, world_size: int, arms: dict[str, Arm], groups: Sequence[int], reps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Per arm and turn: this rank's seconds of a step, and how many of them it waited for collectives.

    Args:
        rank: This rank.
        world_size: All of them.
        arms: What has turns.
        groups: How many bucket groups each arm is planned to have.
        reps: Turns.
    """
    quiet()
    waits: dict[str, list[float]] = {name: [] for name in arms}
    with slow_network() as network:

        def turns(name: str, arm: Arm, planned: int) -> Any:
            def turn() -> float:
                step_s, waited_s = _turn(arm, network, planned)
                waits[name].append(waited_s)
                return step_s

            return turn

        bodies = {
            name: turns(name, arm, planned)
            for (name, arm), planned in zip(arms.items(), groups, strict=True)
        }
        steps = interleave(bodies, reps, warm_up=1)
    return steps, {name: times[-reps:] for name, times in waits.items()}


def _turn(arm: Arm, network: SlowNetwork, planned: int) -> tuple[float, float]:
    import megatron_buffer

    with contextlib.ExitStack() as scopes:
        if arm.config is not None:
            scopes.enter_context(megatron_buffer.activated(arm.config))
        network.slowed = False
        step, groups = _training(arm.bucket_size_elems)
        assert groups == planned, f'the plan has {planned} groups, and the model {groups}'
        network.slowed = True
        _steps(step, WARM_UP_STEPS)
        network.waited_s = 0.0
        step_s = _steps(step, STEPS)
        del step
        gc.collect()  # activated() refuses to end while a model of ours lives
    return step_s, network.waited_s / STEPS


def _steps(step: Any, steps: int) -> float:
    """Seconds of a step."""
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def _training(bucket_size_elems: int) -> tuple[Any, int]:
    """A step of a new model, and how many bucket groups that has."""
    import torch
    from megatron.core import distributed
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    net = wrap(bucket_size=bucket_size_elems, overlap_param_gather=True)
    config = OptimizerConfig(
        optimizer='adam',
        lr=1e-3,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    optimizer = get_megatron_optimizer(config, [net])

    def step() -> None:
        backward(net)
        distributed.finalize_model_grads([net])
        optimizer.step()

    return step, len(net.bucket_groups)


def show(name: str, result: dict[str, Any]) -> None:
    """Prints the table."""
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f'{name}: a step, of stock with its default size (headline: {result["ratio"]:.3f})',
        title_justify='left',
    )
    for title in ('arm', 'ranks', 'groups', 'ratio', '95 % interval', 'verdict'):
        table.add_column(title, justify='left' if title in ('arm', 'verdict') else 'right')
    for title in ('step', 'exposed', 'simulated'):
        table.add_column(title, justify='right')
    for case in result['cases']:
        low, high = case['interval95']
        times = (case['ours_s'], case['exposed_s'], case['simulated_exposed_s'])
        table.add_row(
            case['what'],
            case['size'].partition(' ')[0],
            str(case['groups']),
            f'{case["ratio"]:.3f}',
            f'{low:.3f} to {high:.3f}',
            '' if case['what'] == STOCK else case['verdict'],
            *(f'{1e3 * seconds:.1f} ms' for seconds in times),
        )
    console = Console(file=sys.stdout, width=130)
    console.print(table)
    for size in dict.fromkeys(case['size'] for case in result['cases']):
        of_size = {c['what']: c for c in result['cases'] if c['size'] == size}
        best = of_size[BEST]
        console.print(
            f'{size}: {BEST} takes {best["ratio_to_best_fixed"]:.3f} of the best fixed size of stock '
            f"({best['best_fixed']}); exposed time, simulated and measured: Spearman's coefficient "
            f'{result["spearman"][size]:.2f}'
        )
    console.print(result['headline'])

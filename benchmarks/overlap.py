"""Exposed reductions on a slowed network: what the simulator says of a bucketing, and what a run measures.

Two real ranks over gloo train a model of equal layers whose backward takes a known time each, on a network
that is slow in a known way (:mod:`benchmarks.slow_network`). The times at which gradients arrive are recorded by
``--custom-buffer-record``'s own recorder; ``megatron-buffer simulate`` then predicts, for a sweep of
bucketings, how long the optimizer has to wait for reductions. The measured waits are compared in rank:
Spearman's coefficient, over the medians of rounds in which all bucketings take turns. Rounds are added until
one half of them ranks the bucketings as the other half does.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.slow_network import SlowNetwork, simulate_all, sleeper

LAYERS, WIDTH = 16, 48
BACKWARD_S = 0.010
STARTUP_S, S_PER_BYTE = 0.015, 0.010 / (4 * WIDTH * WIDTH)  # so that the bucketings lie apart
RANKS = 2
# Sizes of buckets in layers; 0 is time_optimal.
SWEEP = (1, 2, 3, 4, 5, 10, 12, 16, 0)
FEWEST_ROUNDS, MOST_ROUNDS = 4, 24
RELIABLE = 0.95
"""Spearman's coefficient of one half of the rounds with the other, from which on they say something."""


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``spearman`` and a case per bucketing."""
    from megatron_buffer.testing import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        env = {
            'MEGATRON_BUFFER_RECORD': os.path.join(folder, 'profile.json'),
            'MEGATRON_BUFFER_RECORD_STEPS': '3',
        }
        run_ranks(record, RANKS, env=env, timeout_s=300)
        profile = env['MEGATRON_BUFFER_RECORD']
        network = slow_network().as_file(os.path.join(folder, 'network.yaml'))
        arguments = ['--profile', profile, '--network', network, '--fp32']
        said = run_ranks(
            simulate_all,
            1,
            folder,
            [config_of(layers, profile, network) for layers in SWEEP],
            [arguments] * len(SWEEP),
            init=False,
            timeout_s=300,
        )[0]
        rounds = run_ranks(
            measure,
            RANKS,
            profile,
            network,
            [len(one['groups']) for one in said],
            max(reps, FEWEST_ROUNDS),
            timeout_s=1200,
        )[0]
    measured = medians(rounds)
    cases = [
        {
            'what': name_of(layers),
            'groups': len(said[i]['groups']),
            'simulated_s': said[i]['times']['exposed_grad_s'],
            'measured_s': measured[i],
            'measured_all_s': [r[i] for r in rounds],
        }
        for i, layers in enumerate(SWEEP)
    ]
    return {
        'spearman': spearman([case['simulated_s'] for case in cases], measured),
        'rounds': len(rounds),
        'reliability': reliability(rounds),
        'headline': "Spearman's coefficient of simulated and measured exposed reductions",
        'cases': cases,
    }


def name_of(layers: int) -> str:
    """What a bucketing is called."""
    return f'fixed_size, {layers} layers' if layers else 'time_optimal'


def slow_network() -> SlowNetwork:
    """Times per byte of a bucket, of which half travels between two ranks."""
    return SlowNetwork(STARTUP_S, 2 * S_PER_BYTE)


def config_of(layers: int, profile: str, network: str) -> dict[str, Any]:
    """The config of a bucketing; gradients are reduced in the order of the layout."""
    bucketing: dict[str, Any] = {'name': 'fixed_size', 'bucket_size_elems': layers * WIDTH * WIDTH}
    if not layers:
        bucketing = {'name': 'time_optimal', 'profile': profile, 'network': network}
    return {'bucketing': bucketing, 'dispatch_order': 'in_order', 'readiness': 'golden_static'}


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's coefficient; equal values share their mean place."""
    if len(set(left)) == 1 or len(set(right)) == 1:
        return 0.0
    return statistics.correlation(left, right, method='ranked')


def medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Of each bucketing over the rounds."""
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


# In the ranks -------------------------------------------------------------------------------------


def model() -> Any:
    """Layers of one matrix; the backward of each takes at least its time, asleep."""
    import torch

    return torch.nn.Sequential(*(sleeper((WIDTH, WIDTH), 0.0, BACKWARD_S) for _ in range(LAYERS)))


def wrap(config: Any) -> Any:
    """The model under our DDP, with overlap."""
    import megatron_buffer
    from megatron_buffer.testing import small_model

    return small_model.wrap(
        model(),
        megatron_buffer.DistributedDataParallel,
        buffer_config=config,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
    )


def iterate(net: Any) -> float:
    """One iteration; returns how long it waited for reductions after backward."""
    import torch

    net.zero_grad_buffer()
    net(torch.ones(2, WIDTH)).sum().backward()
    begin = time.perf_counter()
    net.finish_grad_sync()
    return time.perf_counter() - begin


def record(rank: int, world_size: int) -> None:
    """A run whose times are recorded; with the reductions at the end, which disturb nothing."""
    net = wrap({'readiness': 'deferred'})
    for _ in range(6):
        iterate(net)


def measure(
    rank: int, world_size: int, profile: str, network: str, groups: Sequence[int], fewest: int
) -> list[list[float]]:
    """Rounds in which every bucketing has a turn, until they are reliable or there are many.

    Args:
        rank: This rank.
        world_size: All of them.
        profile: What was recorded.
        network: The slowed network.
        groups: How many bucket groups each bucketing is planned to have.
        fewest: Rounds to begin with.
    """
    import torch.distributed as dist

    rounds: list[list[float]] = []
    with slow_network():
        nets = [wrap(config_of(layers, profile, network)) for layers in SWEEP]
        assert [len(net.bucket_groups) for net in nets] == list(groups), 'the plan has other groups'
        for net in nets:
            iterate(net)
        while len(rounds) < max(fewest, MOST_ROUNDS):
            turn: list[float] = []
            for net in nets:
                dist.barrier()  # a wait for the other rank would be no wait for the network
                turn.append(iterate(net))
            rounds.append(turn)
            enough = [len(rounds) >= fewest and reliability(rounds) >= RELIABLE]
            dist.broadcast_object_list(enough, src=0)
            if enough[0]:
                break
    return rounds


def reliability(rounds: Sequence[Sequence[float]]) -> float:
    """How well every other round ranks the bucketings as the rest do: Spearman's coefficient."""
    return spearman(medians(rounds[::2]), medians(rounds[1::2]))


def show(name: str, result: dict[str, Any]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f'{name}: exposed reductions, simulated and measured', title_justify='left')
    for title in ('bucketing', 'groups', 'simulated', 'measured'):
        table.add_column(title, justify='left' if title == 'bucketing' else 'right')
    for case in sorted(result['cases'], key=lambda case: case['simulated_s']):
        times = (f'{1e3 * case[key]:.1f} ms' for key in ('simulated_s', 'measured_s'))
        table.add_row(case['what'], str(case['groups']), *times)
    console = Console()
    console.print(table)
    console.print(
        f"Spearman's coefficient {result['spearman']:.3f}, over {result['rounds']} rounds; of one half of "
        f"them with the other {result['reliability']:.3f}"
    )

"""The benchmarks run, whatever they measure: every case once or twice, and no assertion on times."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import instructions, memory, network
from benchmarks.accumulate import floor_bytes
from benchmarks.compare import interleave, median_interval, ratio_case
from benchmarks.slow_network import SlowNetwork, simulate_all
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parent.parent


def _command(*arguments: str, limit_s: int = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-m', 'benchmarks', *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def test_a_typo_is_one_sentence() -> None:
    done = _command('hook')
    assert done.returncode == 2
    assert (
        "no benchmark 'hook'; there are hooks, accumulate, copies, step, step4, startup, gpu"
        in done.stderr
    )


def test_without_a_gpu_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    done = _command('gpu', '--json', str(tmp_path / 'gpu.json'))
    assert (done.returncode, done.stdout) == (0, 'gpu: skipped, no CUDA device\n')
    assert json.loads((tmp_path / 'gpu.json').read_text())['skipped'] == 'no CUDA device'


def test_arms_take_turns_in_both_directions() -> None:
    order = []

    def arm(name: str) -> Any:
        return lambda: float(order.append(name) or len(order))

    times = interleave({name: arm(name) for name in 'abc'}, reps=2, warm_up=1)
    assert ''.join(order) == 'abccbaabc'
    assert times == {'a': [6.0, 7.0], 'b': [5.0, 8.0], 'c': [4.0, 9.0]}


def test_an_interval_over_one_is_no_difference() -> None:
    stock = [1.0] * 15
    slower = [0.9 + 0.02 * i for i in range(15)]
    case = ratio_case(slower, stock, what='x')
    assert math.isclose(case['ratio'], 1.04)
    assert case['verdict'] == 'no difference'
    # Of 15 values the 4th and the 12th: fewer than 4 lie below the median once in 57 times.
    assert median_interval(slower) == (slower[3], slower[11])
    assert ratio_case([0.5] * 15, stock)['verdict'] == 'faster'
    assert ratio_case([1.5] * 15, stock)['verdict'] == 'slower'


def test_bytes_per_element() -> None:
    assert floor_bytes('stock', 'bf16', 1, 8) == 4 + 2 + 4 + 4 + 8 == 22
    assert floor_bytes('first_write, shard_postscale', 'bf16', 1, 8) == 6 + 8 / 8
    assert floor_bytes('first_write, average', 'bf16', 1, 8) == 6
    assert floor_bytes('first_write', 'bf16', 4, 8) == 6 + 3 * 10 + 8


def _small(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The GPU's benchmark with small sizes on a CPU, and the others' cases as small."""
    from benchmarks import accumulate, copies, gpu, hooks

    copies.SIZES = (20,)
    cases = copies.measure(rank, world_size, 1)
    cases += gpu.measure(rank, world_size, 1, gpu.SMALL_SIZES, 'cpu')
    hooks.SIZES, accumulate.NUM_PARAMS, accumulate.PARAM_ELEMS = (20,), 2, 64
    return cases + hooks.measure(rank, world_size, 1) + accumulate.measure(rank, world_size, 1)


@pytest.mark.long
def test_every_case_of_one_process() -> None:
    for cases in run_ranks(_small, 1, timeout_s=200):
        assert {
            *('accumulate: first_write, average', 'backward: recommended', 'step: upstream'),
            *('last micro-batch', 'zero_grad_buffer', 'first_write, shard_postscale'),
            *('updated parameters into the buffer', 'bf16 gradients to main parameters'),
        } <= {case['what'] for case in cases}
        for case in cases:
            assert {'ratio', 'interval95', 'verdict', 'ours_s', 'stock_s'} <= case.keys()


@pytest.mark.slow
def test_every_arm_of_a_step() -> None:
    from benchmarks import step

    arms = ['stock', *step.ARMS, step.TORCH]
    of_arms = step.train_in_turn({'steps': 2}, arms, 2, turns=2)
    assert list(of_arms) == arms
    for turns in of_arms.values():
        assert [len(of_ranks) for of_ranks in turns] == [2, 2]
        assert all(times.wall_s > 0 for of_ranks in turns for times in of_ranks)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['hooks', 'accumulate', 'copies', 'step', 'startup'])
def test_each_benchmark_as_a_command(name: str, tmp_path: Path) -> None:
    done = _command(name, '--reps', '1', '--json', str(tmp_path / 'out.json'))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / 'out.json').read_text())
    assert result['ratio'] > 0
    assert result['cases']
    assert result['machine']['torch']


def test_tensors_take_no_more_memory_than_stocks() -> None:
    peaks = {arm: memory.tensor_bytes(arm, {}) for arm in ('stock', 'upstream', 'recommended')}
    buffer_bytes = 4 * 22_528  # the model's gradients, or its parameters, padded, in fp32
    assert peaks['stock'] > 2 * buffer_bytes
    # On an idle machine they are equal but for 8 bytes a parameter; on a busy one gloo may hold a copy of a bucket.
    assert peaks['upstream'] - peaks['stock'] < buffer_bytes / 2
    assert peaks['recommended'] - peaks['stock'] < buffer_bytes / 2


# network ------------------------------------------------------------------------------------------


def _queued(rank: int, world_size: int) -> dict[str, Any]:
    """Three launches on a network with a startup time and one with a time per byte; what was waited for."""
    import torch
    import torch.distributed as dist

    before = dict(vars(dist.ProcessGroup))
    whole, shard = torch.full((8,), float(rank + 1)), torch.zeros(4)
    begin = time.perf_counter()
    with SlowNetwork(0.02, 0.001) as slow:
        first = dist.all_reduce(torch.ones(4), async_op=True)  # 0.02 + 16 bytes
        with dist._coalescing_manager(async_ops=True) as second:  # 0.02 + 2 x 16 bytes
            for _ in range(2):
                dist.reduce_scatter_tensor(shard, whole, async_op=True)
        dist.all_gather_into_tensor(
            torch.zeros(8), torch.ones(4)
        )  # 0.02 + 16 bytes, all waited for
        third_s = time.perf_counter() - begin
        first.wait()
        second.wait()
        slow.slowed = False
        dist.all_reduce(torch.ones(4))
        launches = slow.launches
    return {
        'third_s': third_s,
        'launches': launches,
        'shard': shard.tolist(),
        'restored': dict(vars(dist.ProcessGroup)) == before,
    }


def test_collectives_of_a_slowed_network_wait_for_each_other() -> None:
    for said in run_ranks(_queued, 2):
        # Of two ranks half of the bytes travel, of an all-reduce's twice that.
        assert said['third_s'] >= 3 * 0.02 + (16 + 2 * 16 + 16) * 0.001
        assert said['launches'] == 3
        assert said['shard'] == [3.0] * 4
        assert said['restored']


def _few_arms(profile: str, path: str) -> dict[str, network.Arm]:
    arms = network_arms_of(profile, path)
    return {name: arms[name] for name in (network.STOCK, 'upstream, default size', network.BEST)}


network_arms_of = network.arms_of


def _networked(rank: int, world_size: int, profile: str) -> Any:
    """A model of one layer that computes nothing, recorded, simulated and measured."""
    network.LAYERS, network.BACKWARD_S_PER_ELEM, network.STARTUP_S = 1, 1e-9, 1e-4
    network.record(rank, world_size)
    del os.environ['MEGATRON_BUFFER_RECORD']
    import torch.distributed as dist

    slow = f'{profile}.network.yaml'
    if rank == 0:
        network.slow_network().as_file(slow)
    dist.barrier()
    arms = _few_arms(profile, slow)
    Path(f'{profile}.{rank}').mkdir()
    said = simulate_all(
        rank,
        world_size,
        f'{profile}.{rank}',
        [arm.config or 'upstream' for arm in arms.values()],
        [
            [
                *('--profile', profile, '--network', slow),
                *('--bucket-size', str(arm.bucket_size_elems)),
            ]
            for arm in arms.values()
        ],
    )
    groups = [len(one['groups']) for one in said]
    return groups, network.measure(rank, world_size, arms, groups, 1)


@pytest.mark.long
def test_steps_on_a_slowed_network(tmp_path: Path) -> None:
    """The groups are those that were planned: `measure` checks it."""
    profile = str(tmp_path / 'profile.json')
    env = {'MEGATRON_BUFFER_RECORD': profile, 'MEGATRON_BUFFER_RECORD_STEPS': '5'}
    for groups, (steps, waits) in run_ranks(_networked, 2, profile, env=env):
        # The head, the layer (49,152 elements, the size is 39,062), and the embedding.
        assert groups[:2] == [3, 3]
        assert list(steps) == list(waits) == [*_few_arms('', '')]
        assert all(steps[name][0] > waits[name][0] > 0 for name in steps)
        assert {len(turns) for turns in [*steps.values(), *waits.values()]} == {1}


@pytest.mark.slow
def test_network_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, 'RANKS', (2,))
    monkeypatch.setattr(network, 'arms_of', _few_arms)
    result = network.run(1)
    assert [case['what'] for case in result['cases']] == [*_few_arms('', '')]
    assert result['cases'][0]['ratio'] == 1.0
    assert all(case['simulated_exposed_s'] > 0 for case in result['cases'])
    network.show('network', result)
    assert '(stock, default size)' in capsys.readouterr().out


# instructions -------------------------------------------------------------------------------------


def test_without_valgrind_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PATH', '/nowhere')
    done = _command('instructions')
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith('instructions: valgrind is not installed')
    assert done.stderr.count('\n') == 1


def test_instructions_per_call() -> None:
    of = {
        'last micro-batch': 1000.0,
        'earlier micro-batch': 800.0,
        'bare': 400.0,
        'reset': 150.0,
        'forward pre-hooks, all gathered': 250.0,
        'no_sync': 90.0,
        'zero_grad_buffer': 150.0,
        'empty': 50.0,
        'hooks': 5,
        'params': 10,
        'one': 1,
    }
    counts = {'ours': of, 'stock': {**of, 'last micro-batch': 1500.0}}
    cases = {what: instructions._case(what, counts) for what in instructions.UNITS}
    assert cases['last micro-batch']['ours_instructions'] == (1000 - 400 - (150 - 50)) / 5
    assert cases['last micro-batch']['ratio'] == 500 / 1000
    assert cases['earlier micro-batch']['ours_instructions'] == (800 - 400) / 5
    assert cases['forward pre-hooks, all gathered']['ours_instructions'] == 200 / 10
    assert cases['no_sync']['ours_instructions'] == 40
    assert cases['zero_grad_buffer']['ours_instructions'] == 100 / 10


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.skipif(not shutil.which('valgrind'), reason='counted by valgrind')
def test_instructions_under_valgrind(tmp_path: Path) -> None:
    done = _command(
        'instructions', '--reps', '2', '--json', str(tmp_path / 'out.json'), limit_s=1500
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / 'out.json').read_text())
    assert [case['what'] for case in result['cases']] == list(instructions.UNITS)
    assert all(case['ours_instructions'] > 0 for case in result['cases'])

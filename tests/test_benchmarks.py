"""The benchmarks run, whatever they measure: every case once or twice, and no assertion on times."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accumulate import floor_bytes
from benchmarks.compare import interleave, median_interval, ratio_case
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parent.parent


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-m', 'benchmarks', *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_typo_is_one_sentence() -> None:
    done = _command('hook')
    assert done.returncode == 2
    assert "no benchmark 'hook'; there are hooks, accumulate, step, startup, gpu" in done.stderr


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
    from benchmarks import accumulate, gpu, hooks

    cases = gpu.measure(rank, world_size, 1, gpu.SMALL_SIZES, 'cpu')
    hooks.SIZES, accumulate.NUM_PARAMS, accumulate.PARAM_ELEMS = (20,), 2, 64
    return cases + hooks.measure(rank, world_size, 1) + accumulate.measure(rank, world_size, 1)


def test_every_case_of_one_process() -> None:
    for cases in run_ranks(_small, 1, timeout_s=200):
        assert {
            *('accumulate: first_write, average', 'backward: recommended', 'step: upstream'),
            *('last micro-batch', 'zero_grad_buffer', 'first_write, shard_postscale'),
        } <= {case['what'] for case in cases}
        for case in cases:
            assert {'ratio', 'interval95', 'verdict', 'ours_s', 'stock_s'} <= case.keys()


def _stepped(rank: int, world_size: int) -> dict[str, list[float]]:
    from benchmarks import step

    arms = [*step.ARMS, step.TORCH]
    return step.measure(rank, world_size, {'steps': 2}, arms, 1, 1)


@pytest.mark.slow
def test_every_arm_of_a_step() -> None:
    for times in run_ranks(_stepped, 2, timeout_s=200):
        assert list(times) == [
            *('stock', 'upstream', 'recommended', 'recommended, zero_then_add', "PyTorch's DDP")
        ]
        assert all(len(turns) == 1 and turns[0] > 0 for turns in times.values())


@pytest.mark.slow
@pytest.mark.parametrize('name', ['hooks', 'accumulate', 'step', 'startup'])
def test_each_benchmark_as_a_command(name: str, tmp_path: Path) -> None:
    done = _command(name, '--reps', '1', '--json', str(tmp_path / 'out.json'))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / 'out.json').read_text())
    assert result['ratio'] > 0
    assert result['cases']
    assert result['machine']['torch']

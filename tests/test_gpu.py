"""What only a GPU shows: NCCL, memory that is registered with it, captured layers, fused weight gradients.

Each case trains the tiny GPT with stock Megatron-Core and with ours and compares all bits. `tests/gpu_training.py`
is the script; its cases that need no GPU run here on gloo, so that the script is known to work.
"""

import functools
import json
import os
import subprocess
import sys

import pytest

from tests import gpu_training
from tests.harness import ROOT


def _train(name: str, ranks: int, **env: str) -> list[dict[str, object]]:
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    done = subprocess.run(
        [*torchrun, f'--nproc-per-node={ranks}', '-m', 'tests.gpu_training', name],
        cwd=ROOT,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_DEVICE_MAX_CONNECTIONS': '1', **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == ranks
    for rank, one in enumerate(found):
        assert one['differences'] == [], f'rank {rank}'
        assert (one['stock']['ours'], one['ours']['ours']) == (False, True)
    return found


@functools.cache
def _num_gpus() -> int:
    code = 'import torch; print(torch.cuda.device_count())'
    asked = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, timeout=240
    )
    return int(asked.stdout or 0)


@pytest.mark.gpu
@pytest.mark.parametrize('ranks', [1, 2])
@pytest.mark.parametrize('name', gpu_training.CASES)
def test_same_bits_on_nccl(name: str, ranks: int) -> None:
    if reason := gpu_training.missing(name):
        pytest.skip(reason)
    if ranks > _num_gpus():
        pytest.skip(f'needs {ranks} GPUs; there are {_num_gpus()}')
    registered = name.startswith('registered')
    for one in _train(name, ranks):
        for arm in ('stock', 'ours'):
            assert one[arm]['device'] == 'cuda'
            assert one[arm]['registered'] == [registered] * len(one[arm]['registered'])


@pytest.mark.long
@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != 'recommended'))
        for name, case in gpu_training.CASES.items()
        if not case.gpu_only
    ],
)
def test_the_script_itself_on_gloo(name: str) -> None:
    for one in _train(name, 2, MEGATRON_BUFFER_CPU='1', CUDA_VISIBLE_DEVICES=''):
        assert one['ours']['registered'] == [False] * len(one['ours']['registered'])

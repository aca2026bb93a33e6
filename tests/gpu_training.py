"""Trains the tiny GPT with stock Megatron-Core and with ours in one process and prints where they differ.

    torchrun --nproc-per-node N -m tests.gpu_training NAME

On a machine with GPUs it runs on NCCL. With MEGATRON_BUFFER_CPU=1 the cases that need no GPU run on gloo, by
which the script itself is tried where there is none.
"""

import gc
import importlib.util
import json
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_buffer import cpu
from tests.tiny_gpt import TrainCase, compare, train

BASE = TrainCase(
    dist_opt=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    dtype='bf16',
    bucket_size=2000,
)


@dataclass(frozen=True)
class GpuCase:
    """A training run and the config to compare with stock's.

    Attributes:
        case: What both train.
        config: Our config.
        needs: Module that must be importable, beside a GPU.
        gpu_only: Whether the case means nothing on a CPU.
    """

    case: TrainCase
    config: Any = 'upstream'
    needs: str = ''
    gpu_only: bool = True


_GRAPHS = {'cuda_graph_impl': 'local', 'cuda_graph_warmup_steps': 1}
CASES = {
    'upstream': GpuCase(BASE, gpu_only=False),
    'recommended': GpuCase(BASE, 'recommended', gpu_only=False),
    'plain DDP': GpuCase(
        replace(BASE, dist_opt=False, overlap_param_gather=False), 'recommended', gpu_only=False
    ),
    'registered memory': GpuCase(replace(BASE, ddp={'nccl_ub': True})),
    'registered memory, recommended': GpuCase(replace(BASE, ddp={'nccl_ub': True}), 'recommended'),
    'registered memory, not symmetric': GpuCase(
        replace(BASE, ddp={'nccl_ub': True, 'disable_symmetric_registration': True})
    ),
    'captured layers': GpuCase(replace(BASE, model=_GRAPHS)),
    'captured layers, recommended': GpuCase(replace(BASE, model=_GRAPHS), 'recommended'),
    'fused weight gradients': GpuCase(
        replace(BASE, model={'gradient_accumulation_fusion': True}),
        'recommended',
        needs='fused_weight_gradient_mlp_cuda',
    ),
}


def _start() -> None:
    if cpu.requested():
        cpu.enable()  # before Megatron is imported
    # The same kernel every time, so that equal means equal.
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    torch.use_deterministic_algorithms(True, warn_only=True)
    if not cpu.is_enabled():
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    dist.init_process_group('gloo' if cpu.is_enabled() else 'nccl')


def _prepare(case: TrainCase) -> None:
    """What megatron.training does for graphs before it seeds anything."""
    if 'cuda_graph_impl' in case.model:
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)


def _observe(run: Any) -> dict[str, Any]:
    """What must hold of the buffers beside the bits."""
    buffers = [b for chunk in run.chunks for b in chunk.buffers]
    return {
        'device': buffers[0].grad_data.device.type,
        'registered': [b.nccl_mem_pool is not None for b in buffers],
        'ours': type(buffers[0]).__module__.startswith('megatron_buffer'),
    }


def run(name: str) -> dict[str, Any]:
    """Train twice; returns `differences` and, of both runs, what was observed."""
    chosen = CASES[name]
    results = []
    for arm in ('stock', chosen.config):
        _prepare(chosen.case)
        results.append(train(chosen.case, arm, observe=_observe))
        gc.collect()
    return {
        'differences': compare(*results),
        'stock': results[0]['observed'],
        'ours': results[1]['observed'],
        'losses': results[1]['losses'],
    }


def missing(name: str) -> str | None:
    """Why the case cannot run here, if it can't."""
    needs = CASES[name].needs
    if needs and importlib.util.find_spec(needs) is None:
        return f'needs {needs} (NVIDIA apex)'
    return None


if __name__ == '__main__':
    _start()
    found = run(sys.argv[1])
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    if dist.get_rank() == 0:
        sys.stdout.write('\n' + json.dumps(everybody) + '\n')
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()

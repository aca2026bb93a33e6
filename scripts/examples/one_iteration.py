"""What three iterations do to the buffer of a small model on two CPU processes: views, collectives, zeroing.

    python scripts/examples/one_iteration.py                # the config upstream
    python scripts/examples/one_iteration.py recommended    # another config: a name or a file
    python scripts/examples/one_iteration.py stock          # Megatron-Core without us

The model is wrapped by Megatron's own DistributedDataParallel with the distributed optimizer, bf16 parameters,
fp32 gradients and both overlaps; each iteration has two micro-batches.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections import Counter
from typing import Any

import megatron_buffer
from megatron_buffer.errors import MegatronBufferError
from megatron_buffer.testing import RanksFailed, run_ranks

PHASES = ('zero', 'forward', 'backward', 'finalize', 'step')


def story(rank: int, world_size: int, choice: str) -> list[str]:
    """Trains on one rank, and returns what there is to tell."""
    from megatron.core import parallel_state

    logging.getLogger().setLevel(logging.WARNING)
    parallel_state.initialize_model_parallel()
    with contextlib.ExitStack() as stack:
        if choice != 'stock':
            stack.enter_context(megatron_buffer.activated(choice))
        return _train(rank)


def _train(rank: int) -> list[str]:
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    sizes = (8, 32, 32, 8)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    net = torch.nn.Sequential(*layers).bfloat16()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=400,
    )
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model: Any = DistributedDataParallel(config, ddp_config, net)
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(
            lr=0.01, bf16=True, use_distributed_optimizer=True, overlap_param_gather=True
        ),
        [model],
    )
    (buffer,) = model.buffers
    weight = layers[0].weight
    lines = [
        f'buffer: {len(buffer.buckets)} buckets, {buffer.grad_data.numel()} elements',
        f'param.data is a view of param_data: {_is_view(weight.data, buffer.param_data)}',
        f'param.main_grad is a view of grad_data: {_is_view(weight.main_grad, buffer.grad_data)}, '
        f'{weight.main_grad.dtype} for {weight.dtype}',
    ]

    place = buffer.grad_data.data_ptr()
    watch = _Collectives()
    for iteration in (1, 2, 3):
        watch.counts.clear()
        with watch.during('zero'):
            model.zero_grad_buffer()
            optimizer.zero_grad()
        zeroed = not buffer.grad_data.any()
        for micro_batch in (0, 1):
            last = micro_batch == 1
            with contextlib.nullcontext() if last else model.no_sync():
                x = torch.randn(4, 8, dtype=torch.bfloat16)
                with watch.during('forward'):
                    loss = model(x).float().square().mean() / 2
                with watch.during('backward'):
                    loss.backward()
        freed = weight.grad is None
        with watch.during('finalize'):
            finalize_model_grads([model])
        with watch.during('step'):
            optimizer.step()
        lines += [f'iteration {iteration}: {watch}']
    lines += [
        f'zero_grad_buffer leaves zeros: {zeroed}; at the same address: '
        f'{buffer.grad_data.data_ptr() == place}',
        f'param.grad is None after backward: {freed}',
    ]
    return lines


def _is_view(tensor: Any, storage: Any) -> bool:
    same = tensor.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    return bool(same and tensor.data_ptr() != 0)


class _Collectives:
    """Counts what goes out in each phase, below torch.distributed; not the optimizer's gradient norm."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def during(self, phase: str) -> Any:
        from torch.utils._python_dispatch import TorchDispatchMode

        counts = self.counts
        kinds = ['reduce_scatter', 'allgather'] + ['allreduce'] * (phase != 'step')

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func.namespace == 'c10d':
                    for kind in kinds:
                        counts[phase, kind] += kind in func.__name__
                return func(*args, **(kwargs or {}))

        with Noting():
            yield

    def __str__(self) -> str:
        parts = []
        for phase in PHASES:
            seen = [
                f'{n} {kind}' for (where, kind), n in self.counts.items() if where == phase and n
            ]
            parts.append(f'{phase} {", ".join(seen) or "-"}')
        return '; '.join(parts)


def main(arguments: list[str]) -> int:
    choice = arguments[0] if arguments else 'upstream'
    try:
        if choice != 'stock':
            megatron_buffer.load_config(choice)
        lines, _ = run_ranks(story, 2, choice)
    except (MegatronBufferError, RanksFailed) as error:
        sys.stderr.write(f'error: {error}\n')
        return 2
    print('\n'.join(lines))
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

"""A three-layer model that any rank can also train alone: the small cases' subject and their oracle.

The oracle knows no buffer: it adds up every rank's gradients of an unwrapped copy, over all micro-batches
and ranks, each loss divided by the number of data-parallel ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig


class Net(torch.nn.Module):
    """Linear, tanh, linear, tanh, linear; ``unused`` adds a layer that forward never calls."""

    def __init__(self, dtype: torch.dtype = torch.float32, unused: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16, dtype=dtype)
        self.second = torch.nn.Linear(16, 16, dtype=dtype)
        self.third = torch.nn.Linear(16, 8, dtype=dtype)
        if unused:
            self.spare = torch.nn.Linear(16, 16, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``[batch, 8]``."""
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def make_net(**kwargs: Any) -> Net:
    """The same weights on every rank."""
    torch.manual_seed(7)
    return Net(**kwargs)


def batch(rank: int, step: int, micro_batch: int) -> torch.Tensor:
    """Other data on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank + 1)
    return torch.randn(4, 8, generator=generator)


def transformer_config(**kwargs: Any) -> TransformerConfig:
    """The smallest config that DDP accepts."""
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **kwargs)


def ddp_class() -> type[Any]:
    """Whatever Megatron-Core's name stands for now: stock's class, or ours when installed."""
    return importlib.import_module('megatron.core.distributed').DistributedDataParallel


def init_parallel() -> None:
    """Data parallelism only."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()


def wrap(net: torch.nn.Module, cls: type[Any] | None = None, **flags: Any) -> Any:
    """Wraps ``net``; ``config_`` and ``buffer_config`` go to the right places, the rest is ddp_config's."""
    init_parallel()
    kwargs = {}
    if 'buffer_config' in flags:
        kwargs['buffer_config'] = flags.pop('buffer_config')
    config = transformer_config(**flags.pop('config', {}))
    ddp_config = DistributedDataParallelConfig(**flags)
    return (cls or ddp_class())(config, ddp_config, net, **kwargs)


def run_window(
    model: Any, rank: int, step: int, micro_batches: int = 3, loss: Callable[..., Any] | None = None
) -> None:
    """One iteration's forward and backward passes, synchronised with the last micro-batch."""
    model.zero_grad_buffer()
    with model.no_sync():
        for micro_batch in range(micro_batches - 1):
            _backward(model, rank, step, micro_batch, loss)
    _backward(model, rank, step, micro_batches - 1, loss)
    model.finish_grad_sync()


def _backward(model: Any, rank: int, step: int, micro_batch: int, loss: Any) -> None:
    output = model(batch(rank, step, micro_batch))
    (output.square().mean() if loss is None else loss(output)).backward()


def owned_main_grads(model: Any) -> dict[str, torch.Tensor]:
    """Reduced gradients that this rank holds: its shards under the distributed optimizer, else all.

    Returns:
        Per parameter a flat tensor; elements that another rank owns are NaN.
    """
    result: dict[str, torch.Tensor] = {}
    for buffer in model.buffers + model.expert_parallel_buffers:
        owned = torch.full_like(buffer.grad_data, float('nan'), dtype=torch.float32)
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel()
            start, end = bucket.offset, bucket.offset + size
            if model.ddp_config.use_distributed_optimizer:
                shard = size // buffer.data_parallel_world_size
                start += shard * buffer.data_parallel_group.rank()
                end = start + shard
            owned[start:end] = buffer.grad_data[start:end].float()
        for param, (start, end, _) in buffer.param_index_map.items():
            result[names_of(model)[param]] = owned[start:end].clone()
    return result


def names_of(model: Any) -> dict[Any, str]:
    """Parameter to name in the wrapped module."""
    return {param: name for name, param in model.module.named_parameters()}


def oracle_grads(
    rank: int,
    world_size: int,
    step: int,
    micro_batches: int = 3,
    scale: float | None = None,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """Gradients of an unwrapped copy, summed over every rank's micro-batches; ``scale`` is 1/dp."""
    net = make_net(**kwargs)
    scale = 1.0 / world_size if scale is None else scale
    for other in range(world_size):
        for micro_batch in range(micro_batches):
            loss = net(batch(other, step, micro_batch)).square().mean() * scale
            loss.backward()
    return {n: p.grad.flatten() for n, p in net.named_parameters() if p.grad is not None}


def differences(
    owned: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-6
) -> list[str]:
    """Names whose owned elements differ from the oracle's by more than ``rtol`` of its largest."""
    wrong = []
    for name, reference in expected.items():
        mine = owned[name]
        mask = ~mine.isnan()
        if mask.any():
            error = (mine[mask] - reference[mask]).abs().max()
            if error > rtol * reference.abs().max():
                wrong.append(f'{name}: {error:.3g} of {reference.abs().max():.3g}')
    return wrong


def covered(model: Any, owned: dict[str, torch.Tensor]) -> bool:
    """True when the ranks together own every element of every parameter exactly once."""
    ok = True
    for name in sorted(owned):
        count = (~owned[name].isnan()).int()
        dist.all_reduce(count)
        expected = 1 if model.ddp_config.use_distributed_optimizer else dist.get_world_size()
        ok &= bool((count == expected).all())
    return ok

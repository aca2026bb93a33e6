"""A plain training loop that builds DDP and the optimizer itself, with megatron_buffer installed around it.

    torchrun --nproc-per-node 2 scripts/examples/simple_loop.py --config recommended

No part of ``megatron.training`` is used. The names below are imported before ``install()``: it finds and
changes whoever holds Megatron's classes, this module too.
"""

from __future__ import annotations

import sys
from typing import Any

import common
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig


def train(steps: int) -> list[float]:
    """Trains a small GPT; returns the mean loss of every step."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=common.VOCAB,
        max_sequence_length=common.SEQUENCE,
    ).cuda()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=10_000,
    )
    model = DistributedDataParallel(config, ddp_config, gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer='adam', lr=1e-2, use_distributed_optimizer=True, overlap_param_gather=True
        ),
        [model],
    )
    return [train_step(model, optimizer, step) for step in range(steps)]


def train_step(model: Any, optimizer: Any, step: int) -> float:
    """One iteration: only the last micro-batch lets gradients be reduced."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    *first, last = common.batches(step)
    losses: list[torch.Tensor] = []

    def backward(batch: common.Batch) -> None:
        loss = common.token_losses(model, batch).float().mean() / (len(first) + 1)
        loss.backward()
        losses.append(loss.detach())

    with model.no_sync():
        for batch in first:
            backward(batch)
    backward(last)
    finalize_model_grads([model])
    optimizer.step()
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


if __name__ == '__main__':
    sys.exit(common.main((__doc__ or '').split('\n')[0], train))

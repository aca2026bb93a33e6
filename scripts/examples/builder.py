"""A provider that builds and wraps its model through Megatron's helper, as Megatron-Bridge's providers do.

    torchrun --nproc-per-node 2 scripts/examples/builder.py --config recommended

The recipe knows nothing of megatron_buffer: ``install()`` is called before it builds the model. Steps go
through Megatron's schedule, which calls ``finalize_model_grads``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import common
import torch
import torch.distributed as dist
from megatron.core import distributed
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.training.models.dist_utils import unimodal_build_distributed_models


@dataclass
class GPTProvider:
    """A model recipe: sizes, and how to build and wrap the model."""

    num_layers: int = 2
    hidden_size: int = 32
    num_attention_heads: int = 4
    bf16: bool = True
    ddp: DistributedDataParallelConfig = field(
        default_factory=lambda: DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
            bucket_size=10_000,
        )
    )

    def transformer_config(self) -> TransformerConfig:
        """The sizes as Megatron wants them."""
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            bf16=self.bf16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
        )

    def provide_distributed_model(self) -> list[Any]:
        """Builds this rank's chunks, and wraps them in whatever DDP Megatron has at this moment."""
        config = self.transformer_config()

        def build(
            groups: ProcessGroupCollection,
            pre_process: bool = True,
            post_process: bool = True,
            vp_stage: int | None = None,
        ) -> GPTModel:
            return GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=common.VOCAB,
                max_sequence_length=common.SEQUENCE,
                pre_process=pre_process,
                post_process=post_process,
                vp_stage=vp_stage,
                pg_collection=groups,
            )

        groups = ProcessGroupCollection.use_mpu_process_groups()
        return unimodal_build_distributed_models(build, config, groups, ddp_config=self.ddp)


def train(steps: int) -> list[float]:
    """Trains what the provider makes; returns the mean loss of every step."""
    provider = GPTProvider()
    chunks = provider.provide_distributed_model()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer='adam',
            lr=1e-2,
            bf16=provider.bf16,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        chunks,
    )
    config = chunks[0].config
    config.no_sync_func = chunks[0].no_sync
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = distributed.finalize_model_grads
    losses = []
    for step in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=common.batches(step),
            model=chunks,
            num_microbatches=common.MICRO_BATCHES,
            seq_length=common.SEQUENCE,
            micro_batch_size=common.SAMPLES,
            forward_only=False,
        )
        optimizer.step()
        total = torch.stack([one['loss'] for one in found]).mean()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def forward_step(data: Iterator[common.Batch], model: torch.nn.Module) -> tuple[Any, Any]:
    """One micro-batch: the loss of every token, and how to make one number of it."""

    def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {'loss': loss.detach().clone()}  # the schedule divides the loss in place

    return common.token_losses(model, next(data)), mean


if __name__ == '__main__':
    sys.exit(common.main((__doc__ or '').split('\n')[0], train))

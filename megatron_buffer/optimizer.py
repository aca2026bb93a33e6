"""``DistributedOptimizer``: upstream's, with the config's layout.

Stands for ``DistributedOptimizer`` (``megatron/core/optimizer/distrib_optimizer.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout

from megatron_buffer.collectives import reduce_scatter_global_preserved
from megatron_buffer.param_layout import compute_per_buffer_param_layout, group_params_for_buffers

_do = importlib.import_module('megatron.core.optimizer.distrib_optimizer')


class DistributedOptimizer(_do.DistributedOptimizer):
    """``DistributedOptimizer`` that lays buffers out as the config in force has it.

    The constructor partitions buckets once more for a list that nobody reads; the process-wide
    reduce-scatter function that upstream sets while doing so is put back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with reduce_scatter_global_preserved():
            super().__init__(*args, **kwargs)

    @staticmethod
    def _compute_per_buffer_param_layout(
        params: Sequence[torch.nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: list[int] | None = None,
    ) -> PerBufferParamLayout:
        """Layout of one buffer; see :func:`compute_per_buffer_param_layout`."""
        return compute_per_buffer_param_layout(
            params, bucket_size, data_parallel_world_size, ddp_config, param_indices
        )

    @staticmethod
    def compute_full_param_layout(
        params: Sequence[torch.nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        expert_data_parallel_world_size: int | None = None,
    ) -> FullParamLayout:
        """Layouts of all buffers of a model chunk.

        Upstream: ``DistributedOptimizer.compute_full_param_layout``.

        Args:
            params: Trainable parameters in registration order.
            bucket_size: Resolved size in elements, or None for one bucket per buffer.
            data_parallel_world_size: Ranks that dense buckets are sharded over.
            ddp_config: DDP config.
            expert_data_parallel_world_size: Ranks that expert buckets are sharded over; None takes the
                dense number.
        """
        expert_size = expert_data_parallel_world_size or data_parallel_world_size
        grouped = group_params_for_buffers(params, ddp_config.grad_reduce_in_fp32)
        return FullParamLayout(
            layouts={
                key: compute_per_buffer_param_layout(
                    members,
                    bucket_size,
                    expert_size if key.is_expert_parallel else data_parallel_world_size,
                    ddp_config,
                    indices,
                )
                for key, (members, indices) in grouped.items()
            }
        )

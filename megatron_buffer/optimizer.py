"""``DistributedOptimizer``: upstream's, with the config's layout.

Stands for ``DistributedOptimizer`` (``megatron/core/optimizer/distrib_optimizer.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.param_layout import PerBufferParamLayout

from megatron_buffer.collectives import reduce_scatter_global_preserved
from megatron_buffer.param_layout import compute_per_buffer_param_layout

_do = importlib.import_module('megatron.core.optimizer.distrib_optimizer')


class DistributedOptimizer(_do.DistributedOptimizer):
    """``DistributedOptimizer`` that lays buffers out as the installed config has it.

    ``compute_full_param_layout`` is upstream's, and finds our grouping and this class by their
    rebound names: it follows the config under ``install()`` only.

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

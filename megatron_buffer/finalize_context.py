"""What a finalize step gets to work with; public, since third-party steps are written against it.

Stands for the arguments and the first lines of ``finalize_model_grads``
(``megatron/core/distributed/finalize_model_grads.py``), which find the process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config


@dataclass(frozen=True)
class FinalizeContext:
    """What a step may use.

    Behind ``finish_grad_sync`` the gradient of a parameter is ``param.main_grad``. Under the distributed
    optimizer only the part of it that this rank owns is reduced over the data-parallel ranks; the rest
    is this rank's own sum and is never read. Whatever is linear and the same on every element (scaling,
    summing over other groups) may be done to all of it.

    No step may read a tensor's value on the host (``item()``, ``if tensor``): finalize runs inside
    captured CUDA graphs too. Collectives must be issued alike by all ranks of their group.

    Attributes:
        model: The model chunks of this rank, as Megatron wrapped them; ``chunk.module`` is the model,
            ``chunk.buffers`` and ``chunk.expert_parallel_buffers`` hold its gradients.
        num_tokens: Tokens in this rank's micro-batches (a one-element tensor, valid on the last
            pipeline stage) under per-token loss, else None. ``scale_by_num_tokens`` changes it in place
            to the number of the global batch.
        pg_collection: The process groups that the schedule handed over; None means parallel_state's.
        force_all_reduce: Whole buckets are reduced in this iteration, on every rank.
    """

    model: Sequence[Any]
    num_tokens: torch.Tensor | None
    pg_collection: Any
    force_all_reduce: bool

    @cached_property
    def config(self) -> Any:
        """Transformer config of the first chunk."""
        return get_model_config(self.model[0])

    def _group(self, name: str, fallback: Callable[[], Any]) -> Any:
        if self.pg_collection is None:
            return fallback()
        if not hasattr(self.pg_collection, name):
            raise ValueError(
                f'finalize_model_grads: pg_collection has no {name!r} group; set it (to None if this '
                'model does not need it)'
            )
        return getattr(self.pg_collection, name)

    @cached_property
    def tp_group(self) -> Any:
        """Tensor-parallel group."""
        return self._group('tp', parallel_state.get_tensor_model_parallel_group)

    @cached_property
    def pp_group(self) -> Any:
        """Pipeline-parallel group."""
        return self._group('pp', parallel_state.get_pipeline_model_parallel_group)

    @cached_property
    def embd_group(self) -> Any:
        """Stages that hold the tied word embedding."""
        return self._group(
            'embd', lambda: parallel_state.get_embedding_group(check_initialized=False)
        )

    @cached_property
    def pos_embd_group(self) -> Any:
        """Stages that hold the position embedding."""
        return self._group(
            'pos_embd', lambda: parallel_state.get_position_embedding_group(check_initialized=False)
        )

    @cached_property
    def dp_cp_group(self) -> Any:
        """Ranks whose tokens are counted: data- and context-parallel, weight-remat peers included."""
        whole = getattr(self.pg_collection, 'dp_cp_gtp_remat', None)
        return whole or self._group(
            'dp_cp', lambda: parallel_state.get_data_parallel_group(with_context_parallel=True)
        )

    @cached_property
    def tp_dp_cp_group(self) -> Any:
        """Ranks that route tokens to the same experts' biases.

        Raises:
            ValueError: If ``pg_collection`` has it as None.
        """
        group = self._group(
            'tp_dp_cp',
            lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        )
        if group is None:
            raise ValueError(
                'finalize_model_grads: pg_collection.tp_dp_cp is None, and '
                'moe_router_enable_expert_bias needs it'
            )
        return group

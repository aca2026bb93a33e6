"""``DistributedOptimizer``: upstream's, with the config's layout and guarded checkpoints.

Stands for ``DistributedOptimizer`` (``megatron/core/optimizer/distrib_optimizer.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.param_layout import PerBufferParamLayout

from megatron_buffer.bucket_groups import ParamAndGradBucketGroup
from megatron_buffer.checkpointing import CheckpointedOptimizer
from megatron_buffer.collectives import reduce_scatter_global_preserved
from megatron_buffer.param_layout import compute_per_buffer_param_layout
from megatron_buffer.shard_copies import ShardCopies, copies_plainly
from megatron_buffer.strategies.gather import chain_heads

_do = importlib.import_module('megatron.core.optimizer.distrib_optimizer')


class DistributedOptimizer(CheckpointedOptimizer):
    """``DistributedOptimizer`` that lays buffers out as the installed config has it.

    ``compute_full_param_layout`` is upstream's, and finds our grouping and this class by their
    rebound names: it follows the config under ``install()`` only.

    The constructor partitions buckets once more for a list that nobody reads; the process-wide
    reduce-scatter function that upstream sets while doing so is put back.
    """

    _copies: ShardCopies | None = None

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

    @torch.no_grad()
    def _copy_model_grads_to_main_grads(self) -> None:
        """By slices that were looked up once; upstream: ``_copy_model_grads_to_main_grads``."""
        copies = self._shard_copies()
        if copies is None:
            super()._copy_model_grads_to_main_grads()
        else:
            copies.hand_over_grads()

    @torch.no_grad()
    def _copy_main_params_to_model_params(self) -> None:
        """All parameters of a dtype at once; upstream: ``_copy_main_params_to_model_params``."""
        copies = self._shard_copies()
        if copies is None:
            super()._copy_main_params_to_model_params()
        else:
            copies.write_params()

    def _shard_copies(self) -> ShardCopies | None:
        """The slices, looked up again if anything was replaced; None where upstream does more than copy."""
        if not copies_plainly(self):
            return None
        if self._copies is None or not self._copies.hold(self):
            self._copies = ShardCopies(self)
        return self._copies

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Steps; under ``param_gather: eager`` then starts the gathers that forward needs first.

        Upstream: ``DistributedOptimizer.step_with_ready_grads``, after which the first forward pre-hook
        starts them. Each later gather is started by the pre-hook that waits for its predecessor.

        Returns:
            Whether parameters were updated.
        """
        groups = self._eager_groups()
        for group in groups:
            if group.param_gather_handle is not None:  # no forward pass since the last step
                group.start_param_sync(force_sync=True)
                group.param_gather_dispatched = False
        updated = super().step_with_ready_grads()
        if updated and self.ddp_config.overlap_param_gather:
            for group in self._own_groups():
                group.params_stale = True
        for group in groups:
            if updated and not group.param_gather_dispatched:
                group.start_param_sync()
        return updated

    def _eager_groups(self) -> list[Any]:
        """The bucket groups to gather right after the step: none unless forward pre-hooks wait for them.

        A group counts only if this optimizer updates all of it (experts and LayerWise parameters have
        optimizers of their own, which may step later). With ``overlap_param_gather_with_optimizer_step``,
        ``align_param_gather`` or a ``param_sync_func`` others start the gathers; a captured step cannot.
        """
        if (
            self.is_stub_optimizer
            or not self.ddp_config.overlap_param_gather
            or self.ddp_config.align_param_gather
            or self.config.overlap_param_gather_with_optimizer_step
            or self.config.optimizer_cuda_graph
            or any(chunk.config.param_sync_func is not None for chunk in self.model_chunks)
        ):
            return []
        eager = [c for c in self.model_chunks if _is_eager(c) and c.remove_forward_pre_hook_handles]
        if not eager:
            return []
        own = {id(group) for group in self._own_groups()}
        heads = [
            head
            for chunk in eager
            for head in chain_heads(chunk.bucket_groups + chunk.expert_parallel_bucket_groups)
        ]
        return [head for head in heads if id(head) in own]

    def _own_groups(self) -> list[ParamAndGradBucketGroup]:
        """The bucket groups of ours that this optimizer updates alone."""
        own = {id(bucket) for buffer in self.buffers for bucket in buffer.buckets}
        return [
            group
            for chunk in self.model_chunks
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            if isinstance(group, ParamAndGradBucketGroup)
            and all(id(bucket) in own for bucket in group.buckets)
        ]


def _is_eager(chunk: Any) -> bool:
    """Whether the config that wrapped this model chunk asks for eager gathers; stock's wrapper has none."""
    runtime = getattr(chunk, 'runtime', None)
    return runtime is not None and getattr(runtime.param_gather, 'eager', False)

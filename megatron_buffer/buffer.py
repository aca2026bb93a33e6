"""Storage of one buffer: allocation and views are upstream's, layout and zeroing are the config's.

Stands for ``_ParamAndGradBuffer`` and ``_ParamAndGradBucket``
(``megatron/core/distributed/param_and_grad_buffer.py``).
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

from megatron_buffer import runtime as runtime_module
from megatron_buffer.errors import LayoutError, ParamStorageError
from megatron_buffer.grad_writes import GradWrites
from megatron_buffer.param_layout import (
    compute_default_per_buffer_param_layout,
    has_own_address,
    is_packed,
    uses_quantized_storage,
)
from megatron_buffer.strategies.padding import keeps_whole_bytes

_pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')
logger = logging.getLogger(__name__)


class ParamAndGradBuffer(_pgb._ParamAndGradBuffer):
    """``_ParamAndGradBuffer`` whose layout and zeroing follow the config in force.

    Args:
        As upstream's. ``bucket_size`` is in elements; ``grad_data`` has ``numel`` elements of
        ``grad_dtype``; ``param_data`` exists under the distributed optimizer only, and is packed for
        NVFP4 and shared with ``grad_data`` for MXFP8.

    Attributes:
        runtime: The config that the buffer was built under.
        param_to_name: Names of the parameters, for messages.
        grad_writes: What was written in this window, if the accumulation strategy overwrites; DDP sets it.
    """

    def __init__(
        self,
        ddp_config: Any,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params_with_names: list[tuple[torch.nn.Parameter, str]],
        data_parallel_group: Any,
        bucket_size: int | None,
        param_to_name: dict[torch.nn.Parameter, str],
        *args: Any,
        param_layout: Any = None,
        **kwargs: Any,
    ) -> None:
        self.runtime = runtime_module.current()
        self.param_to_name = param_to_name
        self.grad_writes: GradWrites | None = None
        if param_layout is None:
            param_layout = compute_default_per_buffer_param_layout(
                [param for param, _ in params_with_names], bucket_size
            )
        if ddp_config.use_distributed_optimizer:
            self._check_grouped_params(params_with_names)
            self._check_packed_params(params_with_names)
        kwargs['param_layout'] = param_layout
        super().__init__(
            ddp_config,
            param_dtype,
            grad_dtype,
            params_with_names,
            data_parallel_group,
            bucket_size,
            param_to_name,
            *args,
            **kwargs,
        )

    @staticmethod
    def _check_grouped_params(params_with_names: list[tuple[torch.nn.Parameter, str]]) -> None:
        """Megatron-Core 0.18 mounts the wrapper of a grouped tensor and leaves the matrices where they are."""
        if hasattr(_pgb, 'is_grouped_tensor'):
            return
        for param, name in params_with_names:
            if not (uses_quantized_storage(param) or has_own_address(param)):
                raise LayoutError(
                    f'buffer: {name} is a {type(param).__name__}, a wrapper of other tensors, which this '
                    'version of Megatron-Core cannot place in its buffer: the weights that the module uses '
                    'would never be updated. Turn single grouped weights off, or use Megatron-Core 0.19'
                )

    @staticmethod
    def _check_packed_params(params_with_names: list[tuple[torch.nn.Parameter, str]]) -> None:
        """NVFP4 parameters take half a byte an element: with others in one buffer shards would not agree."""
        packed = [name for param, name in params_with_names if is_packed(param)]
        others = [name for param, name in params_with_names if not is_packed(param)]
        if packed and others:
            raise LayoutError(
                f'buffer: {packed[0]} is an NVFP4 parameter and {others[0]} is not, and both are stored as '
                "bytes in one buffer: a rank's shard of the bytes would not be its shard of the gradients. "
                'Store the weights of a model in one recipe; Megatron-Core mixes them without an error'
            )

    def _compute_nvfp4_packed_layout(
        self, params_with_names: list[tuple[torch.nn.Parameter, str]]
    ) -> None:
        """Places packed bytes where the layout has the values: each offset halved.

        Upstream: ``_ParamAndGradBuffer._compute_nvfp4_packed_layout``, which pads the bytes by the rule for
        elements; a rank's bytes are then not always its gradients'. It is left at that, with a warning,
        where the config wants upstream's padding.

        Raises:
            LayoutError: If a parameter or a shard starts inside a byte.
        """
        dist_opt = self.ddp_config.use_distributed_optimizer
        if not (dist_opt and keeps_whole_bytes(self.runtime.layout.padding)):
            super()._compute_nvfp4_packed_layout(params_with_names)
            if dist_opt and self.data_parallel_world_size > 1:
                self._warn_of_other_shards(params_with_names)
            return
        self._check_whole_bytes(params_with_names)
        self.nvfp4_packed_param_index_map = {
            param: (start // 2, end // 2, bucket)
            for param, (start, end, bucket) in self.param_index_map.items()
        }
        self.nvfp4_packed_bucket_indices = [
            (start // 2, end // 2) for start, end in self.bucket_indices
        ]
        last_ends = [0] * len(self.bucket_indices)
        for _, end, bucket in self.nvfp4_packed_param_index_map.values():
            last_ends[bucket] = max(last_ends[bucket], end)
        self.nvfp4_packed_numel_unpadded = sum(last_ends) - sum(
            start for start, _ in self.nvfp4_packed_bucket_indices
        )

    def _warn_of_other_shards(
        self, params_with_names: list[tuple[torch.nn.Parameter, str]]
    ) -> None:
        for param, name in params_with_names:
            start, end, bucket = self.param_index_map[param]
            values = (start, end, *self.bucket_indices[bucket])
            packed_start, packed_end, _ = self.nvfp4_packed_param_index_map[param]
            packed = (packed_start, packed_end, *self.nvfp4_packed_bucket_indices[bucket])
            if is_packed(param) and values != tuple(2 * place for place in packed):
                logger.warning(
                    'the bytes of NVFP4 parameter %s do not lie where its gradients do: a rank gathers bytes '
                    'that another one has to write, so weights go wrong. Set padding: {name: megatron, '
                    'whole_bytes: true}',
                    name,
                )
                return

    def _check_whole_bytes(self, params_with_names: list[tuple[torch.nn.Parameter, str]]) -> None:
        """A layout that was computed by stock may cut a byte in two."""
        shards = 2 * self.data_parallel_world_size
        for param, name in params_with_names:
            start, _, bucket = self.param_index_map[param]
            bucket_start, bucket_end = self.bucket_indices[bucket]
            if start % 2 or bucket_start % 2 or (bucket_end - bucket_start) % shards:
                raise LayoutError(
                    f'full_param_layout: {name} is an NVFP4 parameter, two of whose values share a byte; '
                    f'it starts at {start}, in a bucket of {bucket_end - bucket_start} elements: expected '
                    f'an even start and a multiple of {shards} (2 x dp_size). Compute the layout after '
                    'megatron_buffer.install(), or leave it out'
                )

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Frees the storage of gradients, and moves parameters to the host.

        Upstream: ``_ParamAndGradBuffer.offload_to_cpu``, which resizes a storage to nothing: that is wrong
        for memory that is registered with NCCL, and takes parameters along that share it.

        Raises:
            ParamStorageError: If the storage is not this buffer's alone.
        """
        if move_grads and self.ddp_config.nccl_ub:
            raise ParamStorageError(
                'offload: grad_data lies in a pool that is registered with NCCL (nccl_ub) and cannot be '
                'freed; turn nccl_ub off'
            )
        if move_grads and self._shares_storage():
            raise ParamStorageError(
                'offload: grad_data shares its storage with param_data '
                '(reuse_grad_buf_for_mxfp8_param_ag), so freeing gradients would free parameters that '
                'were not gathered yet; turn the reuse off'
            )
        super().offload_to_cpu(move_params=move_params, move_grads=move_grads)

    def _shares_storage(self) -> bool:
        if self.param_data is None or self.grad_data.untyped_storage().size() == 0:
            return False
        return (
            self.param_data.untyped_storage().data_ptr()
            == self.grad_data.untyped_storage().data_ptr()
        )

    def zero_grads(self) -> None:
        """Zeroes ``grad_data`` and the extra main_grads."""
        super().reset()

    def forget_grads(self) -> None:
        """Leaves ``grad_data`` to be overwritten, but for what can only be added to."""
        if self.grad_writes is None:
            self.zero_grads()
        else:
            self.grad_writes.begin()

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiplies all gradients; upstream: ``_ParamAndGradBuffer.scale_gradients``."""
        if self.grad_writes is not None:
            self.grad_writes.settle()
            self.grad_writes.gaps_dirty = True  # zero times infinity is not zero
        super().scale_gradients(scaling_factor)

    def reset(self) -> None:
        """Prepares the buffer for a new iteration, as the accumulation strategy has it."""
        self.runtime.accumulation.begin_window(self)

"""Storage of one buffer: allocation and views are upstream's, layout and zeroing are the config's.

Stands for ``_ParamAndGradBuffer`` and ``_ParamAndGradBucket``
(``megatron/core/distributed/param_and_grad_buffer.py``).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core.optimizer.param_layout import bucket_end_divisor, pad_param_start

from megatron_buffer import runtime as runtime_module
from megatron_buffer.errors import LayoutError, ParamStorageError
from megatron_buffer.param_layout import compute_default_per_buffer_param_layout
from megatron_buffer.strategies.padding import Alignment
from megatron_buffer.strategies.specs import BufferTraits

_pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')


class ParamAndGradBuffer(_pgb._ParamAndGradBuffer):
    """``_ParamAndGradBuffer`` whose layout and zeroing follow the config in force.

    Args:
        As upstream's. ``bucket_size`` is in elements; ``grad_data`` has ``numel`` elements of
        ``grad_dtype``; ``param_data`` exists under the distributed optimizer only, and is packed for
        NVFP4 and shared with ``grad_data`` for MXFP8.

    Attributes:
        runtime: The config that the buffer was built under.
        param_to_name: Names of the parameters, for messages.
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
        if param_layout is None:
            param_layout = compute_default_per_buffer_param_layout(
                [param for param, _ in params_with_names], bucket_size
            )
        elif ddp_config.use_distributed_optimizer:
            self._check_packed_params(
                params_with_names,
                BufferTraits(
                    dp_size=data_parallel_group.size(),
                    high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
                    param_bytes=param_dtype.itemsize,
                    grad_bytes=grad_dtype.itemsize,
                ),
            )
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

    def _check_packed_params(
        self, params_with_names: list[tuple[torch.nn.Parameter, str]], traits: BufferTraits
    ) -> None:
        """Upstream derives the packed fp4 offsets by its own alignment: ours must be the same."""
        ours = self.runtime.layout.padding.alignment(traits)
        end_elems = bucket_end_divisor(traits.dp_size, traits.high_busbw)
        if ours == Alignment(pad_param_start(1), end_elems):
            return
        for param, name in params_with_names:
            if _is_packed(param):
                raise LayoutError(
                    f'padding: {name} is an NVFP4 parameter, whose packed bytes Megatron-Core lays out '
                    f'with its own alignment; found {ours}, expected param_start_elems: 64 and '
                    'bucket_end_elems: 128'
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

    def reset(self) -> None:
        """Prepares the buffer for a new iteration, as the accumulation strategy has it."""
        self.runtime.accumulation.begin_window(self)


def _is_packed(param: torch.nn.Parameter) -> bool:
    """True for NVFP4 parameters, grouped ones (from core_v0.19 on) included."""
    is_grouped = getattr(_pgb, 'is_grouped_nvfp4tensor', lambda param: False)
    return _pgb.is_nvfp4tensor(param) or is_grouped(param)

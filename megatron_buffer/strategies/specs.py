"""What the layout strategies are told of parameters and buffers; plain values, no tensors.

Stands for the arguments of ``DistributedOptimizer._compute_per_buffer_param_layout``
(``megatron/core/optimizer/distrib_optimizer.py``), which hands over the parameters themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """A parameter, as far as a layout is concerned."""

    numel_elems: int
    """Elements of the parameter (logical ones: an fp4 parameter counts each value)."""
    name: str = ''
    """Name in the wrapped module; '' where upstream hands over bare parameters."""
    shared_embedding: bool = False
    """Megatron's mark on embeddings tied across pipeline stages."""
    pipeline_synced: bool = False
    """Another mark of parameters whose gradients finalize sums over pipeline stages."""


class BufferTraits(NamedTuple):
    """A buffer, as far as its layout is concerned.

    Attributes:
        dp_size: Ranks that each bucket is sharded over; 1 when nothing is sharded.
        high_busbw: ``ddp_config.pad_buckets_for_high_nccl_busbw``.
        param_bytes: Bytes per element of ``param_data`` (1 for quantized parameters).
        grad_bytes: Bytes per element of ``grad_data``.
        pp_rank: Pipeline stage of the model chunk.
        vp_stage: Which of the stage's model chunks it is; 0 without an interleaved schedule.
        values_per_byte: Elements that share a byte of ``param_data``: 2 for NVFP4 parameters.
    """

    dp_size: int = 1
    high_busbw: bool = False
    param_bytes: int = 2
    grad_bytes: int = 4
    pp_rank: int = 0
    vp_stage: int = 0
    values_per_byte: int = 1

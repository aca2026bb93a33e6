"""``padding``: where parameters may start and bucket ends must lie, under the distributed optimizer.

Stands for ``pad_param_start``, ``bucket_end_divisor`` and ``pad_bucket_end`` of
``megatron/core/optimizer/param_layout.py``. Without the distributed optimizer nothing is padded.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from megatron_buffer.config_layout import ByteAlignedPadding as ByteAlignedParams
from megatron_buffer.config_layout import MegatronPadding as MegatronPaddingParams
from megatron_buffer.config_layout import MinimalPadding as MinimalPaddingParams
from megatron_buffer.strategies.registry import strategy
from megatron_buffer.strategies.specs import BufferTraits

_HIGH_BUSBW_ELEMS = 2**16


class Alignment(NamedTuple):
    """Divisors that offsets are rounded up to, both in elements; 1 means no padding."""

    param_start_elems: int
    bucket_end_elems: int


UNPADDED = Alignment(1, 1)


def round_up(value: int, divisor: int) -> int:
    """Smallest multiple of ``divisor`` that is at least ``value``; exact for any size."""
    return -(-value // divisor) * divisor


def in_whole_bytes(alignment: Alignment, buffer: BufferTraits) -> Alignment:
    """``alignment`` so that no parameter, and no shard, starts inside a byte of packed parameters.

    A rank's shard of the packed bytes then holds just the parameters of its shard of the gradients.
    Upstream pads both by one rule, which gives other shards where ``dp_size`` is not a power of two.
    """
    if buffer.values_per_byte == 1:
        return alignment
    return Alignment(
        math.lcm(alignment.param_start_elems, buffer.values_per_byte),
        math.lcm(alignment.bucket_end_elems, buffer.values_per_byte * buffer.dp_size),
    )


def keeps_whole_bytes(padding: Padding) -> bool:
    """Whether a padding puts packed bytes where the layout has the values; only Megatron's may not."""
    return getattr(padding, 'whole_bytes', True)


class Padding(Protocol):
    """Chooses the alignment of a buffer whose buckets are sharded."""

    def alignment(self, buffer: BufferTraits) -> Alignment:
        """Returns the divisors for one buffer; the one of bucket ends is a multiple of ``dp_size``.

        Args:
            buffer: Number of shards, bytes per element, and what ddp_config says.
        """
        ...


@strategy('padding', MegatronPaddingParams)
class MegatronPadding:
    """Parameters start at multiples of 64 elements, buckets end at multiples of lcm(dp, 128)."""

    def __init__(self, params: MegatronPaddingParams) -> None:
        self.params = params
        self.whole_bytes = params.whole_bytes

    def alignment(self, buffer: BufferTraits) -> Alignment:
        """With ``high_busbw`` a bucket's shard is also a multiple of a large power of two."""
        high_busbw = self.params.high_busbw
        if high_busbw is None:
            high_busbw = buffer.high_busbw
        end_elems = math.lcm(buffer.dp_size, self.params.bucket_end_elems)
        if high_busbw:
            end_elems = math.lcm(end_elems, _HIGH_BUSBW_ELEMS)
        return Alignment(self.params.param_start_elems, end_elems)


@strategy('padding', ByteAlignedParams)
class ByteAlignedPadding:
    """Addresses instead of counts: what a kernel or a network card sees, whatever the dtype."""

    def __init__(self, params: ByteAlignedParams) -> None:
        self.params = params

    def alignment(self, buffer: BufferTraits) -> Alignment:
        """Holds in ``param_data`` and in ``grad_data``; buckets end where every shard is a multiple."""
        return Alignment(
            _elems_of_bytes(self.params.param_start_bytes, buffer),
            buffer.dp_size * _elems_of_bytes(self.params.bucket_end_bytes, buffer),
        )


@strategy('padding', MinimalPaddingParams)
class MinimalPadding:
    """As little as Megatron-Core can work with."""

    def __init__(self, params: MinimalPaddingParams) -> None:
        self.params = params

    def alignment(self, buffer: BufferTraits) -> Alignment:
        """Parameters touch; shards are equal."""
        return Alignment(1, buffer.dp_size)


def _elems_of_bytes(num_bytes: int, buffer: BufferTraits) -> int:
    """Fewest elements whose size is a multiple of ``num_bytes`` in both dtypes of the buffer."""
    in_params = num_bytes // math.gcd(num_bytes, buffer.param_bytes) * buffer.values_per_byte
    return math.lcm(in_params, num_bytes // math.gcd(num_bytes, buffer.grad_bytes))

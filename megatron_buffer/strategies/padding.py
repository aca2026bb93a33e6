"""``padding``: where parameters may start and bucket ends must lie, under the distributed optimizer.

Stands for ``pad_param_start``, ``bucket_end_divisor`` and ``pad_bucket_end`` of
``megatron/core/optimizer/param_layout.py``. Without the distributed optimizer nothing is padded.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from megatron_buffer.config_layout import MegatronPadding as MegatronPaddingParams
from megatron_buffer.strategies.registry import strategy

_HIGH_BUSBW_ELEMS = 2**16


class Alignment(NamedTuple):
    """Divisors that offsets are rounded up to, both in elements; 1 means no padding."""

    param_start_elems: int
    bucket_end_elems: int


UNPADDED = Alignment(1, 1)


def round_up(value: int, divisor: int) -> int:
    """Smallest multiple of ``divisor`` that is at least ``value``; exact for any size."""
    return -(-value // divisor) * divisor


class Padding(Protocol):
    """Chooses the alignment of a buffer that is sharded over ``dp_size`` ranks."""

    def alignment(self, dp_size: int, high_busbw: bool) -> Alignment:
        """Returns the divisors for one buffer.

        Args:
            dp_size: Ranks that each bucket is sharded over.
            high_busbw: ``ddp_config.pad_buckets_for_high_nccl_busbw``.
        """
        ...


@strategy('padding', MegatronPaddingParams)
class MegatronPadding:
    """Parameters start at multiples of 64 elements, buckets end at multiples of lcm(dp, 128)."""

    def __init__(self, params: MegatronPaddingParams) -> None:
        self.params = params

    def alignment(self, dp_size: int, high_busbw: bool) -> Alignment:
        """With ``high_busbw`` a bucket's shard is also a multiple of a large power of two."""
        if self.params.high_busbw is not None:
            high_busbw = self.params.high_busbw
        end_elems = math.lcm(dp_size, self.params.bucket_end_elems)
        if high_busbw:
            end_elems = math.lcm(end_elems, _HIGH_BUSBW_ELEMS)
        return Alignment(self.params.param_start_elems, end_elems)

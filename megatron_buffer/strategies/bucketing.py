"""``bucketing``: where a buffer is cut into buckets, the units of communication.

Stands for the cut inside ``DistributedOptimizer._compute_per_buffer_param_layout``
(``megatron/core/optimizer/distrib_optimizer.py``) and ``_compute_default_per_buffer_param_layout``
(``megatron/core/distributed/param_and_grad_buffer.py``). A cut is only ever made at a parameter's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from megatron_buffer.config_layout import FixedSizeBucketing as FixedSizeParams
from megatron_buffer.strategies.registry import strategy


class OpenBucket(NamedTuple):
    """The bucket being filled, just after a parameter was placed in it.

    Attributes:
        position: Index of that parameter in layout order.
        start_elems: Start of the bucket in its buffer.
        end_elems: End of that parameter (alignment gaps before it included, end pad excluded).
    """

    position: int
    start_elems: int
    end_elems: int


Cutter = Callable[[OpenBucket], bool]


class Bucketing(Protocol):
    """Decides after each parameter whether its bucket ends there."""

    def cutter(self, numels: Sequence[int], bucket_size_elems: int | None) -> Cutter:
        """Prepares the decisions for one buffer.

        Args:
            numels: Sizes of the buffer's parameters, in elements, in layout order.
            bucket_size_elems: What ddp_config and Megatron's rules resolve to; None where Megatron
                wants one bucket (no overlap, pipeline rank above 0, later model chunks).

        Returns:
            A function of the open bucket: True closes it.
        """
        ...


@strategy('bucketing', FixedSizeParams)
class FixedSize:
    """Closes a bucket as soon as it holds at least ``bucket_size_elems`` elements."""

    def __init__(self, params: FixedSizeParams) -> None:
        self.params = params

    def cutter(self, numels: Sequence[int], bucket_size_elems: int | None) -> Cutter:
        """A size of the config takes the place of a resolved one, never of "one bucket"."""
        if bucket_size_elems is None:
            return lambda bucket: False
        limit_elems = self.params.bucket_size_elems or bucket_size_elems
        return lambda bucket: bucket.end_elems - bucket.start_elems >= limit_elems

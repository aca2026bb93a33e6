"""``bucket_isolation``: which parameters get a bucket of their own.

Stands for the ``shared_embedding`` test in ``DistributedOptimizer._compute_per_buffer_param_layout``
(``megatron/core/optimizer/distrib_optimizer.py``). A tied embedding must stay alone: finalize sums its
whole main_grad over the first and last pipeline stage after the reduce-scatter, so both stages have to
shard it identically.
"""

from __future__ import annotations

from typing import Protocol

from megatron_buffer.config_layout import SharedEmbeddingIsolation as SharedEmbeddingParams
from megatron_buffer.strategies.registry import strategy


class BucketIsolation(Protocol):
    """Names the parameters that share their bucket with no other."""

    def is_alone(self, name: str, shared_embedding: bool) -> bool:
        """Returns True when the parameter gets its own bucket.

        Args:
            name: Parameter name; '' where unknown.
            shared_embedding: Megatron's mark on embeddings tied across pipeline stages.
        """
        ...


@strategy('bucket_isolation', SharedEmbeddingParams)
class SharedEmbedding:
    """Embeddings tied across pipeline stages, and nothing else."""

    def __init__(self, params: SharedEmbeddingParams) -> None:
        self.params = params

    def is_alone(self, name: str, shared_embedding: bool) -> bool:
        """Megatron's mark decides."""
        return shared_embedding

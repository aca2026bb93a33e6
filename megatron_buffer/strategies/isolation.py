"""``bucket_isolation``: which parameters get a bucket of their own.

Stands for the ``shared_embedding`` test in ``DistributedOptimizer._compute_per_buffer_param_layout``
(``megatron/core/optimizer/distrib_optimizer.py``). A tied embedding must stay alone: finalize sums its
whole main_grad over the first and last pipeline stage after the reduce-scatter, so both stages have to
shard it identically.
"""

from __future__ import annotations

from typing import Protocol

from megatron_buffer.config_layout import PatternIsolation as PatternIsolationParams
from megatron_buffer.config_layout import SharedEmbeddingIsolation as SharedEmbeddingParams
from megatron_buffer.strategies.names import matches_any
from megatron_buffer.strategies.registry import strategy


class BucketIsolation(Protocol):
    """Names the parameters that share their bucket with no other.

    Attributes:
        pipeline_synced: True if the layout should hand over the other parameters that finalize sums over
            pipeline stages (conditional embedders, flextron routers) as ``shared_embedding`` too; may be
            left out, and is then False.
    """

    def is_alone(self, name: str, shared_embedding: bool) -> bool:
        """Returns True when the parameter gets its own bucket.

        Args:
            name: Parameter name; '' where unknown.
            shared_embedding: Megatron's mark on embeddings tied across pipeline stages; always False
                without the distributed optimizer, where nothing is sharded and it means nothing.
        """
        ...


@strategy('bucket_isolation', SharedEmbeddingParams)
class SharedEmbedding:
    """Embeddings tied across pipeline stages; with ``pipeline_synced`` the others of their kind too."""

    def __init__(self, params: SharedEmbeddingParams) -> None:
        self.params = params
        self.pipeline_synced = params.pipeline_synced

    def is_alone(self, name: str, shared_embedding: bool) -> bool:
        """Megatron's mark decides."""
        return shared_embedding


@strategy('bucket_isolation', PatternIsolationParams)
class PatternIsolation:
    """Parameters whose name matches, in addition to tied embeddings."""

    needs_names = True
    pipeline_synced = True

    def __init__(self, params: PatternIsolationParams) -> None:
        self.params = params

    def patterns(self) -> list[tuple[str, str]]:
        """YAML path inside the axis and pattern, for each pattern."""
        return [(f'patterns[{i}]', pattern) for i, pattern in enumerate(self.params.patterns)]

    def is_alone(self, name: str, shared_embedding: bool) -> bool:
        """A parameter without a known name matches nothing."""
        return shared_embedding or matches_any(name, self.params.patterns)

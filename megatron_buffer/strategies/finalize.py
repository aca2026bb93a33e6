"""``finalize``: what happens to gradients between the last backward and the optimizer step.

Stands for the order of calls in ``finalize_model_grads``
(``megatron/core/distributed/finalize_model_grads.py``). The steps themselves are in
``megatron_buffer/finalize.py``; a step that the installed version does not have is left out there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_buffer.config_runtime import UpstreamFinalize as UpstreamFinalizeParams
from megatron_buffer.strategies.registry import strategy

UPSTREAM_STEPS = (
    'gtp_fence',
    'finish_grad_sync',
    'conditional_embedder_grads',
    'flextron_router_grads',
    'non_tp_grads',
    'gtp_replicated_grads',
    'word_embedding_grads',
    'position_embedding_grads',
    'router_expert_bias',
    'router_quantile_bias',
    'reset_temporary_tensors',
    'scale_by_num_tokens',
)


class Finalize(Protocol):
    """An ordered list of named steps."""

    def steps(self) -> Sequence[str]:
        """Names, in the order in which they run."""
        ...


@strategy('finalize', UpstreamFinalizeParams)
class UpstreamFinalize:
    """Upstream's steps in upstream's order."""

    def __init__(self, params: UpstreamFinalizeParams) -> None:
        self.params = params

    def steps(self) -> Sequence[str]:
        """All steps that any supported version has."""
        return UPSTREAM_STEPS

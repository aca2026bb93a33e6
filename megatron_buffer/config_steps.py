"""The finalize steps that come with the package: their order, their options, what must precede what.

Stands for the calls in ``finalize_model_grads`` (``megatron/core/distributed/finalize_model_grads.py``),
one step per call. The code that runs them is in ``finalize_steps``. Imports neither torch nor megatron.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from megatron_buffer.config_base import FINALIZE, params_dataclass

GRAD_SYNC = 'finish_grad_sync'
"""The step after which gradients are reduced over the data-parallel ranks."""


@params_dataclass
class NoOptions:
    """Options of a step that has none."""


@params_dataclass
class ChunkOptions:
    """Options of a step that flattens many gradients into one all-reduce."""

    chunk_bytes: Annotated[int, Field(ge=1)] | None = None
    """Gradients are all-reduced this many bytes at a time, and never copied more than that; a larger
    one goes alone, in place. null: all at once, as upstream does. Two ranks get the same bits either
    way; among more, the collective chooses the order of the additions by the size of the message."""


class Step(NamedTuple):
    """A built-in step, for people and for checks.

    Attributes:
        meaning: What it does, in one line.
        upstream_symbol: The function that upstream calls there.
        options: Dataclass of its options.
        needs_grad_sync: Whether it works on gradients that are reduced already.
    """

    meaning: str
    upstream_symbol: str
    options: type[Any] = NoOptions
    needs_grad_sync: bool = True


def _upstream(function: str) -> str:
    return f'{FINALIZE}: {function}'


STEPS: Mapping[str, Step] = MappingProxyType(
    {
        'gtp_fence': Step(
            'waits for the gradients of weight-rematerialised parameters (core_v0.19 on)',
            'megatron/core/tensor_parallel/gtp_api.py: '
            'wait_for_gtp_grad_reduction_on_current_stream',
            needs_grad_sync=False,
        ),
        GRAD_SYNC: Step(
            'waits for the data-parallel reductions of every model chunk',
            _upstream('finalize_model_grads (model_chunk.finish_grad_sync)'),
            needs_grad_sync=False,
        ),
        'conditional_embedder_grads': Step(
            'sums the gradients of replicated conditional embedders over pipeline stages',
            _upstream('_allreduce_conditional_embedding_grads'),
        ),
        'flextron_router_grads': Step(
            'sums the gradients of flextron routers over pipeline stages',
            _upstream('_allreduce_router_grads'),
        ),
        'non_tp_grads': Step(
            'sums gradients that tensor parallelism leaves partial: sequence-parallel and qk norms',
            _upstream('_allreduce_non_tensor_model_parallel_grads'),
            ChunkOptions,
        ),
        'gtp_replicated_grads': Step(
            'reduces replicated parameters over weight-rematerialisation peers (core_v0.19 on)',
            _upstream('_allreduce_replicated_grads_over_gtp_remat_group'),
            ChunkOptions,
        ),
        'word_embedding_grads': Step(
            'sums the gradients of a tied word embedding over its pipeline stages',
            _upstream('_allreduce_word_embedding_grads'),
        ),
        'position_embedding_grads': Step(
            'sums the gradients of shared position embeddings over their pipeline stages',
            _upstream('_allreduce_position_embedding_grads'),
        ),
        'router_expert_bias': Step(
            'updates the load-balancing biases of MoE routers',
            _upstream('_update_router_expert_bias'),
            needs_grad_sync=False,
        ),
        'router_quantile_bias': Step(
            'updates the quantile-balancing biases of MoE routers (core_v0.19 on)',
            _upstream('_update_router_qb_beta'),
            needs_grad_sync=False,
        ),
        'reset_temporary_tensors': Step(
            'zeroes the counters that MoE routers keep over one global batch',
            _upstream('reset_model_temporary_tensors'),
            needs_grad_sync=False,
        ),
        'scale_by_num_tokens': Step(
            'per-token loss: divides gradients by the number of tokens of the global batch',
            _upstream('finalize_model_grads (num_tokens)'),
        ),
    }
)
"""Built-in steps by name, in upstream's order."""

UPSTREAM_ORDER = tuple(STEPS)

PRECEDENCE: tuple[tuple[str, str, str], ...] = (
    ('gtp_fence', GRAD_SYNC, 'which would reduce gradients that are still being computed'),
    ('router_expert_bias', 'reset_temporary_tensors', 'which zeroes the token counts it reads'),
    ('router_quantile_bias', 'reset_temporary_tensors', 'which zeroes the sums it reads'),
)
"""Pairs of steps in the order in which they must run, and why."""

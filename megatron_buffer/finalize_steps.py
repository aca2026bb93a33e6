"""The built-in finalize steps, each calling upstream's own function.

Stands for the body of ``finalize_model_grads`` (``megatron/core/distributed/finalize_model_grads.py``),
cut into the steps that ``config_steps`` lists. No step may synchronise with the host: finalize runs
inside captured graphs too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_buffer.finalize_chunks import reduce_in_chunks
from megatron_buffer.finalize_context import FinalizeContext

_fmg = importlib.import_module('megatron.core.distributed.finalize_model_grads')


class FinalizeStep(NamedTuple):
    """A step: what it does, and upstream's timer around it (neighbours with one timer share it).

    Attributes:
        run: Called with the context, and with the step's options by keyword.
        timer: Name of the timer, or None.
    """

    run: Callable[..., None]
    timer: str | None = None


def _gtp_fence(ctx: FinalizeContext) -> None:
    """Waits for weight-remat gradient work; from core_v0.19 on."""
    sizes = ('gtp_weight_remat_size', 'expert_gtp_weight_remat_size')
    if max(getattr(ctx.config, size, 1) for size in sizes) > 1:
        gtp_api = importlib.import_module('megatron.core.tensor_parallel.gtp_api')
        gtp_api.wait_for_gtp_grad_reduction_on_current_stream()


def _finish_grad_sync(ctx: FinalizeContext) -> None:
    """Waits for the data-parallel reductions of every chunk."""
    for chunk in ctx.model:
        chunk.finish_grad_sync(force_all_reduce=ctx.force_all_reduce)


def _conditional_embedder_grads(ctx: FinalizeContext) -> None:
    """Replicated embedders of diffusion transformers, over pipeline stages."""
    _fmg._allreduce_conditional_embedding_grads(ctx.model, ctx.config, ctx.pp_group)


def _flextron_router_grads(ctx: FinalizeContext) -> None:
    """Flextron routers, over pipeline stages."""
    if getattr(ctx.config, 'flextron', False):
        _fmg._allreduce_router_grads(ctx.model, ctx.config)


def _non_tp_grads(ctx: FinalizeContext, chunk_bytes: int | None = None) -> None:
    """Parameters that tensor parallelism does not shard (sequence-parallel and qk norms)."""
    reduce = _fmg._allreduce_non_tensor_model_parallel_grads
    reduce_in_chunks(ctx.model, chunk_bytes, lambda part: reduce(part, ctx.config, ctx.tp_group))


def _gtp_replicated_grads(ctx: FinalizeContext, chunk_bytes: int | None = None) -> None:
    """Parameters replicated over weight-remat peers; from core_v0.19 on."""
    reduce = getattr(_fmg, '_allreduce_replicated_grads_over_gtp_remat_group', None)
    if reduce is not None:
        per_token = ctx.config.calculate_per_token_loss
        reduce_in_chunks(
            ctx.model, chunk_bytes, lambda part: reduce(part, calculate_per_token_loss=per_token)
        )


def _word_embedding_grads(ctx: FinalizeContext) -> None:
    """Tied word embeddings, first and last stage."""
    _fmg._allreduce_word_embedding_grads(ctx.model, ctx.config, ctx.embd_group, ctx.pp_group)


def _position_embedding_grads(ctx: FinalizeContext) -> None:
    """Position embeddings shared by encoder and decoder."""
    _fmg._allreduce_position_embedding_grads(
        ctx.model, ctx.config, ctx.pos_embd_group, ctx.pp_group
    )


def _router_expert_bias(ctx: FinalizeContext) -> None:
    """Load-balancing biases of MoE routers."""
    if ctx.config.moe_router_enable_expert_bias:
        _fmg._update_router_expert_bias(ctx.model, ctx.config, tp_dp_cp_group=ctx.tp_dp_cp_group)


def _router_quantile_bias(ctx: FinalizeContext) -> None:
    """Quantile-balancing biases of MoE routers; from core_v0.19 on."""
    update = getattr(_fmg, '_update_router_qb_beta', None)
    balancing = ctx.config.moe_router_load_balancing_type
    if update is not None and balancing == 'quantile_balancing':
        update(ctx.model, ctx.config, dp_cp_group=ctx.dp_cp_group)


def _reset_temporary_tensors(ctx: FinalizeContext) -> None:
    """Counters that routers keep over one global batch."""
    _fmg.reset_model_temporary_tensors(ctx.config, ctx.model)


def _scale_by_num_tokens(ctx: FinalizeContext) -> None:
    """Per-token loss: divides by the number of tokens in the global batch."""
    tokens = ctx.num_tokens
    if tokens is None:
        return
    if isinstance(ctx.pp_group, list):
        raise ValueError(
            'finalize_model_grads: num_tokens with several pipeline groups is not defined'
        )
    # Only the last stage has counted; then every data-parallel rank adds its own.
    source = _fmg.get_pp_last_rank(ctx.pp_group)
    torch.distributed.broadcast(tokens, src=source, group=ctx.pp_group)
    torch.distributed.all_reduce(tokens, group=ctx.dp_cp_group)
    factor = 1.0 / tokens.clamp(min=1)
    for chunk in ctx.model:
        chunk.scale_gradients(factor)


_NON_TP_TIMER = 'non-tensor-parallel-grads-all-reduce'
_EMBEDDING_TIMER = 'embedding-grads-all-reduce'

STEPS: dict[str, FinalizeStep] = {
    'gtp_fence': FinalizeStep(_gtp_fence),
    'finish_grad_sync': FinalizeStep(_finish_grad_sync, 'all-grads-sync'),
    'conditional_embedder_grads': FinalizeStep(
        _conditional_embedder_grads, 'conditional-embedder-grads-all-reduce'
    ),
    'flextron_router_grads': FinalizeStep(_flextron_router_grads),
    'non_tp_grads': FinalizeStep(_non_tp_grads, _NON_TP_TIMER),
    'gtp_replicated_grads': FinalizeStep(_gtp_replicated_grads, _NON_TP_TIMER),
    'word_embedding_grads': FinalizeStep(_word_embedding_grads, _EMBEDDING_TIMER),
    'position_embedding_grads': FinalizeStep(_position_embedding_grads, _EMBEDDING_TIMER),
    'router_expert_bias': FinalizeStep(_router_expert_bias),
    'router_quantile_bias': FinalizeStep(_router_quantile_bias),
    'reset_temporary_tensors': FinalizeStep(_reset_temporary_tensors),
    'scale_by_num_tokens': FinalizeStep(_scale_by_num_tokens),
}

"""Finalize as a list of named steps, each calling upstream's own function.

Stands for ``finalize_model_grads`` (``megatron/core/distributed/finalize_model_grads.py``). Which steps
run, and in which order, is the config's; what a step does is upstream's. No step may synchronise with
the host: finalize runs inside captured graphs too.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_buffer.runtime import Runtime

_fmg = importlib.import_module('megatron.core.distributed.finalize_model_grads')
_upstream_finalize = _fmg.finalize_model_grads


@dataclass(frozen=True)
class FinalizeContext:
    """What a step may use.

    Attributes:
        model: The model chunks of this rank.
        num_tokens: Tokens in this rank's micro-batches (a one-element tensor, valid on the last
            pipeline stage) under per-token loss, else None.
        pg_collection: The process groups that the schedule handed over; None means parallel_state's.
        force_all_reduce: Reduce whole buckets in this iteration.
    """

    model: Sequence[Any]
    num_tokens: torch.Tensor | None
    pg_collection: Any
    force_all_reduce: bool

    @cached_property
    def config(self) -> Any:
        """Transformer config of the first chunk."""
        return get_model_config(self.model[0])

    def _group(self, name: str, fallback: Callable[[], Any]) -> Any:
        if self.pg_collection is None:
            return fallback()
        if not hasattr(self.pg_collection, name):
            raise ValueError(
                f'finalize_model_grads: pg_collection has no {name!r} group; set it (to None if this '
                'model does not need it)'
            )
        return getattr(self.pg_collection, name)

    @cached_property
    def tp_group(self) -> Any:
        """Tensor-parallel group."""
        return self._group('tp', parallel_state.get_tensor_model_parallel_group)

    @cached_property
    def pp_group(self) -> Any:
        """Pipeline-parallel group."""
        return self._group('pp', parallel_state.get_pipeline_model_parallel_group)

    @cached_property
    def embd_group(self) -> Any:
        """Stages that hold the tied word embedding."""
        return self._group(
            'embd', lambda: parallel_state.get_embedding_group(check_initialized=False)
        )

    @cached_property
    def pos_embd_group(self) -> Any:
        """Stages that hold the position embedding."""
        return self._group(
            'pos_embd', lambda: parallel_state.get_position_embedding_group(check_initialized=False)
        )

    @cached_property
    def dp_cp_group(self) -> Any:
        """Ranks whose tokens are counted: data- and context-parallel, weight-remat peers included."""
        whole = getattr(self.pg_collection, 'dp_cp_gtp_remat', None)
        return whole or self._group(
            'dp_cp', lambda: parallel_state.get_data_parallel_group(with_context_parallel=True)
        )

    @cached_property
    def tp_dp_cp_group(self) -> Any:
        """Ranks that route tokens to the same experts' biases."""
        group = self._group(
            'tp_dp_cp',
            lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        )
        if group is None:
            raise ValueError(
                'finalize_model_grads: pg_collection.tp_dp_cp is None, and '
                'moe_router_enable_expert_bias needs it'
            )
        return group


class FinalizeStep(NamedTuple):
    """A step: what it does, and upstream's timer around it (neighbours with one timer share it)."""

    run: Callable[[FinalizeContext], None]
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


def _non_tp_grads(ctx: FinalizeContext) -> None:
    """Parameters that tensor parallelism does not shard (sequence-parallel and qk norms)."""
    _fmg._allreduce_non_tensor_model_parallel_grads(ctx.model, ctx.config, ctx.tp_group)


def _gtp_replicated_grads(ctx: FinalizeContext) -> None:
    """Parameters replicated over weight-remat peers; from core_v0.19 on."""
    reduce = getattr(_fmg, '_allreduce_replicated_grads_over_gtp_remat_group', None)
    if reduce is not None:
        reduce(ctx.model, calculate_per_token_loss=ctx.config.calculate_per_token_loss)


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


def finalize_model_grads(
    model: Sequence[Any],
    num_tokens: torch.Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Runs the config's finalize steps on a model that we wrapped; others get upstream's function.

    Upstream: ``finalize_model_grads.py: finalize_model_grads``.

    Args:
        model: Model chunks of this rank.
        num_tokens: See :class:`FinalizeContext`; changed in place to the global number.
        pg_collection: Process groups, or None for parallel_state's.
        force_all_reduce: Reduce whole buckets in this iteration.

    Raises:
        ValueError: If ``pg_collection`` lacks a group that a step needs.
    """
    runtime = getattr(model[0], 'runtime', None)
    if not isinstance(runtime, Runtime):
        _upstream_finalize(model, num_tokens, pg_collection, force_all_reduce)
        return
    ctx = FinalizeContext(model, num_tokens, pg_collection, bool(force_all_reduce))
    steps = [STEPS[name] for name in runtime.finalize.steps()]
    for timer, timed in groupby(steps, key=lambda step: step.timer):
        with _timed(ctx.config, timer):
            for step in timed:
                step.run(ctx)


@contextlib.contextmanager
def _timed(config: Any, name: str | None) -> Iterator[None]:
    """Upstream's timers, where Megatron has set them."""
    timers = config.timers
    if timers is None or name is None:
        yield
        return
    timers(name, log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    timers(name).stop()

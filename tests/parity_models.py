"""Tiny models beside the usual GPT: predicted further tokens, latent attention, grouped queries.

Each function makes `tests.tiny_gpt` build another model, for a whole process; stock and ours meet the same.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from megatron_buffer.testing.tiny_model import TrainCase, build_model


def _build_with(build: Any) -> None:
    vars(importlib.import_module('megatron_buffer.testing.tiny_gpt'))['build_model'] = build


def multi_token_prediction() -> None:
    """A layer that predicts one token more; its loss is added to the gradient behind the main one."""
    _build_with(_with_mtp)


def _with_mtp(case: TrainCase, vp_stage: int | None = None, **more: Any) -> torch.nn.Module:
    """The usual model, whose constructor is given the layers for further tokens too."""
    gpt = importlib.import_module('megatron.core.models.gpt')
    specs = importlib.import_module('megatron.core.models.gpt.gpt_layer_specs')
    usual = gpt.GPTModel

    def model(*, config: Any, transformer_layer_spec: Any, **rest: Any) -> Any:
        config.mtp_num_layers, config.mtp_loss_scaling_factor = 1, 0.3
        block = specs.get_gpt_mtp_block_spec(
            config, transformer_layer_spec, use_transformer_engine=False, vp_stage=vp_stage
        )
        given = {'config': config, 'transformer_layer_spec': transformer_layer_spec}
        return usual(**given, mtp_block_spec=block, **rest)

    vars(gpt)['GPTModel'] = model
    try:
        return build_model(case, vp_stage, **more)
    finally:
        vars(gpt)['GPTModel'] = usual


def grouped_queries() -> None:
    """Half as many keys as queries, normed, with rotary positions and gated MLPs: as recent models have it."""
    _build_with(functools.partial(_with_spec, {'qk_layernorm': True}, _GROUPED, None))


def latent_attention() -> None:
    """Queries and keys through low-rank projections."""
    spec = {'multi_latent_attention': True}
    _build_with(functools.partial(_with_spec, spec, _LATENT, PlainAttention))


_GROUPED = {
    'qk_layernorm': True,
    'num_query_groups': 2,
    'gated_linear_unit': True,
    'activation_func': torch.nn.functional.silu,
    'add_bias_linear': False,
}
_LATENT = {
    'multi_latent_attention': True,
    'q_lora_rank': 16,
    'kv_lora_rank': 16,
    'qk_head_dim': 8,
    'qk_pos_emb_head_dim': 8,
    'v_head_dim': 8,
    'rope_type': 'rope',
    'apply_rope_fusion': False,
    'add_bias_linear': False,
}


class PlainAttention(torch.nn.Module):
    """Causal attention where Megatron asks for Transformer Engine's: keys and values of different sizes."""

    def __init__(self, *unused: Any, **more: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any, **more: Any
    ) -> torch.Tensor:
        """`[sequence, batch, heads, size]` each, to `[sequence, batch, heads * size]`."""
        scores = torch.einsum('qbhd,kbhd->bhqk', query, key) / query.shape[-1] ** 0.5
        future = torch.ones(query.shape[0], query.shape[0]).triu(1).bool()
        weights = scores.masked_fill(future, -1e4).softmax(-1)
        return torch.einsum('bhqk,kbhd->qbhd', weights, value).flatten(2)


def _with_spec(
    spec_options: dict[str, Any],
    fields: dict[str, Any],
    attention: type[torch.nn.Module] | None,
    case: TrainCase,
    vp_stage: int | None = None,
    **more: Any,
) -> torch.nn.Module:
    """The usual model with other layers, another config and rotary positions."""
    from dataclasses import replace

    gpt = importlib.import_module('megatron.core.models.gpt')
    specs = importlib.import_module('megatron.core.models.gpt.gpt_layer_specs')
    transformer = importlib.import_module('megatron.core.transformer')
    configs = importlib.import_module('megatron.core.transformer.transformer_config')
    usual, usual_config = gpt.GPTModel, transformer.TransformerConfig
    spec = specs.get_gpt_layer_local_spec(**spec_options)
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention

    def model(**given: Any) -> Any:
        given.update(transformer_layer_spec=spec, position_embedding_type='rope')
        return usual(**given)

    vars(gpt)['GPTModel'] = model
    if attention is not None:
        vars(transformer)['TransformerConfig'] = configs.MLATransformerConfig
    try:
        return build_model(replace(case, model={**fields, **case.model}), vp_stage, **more)
    finally:
        vars(gpt)['GPTModel'] = usual
        vars(transformer)['TransformerConfig'] = usual_config

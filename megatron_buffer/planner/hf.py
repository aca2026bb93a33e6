"""Hugging Face's ``config.json`` as a model file.

Read are the sizes that decide which parameters there are, of the families in :data:`FAMILIES`; what
Megatron's ``GPTModel`` cannot build is refused. Stands for the converters of ``megatron-bridge``, without
weights. Imports neither torch nor megatron.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_buffer.config_yaml import did_you_mean, read_file
from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.architecture import Architecture

_ACTIVATIONS = {
    'silu': 'silu',
    'swish': 'silu',
    'gelu': 'gelu',
    'gelu_new': 'gelu',
    'gelu_pytorch_tanh': 'gelu',
    'relu': 'relu',
}
_MISSING: Any = object()


class _Reader:
    """Typed access to the JSON's keys."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self.values = values

    def refuse(self, key: str, text: str) -> NoReturn:
        """Raises a ConfigError about ``key``."""
        raise ConfigError(f'{self.source}: {key}: {text}', yaml_path=key, source=self.source)

    def size(self, key: str, default: Any = _MISSING) -> int:
        """A positive integer; ``default`` where it is left out or null."""
        value = self.values.get(key)
        if value is None and default is _MISSING:
            near = did_you_mean(key, self.values)
            self.refuse(key, f'is missing, and a {self.values["model_type"]} model needs it.{near}')
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, f'found {value!r}, expected a positive integer')
        return value

    def count(self, key: str, default: int = 0) -> int:
        """An integer that may be 0."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.refuse(key, f'found {value!r}, expected 0 or a positive integer')
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(key, f'found {value!r}, expected true or false')
        return value

    def activation(self, key: str, default: str) -> str:
        """Name of the activation as the model files have it."""
        value = self.values.get(key) or default
        if value not in _ACTIVATIONS:
            self.refuse(key, f'found {value!r}, expected one of {", ".join(_ACTIVATIONS)}')
        return _ACTIVATIONS[value]


def load_hf(source: str) -> tuple[Architecture, list[str]]:
    """Reads a ``config.json``.

    Args:
        source: Its path, or the folder it lies in.

    Returns:
        The model, and remarks about what the file has and Megatron's model here does not.

    Raises:
        ConfigError: If it is not JSON, of an unknown family, or lacks a size.
    """
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        path, source = os.path.join(path, 'config.json'), os.path.join(source, 'config.json')
    text = read_file(path, source)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f'line {error.lineno}' if isinstance(error, json.JSONDecodeError) else 'its bytes'
        ends = isinstance(error, json.JSONDecodeError) and not text[error.pos :].strip()
        what = 'the file ends in the middle; is it complete?' if ends else f'{error}'
        raise ConfigError(f'{source}: not JSON, {at}: {what}', source=source) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f'{source}: found {reprlib.repr(values)}, expected the config.json of a model',
            source=source,
        )
    kind = values.get('model_type')
    if not isinstance(kind, str) or kind not in FAMILIES:
        found = 'has no model_type' if kind is None else f'model_type {kind!r} is not known here'
        raise ConfigError(
            f'{source}: {found}; there are: {", ".join(FAMILIES)}.'
            f'{did_you_mean(str(kind), FAMILIES)} Any other model can be given as a YAML file (--model)',
            yaml_path='model_type',
            source=source,
        )
    notes: list[str] = []
    read = _Reader(source, values)
    return Architecture(source, FAMILIES[kind](read, notes), {}), notes


def _llama(read: _Reader, notes: list[str]) -> dict[str, Any]:
    """What all decoders with rotary embeddings, RMSNorm and gated units have."""
    heads, hidden = read.size('num_attention_heads'), read.size('hidden_size')
    for key in ('attention_bias', 'mlp_bias'):
        if read.flag(key, False):
            read.refuse(
                key, "true is not supported: Megatron's GPTModel has biases everywhere or not"
            )
    if read.values.get('sliding_window') and read.flag('use_sliding_window', True):
        notes.append('sliding_window changes no parameter and is left out')
    if read.values.get('head_dim') is None and hidden % heads:
        read.refuse('num_attention_heads', f'{heads} does not divide hidden_size {hidden}')
    return {
        'num_layers': read.size('num_hidden_layers'),
        'hidden_size': hidden,
        'ffn_hidden_size': read.size('intermediate_size'),
        'num_attention_heads': heads,
        'num_query_groups': read.size('num_key_value_heads', heads),
        'kv_channels': read.size('head_dim', hidden // heads),
        'vocab_size': read.size('vocab_size'),
        'max_sequence_length': read.size('max_position_embeddings'),
        'share_embeddings_and_output_weights': read.flag('tie_word_embeddings', False),
        'position_embedding_type': 'rope',
        'normalization': 'RMSNorm',
        'gated_linear_unit': True,
        'activation_func': read.activation('hidden_act', 'silu'),
        'add_bias_linear': False,
    }


def _qwen2(read: _Reader, notes: list[str]) -> dict[str, Any]:
    return _llama(read, notes) | {'add_qkv_bias': True}


def _qwen3(read: _Reader, notes: list[str]) -> dict[str, Any]:
    return _llama(read, notes) | {'qk_layernorm': True, 'kv_channels': read.size('head_dim', 128)}


def _mixtral(read: _Reader, notes: list[str]) -> dict[str, Any]:
    return _llama(read, notes) | {
        'num_moe_experts': read.size('num_local_experts'),
        'moe_router_topk': read.size('num_experts_per_tok'),
        'moe_ffn_hidden_size': read.size('intermediate_size'),
    }


def _qwen_moe(read: _Reader, values: dict[str, Any]) -> dict[str, Any]:
    step, layers = read.size('decoder_sparse_step', 1), values['num_layers']
    dense = read.values.get('mlp_only_layers') or []
    pattern = [int((i + 1) % step == 0 and i not in dense) for i in range(layers)]
    return values | {
        'num_moe_experts': read.size('num_experts'),
        'moe_router_topk': read.size('num_experts_per_tok'),
        'moe_ffn_hidden_size': read.size('moe_intermediate_size'),
        'moe_layer_freq': pattern,
    }


def _qwen2_moe(read: _Reader, notes: list[str]) -> dict[str, Any]:
    return _qwen_moe(read, _qwen2(read, notes)) | {
        'moe_shared_expert_intermediate_size': read.size('shared_expert_intermediate_size'),
        'moe_shared_expert_gate': True,
    }


def _qwen3_moe(read: _Reader, notes: list[str]) -> dict[str, Any]:
    return _qwen_moe(read, _qwen3(read, notes))


def _deepseek(read: _Reader, notes: list[str]) -> dict[str, Any]:
    values = _llama(read, notes)
    del values['num_query_groups'], values['kv_channels']
    layers = values['num_layers']
    q_rank = read.values.get('q_lora_rank')
    values |= {
        'multi_latent_attention': True,
        'q_lora_rank': None if q_rank is None else read.size('q_lora_rank'),
        'kv_lora_rank': read.size('kv_lora_rank'),
        'qk_head_dim': read.size('qk_nope_head_dim'),
        'qk_pos_emb_head_dim': read.size('qk_rope_head_dim'),
        'v_head_dim': read.size('v_head_dim'),
        'qk_layernorm': True,
        'rope_type': 'rope',
    }
    if read.values.get('n_routed_experts') is not None:
        dense, step = read.count('first_k_dense_replace'), read.size('moe_layer_freq', 1)
        width = read.size('moe_intermediate_size')
        values |= {
            'moe_layer_freq': [int(i >= dense and i % step == 0) for i in range(layers)],
            'num_moe_experts': read.size('n_routed_experts'),
            'moe_router_topk': read.size('num_experts_per_tok'),
            'moe_ffn_hidden_size': width,
        }
        if shared := read.count('n_shared_experts'):
            values['moe_shared_expert_intermediate_size'] = shared * width
    if extra := read.count('num_nextn_predict_layers'):
        notes.append(
            f'num_nextn_predict_layers {extra}: multi-token prediction is left out; a model file has '
            'mtp_num_layers'
        )
    return values


def _deepseek_v3(read: _Reader, notes: list[str]) -> dict[str, Any]:
    values = _deepseek(read, notes)
    if 'num_moe_experts' in values:
        values |= {'moe_router_score_function': 'sigmoid', 'moe_router_enable_expert_bias': True}
    return values


def _gpt2(read: _Reader, notes: list[str]) -> dict[str, Any]:
    hidden, heads = read.size('n_embd'), read.size('n_head')
    if hidden % heads:
        read.refuse('n_head', f'{heads} does not divide n_embd {hidden}')
    return {
        'num_layers': read.size('n_layer'),
        'hidden_size': hidden,
        'ffn_hidden_size': read.size('n_inner', 4 * hidden),
        'num_attention_heads': heads,
        'vocab_size': read.size('vocab_size'),
        'max_sequence_length': read.size('n_positions'),
        'share_embeddings_and_output_weights': read.flag('tie_word_embeddings', True),
        'position_embedding_type': 'learned_absolute',
        'normalization': 'LayerNorm',
        'activation_func': read.activation('activation_function', 'gelu_new'),
        'add_bias_linear': True,
    }


FAMILIES: dict[str, Callable[[_Reader, list[str]], dict[str, Any]]] = {
    'llama': _llama,
    'mistral': _llama,
    'mixtral': _mixtral,
    'qwen2': _qwen2,
    'qwen2_moe': _qwen2_moe,
    'qwen3': _qwen3,
    'qwen3_moe': _qwen3_moe,
    'deepseek_v2': _deepseek,
    'deepseek_v3': _deepseek_v3,
    'gpt2': _gpt2,
}
"""How each ``model_type`` is read."""

"""The flags of a pretrain script as a model file and as the options of ``megatron-buffer plan``.

Read are the flags that decide which parameters there are, how they are divided, and how the buffer is asked
to work; others are counted and left out. Stands for ``core_transformer_config_from_args`` and
``validate_args`` (``megatron/training/arguments.py``). Imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.architecture import Architecture

SOURCE = '--megatron-args'
"""What messages call the model."""

_SIZES = {
    'num-layers': 'num_layers',
    'hidden-size': 'hidden_size',
    'ffn-hidden-size': 'ffn_hidden_size',
    'num-attention-heads': 'num_attention_heads',
    'num-query-groups': 'num_query_groups',
    'kv-channels': 'kv_channels',
    'max-position-embeddings': 'max_sequence_length',
    'vocab-size': 'vocab_size',
    'make-vocab-size-divisible-by': 'make_vocab_size_divisible_by',
    'num-experts': 'num_moe_experts',
    'moe-ffn-hidden-size': 'moe_ffn_hidden_size',
    'moe-router-topk': 'moe_router_topk',
    'moe-shared-expert-intermediate-size': 'moe_shared_expert_intermediate_size',
    'q-lora-rank': 'q_lora_rank',
    'kv-lora-rank': 'kv_lora_rank',
    'qk-head-dim': 'qk_head_dim',
    'qk-pos-emb-head-dim': 'qk_pos_emb_head_dim',
    'v-head-dim': 'v_head_dim',
    'mtp-num-layers': 'mtp_num_layers',
    'decoder-first-pipeline-num-layers': 'num_layers_in_first_pipeline_stage',
    'decoder-last-pipeline-num-layers': 'num_layers_in_last_pipeline_stage',
}
_WORDS = {'normalization': 'normalization', 'position-embedding-type': 'position_embedding_type'}
_SWITCHES: dict[str, dict[str, Any]] = {
    'untie-embeddings-and-output-weights': {'share_embeddings_and_output_weights': False},
    'disable-bias-linear': {'add_bias_linear': False},
    'add-qkv-bias': {'add_qkv_bias': True},
    'qk-layernorm': {'qk_layernorm': True},
    'multi-latent-attention': {'multi_latent_attention': True},
    'swiglu': {'gated_linear_unit': True, 'activation_func': 'silu'},
    'squared-relu': {'activation_func': 'squared_relu'},
    'moe-shared-expert-gate': {'moe_shared_expert_gate': True},
    'account-for-embedding-in-pipeline-split': {'account_for_embedding_in_pipeline_split': True},
    'account-for-loss-in-pipeline-split': {'account_for_loss_in_pipeline_split': True},
}
# Options of the command, by the flag that sets them.
_JOB = {
    'tensor-model-parallel-size': 'tp',
    'pipeline-model-parallel-size': 'pp',
    'num-virtual-stages-per-pipeline-rank': 'vpp',
    'context-parallel-size': 'cp',
    'expert-model-parallel-size': 'ep',
    'expert-tensor-parallel-size': 'etp',
    'num-distributed-optimizer-instances': 'instances',
    'ddp-bucket-size': 'bucket_size',
    'ddp-num-buckets': 'num_buckets',
}
_JOB_WORDS = {
    'main-params-dtype': 'main_params_dtype',
    'exp-avg-dtype': 'exp_avg_dtype',
    'exp-avg-sq-dtype': 'exp_avg_sq_dtype',
    'custom-buffer-config': 'config',
}
_JOB_SWITCHES = {
    'ddp-pad-buckets-for-high-nccl-busbw': 'high_busbw',
    'use-precision-aware-optimizer': 'precision_aware',
}
# Options of simulate and tune, which have an iteration.
_ITERATION = {
    'seq-length': 'seq_length',
    'micro-batch-size': 'micro_batch_size',
    'global-batch-size': 'global_batch_size',
    'microbatch-group-size-per-virtual-pipeline-stage': 'microbatch_group_size',
}
_ITERATION_SWITCHES = {
    'no-align-grad-reduce': 'no_align_grad_reduce',
    'no-align-param-gather': 'no_align_param_gather',
}
_TIMING = (
    'delay-wgrad-compute',
    'defer-embedding-wgrad-compute',
    'overlap-param-gather-with-optimizer-step',
    'overlap-moe-expert-parallel-comm',
)
_READ_TOO = (
    *(
        'use-distributed-optimizer',
        'overlap-grad-reduce',
        'bf16',
        'fp16',
        'fp8-recipe',
        'seq-length',
    ),
    *('fp8-param-gather', 'fp4-param-gather', 'group-query-attention', 'moe-layer-freq'),
    *('num-layers-per-virtual-pipeline-stage', 'grad-reduce-in-bf16'),
    'accumulate-allreduce-grads-in-fp32',
)


class Flags(NamedTuple):
    """What the flags say.

    Attributes:
        architecture: The model.
        options: Options of the command, by their names in its namespace.
        ignored: Flags that change nothing in a buffer.
        iteration: Options of commands that simulate an iteration.
        of_iteration: The flags that these come from.
        timing: Flags that change an iteration in a way that is not simulated.
    """

    architecture: Architecture
    options: dict[str, Any]
    ignored: list[str]
    iteration: dict[str, Any]
    of_iteration: list[str]
    timing: list[str]


def read_flags(text: str) -> Flags:
    """Reads the flags of a pretrain script.

    Args:
        text: As on a command line; flags with ``=`` or without.

    Raises:
        ConfigError: If a size is missing or no number.
    """
    given = _split(text)
    values: dict[str, Any] = {
        'position_embedding_type': 'learned_absolute',
        'normalization': 'LayerNorm',
        'share_embeddings_and_output_weights': True,
        'add_bias_linear': True,
    }
    options: dict[str, Any] = {}
    for flag, value in given.items():
        if flag in _SIZES:
            values[_SIZES[flag]] = _number(flag, value)
        elif flag in _WORDS:
            values[_WORDS[flag]] = _word(flag, value)
        elif flag in _SWITCHES:
            values |= _SWITCHES[flag]
        elif flag in _JOB:
            options[_JOB[flag]] = _number(flag, value)
        elif flag in _JOB_WORDS:
            options[_JOB_WORDS[flag]] = _word(flag, value)
        elif flag in _JOB_SWITCHES:
            options[_JOB_SWITCHES[flag]] = True
    if 'max_sequence_length' not in values and 'seq-length' in given:
        values['max_sequence_length'] = _number('seq-length', given['seq-length'])
    _complete(values, given)
    result = Architecture(SOURCE, values, {})
    for key in _SIZES.values():
        if key in values:
            result.positive(key)
    known = {*_SIZES, *_WORDS, *_SWITCHES, *_JOB, *_JOB_WORDS, *_JOB_SWITCHES, *_READ_TOO}
    options |= _ddp_options(given)
    layers = given.get('num-layers-per-virtual-pipeline-stage')
    if layers is not None:
        per_stage = values['num_layers'] // max(1, options.get('pp', 1))
        options['vpp'] = max(
            1, per_stage // max(1, _number('num-layers-per-virtual-pipeline-stage', layers))
        )
    ignored = [f'--{flag}' for flag in given if flag not in known]
    iteration: dict[str, Any] = {
        name: _number(flag, given[flag]) for flag, name in _ITERATION.items() if flag in given
    }
    iteration |= {name: True for flag, name in _ITERATION_SWITCHES.items() if flag in given}
    of_iteration = [f'--{flag}' for flag in (*_ITERATION, *_ITERATION_SWITCHES)]
    if 'overlap-param-gather' not in given:
        iteration['no_overlap_param_gather'] = True
    of_iteration.append('--overlap-param-gather')
    if given.get('recompute-granularity') == 'full':
        iteration['recompute'] = True
        of_iteration += [f'--{flag}' for flag in given if flag.startswith('recompute-')]
    timing = [f'--{flag}' for flag in given if flag in _TIMING]
    return Flags(result, options, ignored, iteration, of_iteration, timing)


def apply_options(options: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Sets options that flags have said.

    Raises:
        ConfigError: If an option is given both ways.
    """
    for name, value in values.items():
        current = getattr(options, name)
        # Left out, an option is None or False, and the sizes of parallelism are 1.
        if current not in (None, False, 1) and current != value:
            option = '--' + name.replace('_', '-')
            raise ConfigError(
                f'{option}: {SOURCE} says {value}, and the option {current}; give one of them'
            )
        vars(options)[name] = value


def _split(text: str) -> dict[str, str | None]:
    """Flags without dashes, each with the words that follow it; the last of several counts."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f'{SOURCE}: cannot be split into words: {error}') from error
    given: dict[str, str | None] = {}
    flag = ''
    for word in words:
        if re.match(r'--[A-Za-z]', word):
            flag, equals, value = word[2:].partition('=')
            flag = flag.replace('_', '-')
            given[flag] = value if equals else None
        elif flag:
            given[flag] = word if given[flag] is None else f'{given[flag]} {word}'
    return given


def _complete(values: dict[str, Any], given: dict[str, str | None]) -> None:
    """What Megatron derives from other flags."""
    needed = {
        'num_layers': '--num-layers',
        'hidden_size': '--hidden-size',
        'num_attention_heads': '--num-attention-heads',
        'max_sequence_length': '--max-position-embeddings',
        'vocab_size': '--vocab-size (the tokenizer has it in a run; give it here)',
    }
    for key, flag in needed.items():
        if key not in values:
            raise ConfigError(f'{SOURCE}: {flag} is missing')
    if 'group-query-attention' not in given:
        values.pop('num_query_groups', None)
    if 'ffn_hidden_size' not in values:
        hidden = values['hidden_size']
        # With a gated unit Megatron keeps the number of parameters of 4 x hidden.
        values['ffn_hidden_size'] = (
            int(4 * hidden * 2 / 3 / 64) * 64 if 'swiglu' in given else 4 * hidden
        )
    if 'num_moe_experts' in values:
        values.setdefault('moe_ffn_hidden_size', values['ffn_hidden_size'])
    pattern = given.get('moe-layer-freq')
    if pattern is not None:
        values['moe_layer_freq'] = _layer_pattern(pattern)


def _layer_pattern(text: str) -> int | list[int]:
    """``2``, ``[0,1]`` or sums of repetitions such as ``([0]*3+[1]*58)``."""
    plain = re.sub(r'[\s()]', '', text)
    if plain.isdecimal():
        return int(plain)
    result: list[int] = []
    for part in plain.split('+'):
        match = re.fullmatch(r'\[([01](?:,[01])*)\](?:\*(\d{1,4}))?', part)
        if match is None:
            raise ConfigError(
                f'{SOURCE}: --moe-layer-freq {text}: expected a number or lists such as ([0]*3+[1]*58)'
            )
        result += [int(bit) for bit in match[1].split(',')] * int(match[2] or 1)
    return result


def _ddp_options(given: dict[str, str | None]) -> dict[str, Any]:
    dtype = 'bf16' if 'bf16' in given else 'fp16' if 'fp16' in given else 'fp32'
    # megatron.training reduces bf16 gradients in fp32 unless it is told otherwise.
    in_fp32 = dtype == 'bf16' or 'accumulate-allreduce-grads-in-fp32' in given
    result: dict[str, Any] = {
        'dtype': dtype,
        'grads': 'fp32' if in_fp32 and 'grad-reduce-in-bf16' not in given else dtype,
        'no_dist_opt': 'use-distributed-optimizer' not in given,
        'no_overlap': 'overlap-grad-reduce' not in given,
    }
    if 'fp8-param-gather' in given:
        result['recipe'] = 'mxfp8' if given.get('fp8-recipe') == 'mxfp8' else 'fp8'
    elif 'fp4-param-gather' in given:
        result['recipe'] = 'nvfp4'
    return result


def _number(flag: str, value: str | None) -> int:
    if value is None or not re.fullmatch(r'[+-]?\d+', value):
        raise ConfigError(f'{SOURCE}: --{flag}: found {value or "nothing"!r}, expected an integer')
    return int(value)


def _word(flag: str, value: str | None) -> str:
    if not value:
        raise ConfigError(f'{SOURCE}: --{flag}: found nothing, expected a word')
    return value

"""The parameters of one rank, from Megatron's own model on the meta device: nothing is allocated.

Stands for ``model_provider`` of a pretrain script: ``GPTModel`` (``megatron/core/models/gpt``) with
Megatron's local layers, wrapped in ``Float16Module`` for 16-bit parameters. Names, order, sizes, dtypes and
the marks that grouping reads (``allreduce``, ``shared_embedding``) are therefore Megatron's, and names are
those that DDP knows, with ``module.`` in front under ``Float16Module``.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic
import torch

from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.architecture import DEFAULT_VOCAB_DIVISOR, Architecture
from megatron_buffer.planner.job import Job
from megatron_buffer.planner.params import PlannedParam
from megatron_buffer.planner.world import fake_world, quiet

_OWN_KEYS = ('description', 'make_vocab_size_divisible_by')
_GIVEN_BY_THE_JOB: Mapping[str, str] = {
    'tensor_model_parallel_size': '--tp',
    'pipeline_model_parallel_size': '--pp',
    'virtual_pipeline_model_parallel_size': '--vpp',
    'context_parallel_size': '--cp',
    'expert_model_parallel_size': '--ep',
    'expert_tensor_parallel_size': '--etp',
    'bf16': '--bf16',
    'fp16': '--fp16',
    'params_dtype': '--bf16, --fp16 or --fp32',
    'pipeline_dtype': '--bf16, --fp16 or --fp32',
}
_SET_HERE = ('perform_initialization', 'use_cpu_initialization', 'init_model_with_meta_device')
_MAY_BE_NULL = ('q_lora_rank',)  # its type says int; without it queries are not compressed
_NOT_FROM_YAML = (
    *('self', 'config', 'transformer_layer_spec', 'pre_process', 'post_process', 'mtp_block_spec'),
    *('pg_collection', 'vp_stage'),
)


def build_params(
    architecture: Architecture, job: Job, dtype: torch.dtype
) -> dict[int, list[PlannedParam]]:
    """Builds all model chunks of ``job``'s stage ``pp_rank`` and returns their parameters.

    Args:
        architecture: The model file.
        job: The parallelism; the rank is the first one of the stage.
        dtype: Dtype of the parameters.

    Returns:
        Per chunk the trainable parameters in registration order.

    Raises:
        ConfigError: If the file does not describe a model that fits the job.
    """
    check_divisions(architecture, job)
    with quiet(), fake_world(job):
        return {
            chunk: _params_of(_build_chunk(architecture, job, dtype, chunk))
            for chunk in range(job.vpp)
        }


def padded_vocab_size(architecture: Architecture, tp: int) -> int:
    """The vocabulary with the dummy tokens that Megatron adds.

    Upstream: ``vocab_size_with_padding`` (``megatron/core/tokenizers/utils/build_tokenizer.py``).
    """
    divisor = tp * architecture.positive('make_vocab_size_divisible_by', DEFAULT_VOCAB_DIVISOR)
    return -(-architecture.positive('vocab_size') // divisor) * divisor


def check_divisions(architecture: Architecture, job: Job) -> None:
    """What Megatron would only find in the middle of building a model.

    Raises:
        ConfigError: Naming the option and the key that do not fit.
    """
    heads = architecture.positive('num_attention_heads')
    groups = architecture.positive('num_query_groups', heads)
    experts = architecture.values.get('num_moe_experts')
    divided = [
        ('num_attention_heads', heads, '--tp', job.tp),
        ('ffn_hidden_size', architecture.positive('ffn_hidden_size', job.tp), '--tp', job.tp),
    ]
    if experts is None and job.ep > 1:
        raise ConfigError(f'--ep {job.ep}: {architecture.source} has no experts (num_moe_experts)')
    if experts is not None:
        divided.append(
            ('num_moe_experts', architecture.positive('num_moe_experts'), '--ep', job.ep)
        )
    uneven = ('pipeline_model_parallel_layout', 'num_layers_in_first_pipeline_stage')
    uneven += ('num_layers_in_last_pipeline_stage', 'account_for_embedding_in_pipeline_split')
    uneven += ('account_for_loss_in_pipeline_split',)
    if not any(architecture.values.get(key) for key in uneven):
        layers = architecture.positive('num_layers')
        name = '--pp' if job.vpp == 1 else f'--pp {job.pp} x --vpp'
        divided.append(('num_layers', layers, name, job.pp * job.vpp))
    for key, value, option, by in divided:
        if value % by:
            shown = by if option.startswith('--pp ') is False else job.vpp
            architecture.problem(key, f'{value} cannot be divided over {option} {shown}')
    if heads % groups:
        architecture.problem('num_query_groups', f'{groups} does not divide {heads} heads')
    if groups % job.tp and job.tp % groups:
        architecture.problem(
            'num_query_groups', f'{groups} cannot be divided over --tp {job.tp}, nor the reverse'
        )


def _build_chunk(
    architecture: Architecture, job: Job, dtype: torch.dtype, chunk: int
) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.module import Float16Module

    options, config_values = _sort_values(architecture, GPTModel)
    options['vocab_size'] = padded_vocab_size(architecture, job.tp)
    vp_stage = chunk if job.vpp > 1 else None
    stage: dict[str, Any] = {'ignore_virtual': False, 'vp_stage': vp_stage}
    try:
        config = _transformer_config(config_values, job, dtype)
        only_kv_norm = _only_kv_norm(config)
        spec: Any = specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            qk_l2_norm=getattr(config, 'qk_l2_norm', False),
            vp_stage=vp_stage,
        )
        layers: Any = specs.get_gpt_decoder_layer_specs(
            config, use_transformer_engine=False, normalization=config.normalization
        )
        for layer in [*spec.layer_specs, *layers]:
            _replace_mla_core(config, layer)
        if getattr(config, 'mtp_num_layers', None):
            options['mtp_block_spec'] = specs.get_gpt_mtp_block_spec(
                config, layers[-1], use_transformer_engine=False, vp_stage=vp_stage
            )
        with torch.device('meta'):
            model: torch.nn.Module = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                pre_process=parallel_state.is_pipeline_first_stage(**stage),
                post_process=parallel_state.is_pipeline_last_stage(**stage),
                vp_stage=vp_stage,
                **options,
            )
            if only_kv_norm:
                _add_kv_norms(model, config)
            return Float16Module(config, model) if dtype != torch.float32 else model
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError) as error:
        problem = error
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        problem = error
    text = ' '.join(str(problem).split()) or type(problem).__name__
    raise ConfigError(
        f'{architecture.source}: Megatron-Core cannot build stage {job.pp_rank}, chunk {chunk} of this '
        f'model: {text}',
        source=architecture.source,
    ) from problem


class _NoParams(torch.nn.Module):
    """Stands for a module without parameters."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def _replace_mla_core(config: Any, layer: Any) -> None:
    """Of multi-latent attention Megatron's local core cannot be built; it has no parameters anyway."""
    if config.multi_latent_attention:
        layer.submodules.self_attention.submodules.core_attention = _NoParams


def _only_kv_norm(config: Any) -> bool:
    """Whether keys and values are normed and queries, which are not compressed, are not.

    Megatron then wants Transformer Engine's linear with a norm in it, so the model is built without and
    given the norms afterwards. Turns ``qk_layernorm`` off.
    """
    found = config.multi_latent_attention and config.q_lora_rank is None and config.qk_layernorm
    if found:
        config.qk_layernorm = False
    return found


def _add_kv_norms(model: torch.nn.Module, config: Any) -> None:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for module in model.modules():
        if isinstance(module, MLASelfAttention):
            norm: Any = WrappedTorchNorm(config, config.kv_lora_rank, config.layernorm_epsilon)
            module.kv_layernorm = norm


def _params_of(model: torch.nn.Module) -> list[PlannedParam]:
    from megatron_buffer.param_layout import is_pipeline_synced

    return [
        PlannedParam(
            name=name,
            numel_elems=param.numel(),
            dtype=param.dtype,
            shape=tuple(param.shape),
            is_expert_parallel=not getattr(param, 'allreduce', True),
            shared_embedding=getattr(param, 'shared_embedding', False),
            pipeline_synced=is_pipeline_synced(param),
        )
        for name, param in model.named_parameters()
        if param.requires_grad
    ]


def _transformer_config(values: Mapping[str, Any], job: Job, dtype: torch.dtype) -> Any:
    arguments = dict(values)
    arguments.update(
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.expert_tp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        perform_initialization=False,
        use_cpu_initialization=True,  # so that torch.device('meta') decides where tensors are
        init_model_with_meta_device=True,
    )
    if arguments.get('rope_type') == 'yarn':
        arguments['rope_type'] = 'rope'  # its tables are no parameters, and take seconds to compute
    return _config_class(values)(**arguments)


def _config_class(values: Mapping[str, Any]) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    return MLATransformerConfig if values.get('multi_latent_attention') else TransformerConfig


def _sort_values(
    architecture: Architecture, model_class: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's values as arguments of GPTModel and of its config, each checked."""
    config_class = _config_class(architecture.values)
    known = {field.name: field for field in dataclasses.fields(config_class) if field.init}
    of_model = set(inspect.signature(model_class.__init__).parameters) - set(_NOT_FROM_YAML)
    hints = typing.get_type_hints(config_class)
    model_hints = typing.get_type_hints(model_class.__init__)
    options: dict[str, Any] = {}
    config_values: dict[str, Any] = {}
    for key, value in architecture.values.items():
        if key in _OWN_KEYS:
            continue
        if key in _GIVEN_BY_THE_JOB:
            architecture.problem(
                key, f'belongs to the job, not to the model: use {_GIVEN_BY_THE_JOB[key]}'
            )
        if key in _SET_HERE:
            architecture.problem(key, 'is set by the planner; leave it out')
        if key not in known and key not in of_model:
            # Keys of the other parts of Megatron's vocabulary are near to everything: the best only.
            near = difflib.get_close_matches(key, [*known, *of_model, *_OWN_KEYS], n=1, cutoff=0.6)
            hint = f' Did you mean {near[0]!r}?' if near else ''
            architecture.problem(
                key, f'unknown key: no field of {config_class.__name__} or GPTModel.{hint}'
            )
        if key in known:
            config_values[key] = _checked(architecture, key, value, hints.get(key))
        if key in of_model:
            options[key] = _checked(architecture, key, value, model_hints.get(key))
    return options, config_values


def _checked(architecture: Architecture, key: str, value: Any, hint: Any) -> Any:
    if value is None and key in _MAY_BE_NULL:
        return None
    if key == 'activation_func':
        return _activation(architecture, value)
    if 'Callable' in str(hint):
        architecture.problem(key, 'takes a Python function, which a YAML file cannot hold')
    try:
        adapter = pydantic.TypeAdapter(
            hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True, strict=True)
        )
    except pydantic.PydanticUserError:  # a type of upstream's with a validator of its own
        return value
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        expected = error.errors()[0]['msg'].replace('Input should be', 'expected')
        architecture.problem(key, f'found {value!r}, {expected}')


def _activation(architecture: Architecture, value: Any) -> Callable[..., Any]:
    from megatron.core import activations

    names: dict[Any, Callable[..., Any]] = {
        'gelu': torch.nn.functional.gelu,
        'quick_gelu': activations.quick_gelu,
        'relu': torch.nn.functional.relu,
        'silu': torch.nn.functional.silu,
        'squared_relu': activations.squared_relu,
    }
    if value not in names:
        architecture.problem(
            'activation_func', f'found {value!r}, expected one of {", ".join(names)}'
        )
    return names[value]

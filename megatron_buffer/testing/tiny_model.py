"""The tiny GPT of the tests: what a case is made of, the model, its data. Real megatron.core, no wrapper."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB, SEQUENCE, SAMPLES = 128, 16, 2
LR, WEIGHT_DECAY, BETAS, MOMENTUM = 1e-2, 0.01, (0.9, 0.999), 0.9
# Some gradients are zero but for rounding (the key biases): a smaller epsilon would make steps of that.
EPS = 1e-5
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}


@dataclass(frozen=True, kw_only=True)
class TrainCase:
    """What a run is made of; the names are Megatron's where it has one."""

    tp: int = 1
    pp: int = 1
    vpp: int = 0
    cp: int = 1
    """context_parallel_size; needs `attention=False` without Transformer Engine."""
    ep: int = 1
    etp: int = 0
    """expert_tensor_parallel_size; 0: as tp."""
    gtp: int = 1
    """gtp_remat_size of the process groups (core_v0.19 on)."""
    moe: bool = False
    dispatcher: str = 'alltoall'
    sp: bool = False
    dist_opt: bool = False
    instances: int = 1
    """num_distributed_optimizer_instances"""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align: bool = True
    """With pipeline stages: let the schedule start grad reduce and param gather (align_grad_reduce, ...)."""
    dtype: str = 'fp32'
    grad_reduce_in_fp32: bool = True
    average_in_collective: bool = False
    per_token_loss: bool = False
    rs_fp32_accum: bool = False
    """reduce_scatter_with_fp32_accumulation"""
    check_for_nan: bool = False
    bucket_size: int | None = 5000
    high_busbw: bool = False
    """pad_buckets_for_high_nccl_busbw"""
    optimizer: str = 'adam'
    clip: float = 1.0
    tied: bool = True
    layers: int = 2
    hidden: int = 32
    steps: int = 6
    attention: bool = True
    """False: layers of norms and MLPs only."""
    micro_batches: int = 3
    seed: int = 123
    wrapped_by: str = 'ddp'
    """`ddp`: its constructor; `training`: `wrap_model_chunks_with_ddp`, with layouts made beforehand."""
    random_init: bool = False
    """data_parallel_random_init: other weights on each data-parallel rank, then `broadcast_params`."""
    offload: bool = False
    """Free the gradients' storage between the steps."""
    force_all_reduce: bool = False
    """Every other step is one whose gradients are saved: whole buckets are reduced."""
    ddp: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of DistributedDataParallelConfig."""
    model: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of TransformerConfig."""
    optim: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of OptimizerConfig."""

    def __str__(self) -> str:
        """The fields that differ from the default: a name for a test."""
        default = type(self)()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        for more in ('ddp', 'model', 'optim'):
            changed.update(changed.pop(more, {}))
        return '-'.join(k if v is True else f'{k}={v}' for k, v in changed.items()) or 'default'

    @property
    def groups(self) -> tuple[int, ...]:
        """What decides the process groups: runs that agree in it can share them."""
        return (self.tp, self.pp, self.vpp, self.cp, self.ep, self.etp, self.gtp, self.instances)


def build_model(
    case: TrainCase, vp_stage: int | None = None, *, whole: bool = False
) -> torch.nn.Module:
    """Build the GPT, or this rank's stage of it.

    Args:
        case: The sizes and the parallelism.
        vp_stage: The virtual stage, with vpp.
        whole: All layers in one process, whatever the pipeline.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    moe: dict[str, Any] = {}
    if case.moe:
        moe = {
            'num_moe_experts': 4,
            'moe_router_topk': 2,
            'moe_token_dispatcher_type': case.dispatcher,
            'moe_router_load_balancing_type': 'aux_loss',
            'moe_aux_loss_coeff': 1e-2,
            'expert_model_parallel_size': case.ep,
            'expert_tensor_parallel_size': case.etp or None,
            'add_bias_linear': False,
        }
    dtype = DTYPES[case.dtype]
    fields: dict[str, Any] = dict(
        num_layers=case.layers,
        hidden_size=case.hidden,
        ffn_hidden_size=2 * case.hidden,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=case.dtype == 'bf16',
        fp16=case.dtype == 'fp16',
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.sp,
        pipeline_model_parallel_size=case.pp,
        context_parallel_size=case.cp,
        virtual_pipeline_model_parallel_size=case.vpp or None,
        # On gloo the interleaved schedule mixes up batched messages.
        overlap_p2p_comm=bool(case.vpp),
        batch_p2p_comm=not case.vpp,
        calculate_per_token_loss=case.per_token_loss,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **moe,
    )
    config = TransformerConfig(**{**fields, **case.model})
    if case.moe:
        spec: Any = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, vp_stage=vp_stage
        )
    else:
        spec = specs.get_gpt_layer_local_spec()
        if not case.attention:
            for name in ('input_layernorm', 'self_attention', 'self_attn_bda'):
                setattr(spec.submodules, name, getattr(TransformerLayerSubmodules(), name))
    stage = {'ignore_virtual': False, 'vp_stage': vp_stage}
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=whole or parallel_state.is_pipeline_first_stage(**stage),
        post_process=whole or parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type='learned_absolute',
        vp_stage=vp_stage,
    )
    for param in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    return model


def batch(
    case: TrainCase, step: int, micro_batch: int, dp_rank: int, cp_rank: int = 0
) -> tuple[torch.Tensor, ...]:
    """Return tokens, labels and loss mask of one micro-batch: arithmetic sequences, all different.

    With context parallelism each rank has its part of the sequence.
    """
    g = torch.Generator().manual_seed(
        ((case.seed * 1000 + step) * 100 + micro_batch) * 1000 + dp_rank
    )
    first = torch.randint(0, VOCAB, (SAMPLES, 1), generator=g)
    stride = torch.randint(1, 4, (SAMPLES, 1), generator=g)
    text = (first + stride * torch.arange(SEQUENCE + 1)) % VOCAB
    # Unequal numbers of counted tokens tell a mean per token from a mean of means.
    counted = (torch.rand(SAMPLES, SEQUENCE, generator=g) < 0.7).float()
    counted[:, :: SEQUENCE // case.cp] = 1
    part = slice(cp_rank * SEQUENCE // case.cp, (cp_rank + 1) * SEQUENCE // case.cp)
    whole = (text[:, :-1], text[:, 1:], counted)
    return tuple(tensor[:, part].contiguous().cuda() for tensor in whole)  # CPU mode: stays


def call_model(
    model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor, cp_rank: int = 0
) -> torch.Tensor:
    """Return the loss of every token."""
    length = tokens.shape[1]
    future = torch.ones(1, 1, length, length, device=tokens.device).triu(1).bool()
    positions = torch.arange(length, device=tokens.device).expand_as(tokens) + cp_rank * length
    return model(tokens, positions, future, labels=labels)


def init_parallel(case: TrainCase) -> None:
    """Make Megatron's groups for a case and seed everything."""
    from megatron.core import parallel_state

    since_019: dict[str, Any] = {'gtp_remat_size': case.gtp} if case.gtp > 1 else {}
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        virtual_pipeline_model_parallel_size=case.vpp or None,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp or None,
        num_distributed_optimizer_instances=case.instances,
        **since_019,
    )
    seed_everything(case)


def seed_everything(case: TrainCase) -> None:
    """The same weights for the next model as for any other one of this case; needs the groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # As data_parallel_random_init has it: ten apart per rank.
    seed = case.seed + 10 * parallel_state.get_data_parallel_rank() * case.random_init
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)

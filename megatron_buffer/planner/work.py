"""When gradients are ready and parameters are read in one micro-batch: from a profile, or from FLOPs.

Upstream has no counterpart. A profile is what a run measured; without one a matrix of N elements is taken to
cost 2 N operations per token in forward and twice that in backward, modules to run in the order of their
registration, and everything else to be free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.architecture import Architecture
from megatron_buffer.planner.job import Job
from megatron_buffer.planner.params import PlannedParam
from megatron_buffer.profile import (
    SCHEMA_VERSION,
    ChunkProfile,
    ParamProfile,
    Profile,
    World,
    chunk_key,
    dense_positions,
)

DEFAULT_SEQ_LENGTH = 8192
"""Tokens of a sequence, of models that can take more."""

_ATTENTION_OUTPUT = 'self_attention.linear_proj.weight'
_EMBEDDINGS = (
    'word_embeddings.weight',
    'position_embeddings.weight',
    'tokentype_embeddings.weight',
)
_HEAD = 'output_layer.weight'


class ChunkTimes(NamedTuple):
    """One micro-batch of one model chunk, in seconds.

    Attributes:
        forward_s: The forward pass.
        backward_s: The backward pass.
        ready_s: By name, when a gradient is there, from the start of backward.
        first_use_s: By name, when forward first reads a parameter, from its start.
    """

    forward_s: float
    backward_s: float
    ready_s: Mapping[str, float]
    first_use_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a micro-batch makes a rank compute.

    Attributes:
        tokens: Of a micro-batch on one rank: sequence length x micro-batch size / context parallelism.
        seq_length: Tokens of a sequence.
        attention_width: Width of all heads together on a rank, which attention's own products depend on.
        causal: Whether half of attention's products are left out.
        experts: Experts of a layer; 0 for a dense model.
        topk: Experts that a token goes to.
        tied_head: Whether the output layer multiplies with the embedding.
        flops_per_s: What the GPU computes.
        recompute: Whether backward runs forward once more.
    """

    tokens: float
    seq_length: int
    attention_width: float
    causal: bool
    experts: int
    topk: int
    tied_head: bool
    flops_per_s: float
    recompute: bool


def load_of(
    architecture: Architecture,
    job: Job,
    *,
    seq_length: int | None,
    micro_batch_size: int,
    flops_per_s: float,
    recompute: bool,
) -> Load:
    """The load of a model on one rank of a job.

    Raises:
        ConfigError: If context parallelism does not divide the sequence.
    """
    longest = architecture.positive('max_sequence_length')
    seq = seq_length or min(longest, DEFAULT_SEQ_LENGTH)
    if seq % job.cp:
        raise ConfigError(f'--seq-length {seq}: cannot be divided over --cp {job.cp}')
    heads = architecture.positive('num_attention_heads')
    width = architecture.positive(
        'kv_channels', max(1, architecture.positive('hidden_size') // heads)
    )
    experts = architecture.values.get('num_moe_experts') is not None
    tied = architecture.values.get('share_embeddings_and_output_weights', False)
    return Load(
        tokens=seq * micro_batch_size / job.cp,
        seq_length=seq,
        attention_width=heads * width / job.tp,
        causal=True,
        experts=architecture.positive('num_moe_experts') if experts else 0,
        topk=architecture.positive('moe_router_topk', 2) if experts else 0,
        tied_head=bool(tied),
        flops_per_s=flops_per_s,
        recompute=recompute,
    )


def times_from_flops(params: Sequence[PlannedParam], load: Load, job: Job) -> ChunkTimes:
    """Estimates a chunk's times.

    Args:
        params: Of the chunk, in registration order.
        load: What a micro-batch is.
        job: The parallelism, with the stage.
    """
    seconds = [_forward_flops(param, load, job) / load.flops_per_s for param in params]
    head = 0.0
    names = [param.name for param in params]
    is_last = job.pp_rank == job.pp - 1 and not any(name.endswith(_HEAD) for name in names)
    if load.tied_head and is_last:
        embedding = next((p for p in params if p.name.endswith(_EMBEDDINGS[0])), None)
        if embedding is not None:
            head = 2.0 * embedding.numel_elems * load.tokens / load.flops_per_s
    times = 3.0 if load.recompute else 2.0
    first_use: dict[str, float] = {}
    now = 0.0
    for param, cost in zip(params, seconds, strict=True):
        first_use[param.name] = now
        now += cost
    ready: dict[str, float] = {}
    back = times * head
    for param, cost in zip(reversed(params), reversed(seconds), strict=True):
        back += times * cost
        ready[param.name] = back
    return ChunkTimes(now + head, back, ready, first_use)


def _forward_flops(param: PlannedParam, load: Load, job: Job) -> float:
    """Operations of one micro-batch's forward pass in the module that owns a parameter."""
    if param.shape is None or len(param.shape) < 2 or param.name.endswith(_EMBEDDINGS):
        return 0.0
    tokens = load.tokens
    if param.is_expert_parallel and load.experts:
        everybody = tokens * job.dp_cp_size
        tokens = everybody * load.topk / (load.experts * job.expert_dp_size)
    flops = 2.0 * param.numel_elems * tokens
    if param.name.endswith(_ATTENTION_OUTPUT):
        products = 4.0 * load.tokens * load.seq_length * load.attention_width
        flops += products / 2 if load.causal else products
    return flops


def times_from_profile(chunk: ChunkProfile, names: Sequence[str], source: str) -> ChunkTimes:
    """A chunk's times as a run measured them.

    Backward begins with the first gradient and ends with the last; forward ends where the last module is
    called. What has no time is ready last, and never read.

    Raises:
        ConfigError: If the chunk lacks a parameter.
    """
    by_name = {param.name: param for param in chunk.params}
    for name in names:
        if name not in by_name:
            raise ConfigError(
                f'--profile {source}: has no parameter {name}; it was recorded with another model, dtype '
                'or sizes'
            )
    backward = max((p.grad_time_s for p in chunk.params if p.grad_time_s is not None), default=0.0)
    forward = max(
        (p.forward_time_s for p in chunk.params if p.forward_time_s is not None), default=0.0
    )
    ready = {
        p.name: backward if p.grad_time_s is None else max(0.0, p.grad_time_s) for p in chunk.params
    }
    first_use = {
        p.name: max(0.0, p.forward_time_s) for p in chunk.params if p.forward_time_s is not None
    }
    return ChunkTimes(max(0.0, forward), max(0.0, backward), ready, first_use)


def estimated_profile(
    chunks: Mapping[int, Sequence[PlannedParam]], times: Mapping[int, ChunkTimes], job: Job
) -> Profile:
    """Estimated times in the form of a recorded profile, for strategies that read one."""
    return Profile(
        schema_version=SCHEMA_VERSION,
        megatron_buffer='',
        megatron_core='',
        created='',
        world=World(tp=job.tp, pp=job.pp, vpp=job.vpp, dp=job.dp_cp_size, ep=job.ep),
        chunks={
            chunk_key(job.pp_rank, chunk): _chunk_profile(params, times[chunk], job)
            for chunk, params in chunks.items()
        },
    )


def _chunk_profile(params: Sequence[PlannedParam], times: ChunkTimes, job: Job) -> ChunkProfile:
    names = [param.name for param in params]
    arrivals = dense_positions([times.ready_s[name] for name in names], names)
    uses = dense_positions([times.first_use_s[name] for name in names], names)
    return ChunkProfile(
        params=tuple(
            ParamProfile(
                name=param.name,
                numel_elems=param.numel_elems,
                dtype=str(param.dtype).removeprefix('torch.'),
                grad_arrival=arrival,
                grad_time_s=times.ready_s[param.name],
                forward_use=use,
                forward_time_s=times.first_use_s[param.name],
                gradients_per_backward=1.0,
            )
            for param, arrival, use in zip(params, arrivals, uses, strict=True)
        ),
        steps=1,
        ranks=job.dp_cp_size,
        clock='host',
        agreed=True,
        differing_grad_arrivals=0,
        differing_forward_uses=0,
    )

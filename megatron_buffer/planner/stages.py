"""The ledger of every pipeline stage of a job, from the exact layout of each of its model chunks.

Stands for what the ranks of a stage allocate and send once ``DistributedDataParallel`` and
``DistributedOptimizer`` (``megatron/core``) have been built; nothing is allocated here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_buffer.planner import ledger
from megatron_buffer.planner.architecture import Architecture
from megatron_buffer.planner.collect import collect
from megatron_buffer.planner.job import DdpOptions, Job
from megatron_buffer.planner.params import PlannedParam
from megatron_buffer.planner.view import BufferView, LayoutView
from megatron_buffer.runtime import Runtime

_QUANTIZED_NAME = re.compile(r'\.layers\.\d+\.(?:.*\.)?linear_\w+\.weight$')
_WIRE_BYTES = {'bf16': 2, 'fp16': 2, 'fp32': 4}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a plan is made for.

    Attributes:
        model: Name for titles.
        runtime: The config, with its strategies.
        ddp: What ``ddp_config`` says.
        dtype: Dtype that the parameters are asked for in.
        recipe: How the weights of the layers' linear modules are quantized; None: not at all.
        optimizer: How the optimizer stores its state.
    """

    model: str
    runtime: Runtime
    ddp: DdpOptions
    dtype: torch.dtype
    recipe: ledger.Recipe | None
    optimizer: ledger.OptimizerDtypes


@dataclass(frozen=True, kw_only=True)
class BufferLedger:
    """One buffer of one chunk, on each rank of the stage."""

    view: BufferView
    sizes: ledger.BufferSizes
    memory: ledger.Memory
    """Of the rank that owns most."""
    bucket_wires: tuple[ledger.Wire, ...]
    wire: ledger.Wire
    shard_params_elems: tuple[int, ...]
    """Per shard: elements of parameters that the optimizer of its rank owns."""

    def optimizer_bytes(self, shard: int, optimizer: ledger.OptimizerDtypes) -> int:
        """State of one shard."""
        each = optimizer.bytes_per_elem(self.sizes.param_bytes)
        return self.shard_params_elems[shard] * each


@dataclass(frozen=True, kw_only=True)
class ChunkLedger:
    """One model chunk."""

    view: LayoutView
    buffers: tuple[BufferLedger, ...]
    num_reductions: int
    """Launches per iteration; a bucket group is one, and a second one between optimizer instances."""
    num_gathers: int
    """Launches per iteration, on NCCL."""


@dataclass(frozen=True, kw_only=True)
class StageLedger:
    """One pipeline stage."""

    job: Job
    """With its ``pp_rank``."""
    chunks: tuple[ChunkLedger, ...]
    memory: ledger.Memory
    """Of the stage's heaviest rank."""
    least_resident_bytes: int
    """Of its lightest rank."""
    heaviest_rank: int
    """Global rank of the heaviest, the lowest if there are several."""
    resident_bytes_of_all: int
    """Of all ranks of the stage together."""

    @property
    def buffers(self) -> list[BufferLedger]:
        """Those of all chunks."""
        return [buffer for chunk in self.chunks for buffer in chunk.buffers]

    @property
    def wire(self) -> ledger.Wire:
        """What a rank sends in an iteration."""
        return ledger.Wire.total([buffer.wire for buffer in self.buffers])

    @property
    def kind(self) -> str:
        """``first``, ``middle``, ``last`` or ``only``, and ``with experts``."""
        place, last = self.job.pp_rank, self.job.pp - 1
        words = 'only' if last == 0 else {0: 'first', last: 'last'}.get(place, 'middle')
        experts = any(buffer.view.key.is_expert_parallel for buffer in self.buffers)
        return words + (', with experts' if experts else '')

    def signature(self) -> tuple[object, ...]:
        """Equal for stages whose ranks hold and send the same."""
        parts = [
            (b.sizes, b.memory, b.view.layout.buckets, b.shard_params_elems) for b in self.buffers
        ]
        return (self.kind, len(self.chunks), *parts)


def plan_stages(
    architecture: Architecture,
    job: Job,
    ask: Ask,
    *,
    progress: Callable[[int], None] = lambda stage: None,
) -> list[StageLedger]:
    """The ledger of every stage.

    Args:
        architecture: The model.
        job: Its parallelism; all pipeline stages are planned.
        ask: What for.
        progress: Called with the number of stages done.

    Raises:
        ConfigError: If the model does not fit the job.
        LayoutError: If the strategies make a layout that Megatron-Core could not use.
    """
    from megatron_buffer.planner.model import build_params

    result: list[StageLedger] = []
    for pp_rank in range(job.pp):
        of_stage = dataclasses.replace(job, pp_rank=pp_rank)
        chunks = build_params(architecture, of_stage, ask.dtype)
        result.append(stage_ledger(chunks, of_stage, ask))
        progress(pp_rank + 1)
    return result


def stage_ledger(chunks: dict[int, list[PlannedParam]], job: Job, ask: Ask) -> StageLedger:
    """The ledger of one stage, from the parameters of each of its chunks."""
    total = sum(param.numel_elems for params in chunks.values() for param in params)
    ledgers = tuple(
        _chunk_ledger(
            collect(
                quantized(params, ask.recipe),
                model=ask.model,
                runtime=ask.runtime,
                job=dataclasses.replace(job, chunk=chunk),
                ddp=ask.ddp,
                param_dtype=ask.dtype,
                num_params_elems_of_rank=total,
            ),
            ask,
        )
        for chunk, params in sorted(chunks.items())
    )
    return _stage(job, ledgers, ask.optimizer)


def quantized(params: Sequence[PlannedParam], recipe: ledger.Recipe | None) -> list[PlannedParam]:
    """Marks what Transformer Engine stores quantized: the weights of the layers' linear modules.

    Embedding, output layer, router, norms and biases are none.
    """
    if recipe is None:
        return list(params)
    return [
        (
            dataclasses.replace(param, has_quantized_storage=True)
            if _QUANTIZED_NAME.search(param.name)
            else param
        )
        for param in params
    ]


def _chunk_ledger(view: LayoutView, ask: Ask) -> ChunkLedger:
    choice = ask.runtime.grad_reduce.choice(
        dist_opt=ask.ddp.use_distributed_optimizer, fp32_accumulation=False
    )
    kind = 'a2a' if choice.kind in ('a2a', 'upstream_a2a') else choice.kind
    wire_bytes = _WIRE_BYTES[choice.wire_dtype] if choice.wire_dtype else None
    buffers = tuple(_buffer_ledger(view, buffer, ask, kind, wire_bytes) for buffer in view.buffers)
    # One rank has the sum and the parameters already, so nothing is launched; but this collective multiplies.
    several = [group for group in view.groups if view.num_ranks(group) > 1]
    reduced = view.groups if ask.runtime.config.scaling.name == 'premul_sum' else several
    across_instances = len(view.groups) if view.job.instances > 1 else 0
    gathers = 0
    if ask.ddp.use_distributed_optimizer:
        for group in several:
            stored = [buffers[ref.buffer].sizes.gathered_bits for ref in group.buckets]
            dtypes = [
                (bits, view.buffers[r.buffer].key.param_dtype)
                for bits, r in zip(stored, group.buckets, strict=True)
            ]
            gathers += len(ask.runtime.param_gather.launches(dtypes, 'nccl'))
    return ChunkLedger(
        view=view,
        buffers=buffers,
        num_reductions=len(reduced) + across_instances,
        num_gathers=gathers,
    )


def _buffer_ledger(
    view: LayoutView, buffer: BufferView, ask: Ask, kind: str, wire_bytes: int | None
) -> BufferLedger:
    layout, recipe = buffer.layout, None
    is_quantized = buffer.key.param_dtype == torch.uint8
    if is_quantized:
        recipe = ask.recipe
    sizes = ledger.BufferSizes(
        numel_elems=layout.numel_elems,
        params_elems=layout.numel_params_elems,
        grad_bytes=buffer.key.grad_dtype.itemsize,
        param_bytes=(ask.dtype if is_quantized else buffer.key.param_dtype).itemsize,
        recipe=recipe,
        num_shards=buffer.num_ranks,
        instances=view.job.instances,
        dist_opt=ask.ddp.use_distributed_optimizer,
        reduce_kind=kind,
        wire_grad_bytes=wire_bytes,
    )
    owned = tuple(
        ledger.shard_params_elems(
            [(span.start_elems, span.end_elems) for span in layout.buckets],
            [(slot.start_elems, slot.end_elems) for slot in layout.slots],
            buffer.num_shards,
        )
    )
    storages = [
        ledger.te_storage(param.shape, recipe)
        for param in (buffer.params if recipe else ())
        if recipe and param.shape
    ]
    return BufferLedger(
        view=buffer,
        sizes=sizes,
        memory=ledger.memory(
            sizes,
            ask.optimizer,
            shard_elems=max(owned),
            te_rowwise_bytes=sum(rowwise for rowwise, _ in storages),
            te_columnwise_bytes=sum(columnwise for _, columnwise in storages),
            largest_reduction_elems=max(span.numel_elems for span in layout.buckets),
        ),
        bucket_wires=tuple(ledger.wire(sizes, span.numel_elems) for span in layout.buckets),
        wire=ledger.Wire.total([ledger.wire(sizes, span.numel_elems) for span in layout.buckets]),
        shard_params_elems=owned,
    )


def _stage(
    job: Job, chunks: tuple[ChunkLedger, ...], optimizer: ledger.OptimizerDtypes
) -> StageLedger:
    """Adds up what each rank owns; ranks are numbered as Megatron does by default, pipeline outermost."""
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    total = ledger.Memory.total([buffer.memory for buffer in buffers])
    fixed = total.resident_bytes - total.optimizer_bytes
    states = [
        [b.optimizer_bytes(shard, optimizer) for shard in range(len(b.shard_params_elems))]
        for b in buffers
    ]
    owned = [
        sum(
            state[_shard_of(job, rank, buffer) % len(state)]
            for state, buffer in zip(states, buffers, strict=True)
        )
        for rank in range(job.stage_size)
    ]
    heaviest = max(range(job.stage_size), key=owned.__getitem__)
    # The optimizer's temporaries follow its shard: those of the rank that owns most are the bound.
    return StageLedger(
        job=job,
        chunks=chunks,
        memory=total._replace(optimizer_bytes=owned[heaviest]),
        least_resident_bytes=fixed + min(owned),
        heaviest_rank=job.pp_rank * job.stage_size + heaviest,
        resident_bytes_of_all=fixed * job.stage_size + sum(owned),
    )


def _shard_of(job: Job, rank: int, buffer: BufferLedger) -> int:
    """Which shard of a buffer a rank of the stage owns; optimizer instances repeat them."""
    inner = job.expert_model_size if buffer.view.key.is_expert_parallel else job.tp
    return rank // inner

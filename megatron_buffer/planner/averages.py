"""The ledger of a job of which only the number of parameters is known; pure.

Everything is an average: a rank has P / (tp x pp) parameters in one buffer, cut at exact multiples of the
bucket size, without padding, which is bounded apart. Upstream's counterpart is the formula of
``megatron/training/theoretical_memory_usage.py``. Imports neither torch nor megatron.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, NamedTuple

from megatron_buffer.bucket_size import default_bucket_size
from megatron_buffer.errors import ConfigError
from megatron_buffer.planner import ledger
from megatron_buffer.planner.job import DdpOptions, Job

_HIGH_BUSBW_ELEMS = 2**16
_MULTIPLES = {'': 1, 'k': 10**3, 'm': 10**6, 'b': 10**9, 't': 10**12}


class Averages(NamedTuple):
    """The ledger of one rank.

    Attributes:
        params_elems: Parameters of the rank, P / (tp x pp).
        sizes: Its buffer.
        memory: What it weighs.
        unsharded_bytes: The optimizer's state of all its parameters.
        bucket_size_elems: Elements of a full bucket.
        full_buckets: How many there are.
        tail_bucket_elems: Elements of the last, smaller bucket; 0 if there is none.
        bucket_bytes: Gradients of a full bucket.
        bucket_wire: What a rank sends for a full bucket.
        wire: What it sends in an iteration.
        padding_bound_elems: Most elements that bucket ends can be padded by, with
            ``pad_buckets_for_high_nccl_busbw``.
    """

    params_elems: int
    sizes: ledger.BufferSizes
    memory: ledger.Memory
    unsharded_bytes: int
    bucket_size_elems: int
    full_buckets: int
    tail_bucket_elems: int
    bucket_bytes: int
    bucket_wire: ledger.Wire
    wire: ledger.Wire
    padding_bound_elems: int


def parse_params(text: str) -> int:
    """``7.5e9``, ``7.5B`` or ``7_500_000_000`` as a number.

    Raises:
        ConfigError: If it is not a whole, positive number.
    """
    match = re.fullmatch(r'(.*?)([kmbt]?)', text.strip().lower().replace('_', ''))
    assert match is not None
    try:
        value = Decimal(match[1]) * _MULTIPLES[match[2]]
    except InvalidOperation:
        value = Decimal('nan')
    if not value.is_finite() or value < 1 or value > Decimal(10) ** 18 or value % 1:
        raise ConfigError(
            f'--params {text}: expected a whole number of parameters from 1 to 1e18, such as 7.5e9 or '
            '7.5B'
        )
    return int(value)


def averages(
    params: int,
    job: Job,
    ddp: DdpOptions,
    *,
    param_bytes: int = 2,
    recipe: ledger.Recipe | None = None,
    optimizer: ledger.OptimizerDtypes | None = None,
    bucket_size_elems: int | None = None,
) -> Averages:
    """The ledger of a rank of the first pipeline stage.

    Args:
        params: Parameters of the model.
        job: Its parallelism; ``pp_rank`` is ignored.
        ddp: What ``ddp_config`` says.
        param_bytes: Bytes per element of a parameter, before it is quantized.
        recipe: Recipe of quantized weights: then every weight is.
        optimizer: The optimizer's state; None for fp32 throughout.
        bucket_size_elems: Bucket size of the config, if it has one.

    Raises:
        ConfigError: If averages do not tell what was asked.
    """
    if job.ep > 1 or job.etp is not None:
        raise ConfigError(
            '--params knows averages only, and no experts: leave out --ep and --etp, or use --model or '
            '--hf'
        )
    if job.vpp > 1:
        raise ConfigError(
            '--params knows averages only, and no model chunks: leave out --vpp, or use --model or --hf'
        )
    optimizer = optimizer or ledger.OptimizerDtypes()
    shards = job.num_shards(False)
    exact = Fraction(params, job.tp * job.pp)
    elems = -(-exact.numerator // exact.denominator)
    sizes = ledger.BufferSizes(
        numel_elems=elems,
        params_elems=elems,
        grad_bytes=4 if ddp.grad_reduce_in_fp32 else param_bytes,
        param_bytes=param_bytes,
        recipe=recipe,
        num_shards=shards,
        instances=job.instances,
        dist_opt=ddp.use_distributed_optimizer,
    )
    size = ddp.bucket_size or bucket_size_elems or default_bucket_size(job.dp_cp_size)
    if ddp.num_buckets:
        size = -(-elems // ddp.num_buckets)
    if not ddp.overlap:
        size = elems
    full, tail = divmod(elems, size)
    rowwise = columnwise = 0
    if recipe is not None:
        data = ledger.bytes_of(elems, recipe.stored_bits)
        scales = -(-elems // recipe.block_elems) if recipe.block_elems else 0
        rowwise = columnwise = data + scales
    return Averages(
        params_elems=elems,
        sizes=sizes,
        memory=ledger.memory(
            sizes,
            optimizer,
            shard_elems=exact / shards if sizes.dist_opt else exact,
            te_rowwise_bytes=rowwise,
            te_columnwise_bytes=columnwise,
        ),
        unsharded_bytes=elems * optimizer.bytes_per_elem(param_bytes),
        bucket_size_elems=size,
        full_buckets=full,
        tail_bucket_elems=tail,
        bucket_bytes=size * sizes.grad_bytes,
        bucket_wire=ledger.wire(sizes, size),
        wire=ledger.wire(sizes, elems),
        padding_bound_elems=full * (_HIGH_BUSBW_ELEMS - 1) if sizes.dist_opt else 0,
    )


def variants(params: int, job: Job) -> list[tuple[str, Averages | None, ledger.Memory]]:
    """The same job in other ways, each with its name and what a rank's memory is.

    The last one is Megatron's FSDP with everything sharded, which has no buffer of this kind (None).
    """
    fp32, plain = DdpOptions(), DdpOptions(use_distributed_optimizer=False)
    recipes = ledger.RECIPES
    asked: list[tuple[str, DdpOptions, ledger.Recipe | None]] = [
        ('bf16, fp32 gradients, distributed optimizer', fp32, None),
        ('bf16 gradients', DdpOptions(grad_reduce_in_fp32=False), None),
        ('no distributed optimizer (plain DDP)', plain, None),
        ('fp8 parameters', fp32, recipes['fp8']),
        ('MXFP8 parameters gathered in the gradient buffer', fp32, recipes['mxfp8']),
        ('NVFP4 parameters', fp32, recipes['nvfp4']),
    ]
    result: list[tuple[str, Averages | None, ledger.Memory]] = []
    for name, ddp, recipe in asked:
        found = averages(params, job, ddp, recipe=recipe)
        result.append((name, found, found.memory))
    base = result[0][2]
    shards = job.num_shards(False)
    fsdp = ledger.Memory(
        grad_data_bytes=-(-base.grad_data_bytes // shards),
        param_data_bytes=-(-base.param_data_bytes // shards),
        optimizer_bytes=base.optimizer_bytes,
    )
    return [*result, ('FSDP optim_grads_params (ZeRO-3), for comparison', None, fsdp)]


def averages_as_dict(found: Averages, params: int, job: Job) -> dict[str, Any]:
    """The ledger as JSON, with keys that stay as they are (``docs/plan.md`` lists them).

    Every number of the top level is one of the ledger; what was asked for is under ``job``.
    """
    memory = found.memory
    return {
        'kind': 'averages',
        'grad_data_bytes': memory.grad_data_bytes,
        'param_data_bytes': memory.param_data_bytes,
        'optimizer_shard_bytes': memory.optimizer_bytes,
        'optimizer_unsharded_bytes': found.unsharded_bytes,
        'bucket_size_elems': found.bucket_size_elems,
        'full_buckets': found.full_buckets,
        'tail_bucket_elems': found.tail_bucket_elems,
        'bucket_bytes': found.bucket_bytes,
        'bucket_wire_bytes': found.bucket_wire.grad_wire_bytes,
        'grad_wire_bytes_per_iter': found.wire.grad_wire_bytes,
        'param_wire_bytes_per_iter': found.wire.param_wire_bytes,
        'padding_bound_elems': found.padding_bound_elems,
        'job': job.sizes() | {'params': params, 'params_per_rank_elems': found.params_elems},
        'rank': {
            'shard_elems': found.bucket_size_elems // found.sizes.num_shards,
            'shard_bytes': found.bucket_bytes // found.sizes.num_shards,
            'instance_wire_bytes_per_iter': found.wire.instance_wire_bytes,
            'padding_bound_bytes': found.padding_bound_elems * found.sizes.grad_bytes,
            **memory_as_dict(memory),
        },
        'variants': [
            {'name': name, **memory_as_dict(of_variant)}
            | (
                {}
                if other is None
                else {
                    'optimizer_unsharded_bytes': other.unsharded_bytes,
                    'grad_wire_bytes_per_iter': other.wire.grad_wire_bytes,
                    'param_wire_bytes_per_iter': other.wire.param_wire_bytes,
                }
            )
            for name, other, of_variant in variants(params, job)
        ],
    }


def memory_as_dict(memory: ledger.Memory) -> dict[str, int]:
    """The fields, and ``resident_bytes``."""
    return {**memory._asdict(), 'resident_bytes': memory.resident_bytes}

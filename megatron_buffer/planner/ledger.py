"""What a buffer weighs and what goes over the wire: arithmetic on sizes alone; pure.

Stands for what ``_ParamAndGradBuffer`` (``megatron/core/distributed/param_and_grad_buffer.py``) and
``DistributedOptimizer`` (``megatron/core/optimizer/distrib_optimizer.py``) allocate, and for what
``start_grad_sync`` and ``start_param_sync`` send. Imports neither torch nor megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megatron_buffer.errors import ConfigError


class Recipe(NamedTuple):
    """How quantized weights are stored.

    Attributes:
        name: As on the command line.
        gathered_bits: Bits of an element in the collective that gathers parameters.
        shares_grad_buffer: Parameters are gathered inside ``grad_data`` and have no buffer of their own
            (``reuse_grad_buf_for_mxfp8_param_ag``).
        block_elems: Elements that share a scale of one byte; 0: one fp32 scale for the whole matrix.
        stored_bits: Bits of an element in one of Transformer Engine's two copies (row- and columnwise).
    """

    name: str
    gathered_bits: int
    shares_grad_buffer: bool
    block_elems: int
    stored_bits: int


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe('fp8', 8, False, 0, 8),
        Recipe('mxfp8', 16, True, 32, 8),
        Recipe('nvfp4', 4, False, 16, 4),
    )
}
"""The recipes by name."""


class OptimizerDtypes(NamedTuple):
    """Bytes per element of Adam's state for 16-bit and quantized parameters.

    Attributes:
        main_bytes: Main parameters; parameters that are fp32 themselves have none.
        exp_avg_bytes: First moment.
        exp_avg_sq_bytes: Second moment.
        casts_grads: Whether a step begins with an fp32 copy of gradients that are not fp32.
    """

    main_bytes: int = 4
    exp_avg_bytes: int = 4
    exp_avg_sq_bytes: int = 4
    casts_grads: bool = True

    def bytes_per_elem(self, param_bytes: int) -> int:
        """All of it, for a parameter of so many bytes an element."""
        main = 0 if param_bytes == 4 else self.main_bytes
        return main + self.exp_avg_bytes + self.exp_avg_sq_bytes


@dataclass(frozen=True, kw_only=True)
class BufferSizes:
    """What has to be known of one buffer."""

    numel_elems: int
    """With padding."""
    params_elems: int
    """Without padding."""
    grad_bytes: int
    """Bytes per element of a gradient."""
    param_bytes: int
    """Bytes per element of a parameter: the logical dtype's, also if quantized."""
    recipe: Recipe | None = None
    """None: not quantized."""
    num_shards: int
    """Ranks that a bucket is reduced over and, with the distributed optimizer, sharded over."""
    instances: int = 1
    """``num_distributed_optimizer_instances``: copies of the shards."""
    dist_opt: bool = True
    reduce_kind: str = 'reduce_scatter'
    """``reduce_scatter``, ``all_reduce`` or ``a2a``."""
    wire_grad_bytes: int | None = None
    """Bytes per element of a gradient on the wire; None: as in the buffer."""

    @property
    def gathered_bits(self) -> int:
        """Bits per element of what is gathered."""
        return self.recipe.gathered_bits if self.recipe else 8 * self.param_bytes


class Memory(NamedTuple):
    """Bytes of one buffer on one rank.

    Attributes:
        grad_data_bytes: The gradient buffer.
        param_data_bytes: The parameter buffer; 0 where parameters have none.
        shared_buffer_bytes: How much of ``grad_data`` is also what parameters are gathered in; no memory
            of its own.
        module_param_bytes: Parameters in storages of their own (no distributed optimizer).
        te_rowwise_bytes: Transformer Engine's rowwise storage that is not ``param_data``, with scales.
        te_columnwise_bytes: Its columnwise copy, with scales.
        optimizer_bytes: Main parameters and moments.
        temporary_bytes: Of the optimizer step and of the collectives, at most.
    """

    grad_data_bytes: int = 0
    param_data_bytes: int = 0
    shared_buffer_bytes: int = 0
    module_param_bytes: int = 0
    te_rowwise_bytes: int = 0
    te_columnwise_bytes: int = 0
    optimizer_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """What stays allocated all the time."""
        return sum(self) - self.shared_buffer_bytes - self.temporary_bytes

    @classmethod
    def total(cls, parts: Sequence[Memory]) -> Memory:
        """The sum of several."""
        return cls(*(sum(column) for column in zip(cls(), *parts, strict=True)))


class Wire(NamedTuple):
    """Bytes that one rank sends (and receives) in one iteration.

    Attributes:
        grad_wire_bytes: Reductions within an optimizer instance.
        instance_wire_bytes: Reductions of the shards between optimizer instances.
        param_wire_bytes: Gathers.
    """

    grad_wire_bytes: int = 0
    instance_wire_bytes: int = 0
    param_wire_bytes: int = 0

    @classmethod
    def total(cls, parts: Sequence[Wire]) -> Wire:
        """The sum of several."""
        return cls(*(sum(column) for column in zip(cls(), *parts, strict=True)))


def memory(
    sizes: BufferSizes,
    optimizer: OptimizerDtypes,
    *,
    shard_elems: int | Fraction,
    te_rowwise_bytes: int = 0,
    te_columnwise_bytes: int = 0,
    largest_reduction_elems: int = 0,
) -> Memory:
    """The ledger of one buffer.

    Args:
        sizes: The buffer.
        optimizer: Bytes of the optimizer's state.
        shard_elems: Elements of parameters that the rank's optimizer owns.
        te_rowwise_bytes: All of Transformer Engine's rowwise storage of the buffer's parameters.
        te_columnwise_bytes: The same of its columnwise storage.
        largest_reduction_elems: Elements of the largest bucket, for collectives that need a second one.
    """
    grads = sizes.numel_elems * sizes.grad_bytes
    recipe = sizes.recipe
    shared = sizes.dist_opt and recipe is not None and recipe.shares_grad_buffer
    bits = sizes.gathered_bits if sizes.dist_opt or recipe is None else recipe.stored_bits
    params = bytes_of((sizes.numel_elems if sizes.dist_opt else sizes.params_elems), bits)
    # What is gathered as it is stored has its rowwise bytes in param_data.
    rowwise_bytes = te_rowwise_bytes
    if recipe is not None and not shared:
        rowwise_bytes -= bytes_of(sizes.params_elems, recipe.stored_bits)
    casts = optimizer.casts_grads and sizes.grad_bytes != 4
    temporary = _ceil(4 * Fraction(shard_elems)) if casts else 0
    if sizes.reduce_kind == 'a2a':
        temporary += largest_reduction_elems * (sizes.wire_grad_bytes or sizes.grad_bytes)
    return Memory(
        grad_data_bytes=grads,
        param_data_bytes=params if sizes.dist_opt and not shared else 0,
        shared_buffer_bytes=grads if shared else 0,
        module_param_bytes=0 if sizes.dist_opt else params,
        te_rowwise_bytes=max(0, rowwise_bytes),
        te_columnwise_bytes=te_columnwise_bytes,
        optimizer_bytes=_ceil(Fraction(shard_elems) * optimizer.bytes_per_elem(sizes.param_bytes)),
        temporary_bytes=temporary,
    )


def wire(sizes: BufferSizes, numel_elems: int) -> Wire:
    """What a rank sends for ``numel_elems`` elements of a buffer: a bucket, or all of it.

    Reduce-scatter, all-gather and all-to-all send all but the rank's own part; an all-reduce is a
    reduce-scatter and a gather.
    """
    ranks, copies = sizes.num_shards, sizes.instances
    others, other_copies = Fraction(ranks - 1, ranks), Fraction(copies - 1, copies)
    grads = numel_elems * (sizes.wire_grad_bytes or sizes.grad_bytes)
    whole = not sizes.dist_opt or sizes.reduce_kind == 'all_reduce'
    between = 0 if copies == 1 else Fraction(numel_elems * sizes.grad_bytes, ranks)
    params = bytes_of(numel_elems, sizes.gathered_bits) if sizes.dist_opt else 0
    return Wire(
        grad_wire_bytes=_ceil(grads * others * (2 if whole else 1)),
        instance_wire_bytes=_ceil(2 * between * other_copies),
        param_wire_bytes=_ceil(params * others),
    )


def te_storage(shape: tuple[int, ...], recipe: Recipe) -> tuple[int, int]:
    """Bytes of Transformer Engine's rowwise and columnwise storage of a weight, scales included.

    Upstream: ``get_scale_shape`` of ``MXFP8Quantizer`` and ``NVFP4Quantizer``: scales are padded to
    multiples of 128 by 4.
    """
    elems = 1
    for size in shape:
        elems *= size
    rows, columns = elems // max(1, shape[-1]), shape[-1]
    data = bytes_of(elems, recipe.stored_bits)
    if not recipe.block_elems:
        return data + 4, data  # one scale, which both copies use
    block = recipe.block_elems
    rowwise = _up(rows, 128) * _up(-(-columns // block), 4)
    columnwise = _up(columns, 128) * _up(-(-rows // block), 4)
    amax = 0 if recipe.stored_bits == 8 else 4
    return data + rowwise + amax, data + columnwise + amax


def shard_params_elems(
    spans: Sequence[tuple[int, int]], slots: Sequence[tuple[int, int]], num_shards: int
) -> list[int]:
    """Elements of parameters, without padding, in the shards of each rank.

    Args:
        spans: Start and end of each bucket; ends touch the next start.
        slots: Start and end of each parameter, in the order of the buffer.
        num_shards: Ranks that each bucket is cut into equal parts for.

    Returns:
        An entry per rank, summed over buckets.
    """
    result = [sum(end - start for start, end in spans) // num_shards] * num_shards
    gaps: list[tuple[int, int]] = []
    cursor = 0
    for start, end in slots:
        if start > cursor:
            gaps.append((cursor, start))
        cursor = end
    if spans and spans[-1][1] > cursor:
        gaps.append((cursor, spans[-1][1]))
    bucket = 0
    for gap_start, gap_end in gaps:
        while spans[bucket][1] <= gap_start:
            bucket += 1
        at, index = gap_start, bucket
        while at < gap_end:
            start, end = spans[index]
            shard = (end - start) // num_shards
            rank = (at - start) // shard
            until = min(gap_end, start + (rank + 1) * shard)
            result[rank] -= until - at
            at = until
            index += at >= end
    return result


def optimizer_dtypes(
    *,
    precision_aware: bool,
    dist_opt: bool,
    recipe: Recipe | None,
    bf16: bool,
    names: tuple[str | None, str | None, str | None],
) -> OptimizerDtypes:
    """The optimizer's state as ``OptimizerConfig`` (``megatron/core/optimizer``) lets it be stored.

    Args:
        precision_aware: ``use_precision_aware_optimizer``.
        dist_opt: Whether the distributed optimizer is used.
        recipe: Recipe of quantized weights.
        bf16: Whether parameters are bf16, of which fp32 main parameters need 16 more bits only.
        names: Dtypes asked for: main parameters, first and second moment.

    Raises:
        ConfigError: If a dtype is unknown, or needs the precision-aware optimizer, or that the distributed one.
    """
    if not precision_aware:
        if any(names):
            raise ConfigError(
                '--main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype need --precision-aware'
            )
        return OptimizerDtypes()
    if not dist_opt:
        raise ConfigError(
            '--precision-aware needs the distributed optimizer; leave out --no-dist-opt'
        )
    sizes = {'fp32': 4, 'fp16': 2, 'bf16': 2, 'fp8': 1}
    for name in names:
        if name and name not in sizes:
            raise ConfigError(
                f"a dtype of the optimizer's state: {name!r} is none of {', '.join(sizes)}"
            )
    main, exp_avg, exp_avg_sq = (sizes[name or 'fp32'] for name in names)
    # store_param_remainders: the 16 bits that bf16 parameters lack of fp32.
    remainders = main == 4 and bf16 and recipe is None
    # The kernel reads gradients as they are, unless Megatron keeps the main parameters itself.
    casts = main == 4 and recipe is not None
    result = OptimizerDtypes(main, exp_avg, exp_avg_sq, casts_grads=casts)
    return result._replace(main_bytes=2) if remainders else result


def bytes_of(elems: int, bits: int) -> int:
    """Bytes of so many elements."""
    return -(-elems * bits // 8)


def _ceil(value: int | Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _up(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor

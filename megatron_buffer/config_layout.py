"""Parameters of the strategies that shape a buffer: grouping, order, cuts, padding, bucket groups.

The first line of a docstring is the strategy's one-line meaning, and a string under a field
documents that parameter: the command line, the JSON schema and the error messages read them from
here. The code that acts on them is in ``strategies/``. Imports neither torch nor megatron.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_buffer.config_base import (
    LAYOUT,
    PER_BUFFER_LAYOUT,
    PGB,
    EachOnce,
    Pattern,
    PositiveBytes,
    PositiveCount,
    PositiveElems,
    params_dataclass,
)

# buffer_grouping ----------------------------------------------------------------------------------


@params_dataclass
class UpstreamGrouping:
    """One buffer per storage dtype, grad dtype, expert-parallel or not, layer-wise or not."""

    upstream_symbol: ClassVar[str] = f'{PGB}: group_params_for_buffers'
    name: Literal['upstream'] = 'upstream'


@params_dataclass
class GradDtypeRule:
    """Parameters whose full name matches get this dtype for their gradients."""

    pattern: Pattern
    """Shell-style pattern of parameter names."""
    grad_dtype: Literal['fp32', 'bf16', 'fp16']
    """Dtype of their gradients: how they are accumulated, and how they travel."""


@params_dataclass
class GradDtypeRules:
    """As upstream, but patterns of names choose a grad dtype, and with it another buffer."""

    upstream_symbol: ClassVar[str] = f'{PGB}: group_params_for_buffers'
    name: Literal['grad_dtype_rules'] = 'grad_dtype_rules'
    rules: Annotated[tuple[GradDtypeRule, ...], Field(min_length=1), EachOnce]
    """Rules like {pattern: '*.router.*', grad_dtype: fp32}; the first that matches a parameter
    counts, and parameters without a rule are grouped as upstream groups them."""


# param_order --------------------------------------------------------------------------------------


@params_dataclass
class ReverseOrder:
    """Last registered parameter first, roughly the order in which backward produces gradients."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['reverse'] = 'reverse'


@params_dataclass
class ForwardOrder:
    """First registered parameter first: gradients come from the far end of the buffer (control)."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['forward'] = 'forward'


@params_dataclass
class RandomOrder:
    """A random order that is the same on every rank and in every run of one seed (control)."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['random'] = 'random'
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the order."""


@params_dataclass
class RecordedOrder:
    """The order that a run with --custom-buffer-record measured and wrote to a profile file."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['recorded'] = 'recorded'
    profile: Annotated[str, Field(min_length=1)]
    """Path of the profile, relative to the working directory; every rank must have it."""
    layout_by: Literal['grad_arrival', 'forward_use'] = 'grad_arrival'
    """grad_arrival: parameters lie in the order in which their gradients arrived in backward;
    forward_use: in the reverse of the order in which forward first read them."""
    chain_gathers: bool = True
    """With overlap_param_gather, each group's gather starts the one that forward needed next,
    instead of the next one in the buffer."""


# bucketing ----------------------------------------------------------------------------------------


@params_dataclass
class FixedSizeBucketing:
    """A bucket closes at the end of the parameter that brings it to the given size."""

    upstream_symbol: ClassVar[str] = (
        f'{PER_BUFFER_LAYOUT}; {PGB}: _compute_default_per_buffer_param_layout'
    )
    name: Literal['fixed_size'] = 'fixed_size'
    bucket_size_elems: PositiveElems | None = None
    """Elements that close a bucket. null: what ddp_config or the command line says (bucket_size,
    num_buckets, else max(40,000,000, 1,000,000 x dp_size))."""


@params_dataclass
class CountBucketing:
    """A given number of buckets of about equal size, of the trainable parameters of each buffer."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['count'] = 'count'
    num_buckets: PositiveCount
    """Buckets per buffer, if it has so many parameters; isolated parameters come on top."""


@params_dataclass
class FirstLastBucketing:
    """A small first bucket, so that communication starts early; a small last one, to end early."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['first_last'] = 'first_last'
    first_size_elems: PositiveElems
    """The first bucket closes at the parameter that brings it to so many elements."""
    bucket_size_elems: PositiveElems | None = None
    """The same for the buckets between. null: what ddp_config or the command line says."""
    last_size_elems: PositiveElems
    """The last bucket holds the fewest last parameters that make so many elements."""


@params_dataclass
class BalancedBucketing:
    """As many buckets as bucket_size_elems asks for, as equal as can be, without a tiny tail."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['balanced'] = 'balanced'
    bucket_size_elems: PositiveElems | None = None
    """Size to aim at: a run of N elements is cut into max(1, N // size) buckets whose largest is as
    small as possible. null: what ddp_config or the command line says."""


@params_dataclass
class PerModuleBucketing:
    """Cut at the borders of modules, such as transformer layers."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['per_module'] = 'per_module'
    pattern: Pattern = '*layers.*'
    """Shell-style pattern of module names; of nested modules that match, the outermost counts.
    Parameters outside any such module go with the module before them in the buffer, or else the
    first one."""
    modules_per_bucket: PositiveCount = 1
    """Modules that share a bucket."""


@params_dataclass
class ExplicitBucketing:
    """Cut behind the parameters that are named, and nowhere else."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['explicit'] = 'explicit'
    boundaries: Annotated[tuple[Pattern, ...], EachOnce]
    """Full names of parameters, or shell-style patterns; a bucket ends with each that matches."""


@params_dataclass
class TimeOptimalBucketing:
    """The cuts that expose the least of reductions and gathers, from a profile and a network model."""

    upstream_symbol: ClassVar[str] = PER_BUFFER_LAYOUT
    name: Literal['time_optimal'] = 'time_optimal'
    profile: Annotated[str, Field(min_length=1)]
    """Path of the profile that a run with --custom-buffer-record wrote, relative to the working
    directory; every rank must have it."""
    network: Annotated[str, Field(min_length=1)] = 'h100'
    """h100 or h200 (nodes of 8 GPUs with 400 Gb/s for each), or the path of a YAML file that describes
    the network."""


# bucket_isolation ---------------------------------------------------------------------------------


@params_dataclass
class SharedEmbeddingIsolation:
    """A tied embedding is alone in its bucket (with the distributed optimizer)."""

    upstream_symbol: ClassVar[str] = f'{PER_BUFFER_LAYOUT} (shared_embedding)'
    name: Literal['shared_embedding'] = 'shared_embedding'
    pipeline_synced: bool = False
    """Also what else finalize sums over pipeline stages (conditional embedders, flextron routers): stock
    lets each stage shard them in its own way, and then sums shards that do not match."""


@params_dataclass
class PatternIsolation:
    """Parameters that match a pattern are alone in their bucket, and so are tied embeddings."""

    upstream_symbol: ClassVar[str] = f'{PER_BUFFER_LAYOUT} (shared_embedding)'
    name: Literal['patterns'] = 'patterns'
    patterns: Annotated[tuple[Pattern, ...], Field(min_length=1), EachOnce]
    """Shell-style patterns of parameter names. They also hold without the distributed optimizer."""


# padding ------------------------------------------------------------------------------------------


@params_dataclass
class MegatronPadding:
    """Starts and ends at multiples of so many elements (with the distributed optimizer)."""

    upstream_symbol: ClassVar[str] = f'{LAYOUT}: pad_param_start, pad_bucket_end'
    name: Literal['megatron'] = 'megatron'
    param_start_elems: PositiveElems = 64
    """Each parameter starts at a multiple of this many elements."""
    bucket_end_elems: PositiveElems = 128
    """Each bucket ends at a multiple of lcm(dp_size, this many elements)."""
    high_busbw: bool | None = None
    """Bucket ends are also multiples of 65,536 elements, for NCCL's bus bandwidth at large dp_size.
    null: what ddp_config says (pad_buckets_for_high_nccl_busbw)."""
    whole_bytes: bool = False
    """Places the bytes of NVFP4 parameters, which hold two values each, where the layout has the values, so
    that a rank's shard of them is its shard of the gradients. false: Megatron's rule, under which it may
    not be (a warning names the buffer). The other paddings always do so."""


@params_dataclass
class ByteAlignedPadding:
    """Starts and ends at multiples of so many bytes (with the distributed optimizer)."""

    upstream_symbol: ClassVar[str] = f'{LAYOUT}: pad_param_start, pad_bucket_end'
    name: Literal['byte_aligned'] = 'byte_aligned'
    param_start_bytes: PositiveBytes = 128
    """Each parameter starts at a multiple of this many bytes, in both dtypes."""
    bucket_end_bytes: PositiveBytes = 256
    """Each rank's shard of a bucket is a multiple of this many bytes."""


@params_dataclass
class MinimalPadding:
    """No gaps; buckets end at multiples of dp_size (with the distributed optimizer)."""

    upstream_symbol: ClassVar[str] = f'{LAYOUT}: pad_param_start, pad_bucket_end'
    name: Literal['minimal'] = 'minimal'


# bucket_groups ------------------------------------------------------------------------------------


@params_dataclass
class MergeIntoLastFp8:
    """A group per bucket, but non-fp8 buckets join the last fp8 bucket's group, if any."""

    upstream_symbol: ClassVar[str] = f'{PGB}: partition_buckets'
    name: Literal['merge_into_last_fp8'] = 'merge_into_last_fp8'


@params_dataclass
class SeparateGroups:
    """Every bucket communicates on its own."""

    upstream_symbol: ClassVar[str] = f'{PGB}: partition_buckets'
    name: Literal['separate'] = 'separate'


@params_dataclass
class SingleGroup:
    """All buckets that share a process group communicate together, at the end: no overlap."""

    upstream_symbol: ClassVar[str] = f'{PGB}: partition_buckets'
    name: Literal['single'] = 'single'


@params_dataclass
class NearestReadyGroups:
    """Each non-fp8 bucket joins the fp8 group that has all its gradients when it does."""

    upstream_symbol: ClassVar[str] = f'{PGB}: partition_buckets'
    name: Literal['nearest_ready'] = 'nearest_ready'


@params_dataclass
class MergeIntoFirstFp8:
    """Non-fp8 buckets join the first fp8 group, which then waits for all (negative control)."""

    upstream_symbol: ClassVar[str] = f'{PGB}: partition_buckets'
    name: Literal['merge_into_first_fp8'] = 'merge_into_first_fp8'

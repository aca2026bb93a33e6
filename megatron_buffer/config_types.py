"""The vocabulary of a config: every axis, the strategies built for it, and their parameters.

An *axis* is one decision that upstream's gradient buffer makes; a *strategy* is one way of making
it. Each strategy has a frozen dataclass here that holds its parameters; the code that acts on them
is in ``strategies/``. The first line of the docstring is the strategy's one-line meaning, and a
string under a field documents that parameter: the command line, the JSON schema and the error
messages read them from here. Imports neither torch nor megatron.
"""

# ruff: noqa: RUF009  (the defaults that are calls make frozen objects)

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from megatron_buffer.errors import ConfigError

SCHEMA_VERSION = 1

_STRICT = ConfigDict(strict=True, extra='forbid', use_attribute_docstrings=True)

PositiveElems = Annotated[int, Field(ge=1)]

_PGB = 'megatron/core/distributed/param_and_grad_buffer.py'
_DDP = 'megatron/core/distributed/distributed_data_parallel.py: DistributedDataParallel'
_DIST_OPT = 'megatron/core/optimizer/distrib_optimizer.py'
_LAYOUT = 'megatron/core/optimizer/param_layout.py'
_FINALIZE = 'megatron/core/distributed/finalize_model_grads.py'
_PER_BUFFER_LAYOUT = f'{_DIST_OPT}: DistributedOptimizer._compute_per_buffer_param_layout'


class StrategyParams(Protocol):
    """What the parameters of all strategies have in common, ours and third parties'."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class UpstreamGrouping:
    """One buffer per storage dtype, grad dtype, expert-parallel or not, layer-wise or not."""

    upstream_symbol: ClassVar[str] = f'{_PGB}: group_params_for_buffers'
    name: Literal['upstream'] = 'upstream'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ReverseOrder:
    """Last registered parameter first, roughly the order in which backward produces gradients."""

    upstream_symbol: ClassVar[str] = _PER_BUFFER_LAYOUT
    name: Literal['reverse'] = 'reverse'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class FixedSizeBucketing:
    """A bucket closes at the end of the parameter that brings it to the given size."""

    upstream_symbol: ClassVar[str] = (
        f'{_PER_BUFFER_LAYOUT}; {_PGB}: _compute_default_per_buffer_param_layout'
    )
    name: Literal['fixed_size'] = 'fixed_size'
    bucket_size_elems: PositiveElems | None = None
    """Elements that close a bucket. null: what ddp_config or the command line says (bucket_size,
    num_buckets, else max(40,000,000, 1,000,000 x dp_size))."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SharedEmbeddingIsolation:
    """A tied embedding is alone in its bucket (with the distributed optimizer)."""

    upstream_symbol: ClassVar[str] = f'{_PER_BUFFER_LAYOUT} (shared_embedding)'
    name: Literal['shared_embedding'] = 'shared_embedding'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MegatronPadding:
    """Starts and ends at multiples of so many elements (with the distributed optimizer)."""

    upstream_symbol: ClassVar[str] = f'{_LAYOUT}: pad_param_start, pad_bucket_end'
    name: Literal['megatron'] = 'megatron'
    param_start_elems: PositiveElems = 64
    """Each parameter starts at a multiple of this many elements."""
    bucket_end_elems: PositiveElems = 128
    """Each bucket ends at a multiple of lcm(dp_size, this many elements)."""
    high_busbw: bool | None = None
    """Bucket ends are also multiples of 65,536 elements, for NCCL's bus bandwidth at large dp_size.
    null: what ddp_config says (pad_buckets_for_high_nccl_busbw)."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MergeIntoLastFp8:
    """A group per bucket, but non-fp8 buckets join the last fp8 bucket's group, if any."""

    upstream_symbol: ClassVar[str] = f'{_PGB}: partition_buckets'
    name: Literal['merge_into_last_fp8'] = 'merge_into_last_fp8'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class GoldenLazy:
    """Counts gradients in the first batch, without overlap; later batches expect the same."""

    upstream_symbol: ClassVar[str] = f'{_PGB}: _ParamAndGradBucketGroup.register_grad_ready, reset'
    name: Literal['golden_lazy'] = 'golden_lazy'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ArrivalDispatch:
    """A group is reduced when it is ready, in the order of this rank's own autograd."""

    upstream_symbol: ClassVar[str] = f'{_PGB}: _ParamAndGradBucketGroup.register_grad_ready, reset'
    name: Literal['arrival'] = 'arrival'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class UpstreamUnused:
    """An error, by name, where stock asserts (overlap on, group partly ready), else a warning."""

    upstream_symbol: ClassVar[str] = f'{_PGB}: _ParamAndGradBucketGroup.finish_grad_sync'
    name: Literal['upstream'] = 'upstream'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class PrescaleScaling:
    """Scaled before the reduction, as average_in_collective and per-token loss ask."""

    upstream_symbol: ClassVar[str] = f'{_DDP}.__init__ (gradient_scaling_factor)'
    name: Literal['prescale'] = 'prescale'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ZeroThenAdd:
    """The grad buffer is zeroed before each step, and every micro-batch adds to it."""

    upstream_symbol: ClassVar[str] = f'{_DDP}._make_backward_post_hook'
    name: Literal['zero_then_add'] = 'zero_then_add'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class UpstreamReduce:
    """All-reduce, or reduce-scatter with the distributed optimizer: what ddp_config says."""

    upstream_symbol: ClassVar[str] = f'{_PGB}: _ParamAndGradBucketGroup.start_grad_sync'
    name: Literal['upstream'] = 'upstream'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class UpstreamGather:
    """Parameters are gathered per group; with overlap, when the forward pass first needs them."""

    upstream_symbol: ClassVar[str] = f'{_PGB}: _ParamAndGradBucketGroup.start_param_sync'
    name: Literal['upstream'] = 'upstream'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class UpstreamFinalize:
    """Upstream's own steps, in upstream's order."""

    upstream_symbol: ClassVar[str] = f'{_FINALIZE}: finalize_model_grads'
    name: Literal['upstream'] = 'upstream'


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class CheckpointConfig:
    """What is done about optimizer checkpoints that depend on the layout."""

    layout_guard: bool = True
    """Refuse to load optimizer state that was saved under another layout. Accepted already; takes
    effect in a later release."""
    repair_fully_reshardable: Literal['auto', 'always', 'never'] = 'auto'
    """Repair fully_reshardable saves; auto: on Megatron versions that corrupt them. Accepted
    already; takes effect in a later release."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ChecksConfig:
    """What is verified while training."""

    rank_agreement: bool = True
    """After wrapping, compare config, layouts and groups between ranks; name what differs first."""


PLANNED_CHECKS: Mapping[str, str] = {
    'nan_in_grad': 'NaN and Inf reported with parameter names, on every rank',
    'late_gradient': 'a gradient that arrives after its bucket was reduced is detected',
    'stale_read': 'a weight read before its gather finished is detected',
}
"""Keys under ``checks`` that the design names and that are not built yet, with their meaning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One decision of the buffer, and the strategies that can make it.

    Attributes:
        key: Key in YAML.
        meaning: What the axis decides, in one line.
        upstream_symbol: Upstream code that makes this decision.
        strategies: Parameter classes that are built, by strategy name.
        planned: Strategies that the design names and that are not built yet, with their meaning.
        default: Strategy taken when a config leaves the axis out: upstream's.
    """

    key: str
    meaning: str
    upstream_symbol: str
    strategies: Mapping[str, type[Any]]
    planned: Mapping[str, str]
    default: str


def _axis(key: str, meaning: str, upstream: type[Any], **planned: str) -> Axis:
    name: str = upstream.name
    return Axis(
        key=key,
        meaning=meaning,
        upstream_symbol=upstream.upstream_symbol,
        strategies=MappingProxyType({name: upstream}),
        planned=MappingProxyType(planned),
        default=name,
    )


_ALL_AXES = (
    _axis(
        'buffer_grouping',
        'which parameters share a buffer',
        UpstreamGrouping,
        grad_dtype_rules='patterns give parameters their own grad dtype, hence their own buffer',
    ),
    _axis(
        'param_order',
        'in which order parameters lie in their buffer',
        ReverseOrder,
        forward='order of registration (control)',
        random='a seeded random order (control)',
        recorded='the order in which gradients really arrived, from a profile file',
    ),
    _axis(
        'bucketing',
        'where a buffer is cut into buckets',
        FixedSizeBucketing,
        count='a given number of buckets per buffer',
        first_last='a first and a last bucket of their own sizes',
        balanced='buckets of nearly equal size, no tiny tail',
        per_module='cut at module boundaries',
        explicit='cut after the named parameters',
        time_optimal='cuts that minimise exposed communication, from a profile and a network model',
    ),
    _axis(
        'bucket_isolation',
        'which parameters have a bucket to themselves',
        SharedEmbeddingIsolation,
        patterns='parameters matching a pattern, in addition to the shared embedding',
    ),
    _axis(
        'padding',
        'where parameters may start and buckets may end',
        MegatronPadding,
        byte_aligned='alignment given in bytes',
        minimal='only what divisibility by dp_size needs',
    ),
    _axis(
        'bucket_groups',
        'which buckets communicate together',
        MergeIntoLastFp8,
        separate='every bucket on its own',
        single='all buckets together',
        nearest_ready='each non-fp8 bucket joins the fp8 group that becomes ready when it does',
        merge_into_first_fp8='non-fp8 buckets join the first fp8 group (negative control)',
    ),
    _axis(
        'readiness',
        'when a bucket group has all its gradients',
        GoldenLazy,
        golden_static='counts known before the first batch, so that it overlaps too',
        golden_checked='late gradients are detected and reduced, or named, never lost',
        deferred='no overlap (control)',
    ),
    _axis(
        'dispatch_order',
        'in which order ready groups are reduced',
        ArrivalDispatch,
        in_order='the same order on every rank',
    ),
    _axis(
        'unused_params',
        'what happens to parameters without a gradient',
        UpstreamUnused,
        error='any of them is an error, by name',
        zero_fill='zeros are reduced for them, with one warning, and overlap survives',
    ),
    _axis(
        'scaling',
        'how gradients become an average',
        PrescaleScaling,
        average='the collective averages',
        shard_postscale='only the shard that this rank owns is scaled, after the reduce-scatter',
        premul_sum='NCCL multiplies while it sums (GPU only)',
    ),
    _axis(
        'accumulation',
        'how micro-batches add up in the grad buffer',
        ZeroThenAdd,
        first_write='the first micro-batch overwrites, so nothing is zeroed',
    ),
    _axis(
        'grad_reduce',
        'which collective reduces gradients',
        UpstreamReduce,
        all_reduce='all-reduce',
        reduce_scatter='reduce-scatter',
        a2a_fp32_sum='low precision on the wire, fp32 sum at the owner',
    ),
    _axis(
        'param_gather',
        'how updated parameters reach every rank',
        UpstreamGather,
        eager='the first gather is dispatched right after the step',
        per_dtype='no gather of mixed dtypes',
    ),
    _axis(
        'finalize',
        'what happens between the last backward and the optimizer step',
        UpstreamFinalize,
        steps='an ordered list of named steps, with options per step',
    ),
)

AXES: Mapping[str, Axis] = MappingProxyType({axis.key: axis for axis in _ALL_AXES})
"""Every axis by its YAML key, in the order in which a config is written."""

_BUILT_IN = frozenset(cls for axis in _ALL_AXES for cls in axis.strategies.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """A whole config, resolved: the parameters of one strategy per axis, then the general ones.

    Attributes:
        source: File or shipped name that it came from; for messages only, no part of its identity.
    """

    schema_version: int = dataclasses.field(default=SCHEMA_VERSION, init=False)
    buffer_grouping: StrategyParams = UpstreamGrouping()
    param_order: StrategyParams = ReverseOrder()
    bucketing: StrategyParams = FixedSizeBucketing()
    bucket_isolation: StrategyParams = SharedEmbeddingIsolation()
    padding: StrategyParams = MegatronPadding()
    bucket_groups: StrategyParams = MergeIntoLastFp8()
    readiness: StrategyParams = GoldenLazy()
    dispatch_order: StrategyParams = ArrivalDispatch()
    unused_params: StrategyParams = UpstreamUnused()
    scaling: StrategyParams = PrescaleScaling()
    accumulation: StrategyParams = ZeroThenAdd()
    grad_reduce: StrategyParams = UpstreamReduce()
    param_gather: StrategyParams = UpstreamGather()
    finalize: StrategyParams = UpstreamFinalize()
    checkpoint: CheckpointConfig = CheckpointConfig()
    checks: ChecksConfig = ChecksConfig()
    source: str = dataclasses.field(default='', compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:-1]:
            value: object = getattr(self, field.name)
            kind = type(value)
            if field.name not in AXES:
                right = kind is type(field.default)
            elif kind in _BUILT_IN or getattr(value, 'name', '') in AXES[field.name].strategies:
                right = kind in AXES[field.name].strategies.values()
            else:  # a third party's, checked by whoever made it
                right = dataclasses.is_dataclass(kind)
            if not right:
                raise ConfigError(
                    f'{field.name}: found {value!r}, expected parameters such as '
                    f'{type(field.default).__name__}(); load_config() takes names and mappings',
                    yaml_path=field.name,
                )

    def short_str(self) -> str:
        """What differs from upstream's choices, on one line; 'upstream' if nothing does."""
        differing: list[str] = []
        for field in dataclasses.fields(self)[1:-1]:
            value: Any = getattr(self, field.name)
            if value == field.default:
                continue
            values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            name = values.pop('name', None)
            default = field.default if type(value) is type(field.default) else None
            changed = [f'{k}={v}' for k, v in values.items() if v != getattr(default, k, None)]
            strategy = f'={name}' if name is not None else ''
            arguments = f'({",".join(changed)})' if changed else ''
            differing.append(f'{field.name}{strategy}{arguments}')
        return ' '.join(differing) or 'upstream'

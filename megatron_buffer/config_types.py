"""The vocabulary of a config: every axis, and the strategies built for it.

An *axis* is one decision that upstream's gradient buffer makes; a *strategy* is one way of making
it. Each strategy has a frozen dataclass that holds its parameters, in ``config_layout`` or
``config_runtime``; the code that acts on them is in ``strategies/``. Imports neither torch nor
megatron.
"""

# ruff: noqa: RUF009  (the defaults that are calls make frozen objects)

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

from megatron_buffer import config_layout as layout
from megatron_buffer import config_runtime as runtime
from megatron_buffer.config_base import StrategyParams, params_dataclass
from megatron_buffer.config_compat import check_compatible
from megatron_buffer.errors import ConfigError

SCHEMA_VERSION = 1

_PLAIN = re.compile(r'[^\s,:=(){}\[\]\'"]+')


@params_dataclass
class CheckpointConfig:
    """What is done about optimizer checkpoints that depend on the layout."""

    layout_guard: bool = True
    """Refuse to load optimizer state that was saved under another layout, where its format depends on
    what differs (dp_reshardable, dp_zero_gather_scatter); false: only warn, and load it into the wrong
    parameters."""
    repair_fully_reshardable: Literal['auto', 'always', 'never'] = 'auto'
    """Make fully_reshardable saves equal memory, which Megatron up to 0.19.2 corrupts; auto: what
    Megatron made wrong; always: every tensor, whatever Megatron made of it; never: only warn."""


@params_dataclass
class ChecksConfig:
    """What is verified while training."""

    rank_agreement: bool = True
    """After wrapping, compare config, layouts and groups between ranks; name what differs first."""
    nan_in_grad: bool = False
    """After the reduction, look for NaN and Inf in the gradients that this rank owns, and name the
    parameters; one pass over them, and the host waits. Before the reduction
    ddp_config.check_for_nan_in_grad does the same."""
    stale_read: Literal['ignore', 'warn', 'error', 'wait', 'learn'] = 'warn'
    """With overlap_param_gather, a weight that is read in forward before its gather has finished, such as
    a tied weight read by another module: error names it; wait waits for it first, which is always right;
    both look at every torch function of the forward pass. learn waits too, but looks in the first three
    steps only, and lets the modules that it found reading wait from then on; warn names it in these
    steps, once, and changes nothing. In these steps functions that torch.compile has compiled are
    compiled once more."""
    export: Literal['warn', 'error', 'gather'] = 'warn'
    """With overlap_param_gather, a state_dict() while a gather was not started yet would hold last step's
    weights: warn or stop, by name, or gather first (then every rank of the data-parallel group must call
    it). A gather in flight is always waited for. Gradients that are to be saved whole (save_wgrads_interval) are
    partial in stock with several optimizer instances: warn says so, the others complete them."""
    aliased_params: Literal['warn', 'error', 'tie'] = 'warn'
    """Parameters that share storage before wrapping, which the buffer would silently untie: warn or stop,
    with both names; tie makes two that are the same tensor one parameter."""
    replaced_param_data: Literal['ignore', 'warn', 'error'] = 'warn'
    """In each step, look whether code has replaced param.data, so that it lies outside the buffer and the
    distributed optimizer no longer reaches it: warn once, or stop, by name; a comparison of addresses."""


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


def _axis(key: str, meaning: str, upstream: type[Any], *others: type[Any], **planned: str) -> Axis:
    return Axis(
        key=key,
        meaning=meaning,
        upstream_symbol=upstream.upstream_symbol,
        strategies=MappingProxyType({cls.name: cls for cls in (upstream, *others)}),
        planned=MappingProxyType(planned),
        default=upstream.name,
    )


_ALL_AXES = (
    _axis(
        'buffer_grouping',
        'which parameters share a buffer',
        layout.UpstreamGrouping,
        layout.GradDtypeRules,
    ),
    _axis(
        'param_order',
        'in which order parameters lie in their buffer',
        layout.ReverseOrder,
        layout.ForwardOrder,
        layout.RandomOrder,
        layout.RecordedOrder,
    ),
    _axis(
        'bucketing',
        'where a buffer is cut into buckets; nowhere without overlap_grad_reduce',
        layout.FixedSizeBucketing,
        layout.CountBucketing,
        layout.FirstLastBucketing,
        layout.BalancedBucketing,
        layout.PerModuleBucketing,
        layout.ExplicitBucketing,
        layout.TimeOptimalBucketing,
    ),
    _axis(
        'bucket_isolation',
        'which parameters have a bucket to themselves',
        layout.SharedEmbeddingIsolation,
        layout.PatternIsolation,
    ),
    _axis(
        'padding',
        'where parameters may start and buckets may end',
        layout.MegatronPadding,
        layout.ByteAlignedPadding,
        layout.MinimalPadding,
    ),
    _axis(
        'bucket_groups',
        'which buckets communicate together',
        layout.MergeIntoLastFp8,
        layout.SeparateGroups,
        layout.SingleGroup,
        layout.NearestReadyGroups,
        layout.MergeIntoFirstFp8,
    ),
    _axis(
        'readiness',
        'when a bucket group has all its gradients',
        runtime.GoldenLazy,
        runtime.GoldenStatic,
        runtime.GoldenChecked,
        runtime.Deferred,
    ),
    _axis(
        'dispatch_order',
        'in which order ready groups are reduced',
        runtime.ArrivalDispatch,
        runtime.InOrderDispatch,
    ),
    _axis(
        'unused_params',
        'what happens to parameters without a gradient',
        runtime.UpstreamUnused,
        runtime.UnusedIsError,
        runtime.ZeroFillUnused,
    ),
    _axis(
        'scaling',
        'how gradients become an average',
        runtime.PrescaleScaling,
        runtime.AverageScaling,
        runtime.ShardPostscale,
        runtime.PremulSum,
    ),
    _axis(
        'accumulation',
        'how micro-batches add up in the grad buffer',
        runtime.ZeroThenAdd,
        runtime.FirstWrite,
    ),
    _axis(
        'grad_reduce',
        'which collective reduces gradients',
        runtime.UpstreamReduce,
        runtime.AllReduceGrads,
        runtime.ReduceScatterGrads,
        runtime.AllToAllFp32Sum,
    ),
    _axis(
        'param_gather',
        'how updated parameters reach every rank',
        runtime.UpstreamGather,
        runtime.EagerGather,
        runtime.PerDtypeGather,
    ),
    _axis(
        'finalize',
        'what happens between the last backward and the optimizer step',
        runtime.UpstreamFinalize,
        runtime.FinalizeSteps,
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
    buffer_grouping: StrategyParams = layout.UpstreamGrouping()
    param_order: StrategyParams = layout.ReverseOrder()
    bucketing: StrategyParams = layout.FixedSizeBucketing()
    bucket_isolation: StrategyParams = layout.SharedEmbeddingIsolation()
    padding: StrategyParams = layout.MegatronPadding()
    bucket_groups: StrategyParams = layout.MergeIntoLastFp8()
    readiness: StrategyParams = runtime.GoldenLazy()
    dispatch_order: StrategyParams = runtime.ArrivalDispatch()
    unused_params: StrategyParams = runtime.UpstreamUnused()
    scaling: StrategyParams = runtime.PrescaleScaling()
    accumulation: StrategyParams = runtime.ZeroThenAdd()
    grad_reduce: StrategyParams = runtime.UpstreamReduce()
    param_gather: StrategyParams = runtime.UpstreamGather()
    finalize: StrategyParams = runtime.UpstreamFinalize()
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
        check_compatible(self)

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
            changed = [
                f'{key}={_short(said)}'
                for key, said in values.items()
                if said != getattr(default, key, None) and said not in ((), {})
            ]
            strategy = f'={name}' if name is not None else ''
            arguments = f'({",".join(changed)})' if changed else ''
            differing.append(f'{field.name}{strategy}{arguments}')
        return ' '.join(differing) or 'upstream'


def _short(value: object) -> str:
    """A parameter's value on a part of one line, nearly as YAML's flow style has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = cast(Mapping[str, object], value).items()
        return f'{{{",".join(_cut([f"{key}:{_short(item)}" for key, item in items]))}}}'
    if isinstance(value, list | tuple):
        return f'[{",".join(_cut([_short(item) for item in cast(Sequence[object], value)]))}]'
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    if isinstance(value, str):
        text = value if len(value) <= 60 else f'{value[:25]}...{value[-30:]}'
        return text if _PLAIN.fullmatch(text) else repr(text)
    return str(value)


def _cut(items: list[str]) -> list[str]:
    """The first of many."""
    return items if len(items) <= 4 else [*items[:3], f'...{len(items) - 3} more']

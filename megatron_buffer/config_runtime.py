"""Parameters of the strategies that act at run time: readiness to finalize.

The first line of a docstring is the strategy's one-line meaning, and a string under a field
documents that parameter: the command line, the JSON schema and the error messages read them from
here. The code that acts on them is in ``strategies/``. Imports neither torch nor megatron.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue

from megatron_buffer.config_base import DDP, FINALIZE, PGB, EachOnce, Pattern, params_dataclass

# readiness ----------------------------------------------------------------------------------------


@params_dataclass
class GoldenLazy:
    """Counts gradients in the first batch, without overlap; later batches expect the same."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.register_grad_ready, reset'
    name: Literal['golden_lazy'] = 'golden_lazy'


@params_dataclass
class CountRule:
    """Parameters whose full name matches report so many gradients per backward pass."""

    pattern: Pattern
    """Shell-style pattern of parameter names."""
    count: Annotated[int, Field(ge=0)]
    """Gradients per backward pass: 2 for a parameter used in two re-entrant checkpoints, 0 for one
    that is not used."""


@params_dataclass
class GoldenStatic:
    """Counts known before the first batch, which so overlaps too; wrong ones are put right."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.register_grad_ready, reset'
    name: Literal['golden_static'] = 'golden_static'
    counts: Annotated[tuple[CountRule, ...], EachOnce] = ()
    """Counts that are known better, like {pattern: '*.shared.*', count: 2}; the first rule that
    matches decides. All others are read from the autograd graph of the first forward pass."""


@params_dataclass
class GoldenChecked:
    """As golden_lazy, but a gradient that comes after its group was dispatched is never lost."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.register_grad_ready, reset'
    name: Literal['golden_checked'] = 'golden_checked'
    on_late: Literal['reduce', 'error'] = 'reduce'
    """reduce: late gradients are kept aside, and all ranks reduce them together at finish; this
    costs one small all-reduce per iteration and process group. error: the first one stops the run,
    by name."""


@params_dataclass
class Deferred:
    """Nothing is reduced before backward has ended: no overlap (control)."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.register_grad_ready, reset'
    name: Literal['deferred'] = 'deferred'


# dispatch_order -----------------------------------------------------------------------------------


@params_dataclass
class ArrivalDispatch:
    """A group is reduced when it is ready, in the order of this rank's own autograd."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.register_grad_ready, reset'
    name: Literal['arrival'] = 'arrival'


@params_dataclass
class InOrderDispatch:
    """Groups are reduced in one order on every rank: as backward is expected to complete them."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.register_grad_ready, reset'
    name: Literal['in_order'] = 'in_order'


# unused_params ------------------------------------------------------------------------------------


@params_dataclass
class UpstreamUnused:
    """An error, by name, where stock asserts (overlap on, group partly ready), else a warning."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.finish_grad_sync'
    name: Literal['upstream'] = 'upstream'


@params_dataclass
class UnusedIsError:
    """A parameter without a gradient stops the run, by name."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.finish_grad_sync'
    name: Literal['error'] = 'error'


@params_dataclass
class ZeroFillUnused:
    """Zeros are reduced for it, with one warning that names it; overlap survives."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.finish_grad_sync'
    name: Literal['zero_fill'] = 'zero_fill'


# scaling ------------------------------------------------------------------------------------------


@params_dataclass
class PrescaleScaling:
    """Scaled before the reduction, as average_in_collective and per-token loss ask."""

    upstream_symbol: ClassVar[str] = f'{DDP}.__init__ (gradient_scaling_factor)'
    name: Literal['prescale'] = 'prescale'


@params_dataclass
class AverageScaling:
    """The collective averages (ReduceOp.AVG), whatever average_in_collective says."""

    upstream_symbol: ClassVar[str] = f'{DDP}.__init__ (gradient_scaling_factor)'
    name: Literal['average'] = 'average'


@params_dataclass
class ShardPostscale:
    """Summed unscaled; then only the owned shard is scaled. Not with fp16 gradients."""

    upstream_symbol: ClassVar[str] = f'{DDP}.__init__ (gradient_scaling_factor)'
    name: Literal['shard_postscale'] = 'shard_postscale'


@params_dataclass
class PremulSum:
    """NCCL multiplies each contribution while it sums. Needs NCCL, so GPUs."""

    upstream_symbol: ClassVar[str] = f'{DDP}.__init__ (gradient_scaling_factor)'
    name: Literal['premul_sum'] = 'premul_sum'


# accumulation -------------------------------------------------------------------------------------


@params_dataclass
class ZeroThenAdd:
    """The grad buffer is zeroed before each step, and every micro-batch adds to it."""

    upstream_symbol: ClassVar[str] = f'{DDP}._make_backward_post_hook'
    name: Literal['zero_then_add'] = 'zero_then_add'


@params_dataclass
class FirstWrite:
    """The first micro-batch overwrites the grad buffer, which so need not be zeroed before."""

    upstream_symbol: ClassVar[str] = f'{DDP}._make_backward_post_hook'
    name: Literal['first_write'] = 'first_write'


# grad_reduce --------------------------------------------------------------------------------------


@params_dataclass
class UpstreamReduce:
    """All-reduce, or reduce-scatter with the distributed optimizer: what ddp_config says."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.start_grad_sync'
    name: Literal['upstream'] = 'upstream'


@params_dataclass
class AllReduceGrads:
    """Whole buckets are all-reduced, with the distributed optimizer too."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.start_grad_sync'
    name: Literal['all_reduce'] = 'all_reduce'


@params_dataclass
class ReduceScatterGrads:
    """Each rank gets the sum of its own shard only. Needs the distributed optimizer."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.start_grad_sync'
    name: Literal['reduce_scatter'] = 'reduce_scatter'


@params_dataclass
class AllToAllFp32Sum:
    """Shards go to their owner in a narrow dtype and add up in fp32 (distributed optimizer)."""

    upstream_symbol: ClassVar[str] = (
        'megatron/core/distributed/reduce_scatter_with_fp32_accumulation.py: '
        'reduce_scatter_with_fp32_accumulation'
    )
    name: Literal['a2a_fp32_sum'] = 'a2a_fp32_sum'
    wire_dtype: Literal['bf16', 'fp16', 'fp32'] | None = None
    """Dtype on the wire; bf16 under an fp32 buffer halves the bytes. Gradients are converted only where
    that makes them smaller. null: that of the buffer."""


# param_gather -------------------------------------------------------------------------------------


@params_dataclass
class UpstreamGather:
    """Parameters are gathered per group; with overlap, when the forward pass first needs them."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.start_param_sync'
    name: Literal['upstream'] = 'upstream'


@params_dataclass
class EagerGather:
    """The gather that forward needs first starts right after the optimizer step."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.start_param_sync'
    name: Literal['eager'] = 'eager'


@params_dataclass
class PerDtypeGather:
    """No gather takes buckets of several dtypes together."""

    upstream_symbol: ClassVar[str] = f'{PGB}: _ParamAndGradBucketGroup.start_param_sync'
    name: Literal['per_dtype'] = 'per_dtype'


# finalize -----------------------------------------------------------------------------------------


@params_dataclass
class UpstreamFinalize:
    """Upstream's own steps, in upstream's order."""

    upstream_symbol: ClassVar[str] = f'{FINALIZE}: finalize_model_grads'
    name: Literal['upstream'] = 'upstream'


_Options = dict[str, dict[str, JsonValue]]


def _sorted(options: _Options) -> _Options:
    """One order for all spellings, so that equal configs also read alike."""
    return {step: dict(sorted(said.items())) for step, said in sorted(options.items())}


@params_dataclass
class FinalizeSteps:
    """Named steps in a given order, with options."""

    upstream_symbol: ClassVar[str] = f'{FINALIZE}: finalize_model_grads'
    name: Literal['steps'] = 'steps'
    order: tuple[str, ...] | None = None
    """Names of steps, upstream's or third parties', in the order they run in. null: upstream's."""
    options: Annotated[_Options, AfterValidator(_sorted)] = dataclasses.field(
        default_factory=dict[str, dict[str, JsonValue]], hash=False
    )
    """Options of single steps, such as {non_tp_grads: {chunk_bytes: 268435456}}."""

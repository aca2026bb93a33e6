"""``scaling``: how summed gradients become averages.

Stands for the ``gradient_scaling_factor`` rules of ``DistributedDataParallel.__init__``
(``megatron/core/distributed/distributed_data_parallel.py``) and the multiplication and reduce op in
``_ParamAndGradBucketGroup.start_grad_sync``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from megatron_buffer.config_runtime import AverageScaling as AverageParams
from megatron_buffer.config_runtime import PremulSum as PremulSumParams
from megatron_buffer.config_runtime import PrescaleScaling as PrescaleParams
from megatron_buffer.config_runtime import ShardPostscale as ShardPostscaleParams
from megatron_buffer.strategies.registry import strategy


class ScalingContext(NamedTuple):
    """What a buffer's scaling depends on.

    Attributes:
        dp_size: Size of the data-parallel group with context parallelism, over all optimizer instances.
        expert_dp_size: Size of the expert data-parallel group.
        is_expert_parallel: Whether the buffer is reduced over the expert data-parallel group.
        average_in_collective: ``ddp_config.average_in_collective``.
        per_token_loss: ``config.calculate_per_token_loss``: finalize divides by the token count.
    """

    dp_size: int
    expert_dp_size: int
    is_expert_parallel: bool
    average_in_collective: bool
    per_token_loss: bool


class ScalingPlan(NamedTuple):
    """Where the gradients of a bucket are multiplied, and by what.

    Attributes:
        factor: Multiplied into every rank's contribution; 1.0 is none.
        op: How contributions are added up: ``sum``, ``avg`` (divided by the number of ranks), or
            ``premul`` (a sum in which NCCL itself multiplies each contribution by ``factor``).
        post_factor: Multiplied into the result, once the reduction is complete; 1.0 is none.
    """

    factor: float
    op: Literal['sum', 'avg', 'premul']
    post_factor: float = 1.0

    @property
    def bucket_factor(self) -> float:
        """What the whole bucket is multiplied by before its collective; 1.0 is none."""
        return 1.0 if self.op == 'premul' else self.factor


UNSCALED = ScalingPlan(1.0, 'sum')


class Scaling(Protocol):
    """Chooses where the division by the data-parallel size happens."""

    def plan(self, context: ScalingContext) -> ScalingPlan:
        """Returns the plan for one buffer.

        The mean is over the dense data-parallel group for experts too. With per-token loss every
        strategy leaves gradients alone (:data:`UNSCALED`), because finalize does all of the scaling.
        """
        ...


def _averaged(context: ScalingContext) -> ScalingPlan:
    """An averaging collective divides by its own group's size only: experts have edp/dp left to do."""
    if context.is_expert_parallel:
        return ScalingPlan(context.expert_dp_size / context.dp_size, 'avg')
    return ScalingPlan(1.0, 'avg')


@strategy('scaling', PrescaleParams)
class Prescale:
    """Every gradient is multiplied by 1/dp before the sum, unless ddp_config has the collective average."""

    def __init__(self, params: PrescaleParams) -> None:
        self.params = params

    def plan(self, context: ScalingContext) -> ScalingPlan:
        """See the class."""
        if context.per_token_loss:
            return UNSCALED
        if context.average_in_collective:
            return _averaged(context)
        return ScalingPlan(1.0 / context.dp_size, 'sum')


@strategy('scaling', AverageParams)
class Average:
    """The collective averages, whatever ``ddp_config.average_in_collective`` says."""

    def __init__(self, params: AverageParams) -> None:
        self.params = params

    def plan(self, context: ScalingContext) -> ScalingPlan:
        """See the class."""
        return UNSCALED if context.per_token_loss else _averaged(context)


@strategy('scaling', ShardPostscaleParams)
class ShardPostscale:
    """Gradients are summed as they are, and only what this rank owns is multiplied by 1/dp after that.

    Where the whole bucket was all-reduced the whole bucket is multiplied: other readers than the
    owner's optimizer look at it there.
    """

    def __init__(self, params: ShardPostscaleParams) -> None:
        self.params = params

    def plan(self, context: ScalingContext) -> ScalingPlan:
        """See the class."""
        if context.per_token_loss:
            return UNSCALED
        return ScalingPlan(1.0, 'sum', 1.0 / context.dp_size)


@strategy('scaling', PremulSumParams)
class PremulSum:
    """NCCL multiplies each contribution by 1/dp as it reads it: no pass over the bucket is left."""

    def __init__(self, params: PremulSumParams) -> None:
        self.params = params

    def plan(self, context: ScalingContext) -> ScalingPlan:
        """See the class."""
        if context.per_token_loss:
            return UNSCALED
        return ScalingPlan(1.0 / context.dp_size, 'premul')

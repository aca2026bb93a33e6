"""``scaling``: how summed gradients become averages.

Stands for the ``gradient_scaling_factor`` rules of ``DistributedDataParallel.__init__``
(``megatron/core/distributed/distributed_data_parallel.py``) and the multiplication and reduce op in
``_ParamAndGradBucketGroup.start_grad_sync``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from megatron_buffer.config_runtime import PrescaleScaling as PrescaleParams
from megatron_buffer.strategies.registry import strategy


class ScalingContext(NamedTuple):
    """What a buffer's scaling depends on.

    Attributes:
        dp_size: Size of the data-parallel group with context parallelism.
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
    """The factor put on a bucket before its collective (1.0: none), and the collective's op."""

    factor: float
    op: Literal['sum', 'avg']


class Scaling(Protocol):
    """Chooses where the division by the data-parallel size happens."""

    def plan(self, context: ScalingContext) -> ScalingPlan:
        """Returns the plan for one buffer."""
        ...


@strategy('scaling', PrescaleParams)
class Prescale:
    """Every gradient is multiplied by 1/dp before the sum, unless the collective averages.

    The mean is over the dense data-parallel group for experts too. An averaging collective over the
    smaller expert group divides by its own size only, hence the edp/dp left to do before it.
    """

    def __init__(self, params: PrescaleParams) -> None:
        self.params = params

    def plan(self, context: ScalingContext) -> ScalingPlan:
        """See the class; with per-token loss finalize does all of the scaling."""
        if context.per_token_loss:
            return ScalingPlan(1.0, 'sum')
        if not context.average_in_collective:
            return ScalingPlan(1.0 / context.dp_size, 'sum')
        if context.is_expert_parallel:
            return ScalingPlan(context.expert_dp_size / context.dp_size, 'avg')
        return ScalingPlan(1.0, 'avg')

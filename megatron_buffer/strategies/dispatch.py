"""``dispatch_order``: when a complete bucket group's reduction is started.

Stands for the call of ``start_grad_sync`` at the end of
``_ParamAndGradBucketGroup.register_grad_ready`` (``megatron/core/distributed/param_and_grad_buffer.py``).
"""

from __future__ import annotations

from typing import Protocol

from megatron_buffer.config_runtime import ArrivalDispatch as ArrivalDispatchParams
from megatron_buffer.strategies.registry import strategy


class ReducibleGroup(Protocol):
    """What a dispatch strategy may do with a bucket group."""

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Starts the group's reduction."""
        ...


class DispatchOrder(Protocol):
    """Decides what happens when a group's last gradient is in."""

    def group_ready(self, group: ReducibleGroup, force_all_reduce: bool) -> None:
        """Starts the reduction of ``group``, now or (in a fixed order) later."""
        ...


@strategy('dispatch_order', ArrivalDispatchParams)
class Arrival:
    """At once, in whatever order this rank's backward completes the groups."""

    def __init__(self, params: ArrivalDispatchParams) -> None:
        self.params = params

    def group_ready(self, group: ReducibleGroup, force_all_reduce: bool) -> None:
        """Starts the reduction."""
        group.start_grad_sync(force_all_reduce=force_all_reduce)

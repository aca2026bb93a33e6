"""``dispatch_order``: when a complete bucket group's reduction is started, and in which order.

Stands for the call of ``start_grad_sync`` at the end of
``_ParamAndGradBucketGroup.register_grad_ready`` (``megatron/core/distributed/param_and_grad_buffer.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from megatron_buffer.config_runtime import ArrivalDispatch as ArrivalDispatchParams
from megatron_buffer.config_runtime import InOrderDispatch as InOrderDispatchParams
from megatron_buffer.strategies.registry import strategy


class ReducibleGroup(Protocol):
    """What a dispatcher may do with a bucket group.

    Attributes:
        grad_reduce_dispatched: True once its reduction was started in this window.
    """

    grad_reduce_dispatched: bool

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Starts the group's reduction."""
        ...


class Dispatcher(Protocol):
    """Starts the reductions of one model chunk's groups.

    Attributes:
        holding: The groups that wait for each other, in their order; empty if none do. All ranks have
            the same, so whoever tells a dispatcher to drop some tells all ranks alike.
    """

    holding: Sequence[ReducibleGroup]

    def group_ready(self, group: ReducibleGroup, force_all_reduce: bool) -> None:
        """The group's last gradient is in: starts its reduction, now or later."""
        ...

    def hold(self, groups: Sequence[ReducibleGroup]) -> None:
        """From the next window on, only these groups wait for each other; the others go at finish."""
        ...

    def begin_backward(self) -> None:
        """The chunk's synchronised backward pass begins."""
        ...

    def flush(self, force_all_reduce: bool) -> None:
        """Backward is over: starts what has not been started yet."""
        ...

    def reset(self) -> None:
        """A new window begins."""
        ...


class Peers:
    """The dispatchers of the model chunks that share communicators, for an order across chunks."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[InOrderDispatcher] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, dispatcher: InOrderDispatcher) -> None:
        """Adds a chunk's dispatcher."""
        self._members.add(dispatcher)

    def others(self, dispatcher: InOrderDispatcher) -> list[InOrderDispatcher]:
        """Every other chunk's dispatcher."""
        return [other for other in self._members if other is not dispatcher]


class DispatchOrder(Protocol):
    """Makes the dispatcher of a model chunk."""

    def dispatcher(
        self, groups: Sequence[ReducibleGroup], ready_at: Sequence[int], peers: Peers | None = None
    ) -> Dispatcher:
        """Returns the dispatcher of one chunk.

        Args:
            groups: The chunk's groups, dense ones first, in upstream's order.
            ready_at: For each group the lowest forward index among its parameters: backward completes
                the group when it gets there, so a smaller number is later.
            peers: The chunks of an interleaved schedule, which take turns; None without one.
        """
        ...


class ArrivalDispatcher:
    """A group's reduction starts when the group is complete."""

    holding: Sequence[ReducibleGroup] = ()

    def group_ready(self, group: ReducibleGroup, force_all_reduce: bool) -> None:
        """Starts the reduction."""
        group.start_grad_sync(force_all_reduce=force_all_reduce)

    def hold(self, groups: Sequence[ReducibleGroup]) -> None:
        """Nobody waits for anybody."""

    def begin_backward(self) -> None:
        """Means nothing here."""

    def flush(self, force_all_reduce: bool) -> None:
        """Nothing: a group that is not started yet starts when finish comes to it, as in stock."""

    def reset(self) -> None:
        """Keeps no state."""


@strategy('dispatch_order', ArrivalDispatchParams)
class Arrival:
    """At once, in whatever order this rank's backward completes the groups."""

    def __init__(self, params: ArrivalDispatchParams) -> None:
        self.params = params

    def dispatcher(
        self, groups: Sequence[ReducibleGroup], ready_at: Sequence[int], peers: Peers | None = None
    ) -> ArrivalDispatcher:
        """See the class."""
        return ArrivalDispatcher()


class InOrderDispatcher:
    """Groups start in one order, each when it and all before it are complete.

    On a rank where a group never becomes complete, those behind it wait for finish; on the others they
    do not, and yet the order is the same. Groups that no rank expects a gradient for would hold up
    everybody, so they are taken out of the sequence, by agreement, and go last.
    """

    def __init__(
        self, groups: Sequence[ReducibleGroup], ready_at: Sequence[int], peers: Peers | None
    ) -> None:
        order = sorted(range(len(groups)), key=lambda i: (-ready_at[i], i))
        self.sequence = [groups[i] for i in order]
        self.holding: Sequence[ReducibleGroup] = self.sequence
        self._next_holding: Sequence[ReducibleGroup] = self.sequence
        self._ready: set[int] = set()
        self._position = 0
        self._began = False
        self._force_all_reduce = False
        self._peers = peers
        if peers is not None:
            peers.add(self)

    def group_ready(self, group: ReducibleGroup, force_all_reduce: bool) -> None:
        """Starts what has come to the head of the sequence."""
        self.begin_backward()
        self._force_all_reduce = force_all_reduce
        self._ready.add(id(group))
        while self._position < len(self.holding):
            head = self.holding[self._position]
            if id(head) not in self._ready and not head.grad_reduce_dispatched:
                return
            self._start(head)
            self._position += 1

    def hold(self, groups: Sequence[ReducibleGroup]) -> None:
        """See the class; an agreement in the middle of a window must not change its order."""
        wanted = {id(group) for group in groups}
        self._next_holding = [group for group in self.sequence if id(group) in wanted]

    def begin_backward(self) -> None:
        """The chunks before this one are done with backward, complete or not: their groups go first."""
        if self._began or self._peers is None:
            return
        self._began = True
        for other in self._peers.others(self):
            if other._began:
                other._flush_holding()

    def flush(self, force_all_reduce: bool) -> None:
        """Starts the rest of the sequence, then the groups that nobody waits for."""
        self._force_all_reduce = force_all_reduce
        self._flush_holding()
        for group in self.sequence:
            self._start(group)

    def reset(self) -> None:
        """A new window, with what :meth:`hold` has said meanwhile."""
        self.holding = self._next_holding
        self._ready.clear()
        self._position = 0
        self._began = False

    def _flush_holding(self) -> None:
        for group in self.holding[self._position :]:
            self._start(group)
        self._position = len(self.holding)

    def _start(self, group: ReducibleGroup) -> None:
        if not group.grad_reduce_dispatched:
            group.start_grad_sync(force_all_reduce=self._force_all_reduce)


@strategy('dispatch_order', InOrderDispatchParams)
class InOrder:
    """The order in which backward is expected to complete the groups, on every rank.

    It comes from the agreed layout, never from the running rank, and takes dense and expert groups
    together. List order would not do: lists go buffer by buffer, and a whole buffer would wait for the
    embedding that ends the one before it.
    """

    def __init__(self, params: InOrderDispatchParams) -> None:
        self.params = params

    def dispatcher(
        self, groups: Sequence[ReducibleGroup], ready_at: Sequence[int], peers: Peers | None = None
    ) -> InOrderDispatcher:
        """See the class."""
        return InOrderDispatcher(groups, ready_at, peers)

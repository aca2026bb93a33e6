"""``readiness``: when all gradients of a bucket group are in.

Stands for the counting in ``_ParamAndGradBucketGroup.register_grad_ready`` and ``reset``
(``megatron/core/distributed/param_and_grad_buffer.py``). A tracker is a small state machine over any
hashable parameters, so it is tested without a model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

from megatron_buffer.config_runtime import GoldenLazy as GoldenLazyParams
from megatron_buffer.strategies.registry import strategy

Counts = dict[Hashable, int]


class ReadinessTracker(Protocol):
    """Counts one group's gradients over a window (zero_grad_buffer to zero_grad_buffer).

    Attributes:
        counts: How often each parameter was registered in this window.
        golden: How often each has to be registered; empty until known.
        is_first_batch: True until ``golden`` is known.
    """

    counts: Counts
    golden: Counts
    is_first_batch: bool

    def register(self, param: Hashable) -> bool:
        """Counts a gradient; returns True when the group became complete with it."""
        ...

    def reset(self) -> None:
        """Ends the window."""
        ...

    def is_regular(self) -> bool:
        """True when nothing is missing and nothing is too much; cheap, asked once per window."""
        ...

    def missing(self) -> list[Hashable]:
        """Parameters that still wait for a gradient in this window."""
        ...

    def surplus(self) -> list[Hashable]:
        """Parameters that got more gradients than expected in this window."""
        ...


class Readiness(Protocol):
    """Makes the tracker of a group."""

    def tracker(self, params: Iterable[Hashable]) -> ReadinessTracker:
        """Returns a new tracker over ``params``."""
        ...


class GoldenLazyTracker:
    """Learns the counts in the first window that has any, and waits for the same counts later.

    Complete means that every parameter was registered exactly as often as in the learned window.
    ``_unequal`` is the number of parameters whose count differs from the golden one, so a gradient
    costs two look-ups instead of a comparison of whole dictionaries.
    """

    def __init__(self, params: Iterable[Hashable]) -> None:
        self.params = list(params)
        self.is_first_batch = True
        self._counts: Counts = {}
        self._golden: Counts = {}
        self._unequal = 0

    @property
    def counts(self) -> Counts:
        """Counts of this window."""
        return self._counts

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self._counts = counts
        self._recount()

    @property
    def golden(self) -> Counts:
        """Counts of the learned window."""
        return self._golden

    @golden.setter
    def golden(self, counts: Counts) -> None:
        self._golden = counts
        self._recount()

    def register(self, param: Hashable) -> bool:
        """Counts a gradient; in the learned windows tells when the group became complete."""
        count = self._counts.get(param, 0)
        self._counts[param] = count + 1
        if self.is_first_batch:
            return False
        expected = self._golden.get(param, 0)
        if count + 1 == expected:
            self._unequal -= 1
        elif count == expected:
            self._unequal += 1
        return self._unequal == 0

    def reset(self) -> None:
        """Learns the counts if there were any and none are known; starts a new window.

        No count at all teaches nothing: buffers are also zeroed before the first backward, and under
        aligned grad sync gradients are never registered.
        """
        if self.is_first_batch and self.counts:
            self._golden = self.counts
            self.is_first_batch = False
        self.counts = {}

    def is_regular(self) -> bool:
        """In the first window all parameters or none; later, exactly the golden counts."""
        if self.is_first_batch:
            return len(self._counts) in (0, len(self.params))
        return self._unequal == 0

    def missing(self) -> list[Hashable]:
        """In the first window, parameters without any gradient; later, those short of golden."""
        if self.is_first_batch:
            return [param for param in self.params if param not in self.counts]
        return [p for p in self.params if self.counts.get(p, 0) < self._golden.get(p, 0)]

    def surplus(self) -> list[Hashable]:
        """Parameters registered more often than in the learned window."""
        if self.is_first_batch:
            return []
        return [p for p in self.params if self.counts.get(p, 0) > self._golden.get(p, 0)]

    def _recount(self) -> None:
        params = self._golden.keys() | self.counts.keys()
        self._unequal = sum(self.counts.get(p, 0) != self._golden.get(p, 0) for p in params)


@strategy('readiness', GoldenLazyParams)
class GoldenLazy:
    """Golden counts learned in the first iteration; nothing overlaps in that one."""

    def __init__(self, params: GoldenLazyParams) -> None:
        self.params = params

    def tracker(self, params: Iterable[Hashable]) -> GoldenLazyTracker:
        """A tracker that has learned nothing yet."""
        return GoldenLazyTracker(params)

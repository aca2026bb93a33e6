"""``readiness``: when all gradients of a bucket group are in.

Stands for the counting in ``_ParamAndGradBucketGroup.register_grad_ready`` and ``reset``
(``megatron/core/distributed/param_and_grad_buffer.py``). A tracker is a small state machine over any
hashable parameters, so it is tested without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from megatron_buffer.config_runtime import Deferred as DeferredParams
from megatron_buffer.config_runtime import GoldenChecked as GoldenCheckedParams
from megatron_buffer.config_runtime import GoldenLazy as GoldenLazyParams
from megatron_buffer.config_runtime import GoldenStatic as GoldenStaticParams
from megatron_buffer.strategies.names import matches
from megatron_buffer.strategies.registry import strategy

Counts = dict[Hashable, int]
OnLate = Literal['warn', 'reduce', 'error']


class ReadinessTracker(Protocol):
    """Counts one group's gradients over a window (zero_grad_buffer to zero_grad_buffer).

    Attributes:
        counts: How often each parameter was registered in this window.
        golden: How often each has to be registered; empty until known.
        is_first_batch: True until ``golden`` is known.
        adapts: True if each finished window sets ``golden`` for the next one.
    """

    counts: Counts
    golden: Counts
    is_first_batch: bool
    adapts: bool

    def register(self, param: Hashable) -> bool:
        """Counts a gradient; returns True when the group became complete with it."""
        ...

    def expect(self, golden: Counts) -> None:
        """Sets the counts that this and later windows are compared with."""
        ...

    def reset(self, finished: bool = True) -> None:
        """Ends the window.

        Args:
            finished: False when the window was broken off, so that its counts teach nothing.
        """
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
    """Makes the tracker of a group.

    Attributes:
        on_late: What becomes of a gradient that comes after its group was dispatched: ``warn`` (it is
            added as stock does, and named), ``reduce`` (kept aside and reduced at finish) or ``error``.
        predicts: True if counts are read from the autograd graph of the first forward pass.
    """

    on_late: OnLate
    predicts: bool

    def tracker(self, params: Iterable[Hashable], *, adapts: bool = False) -> ReadinessTracker:
        """Returns a new tracker over ``params``.

        Args:
            params: The group's parameters.
            adapts: Another axis asks that each window teach the next one.
        """
        ...

    def known_counts(self, names: Mapping[Any, str]) -> Counts:
        """Counts that the config declares, for those of the named parameters that it mentions."""
        ...


class CountTracker:
    """Compares counts with those of an earlier window, or with a prediction.

    Complete means that every parameter was registered exactly as often as expected. A gradient takes one of as
    many places as are expected: only when all are taken can they be the expected ones, and only then are they
    compared. If they are other ones, more cannot mend it.

    Args:
        params: The group's parameters.
        adapts: Every finished window sets what the next one expects; otherwise the first one does, for
            good.
        overlaps: False never calls a group complete: everything is dispatched at finish.
    """

    __slots__ = (
        '_beyond',
        '_expected',
        '_expected_once',
        '_golden',
        '_index',
        '_is_complete',
        '_is_first_batch',
        '_num_open',
        '_overlaps',
        '_places',
        'adapts',
        'params',
    )

    def __init__(
        self, params: Iterable[Hashable], *, adapts: bool = False, overlaps: bool = True
    ) -> None:
        self.params = list(params)
        self.adapts = adapts
        self._is_first_batch = True
        self._overlaps = overlaps
        self._index = {param: i for i, param in enumerate(self.params)}
        # Indices of the parameters whose gradients came: expected ones from the last place to the first, then others.
        self._places: list[int] = []
        self._num_open = 0
        self._beyond: list[int] = []
        self._is_complete = False
        self._golden: Counts = {}
        self._expected: Counter[int] = Counter()  # golden, by index
        self._expected_once: set[int] | None = None  # golden, where nothing is expected twice

    @property
    def is_first_batch(self) -> bool:
        """True until ``golden`` is known."""
        return self._is_first_batch

    @is_first_batch.setter
    def is_first_batch(self, value: bool) -> None:
        self._is_first_batch = value
        self._set_expected()

    @property
    def counts(self) -> Counts:
        """Counts of this window, of the parameters that have any; a copy."""
        numbers = Counter(self._arrived())
        return {param: n for i, param in enumerate(self.params) if (n := numbers[i])}

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self._start_with([self._index[param] for param, n in counts.items() for _ in range(n)])

    @property
    def num_counted(self) -> int:
        """How many parameters have a count in this window."""
        return len(set(self._arrived()))

    @property
    def golden(self) -> Counts:
        """Counts that are expected; a parameter without an entry is not waited for."""
        return self._golden

    @golden.setter
    def golden(self, counts: Counts) -> None:
        self._golden = counts
        self._set_expected()

    def expect(self, golden: Counts) -> None:
        """From now on a group is complete when it has these counts."""
        self._golden = {param: count for param, count in golden.items() if count}
        self.is_first_batch = False

    def register(self, param: Hashable) -> bool:
        """Counts a gradient; where counts are known, tells whether the group became complete."""
        return self.register_at(self._index[param])

    @property
    def counts_by_place(self) -> bool:
        """Whether ``register_at`` does what ``register`` does: not where a subclass has one of its own."""
        return type(self).register is CountTracker.register

    def place(self, param: Hashable) -> int:
        """What ``register_at`` takes for ``param``."""
        return self._index[param]

    def register_at(self, index: int) -> bool:
        """``register`` for a parameter that was looked up before."""
        still_open = self._num_open - 1
        if still_open > 0:
            self._num_open = still_open
            self._places[still_open] = index
            return False
        if still_open < 0:
            self._beyond.append(index)
            return False
        self._num_open = 0
        self._places[0] = index
        self._is_complete = self._are_expected()
        return self._is_complete and self._overlaps

    def _arrived(self) -> list[int]:
        """Indices of the parameters whose gradients came, in no certain order."""
        return self._places[self._num_open :] + self._beyond

    def _start_with(self, arrived: Sequence[int]) -> None:
        """A window in which these came, which completes nothing."""
        self._is_complete = False
        self._num_open = max(0, len(self._places) - len(arrived))
        taken = len(self._places) - self._num_open
        self._places[self._num_open :] = arrived[:taken]
        self._beyond = list(arrived[taken:])

    def reset(self, finished: bool = True) -> None:
        """Learns from the window, where there is something to learn; starts a new one.

        No count at all teaches nothing: buffers are also zeroed before the first backward, and under
        aligned grad sync gradients are never registered. Nor does a window that was broken off.
        """
        if self._is_first_batch or (self.adapts and not self.is_regular()):
            counted = self.num_counted
            if counted and (finished or counted == len(self.params)):
                self._golden = self.counts
                self.is_first_batch = False
        self._num_open = len(self._places)
        if self._beyond:
            self._beyond = []
        self._is_complete = False

    def is_regular(self) -> bool:
        """In the first window all parameters or none; later, exactly the golden counts."""
        if self._is_first_batch:
            return self.num_counted in (0, len(self.params))
        if self._num_open or self._beyond:
            return False
        return self._is_complete or self._are_expected()

    def missing(self) -> list[Hashable]:
        """In the first window, parameters without any gradient; later, those short of golden."""
        every = range(len(self.params))
        wanted = Counter(every) if self._is_first_batch else self._expected
        short = wanted - Counter(self._arrived())
        return [self.params[i] for i in every if i in short]

    def surplus(self) -> list[Hashable]:
        """Parameters registered more often than expected."""
        if self._is_first_batch:
            return []
        extra = Counter(self._arrived()) - self._expected
        return [param for i, param in enumerate(self.params) if i in extra]

    def _are_expected(self) -> bool:
        """Whether as many gradients as expected are the expected ones."""
        if self._expected_once is not None:
            return set(self._places) == self._expected_once
        return Counter(self._places) == self._expected

    def _set_expected(self) -> None:
        arrived = self._arrived()
        golden = {} if self._is_first_batch else self._golden
        self._expected = Counter(
            {i: n for i, param in enumerate(self.params) if (n := golden.get(param, 0))}
        )
        once = self._expected.total() == len(self._expected)
        self._expected_once = set(self._expected) if once else None
        self._places = [0] * self._expected.total()
        self._start_with(arrived)


@strategy('readiness', GoldenLazyParams)
class GoldenLazy:
    """Golden counts learned in the first iteration; nothing overlaps in that one."""

    on_late: OnLate = 'warn'
    predicts = False

    def __init__(self, params: GoldenLazyParams) -> None:
        self.params = params

    def tracker(self, params: Iterable[Hashable], *, adapts: bool = False) -> CountTracker:
        """A tracker that has learned nothing yet."""
        return CountTracker(params, adapts=adapts)

    def known_counts(self, names: Mapping[Any, str]) -> Counts:
        """None."""
        return {}


@strategy('readiness', GoldenCheckedParams)
class GoldenChecked:
    """Each window expects the counts of the one before; late gradients are reduced, or are an error."""

    predicts = False

    def __init__(self, params: GoldenCheckedParams) -> None:
        self.params = params
        self.on_late: OnLate = params.on_late

    def tracker(self, params: Iterable[Hashable], *, adapts: bool = False) -> CountTracker:
        """A tracker that has learned nothing yet, and learns from every window."""
        return CountTracker(params, adapts=True)

    def known_counts(self, names: Mapping[Any, str]) -> Counts:
        """None."""
        return {}


@strategy('readiness', GoldenStaticParams)
class GoldenStatic:
    """Counts declared by pattern, or read from the graph of the first forward pass; late ones are reduced."""

    on_late: OnLate = 'reduce'
    predicts = True

    def __init__(self, params: GoldenStaticParams) -> None:
        self.params = params

    def tracker(self, params: Iterable[Hashable], *, adapts: bool = False) -> CountTracker:
        """A tracker that is told what to expect before the first backward, and learns afterwards."""
        return CountTracker(params, adapts=True)

    def known_counts(self, names: Mapping[Any, str]) -> Counts:
        """The count of the first rule that matches, for each parameter that any rule matches."""
        found: Counts = {}
        for param, name in names.items():
            for rule in self.params.counts:
                if matches(name, rule.pattern):
                    found[param] = rule.count
                    break
        return found

    def patterns(self) -> list[tuple[str, str]]:
        """Where each pattern is in the config, and the pattern."""
        return [(f'counts[{i}].pattern', rule.pattern) for i, rule in enumerate(self.params.counts)]


@strategy('readiness', DeferredParams)
class Deferred:
    """No group is ever complete before finish."""

    on_late: OnLate = 'warn'
    predicts = False

    def __init__(self, params: DeferredParams) -> None:
        self.params = params

    def tracker(self, params: Iterable[Hashable], *, adapts: bool = False) -> CountTracker:
        """A tracker that counts, for the sake of unused parameters, and never calls a group complete."""
        return CountTracker(params, adapts=True, overlaps=False)

    def known_counts(self, names: Mapping[Any, str]) -> Counts:
        """None."""
        return {}

"""``bucketing``: where a buffer is cut into buckets, the units of communication.

Stands for the cut inside ``DistributedOptimizer._compute_per_buffer_param_layout``
(``megatron/core/optimizer/distrib_optimizer.py``) and ``_compute_default_per_buffer_param_layout``
(``megatron/core/distributed/param_and_grad_buffer.py``). A cut is only ever made at a parameter's end.

All strategies but upstream's plan their cuts beforehand, from the parameters' sizes without the gaps
between them (see :mod:`megatron_buffer.strategies.cuts`), and separately for each run of parameters that
are not alone in their bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from megatron_buffer.config_layout import BalancedBucketing as BalancedParams
from megatron_buffer.config_layout import CountBucketing as CountParams
from megatron_buffer.config_layout import ExplicitBucketing as ExplicitParams
from megatron_buffer.config_layout import FirstLastBucketing as FirstLastParams
from megatron_buffer.config_layout import FixedSizeBucketing as FixedSizeParams
from megatron_buffer.config_layout import PerModuleBucketing as PerModuleParams
from megatron_buffer.strategies import cuts
from megatron_buffer.strategies.names import matches_any, outermost_module
from megatron_buffer.strategies.registry import strategy
from megatron_buffer.strategies.specs import ParamSpec


class OpenBucket(NamedTuple):
    """The bucket being filled, just after a parameter was placed in it.

    Attributes:
        position: Index of that parameter in layout order.
        start_elems: Start of the bucket in its buffer.
        end_elems: End of that parameter (alignment gaps before it included, end pad excluded).
    """

    position: int
    start_elems: int
    end_elems: int


Cutter = Callable[[OpenBucket], bool]


class Bucketing(Protocol):
    """Decides after each parameter whether its bucket ends there.

    One that has to know more of a buffer may have a method ``for_buffer(buffer, alignment, sharded)``: from
    the buffer's :class:`BufferTraits`, its alignment and whether the distributed optimizer is on, it returns
    the object whose ``cutter`` is asked instead.
    """

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """Prepares the decisions for one buffer.

        Args:
            params: The buffer's parameters in layout order.
            alone: Which of them have a bucket of their own anyway; nobody is asked about those.
            bucket_size_elems: What ddp_config and Megatron's rules resolve to; None where Megatron
                wants one bucket (no overlap, pipeline rank above 0, later model chunks).

        Returns:
            A function of the open bucket: True closes it.
        """
        ...


@strategy('bucketing', FixedSizeParams)
class FixedSize:
    """Closes a bucket as soon as it holds at least ``bucket_size_elems`` elements, gaps included."""

    def __init__(self, params: FixedSizeParams) -> None:
        self.params = params

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """A size of the config takes the place of a resolved one, never of "one bucket"."""
        if bucket_size_elems is None:
            return _never
        limit_elems = self.params.bucket_size_elems or bucket_size_elems
        return lambda bucket: bucket.end_elems - bucket.start_elems >= limit_elems


@strategy('bucketing', CountParams)
class Count:
    """So many buckets, each cut as near to its equal share of the elements as a parameter's end can be."""

    def __init__(self, params: CountParams) -> None:
        self.params = params

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """Where parameters that are alone divide the others into runs, each run gets its share."""
        if bucket_size_elems is None:
            return _never
        runs = cuts.runs_of(alone)
        numels = [_numels(params, run) for run in runs]
        shares = cuts.apportion(
            [sum(of_run) for of_run in numels], [len(run) for run in runs], self.params.num_buckets
        )
        return _at(
            run[cut]
            for run, of_run, share in zip(runs, numels, shares, strict=True)
            for cut in cuts.near_equal(of_run, share)
        )


@strategy('bucketing', FirstLastParams)
class FirstLast:
    """A first bucket of one size, a last one of another, and a third size between.

    The first bucket comes first: if what it leaves is less than the last one's size, that is the last
    bucket. What the buckets between leave over goes into a bucket of its own.
    """

    def __init__(self, params: FirstLastParams) -> None:
        self.params = params

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """First and last are those of the buffer; a parameter that is alone is neither."""
        if bucket_size_elems is None:
            return _never
        between_elems = self.params.bucket_size_elems or bucket_size_elems
        positions: list[int] = []
        runs = cuts.runs_of(alone)
        for run in runs:
            numels = _numels(params, run)
            start, end = 0, len(run)
            if run is runs[0]:
                start = next(
                    (c + 1 for c in cuts.by_size(numels, self.params.first_size_elems)), end
                )
            if run is runs[-1]:
                end = max(start, cuts.shortest_suffix(numels, self.params.last_size_elems))
            between = cuts.by_size(numels[start:end], between_elems)
            found = [start - 1, *(start + cut for cut in between), end - 1]
            positions += [run[cut] for cut in found if 0 <= cut < len(run) - 1]
        return _at(positions)


@strategy('bucketing', BalancedParams)
class Balanced:
    """As many buckets as the size asks for, the largest of them as small as it can be."""

    def __init__(self, params: BalancedParams) -> None:
        self.params = params

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """Of all ways to keep the largest bucket that small, one whose cuts are near equal shares."""
        if bucket_size_elems is None:
            return _never
        size_elems = max(1, self.params.bucket_size_elems or bucket_size_elems)
        positions: list[int] = []
        for run in cuts.runs_of(alone):
            numels = _numels(params, run)
            parts = min(max(1, sum(numels) // size_elems), len(run))
            limit = cuts.smallest_limit(numels, parts)
            positions += [run[cut] for cut in cuts.near_equal(numels, parts, limit)]
        return _at(positions)


@strategy('bucketing', PerModuleParams)
class PerModule:
    """Closes a bucket behind every so many modules that match.

    A module ends where the next parameter belongs to another one; a module whose parameters do not lie
    together ends, and counts, several times.
    """

    needs_names = True

    def __init__(self, params: PerModuleParams) -> None:
        self.params = params

    def patterns(self) -> list[tuple[str, str]]:
        """YAML path inside the axis and pattern; the pattern is one of module names."""
        return [('pattern', self.params.pattern)]

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """Parameters outside of any module share its label with the one before, or else the first."""
        if bucket_size_elems is None:
            return _never
        positions: list[int] = []
        for run in cuts.runs_of(alone):
            modules = [outermost_module(params[i].name, self.params.pattern) for i in run]
            labels: list[str] = []
            label = next(filter(None, modules), '')
            for module in modules:
                label = module or label
                labels.append(label)
            found = cuts.behind_changes(labels, self.params.modules_per_bucket)
            positions += [run[cut] for cut in found]
        return _at(positions)


@strategy('bucketing', ExplicitParams)
class Explicit:
    """Closes a bucket behind each parameter whose name matches."""

    needs_names = True

    def __init__(self, params: ExplicitParams) -> None:
        self.params = params

    def patterns(self) -> list[tuple[str, str]]:
        """YAML path inside the axis and pattern, for each boundary."""
        return [(f'boundaries[{i}]', pattern) for i, pattern in enumerate(self.params.boundaries)]

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """A parameter without a known name is no boundary."""
        if bucket_size_elems is None:
            return _never
        return _at(
            i for i, spec in enumerate(params) if matches_any(spec.name, self.params.boundaries)
        )


def _never(bucket: OpenBucket) -> bool:
    return False


def _at(positions: Iterable[int]) -> Cutter:
    planned = frozenset(positions)
    return lambda bucket: bucket.position in planned


def _numels(params: Sequence[ParamSpec], run: range) -> list[int]:
    return [params[i].numel_elems for i in run]

"""Looks for the config with the least exposed communication, by simulating one after the other.

Upstream has no counterpart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_buffer import config_layout as layout
from megatron_buffer.config import BufferConfig
from megatron_buffer.config_runtime import InOrderDispatch
from megatron_buffer.errors import ConfigError, LayoutError
from megatron_buffer.planner.scene import Outcome, Scene
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.time_optimal import TimeOptimal

_SIZES = 49
_MOST_BUCKETS = 400
_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
_MODULES = (1, 2, 4, 8)
_EVALUATIONS = 240


class Candidate(NamedTuple):
    """A config that was tried.

    Attributes:
        what: What it changes, in words.
        config: The config.
        outcome: What came of it.
        bucket_size_elems: Of a candidate of the sweep over fixed sizes, else None.
    """

    what: str
    config: BufferConfig
    outcome: Outcome
    bucket_size_elems: int | None = None

    @property
    def exposed_s(self) -> float:
        """What it is ranked by."""
        return self.outcome.timeline.exposed_s

    @property
    def num_groups(self) -> int:
        """Bucket groups of the stage."""
        return sum(len(chunk.view.groups) for chunk in self.outcome.stage.chunks)

    def key(self) -> tuple[float, int, bool]:
        """Less is better: exposed time to a microsecond, then fewer collectives, then the plainer rule."""
        return round(self.exposed_s, 6), self.num_groups, self.bucket_size_elems is None


class Found(NamedTuple):
    """What a search found.

    Attributes:
        asked: The config that was given, as it is.
        ranking: All candidates, the best first.
        skipped: What could not be tried, and why.
    """

    asked: Candidate
    ranking: list[Candidate]
    skipped: list[str]

    @property
    def sweep(self) -> list[Candidate]:
        """Those with fixed sizes, the smallest first."""
        fixed = [c for c in self.ranking if c.bucket_size_elems is not None]
        return sorted(fixed, key=lambda c: c.bucket_size_elems or 0)


def search(scene: Scene, progress: Callable[[int, int], None] = lambda done, total: None) -> Found:
    """Tries fixed sizes, the other rules of bucketing, and what goes with them.

    Args:
        scene: The job, with the config that others are made from.
        progress: Called with the number of candidates tried, and how many there will be at least.
    """
    base = scene.request.config
    # A size of ddp_config's would contradict those that are tried.
    ddp = dataclasses.replace(scene.request.ddp, bucket_size=None, num_buckets=None)
    asked = Candidate('as given', base, scene.run(scene.runtime(base)))
    ranking: list[Candidate] = []
    skipped: list[str] = []
    planned = list(_candidates(scene, base))
    for done, (what, changes) in enumerate(planned):
        config = dataclasses.replace(base, source=what, **changes)
        bucketing = changes.get('bucketing')
        size = (
            bucketing.bucket_size_elems
            if isinstance(bucketing, layout.FixedSizeBucketing)
            else None
        )
        try:
            ranking.append(Candidate(what, config, scene.run(Runtime(config), ddp), size))
        except (ConfigError, LayoutError) as error:
            skipped.append(f'{what}: {error}')
        progress(done + 1, len(planned))
    ranking += _timed(scene, base, ddp)
    ranking.sort(key=Candidate.key)
    best = _refined(scene, base, ddp, ranking, progress, len(planned))
    if best is not None:
        ranking.append(best)
        ranking.sort(key=Candidate.key)
    return Found(asked, ranking, skipped)


def _candidates(scene: Scene, base: BufferConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What is changed, and how."""
    total = max(sum(p.numel_elems for p in params) for params in scene.chunks.values())
    for size in _sizes(total):
        yield f'fixed_size {size:,}', {
            'bucketing': layout.FixedSizeBucketing(bucket_size_elems=size)
        }
    for count in _COUNTS:
        yield f'count {count}', {'bucketing': layout.CountBucketing(num_buckets=count)}
    for size in _sizes(total)[::6]:
        yield f'balanced {size:,}', {'bucketing': layout.BalancedBucketing(bucket_size_elems=size)}
    for modules in _MODULES:
        yield (
            f'per_module {modules}',
            {'bucketing': layout.PerModuleBucketing(modules_per_bucket=modules)},
        )
    for last in _sizes(total)[::8]:
        for between in _sizes(total)[::8]:
            if last < between:
                yield (
                    f'first_last {last:,}, {between:,}, {last:,}',
                    {
                        'bucketing': layout.FirstLastBucketing(
                            first_size_elems=last, bucket_size_elems=between, last_size_elems=last
                        )
                    },
                )
    if scene.request.recipe is not None:
        groupings: tuple[Any, ...] = (layout.SeparateGroups(), layout.NearestReadyGroups())
        for grouping in groupings:
            for size in _sizes(total)[::4]:
                fixed = layout.FixedSizeBucketing(bucket_size_elems=size)
                what = f'bucket_groups {grouping.name}, fixed_size {size:,}'
                yield what, {'bucketing': fixed, 'bucket_groups': grouping}
    if scene.profile_path is not None:
        recorded = layout.RecordedOrder(profile=scene.profile_path)
        for size in _sizes(total)[::4]:
            fixed = layout.FixedSizeBucketing(bucket_size_elems=size)
            yield f'recorded order, fixed_size {size:,}', {
                'bucketing': fixed,
                'param_order': recorded,
            }


def _sizes(total_elems: int) -> list[int]:
    """Sizes from many buckets to one, in equal steps of their logarithm, with two or three digits."""
    low, high = max(1.0, total_elems / _MOST_BUCKETS), float(max(1, total_elems))
    result: list[int] = []
    for step in range(_SIZES):
        size = low * (high / low) ** (step / (_SIZES - 1))
        digit = 10 ** max(0, math.floor(math.log10(size)) - 1)
        result.append(max(1, round(size / digit) * digit))
    return sorted(set(result))


def _timed(scene: Scene, base: BufferConfig, ddp: Any) -> Iterator[Candidate]:
    """``time_optimal``; without a recorded profile its cuts are written down by name."""
    network = scene.request_network
    params = layout.TimeOptimalBucketing(
        profile=scene.profile_path or '-', network=network or 'h100'
    )
    variants: list[tuple[str, dict[str, Any]]] = [('', {})]
    if base.dispatch_order != InOrderDispatch():
        variants.append((', dispatch_order in_order', {'dispatch_order': InOrderDispatch()}))
    if scene.profile_path is not None:
        recorded = layout.RecordedOrder(profile=scene.profile_path)
        variants.append((', recorded order', {'param_order': recorded}))
    for suffix, changes in variants:
        runtime = Runtime(dataclasses.replace(base, **changes))
        bucketing = TimeOptimal(params, scene.profile, scene.network)
        runtime.layout = dataclasses.replace(runtime.layout, bucketing=bucketing)
        outcome = scene.run(runtime, ddp)
        if scene.profile_path is not None and network:
            config = dataclasses.replace(base, bucketing=params, source='time_optimal', **changes)
            yield Candidate(f'time_optimal{suffix}', config, outcome)
        else:
            config = _explicit(base, _cut_names(outcome), changes)
            yield Candidate(f'the cuts of time_optimal{suffix}', config, outcome)


def _explicit(base: BufferConfig, names: Sequence[str], changes: Mapping[str, Any]) -> BufferConfig:
    bucketing = layout.ExplicitBucketing(boundaries=tuple(dict.fromkeys(names)))
    return dataclasses.replace(base, bucketing=bucketing, source='explicit', **changes)


def _cut_names(outcome: Outcome) -> list[str]:
    """The last parameter of every bucket but the last, of buffers that are cut."""
    return [
        buffer.view.params[slots[-1].param].name
        for chunk in outcome.stage.chunks
        for buffer in chunk.buffers
        for slots in buffer.view.slots_by_bucket[:-1]
    ]


def _refined(
    scene: Scene,
    base: BufferConfig,
    ddp: Any,
    ranking: Sequence[Candidate],
    progress: Callable[[int, int], None],
    done: int,
) -> Candidate | None:
    """Moves, adds and takes away single cuts of the best candidate as long as that helps."""
    best = ranking[0]
    order = [
        buffer.view.params[slot.param].name
        for buffer in best.outcome.stage.chunks[0].buffers
        for slot in buffer.view.layout.slots
    ]
    place = {name: index for index, name in enumerate(order)}
    keeps = {
        key: getattr(best.config, key) for key in ('param_order', 'bucket_groups', 'dispatch_order')
    }
    cuts = {place[name] for name in _cut_names(best.outcome) if name in place}
    found: Candidate | None = None
    tried: set[frozenset[int]] = {frozenset(cuts)}
    evaluations, improved = 0, True
    while improved and evaluations < _EVALUATIONS:
        improved = False
        for move in _moves(cuts, len(order)):
            if evaluations >= _EVALUATIONS:
                break
            if frozenset(move) in tried:
                continue
            tried.add(frozenset(move))
            evaluations += 1
            progress(done + evaluations, done + _EVALUATIONS)
            config = _explicit(base, [order[i] for i in sorted(move)], keeps)
            candidate = Candidate('cuts found by trying', config, scene.run(Runtime(config), ddp))
            if candidate.exposed_s < (found or best).exposed_s * (1 - 1e-4) - 1e-7:
                found, cuts, improved = candidate, move, True
                break
    return found


def _moves(cuts: set[int], count: int) -> Iterator[set[int]]:
    """Cut sets that differ in one cut; those near the end of backward, which matter most, first."""
    far = [step * sign for step in (1, 2, 4, 8, 16, 32) for sign in (1, -1)]
    for cut in sorted(cuts, reverse=True):
        for step in far:
            if 0 <= cut + step < count - 1:
                yield (cuts - {cut}) | {cut + step}
        yield cuts - {cut}
    spots = {max(0, min(count - 2, count * k // 16)) for k in range(1, 16)}
    spots |= {count - 2 - k for k in range(8) if count - 2 - k >= 0}
    for spot in sorted(spots, reverse=True):
        if spot not in cuts and count > 1:
            yield cuts | {spot}

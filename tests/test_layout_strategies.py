"""Orders, bucketings, isolation, padding and grouping: invariants of any combination, and worked examples.

Nothing of the strategies' own arithmetic is used to expect something: the oracles here are slow and
plain, and the examples were worked out by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_buffer import config_layout as cl
from megatron_buffer import param_layout
from megatron_buffer.config import AXES, BufferConfig, load_config
from megatron_buffer.errors import LayoutError
from megatron_buffer.layout import (
    BufferLayout,
    LayoutStrategies,
    ParamSpec,
    compute_buffer_layout,
    plan_layout,
)
from megatron_buffer.runtime import ModelChunk, Runtime, scope
from megatron_buffer.strategies import cuts
from megatron_buffer.strategies.grouping import ParamTraits
from megatron_buffer.strategies.names import matches, outermost_module
from megatron_buffer.strategies.padding import Alignment
from megatron_buffer.strategies.registry import make_strategy
from megatron_buffer.strategies.specs import BufferTraits

FAST = settings(max_examples=300, deadline=None, derandomize=True, database=None)
THOROUGH = settings(
    max_examples=3000,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# ------------------------------------------------------------------ what is drawn

PARTS = ('attn.linear_qkv.weight', 'mlp.linear_fc1.weight', 'mlp.linear_fc1.bias', 'norm.weight')
NAMES = (
    'embedding.word_embeddings.weight',
    *(f'decoder.layers.{layer}.{part}' for layer in range(4) for part in PARTS),
    'decoder.layers.1.mlp.experts.layers.0.weight',
    'decoder.final_norm.weight',
    'output_layer.weight',
)
PATTERNS = ('*norm*', '*.bias', 'output_layer.weight', '*', 'nothing', 'decoder.layers.[02].*')
NUMELS = st.integers(1, 300) | st.sampled_from((0, 1, 63, 64, 65, 128, 2**16, 2**20, 2**31 + 1))
SIZES = st.none() | st.integers(1, 1200) | st.sampled_from((1, 2**16, 2**40))
pattern_lists = st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2, unique=True).map(tuple)

BUCKETINGS: dict[str, st.SearchStrategy[Any]] = {
    'fixed_size': st.builds(cl.FixedSizeBucketing, bucket_size_elems=SIZES),
    'count': st.builds(cl.CountBucketing, num_buckets=st.integers(1, 30)),
    'first_last': st.builds(
        cl.FirstLastBucketing,
        first_size_elems=SIZES.filter(bool),
        bucket_size_elems=SIZES,
        last_size_elems=SIZES.filter(bool),
    ),
    'balanced': st.builds(cl.BalancedBucketing, bucket_size_elems=SIZES),
    'per_module': st.builds(
        cl.PerModuleBucketing,
        pattern=st.sampled_from(('*layers.*', '*.mlp', 'decoder', '*.layers.[0-9]', 'nothing')),
        modules_per_bucket=st.integers(1, 3),
    ),
    'explicit': st.builds(cl.ExplicitBucketing, boundaries=pattern_lists),
}
ORDERS = st.one_of(
    st.just(cl.ReverseOrder()),
    st.just(cl.ForwardOrder()),
    st.builds(cl.RandomOrder, seed=st.integers(0, 2**70)),
)
ISOLATIONS = st.one_of(
    st.just(cl.SharedEmbeddingIsolation()), st.builds(cl.PatternIsolation, patterns=pattern_lists)
)
PADDINGS = st.one_of(
    st.just(cl.MegatronPadding()),
    st.builds(
        cl.MegatronPadding,
        param_start_elems=st.integers(1, 90),
        bucket_end_elems=st.integers(1, 90),
    ),
    st.just(cl.MinimalPadding()),
    st.builds(
        cl.ByteAlignedPadding,
        param_start_bytes=st.sampled_from((1, 2, 6, 16, 100, 128, 4096)),
        bucket_end_bytes=st.sampled_from((1, 3, 16, 256, 1000)),
    ),
)


class Case(NamedTuple):
    """A buffer on paper and how to lay it out."""

    specs: list[ParamSpec]
    config: BufferConfig
    size: int | None
    dist_opt: bool
    buffer: BufferTraits

    def lay_out(self) -> BufferLayout:
        """The checked layout, from the public function."""
        return plan_layout(
            self.specs,
            config=self.config,
            bucket_size_elems=self.size,
            dist_opt=self.dist_opt,
            **self.buffer._asdict(),
        )


@st.composite
def cases(draw: st.DrawFn, bucketing: st.SearchStrategy[Any]) -> Case:
    """Some of a transformer's parameters in registration order, with or without known names."""
    chosen = sorted(draw(st.sets(st.integers(0, len(NAMES) - 1), max_size=len(NAMES))))
    named = draw(st.integers(0, 4)) > 0
    tied = draw(st.sets(st.sampled_from((NAMES[0], NAMES[-1], NAMES[6])), max_size=2))
    numels = draw(st.lists(NUMELS, min_size=len(chosen), max_size=len(chosen)))
    specs = [
        ParamSpec(
            numel_elems=numel,
            name=NAMES[index] if named else '',
            shared_embedding=NAMES[index] in tied,
        )
        for index, numel in zip(chosen, numels, strict=True)
    ]
    config = BufferConfig(
        param_order=draw(ORDERS),
        bucketing=draw(bucketing),
        bucket_isolation=draw(ISOLATIONS),
        padding=draw(PADDINGS),
    )
    buffer = BufferTraits(
        dp_size=draw(st.sampled_from((1, 2, 3, 6, 8, 127, 1024))),
        high_busbw=draw(st.booleans()),
        param_bytes=draw(st.sampled_from((1, 2, 4))),
        grad_bytes=draw(st.sampled_from((2, 4))),
    )
    return Case(specs, config, draw(SIZES), draw(st.booleans()), buffer)


# ------------------------------------------------------------------ invariants of any combination


def is_alone(case: Case, spec: ParamSpec) -> bool:
    """The rule in words: tied under the distributed optimizer, or named by a pattern."""
    import fnmatch

    patterns = getattr(case.config.bucket_isolation, 'patterns', ())
    by_name = spec.name and any(fnmatch.fnmatchcase(spec.name, p) for p in patterns)
    return bool(by_name) or (case.dist_opt and spec.shared_embedding)


def assert_invariants(case: Case, layout: BufferLayout) -> None:
    """What Megatron-Core relies on, checked without `BufferLayout.check`."""
    shards = case.buffer.dp_size if case.dist_opt else 1
    slots = sorted(layout.slots, key=lambda slot: (slot.start_elems, slot.end_elems))
    assert sorted(slot.param for slot in slots) == list(range(len(case.specs)))
    assert layout.slots == tuple(slots), 'in layout order'
    for slot in slots:
        assert slot.end_elems - slot.start_elems == case.specs[slot.param].numel_elems
    for before, after in itertools.pairwise(slots):
        assert before.end_elems <= after.start_elems
        assert after.bucket - before.bucket in (0, 1)
    edges = [0, *(span.end_elems for span in layout.buckets)]
    assert [(s.start_elems, s.end_elems) for s in layout.buckets] == list(itertools.pairwise(edges))
    for index, span in enumerate(layout.buckets):
        inside = [slot for slot in slots if slot.bucket == index]
        assert inside[0].start_elems == span.start_elems
        assert inside[-1].end_elems <= span.end_elems
        assert span.end_elems % shards == span.start_elems % shards == 0
        assert span.numel_elems % shards == 0
        alone = [slot for slot in inside if is_alone(case, case.specs[slot.param])]
        assert not alone or len(inside) == 1
        if not case.dist_opt:
            assert span.numel_elems == sum(case.specs[s.param].numel_elems for s in inside)
            assert span.numel_unpadded == span.numel_elems
    if slots:
        assert slots[0].bucket == 0
        assert slots[-1].bucket == len(layout.buckets) - 1
    assert_padding(case, layout)


def assert_padding(case: Case, layout: BufferLayout) -> None:
    """Starts and ends are where the padding's parameters say."""
    if not case.dist_opt:
        assert layout.padding_elems == 0
        return
    padding: Any = case.config.padding
    for slot in layout.slots:
        start = slot.start_elems
        if padding.name == 'megatron':
            assert start % padding.param_start_elems == 0
        elif padding.name == 'byte_aligned':
            assert start * case.buffer.param_bytes % padding.param_start_bytes == 0
            assert start * case.buffer.grad_bytes % padding.param_start_bytes == 0
    for span in layout.buckets:
        if padding.name == 'megatron':
            assert span.end_elems % padding.bucket_end_elems == 0
        elif padding.name == 'byte_aligned':
            shard = span.numel_elems // case.buffer.dp_size
            assert shard * case.buffer.param_bytes % padding.bucket_end_bytes == 0
            assert shard * case.buffer.grad_bytes % padding.bucket_end_bytes == 0
        else:
            unpadded = sum(s.end_elems - s.start_elems for s in layout.slots_by_bucket()[0])
            assert layout.buckets[0].end_elems - unpadded < case.buffer.dp_size


def assert_isolated_alike(case: Case, layout: BufferLayout) -> None:
    """A tied embedding's bucket is the one it has where it is the only parameter: the other stage's."""
    for slot in layout.slots:
        spec = case.specs[slot.param]
        if case.dist_opt and spec.shared_embedding:
            elsewhere = case._replace(specs=[spec]).lay_out()
            span = layout.buckets[slot.bucket]
            assert slot.start_elems - span.start_elems == elsewhere.slots[0].start_elems == 0
            assert span.numel_elems == elsewhere.numel_elems


def groups_of(case: Case, layout: BufferLayout) -> list[list[ParamSpec]]:
    """The parameters of each bucket, in layout order."""
    return [[case.specs[slot.param] for slot in slots] for slots in layout.slots_by_bucket()]


def expected_groups(case: Case, layout: BufferLayout) -> list[list[ParamSpec]]:
    """The same from the order that came out and the plain oracles below."""
    expected: list[list[ParamSpec]] = []
    run: list[ParamSpec] = []
    runs: list[list[ParamSpec]] = []
    pieces: list[Any] = []
    for slot in layout.slots:
        spec = case.specs[slot.param]
        if is_alone(case, spec):
            pieces += [run, spec]
            run = []
        else:
            run.append(spec)
    pieces.append(run)
    runs = [piece for piece in pieces if isinstance(piece, list) and piece]
    divided = iter(
        ORACLES[case.config.bucketing.name](case, runs) if case.size else runs_whole(runs)
    )
    for piece in pieces:
        if isinstance(piece, ParamSpec):
            expected.append([piece])
        elif piece:
            expected += next(divided)
    return expected


def runs_whole(runs: list[list[ParamSpec]]) -> list[list[list[ParamSpec]]]:
    """Megatron wants one bucket: each run is one."""
    return [[run] for run in runs]


def check_combination(case: Case) -> None:
    """Invariants, the order, and the cuts that the oracle makes."""
    layout = case.lay_out()
    assert_invariants(case, layout)
    assert_isolated_alike(case, layout)
    assert case.lay_out() == layout
    order = [slot.param for slot in layout.slots]
    natural = list(range(len(case.specs)))
    if case.config.param_order.name != 'random':
        assert order == natural[:: 1 if case.config.param_order.name == 'forward' else -1]
    if case.config.bucketing.name != 'fixed_size':
        assert groups_of(case, layout) == expected_groups(case, layout)


# ------------------------------------------------------------------ plain oracles of the cuts


def sizes_of(group: Sequence[ParamSpec]) -> list[int]:
    return [spec.numel_elems for spec in group]


def split(run: list[ParamSpec], ends: Sequence[int]) -> list[list[ParamSpec]]:
    """Divides ``run`` behind so many parameters each."""
    borders = [0, *sorted(set(ends)), len(run)]
    return [run[a:b] for a, b in itertools.pairwise(borders) if a < b]


def naive_near_equal(sizes: list[int], parts: int, limit: int | None = None) -> list[int]:
    """Number of parameters in front of each cut: the nearest possible one, left to right."""
    ends: list[int] = []
    total = sum(sizes)
    for part in range(1, parts):
        before = ends[-1] if ends else 0
        target = Fraction(part * total, parts)
        possible = [
            end
            for end in range(before + 1, len(sizes) - (parts - part) + 1)
            if limit is None
            or (sum(sizes[before:end]) <= limit and largest_of(sizes[end:], parts - part) <= limit)
        ]
        ends.append(min(possible, key=lambda end: (abs(sum(sizes[:end]) - target), end)))
    return ends


def largest_of(sizes: list[int], parts: int) -> int:
    """The smallest possible largest part, by trying the size of the first one over and over."""
    best = [0] + [sum(sizes)] * len(sizes)  # of the first n sizes, in one part
    best = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    for _ in range(parts - 1):
        best = [
            min((max(best[m], sum(sizes[m:n])) for m in range(n)), default=0)
            for n in range(len(sizes) + 1)
        ]
    return best[-1]


def oracle_count(case: Case, runs: list[list[ParamSpec]]) -> list[list[list[ParamSpec]]]:
    params: Any = case.config.bucketing
    shares = [1] * len(runs)
    while sum(shares) < min(params.num_buckets, sum(map(len, runs))):
        averages = [
            Fraction(sum(sizes_of(run)), share) if share < len(run) else Fraction(-1)
            for run, share in zip(runs, shares, strict=True)
        ]
        shares[averages.index(max(averages))] += 1
    return [
        split(run, naive_near_equal(sizes_of(run), share))
        for run, share in zip(runs, shares, strict=True)
    ]


def oracle_balanced(case: Case, runs: list[list[ParamSpec]]) -> list[list[list[ParamSpec]]]:
    params: Any = case.config.bucketing
    divided: list[list[list[ParamSpec]]] = []
    for run in runs:
        sizes = sizes_of(run)
        parts = min(len(run), max(1, sum(sizes) // (params.bucket_size_elems or case.size)))
        ends = naive_near_equal(sizes, parts, largest_of(sizes, parts))
        divided.append(split(run, ends))
        assert len(divided[-1]) == parts
    return divided


def oracle_first_last(case: Case, runs: list[list[ParamSpec]]) -> list[list[list[ParamSpec]]]:
    params: Any = case.config.bucketing
    divided: list[list[list[ParamSpec]]] = []
    for index, run in enumerate(runs):
        rest, first, last = list(run), [], []
        if index == 0:
            while rest and sum(sizes_of(first)) < params.first_size_elems:
                first.append(rest.pop(0))
        if index == len(runs) - 1:
            while rest and sum(sizes_of(last)) < params.last_size_elems:
                last.insert(0, rest.pop())
        between: list[list[ParamSpec]] = [[]]
        for spec in rest:
            if sum(sizes_of(between[-1])) >= (params.bucket_size_elems or case.size or 0):
                between.append([])
            between[-1].append(spec)
        divided.append([group for group in (first, *between, last) if group])
    return divided


def oracle_per_module(case: Case, runs: list[list[ParamSpec]]) -> list[list[list[ParamSpec]]]:
    import fnmatch

    params: Any = case.config.bucketing
    divided: list[list[list[ParamSpec]]] = []
    for run in runs:
        stretches: list[tuple[str, list[ParamSpec]]] = [('', [])]
        for spec in run:
            parts = spec.name.split('.')
            prefixes = ['.'.join(parts[:n]) for n in range(1, len(parts))]
            module = next((p for p in prefixes if fnmatch.fnmatchcase(p, params.pattern)), '')
            current = stretches[-1][0]
            if module and current and module != current:
                stretches.append((module, []))
            elif module:
                stretches[-1] = (module, stretches[-1][1])
            stretches[-1][1].append(spec)
        groups = [group for _, group in stretches]
        step = params.modules_per_bucket
        divided.append(
            [list(itertools.chain(*groups[n : n + step])) for n in range(0, len(groups), step)]
        )
    return divided


def oracle_explicit(case: Case, runs: list[list[ParamSpec]]) -> list[list[list[ParamSpec]]]:
    import fnmatch

    params: Any = case.config.bucketing
    return [
        split(
            run,
            [
                n + 1
                for n, spec in enumerate(run)
                if spec.name and any(fnmatch.fnmatchcase(spec.name, p) for p in params.boundaries)
            ],
        )
        for run in runs
    ]


ORACLES: dict[str, Callable[[Case, list[list[ParamSpec]]], list[list[list[ParamSpec]]]]] = {
    'count': oracle_count,
    'balanced': oracle_balanced,
    'first_last': oracle_first_last,
    'per_module': oracle_per_module,
    'explicit': oracle_explicit,
}


def test_every_built_bucketing_is_drawn() -> None:
    read_a_profile = {'time_optimal'}  # test_time_optimal draws profiles for it
    assert set(BUCKETINGS) | read_a_profile == set(AXES['bucketing'].strategies)


@pytest.mark.parametrize('bucketing', BUCKETINGS)
@FAST
@given(data=st.data())
def test_any_combination(bucketing: str, data: st.DataObject) -> None:
    check_combination(data.draw(cases(BUCKETINGS[bucketing])))


@pytest.mark.slow
@pytest.mark.parametrize('bucketing', BUCKETINGS)
@THOROUGH
@given(data=st.data())
def test_any_combination_thoroughly(bucketing: str, data: st.DataObject) -> None:
    check_combination(data.draw(cases(BUCKETINGS[bucketing])))


# ------------------------------------------------------------------ the arithmetic of cuts


@FAST
@given(
    sizes=st.lists(st.integers(0, 20) | st.integers(0, 2**60), min_size=1, max_size=9),
    data=st.data(),
)
def test_near_equal_and_smallest_limit(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    limit = cuts.smallest_limit(sizes, parts)
    assert limit == largest_of(sizes, parts)
    looser = limit + data.draw(st.integers(0, 10))
    for bound in (None, limit, looser):
        found = [cut + 1 for cut in cuts.near_equal(sizes, parts, bound)]
        assert found == naive_near_equal(sizes, parts, bound)
        borders = [0, *found, len(sizes)]
        largest = max(sum(sizes[a:b]) for a, b in itertools.pairwise(borders))
        assert bound is None or largest <= bound
        assert all(a < b for a, b in itertools.pairwise(borders))


def test_cuts_of_many_parameters_take_no_time_to_speak_of() -> None:
    """A stage of a large mixture of experts; what grew with parameters times buckets would not return."""
    specs = [ParamSpec(numel_elems=1 + i % 97) for i in range(40_000)]
    for name, params in (
        ('count', cl.CountBucketing(num_buckets=20_000)),
        ('balanced', cl.BalancedBucketing(bucket_size_elems=100)),
    ):
        layout = plan_layout(specs, config=BufferConfig(bucketing=params), bucket_size_elems=1)
        # 412 times 1 + ... + 97, and 1 + ... + 36: 1,958,902 elements.
        assert len(layout.buckets) == (20_000 if name == 'count' else 19_589), name


# ------------------------------------------------------------------ worked examples


def buckets_of(
    sizes: Sequence[int | str], bucketing: Any, size: int | None = 1000, names: Sequence[str] = ()
) -> list[list[int]]:
    """Sizes in each bucket, in the order given; a size in quotes is a tied embedding's."""
    specs = [
        ParamSpec(
            numel_elems=int(numel),
            shared_embedding=isinstance(numel, str),
            name=names[index] if names else '',
        )
        for index, numel in enumerate(sizes)
    ]
    config = BufferConfig(
        bucketing=bucketing, param_order=cl.ForwardOrder(), padding=cl.MinimalPadding()
    )
    layout = plan_layout(specs, config=config, bucket_size_elems=size)
    return [[specs[s.param].numel_elems for s in slots] for slots in layout.slots_by_bucket()]


@pytest.mark.parametrize(
    ('num_buckets', 'sizes', 'expected'),
    [
        (1, [3, 1, 2], [[3, 1, 2]]),
        (2, [5, 5, 5, 5], [[5, 5], [5, 5]]),
        # 18 elements, so cuts belong at 6 and 12; parameters end at 1, 3, 6, 10, 15, 18.
        # 10 and 12 are 2 apart, 15 and 12 are 3 apart.
        (3, [1, 2, 3, 4, 5, 3], [[1, 2, 3], [4], [5, 3]]),
        # 4 elements: the cut belongs at 2, and 1 and 3 are equally near: the earlier.
        (2, [1, 2, 1], [[1], [2, 1]]),
        # As many buckets as there are parameters, although the shares are nowhere near.
        (3, [100, 1, 1], [[100], [1], [1]]),
        (3, [1, 1, 100], [[1], [1], [100]]),
        (9, [7, 8], [[7], [8]]),
        (2, [], []),
        # Isolated parameters come on top. 40 elements in front and 20 behind: two buckets and one.
        (3, [10, 10, 10, 10, '7', 10, 10], [[10, 10], [10, 10], [7], [10, 10]]),
        # More runs than buckets: each run is one bucket at least.
        (1, [4, '7', 5, '7', 6], [[4], [7], [5], [7], [6]]),
        # 30, 20: the third bucket goes to the 30 (30/2 < 20/1 only then), the fourth to the 20.
        (4, [10, 10, 10, '7', 10, 10], [[10], [10, 10], [7], [10], [10]]),
    ],
)
def test_count(num_buckets: int, sizes: list[Any], expected: list[list[int]]) -> None:
    bucketing = cl.CountBucketing(num_buckets=num_buckets)
    assert buckets_of(sizes, bucketing) == expected
    assert len(buckets_of(sizes, bucketing, size=None)) == sum(
        1 for _ in itertools.groupby(sizes, key=lambda s: isinstance(s, str))
    )


@pytest.mark.parametrize(
    ('first', 'between', 'last', 'sizes', 'expected'),
    [
        # The first closes at 10 >= 8; the last two make 6 >= 5; between 20 and 20 close at 40 >= 30.
        (8, 30, 5, [4, 6, 20, 20, 20, 3, 3], [[4, 6], [20, 20], [20], [3, 3]]),
        # Nothing is left between.
        (8, 30, 5, [8, 5], [[8], [5]]),
        # One parameter brings the first to its size, and is all there is.
        (8, 30, 5, [8], [[8]]),
        (8, 30, 5, [3], [[3]]),
        (8, 30, 5, [], []),
        # The first takes what it needs although the last would reach further: 4 < 5 are left over.
        (8, 30, 5, [8, 2, 2], [[8], [2, 2]]),
        # The first never gets to its size: one bucket.
        (100, 30, 5, [8, 2, 2], [[8, 2, 2]]),
        # Of the four parameters behind the first, the last three make 15 >= 12.
        (1, 30, 12, [1, 5, 5, 5, 5], [[1], [5], [5, 5, 5]]),
        # The size between comes from outside where the config has none.
        (1, None, 1, [1, 500, 500, 500, 1], [[1], [500, 500], [500], [1]]),
        # First and last are the buffer's, not those of each run.
        (2, 6, 2, [2, 3, 3, '7', 3, 3, 2], [[2], [3, 3], [7], [3, 3], [2]]),
        (2, 6, 2, [2, 3, 3, '7'], [[2], [3], [3], [7]]),
        (2, 6, 2, ['7', 2, 3, 3, 3], [[7], [2], [3, 3], [3]]),
    ],
)
def test_first_last(
    first: int, between: int | None, last: int, sizes: list[Any], expected: list[list[int]]
) -> None:
    bucketing = cl.FirstLastBucketing(
        first_size_elems=first, bucket_size_elems=between, last_size_elems=last
    )
    assert buckets_of(sizes, bucketing) == expected


@pytest.mark.parametrize(
    ('size', 'sizes', 'expected'),
    [
        # 20 // 8 = 2 buckets. Fixed size would make 8, 8 and a tail of 4.
        (8, [4, 4, 4, 4, 4], [[4, 4], [4, 4, 4]]),
        # 10 // 3 = 3 buckets; the largest is 4 at best, cuts near 3.33 and 6.67.
        (3, [1] * 10, [[1] * 3, [1] * 4, [1] * 3]),
        # 24 // 8 = 3. The largest is 9 at best; behind it 6 and 9 are allowed, 10 and 5 are not.
        (8, [9, 1, 2, 3, 4, 5], [[9], [1, 2, 3], [4, 5]]),
        (25, [9, 1, 2, 3, 4, 5], [[9, 1, 2, 3, 4, 5]]),
        (None, [600, 600, 600, 600], [[600, 600], [600, 600]]),
        # Never more buckets than parameters.
        (1, [50, 50], [[50], [50]]),
        # Each run by itself: 6 // 2 = 3, and 2 // 2 = 1.
        (2, [2, 2, 2, '7', 1, 1], [[2], [2], [2], [7], [1, 1]]),
    ],
)
def test_balanced(size: int | None, sizes: list[Any], expected: list[list[int]]) -> None:
    assert buckets_of(sizes, cl.BalancedBucketing(bucket_size_elems=size)) == expected


# Sizes are tens for the layer and ones for the position, so that the buckets can be read.
MODEL = {
    'embedding.word_embeddings.weight': 99,
    'decoder.layers.0.attn.weight': 1,
    'decoder.layers.0.mlp.layers.weight': 2,
    'decoder.layers.1.attn.weight': 11,
    'decoder.layers.1.mlp.layers.weight': 12,
    'decoder.layers.2.attn.weight': 21,
    'decoder.final_norm.weight': 91,
}


@pytest.mark.parametrize(
    ('pattern', 'modules', 'order', 'expected'),
    [
        ('*layers.*', 1, [0, 1, 2, 3, 4, 5, 6], [[99, 1, 2], [11, 12], [21, 91]]),
        ('*layers.*', 1, [6, 5, 4, 3, 2, 1, 0], [[91, 21], [12, 11], [2, 1, 99]]),
        ('*layers.*', 2, [6, 5, 4, 3, 2, 1, 0], [[91, 21, 12, 11], [2, 1, 99]]),
        ('*layers.*', 5, [6, 5, 4, 3, 2, 1, 0], [[91, 21, 12, 11, 2, 1, 99]]),
        # Of decoder.layers.0 and decoder.layers.0.mlp the outermost counts; the latter alone here:
        ('*.mlp', 1, [0, 1, 2, 3, 4, 5, 6], [[99, 1, 2, 11], [12, 21, 91]]),
        ('decoder', 1, [0, 1, 2, 3, 4, 5, 6], [[99, 1, 2, 11, 12, 21, 91]]),
        ('nothing', 1, [0, 1, 2, 3, 4, 5, 6], [[99, 1, 2, 11, 12, 21, 91]]),
        # '[12]' is a choice of characters, as in a shell.
        ('*.layers.[12]', 1, [0, 1, 2, 3, 4, 5, 6], [[99, 1, 2, 11, 12], [21, 91]]),
        # Interleaved: layer 0 ends twice, and layer 1 does.
        ('*layers.*', 1, [1, 3, 2, 4], [[1], [11], [2], [12]]),
        ('*layers.*', 2, [1, 3, 2, 4], [[1, 11], [2, 12]]),
    ],
)
def test_per_module(
    pattern: str, modules: int, order: list[int], expected: list[list[int]]
) -> None:
    names = [list(MODEL)[i] for i in order]
    bucketing = cl.PerModuleBucketing(pattern=pattern, modules_per_bucket=modules)
    sizes = [MODEL[name] for name in names]
    assert buckets_of(sizes, bucketing, names=names) == expected
    assert buckets_of(sizes, bucketing) == [sizes], 'without names nothing matches'


@pytest.mark.parametrize(
    ('boundaries', 'expected'),
    [
        (['decoder.layers.0.mlp.layers.weight'], [[99, 1, 2], [11, 12, 21, 91]]),
        (['*.mlp.*'], [[99, 1, 2], [11, 12], [21, 91]]),
        (['decoder.final*', 'embed*'], [[99], [1, 2, 11, 12, 21, 91]]),
        (['*'], [[99], [1], [2], [11], [12], [21], [91]]),
        (['DECODER*'], [[99, 1, 2, 11, 12, 21, 91]]),
    ],
)
def test_explicit(boundaries: list[str], expected: list[list[int]]) -> None:
    bucketing = cl.ExplicitBucketing(boundaries=tuple(boundaries))
    assert buckets_of(list(MODEL.values()), bucketing, names=list(MODEL)) == expected
    assert buckets_of(list(MODEL.values()), bucketing) == [list(MODEL.values())]


@pytest.mark.parametrize(
    ('name', 'pattern', 'module'),
    [
        ('a.layers.0.b.layers.1.w', '*layers.*', 'a.layers.0'),
        ('a.layers.0.b.layers.1.w', '*.layers.1', 'a.layers.0.b.layers.1'),
        ('a.layers.w', '*layers.*', ''),
        ('w', '*', ''),
        ('', '*', ''),
        ('a.w', '*', 'a'),
        # Float16Module's prefix is no module of the model, and may be left out.
        ('module.a.b.w', '*', 'module.a'),
        ('module.module.a.b.w', 'a.b', 'module.module.a.b'),
        ('module.a.b.w', 'module.a.b', 'module.a.b'),
        ('module.w', '*', ''),
    ],
)
def test_outermost_module(name: str, pattern: str, module: str) -> None:
    assert outermost_module(name, pattern) == module


@pytest.mark.parametrize(
    ('name', 'pattern', 'expected'),
    [
        ('a.b.weight', 'a.b.weight', True),
        ('module.a.b.weight', 'a.b.weight', True),
        ('module.a.b.weight', 'module.a.b.weight', True),
        ('module.module.a.b.weight', 'a.*', True),
        ('a.module.b.weight', 'b.weight', False),
        ('A.b.weight', 'a.b.weight', False),
        ('modules.a.weight', 'a.weight', False),
        ('', '*', False),
    ],
)
def test_a_pattern_may_leave_out_the_prefix_of_16_bit_models(
    name: str, pattern: str, expected: bool
) -> None:
    assert matches(name, pattern) == expected


# ------------------------------------------------------------------ isolation


@pytest.mark.parametrize('dist_opt', [False, True])
def test_patterns_isolate_with_and_without_the_distributed_optimizer(dist_opt: bool) -> None:
    specs = [
        ParamSpec(numel_elems=n, name=name, shared_embedding=name == 'tied')
        for name, n in (('tied', 5), ('a.router', 6), ('a.weight', 7), ('b.weight', 8))
    ]
    config = BufferConfig(
        bucket_isolation=cl.PatternIsolation(patterns=('*.router', 'nothing')),
        padding=cl.MinimalPadding(),
    )
    layout = plan_layout(specs, config=config, dist_opt=dist_opt)
    names = [[specs[s.param].name for s in slots] for slots in layout.slots_by_bucket()]
    assert names == [['b.weight', 'a.weight'], ['a.router'], ['tied']]


def test_before_an_isolated_parameter_the_unpadded_size_ends_with_the_last_one() -> None:
    """Checkpoints need that; before a tied embedding upstream records the aligned end instead."""
    specs = [ParamSpec(numel_elems=n, name=name) for name, n in (('alone', 5), ('other', 70))]
    config = BufferConfig(bucket_isolation=cl.PatternIsolation(patterns=('alone',)))
    layout = plan_layout(specs, config=config, dp_size=2)
    assert [(b.start_elems, b.end_elems, b.numel_unpadded) for b in layout.buckets] == [
        (0, 128, 70),
        (128, 256, 5),
    ]
    specs[0] = ParamSpec(numel_elems=5, name='alone', shared_embedding=True)
    layout = plan_layout(specs, config=config, dp_size=2)
    assert [b.numel_unpadded for b in layout.buckets] == [128, 5]


# ------------------------------------------------------------------ padding


@pytest.mark.parametrize(
    ('params', 'dp', 'param_bytes', 'grad_bytes', 'expected'),
    [
        # 128 bytes are 64 bf16 or 32 fp32; 256 bytes are 128 or 64: the larger holds for both.
        ({}, 8, 2, 4, (64, 8 * 128)),
        ({}, 8, 4, 4, (32, 8 * 64)),
        ({}, 3, 1, 2, (128, 3 * 256)),
        # 6 bytes are 3 bf16; in fp32 3 elements are 12 bytes, a multiple of 6 too.
        ({'param_start_bytes': 6, 'bucket_end_bytes': 1}, 5, 2, 4, (3, 5)),
        # 1 byte asks for nothing.
        ({'param_start_bytes': 1, 'bucket_end_bytes': 2}, 1, 1, 4, (1, 2)),
        # 20 bytes: 10 of 2 bytes, 5 of 4 bytes.
        ({'param_start_bytes': 20, 'bucket_end_bytes': 20}, 2, 2, 4, (10, 20)),
    ],
)
def test_byte_aligned(
    params: dict[str, int], dp: int, param_bytes: int, grad_bytes: int, expected: tuple[int, int]
) -> None:
    padding = make_strategy('padding', cl.ByteAlignedPadding(**params))
    buffer = BufferTraits(dp_size=dp, param_bytes=param_bytes, grad_bytes=grad_bytes)
    assert padding.alignment(buffer) == Alignment(*expected)


def test_minimal_padding_pads_less_than_a_rank_each() -> None:
    config = BufferConfig(padding=cl.MinimalPadding())
    layout = plan_layout([10, 11, 12], config=config, bucket_size_elems=20, dp_size=7)
    # 12 + 11 = 23 up to 28; 10 more end at 38, up to 42.
    assert [(s.start_elems, s.end_elems) for s in layout.slots] == [(0, 12), (12, 23), (28, 38)]
    assert [(b.start_elems, b.end_elems) for b in layout.buckets] == [(0, 28), (28, 42)]


@pytest.mark.parametrize(
    'padding',
    [
        cl.MegatronPadding(param_start_elems=64, bucket_end_elems=1),
        cl.MegatronPadding(param_start_elems=48, bucket_end_elems=32),
        cl.ByteAlignedPadding(param_start_bytes=4096, bucket_end_bytes=16),
    ],
)
def test_a_tied_embedding_is_sharded_alike_behind_anything(padding: Any) -> None:
    """Pipeline stages put other parameters in front of it, and add up their shards of it."""
    found = set()
    for before in (0, 1, 10, 64, 1000):
        specs = [ParamSpec(numel_elems=100, shared_embedding=True)]
        specs += [ParamSpec(numel_elems=before)] if before else []
        layout = plan_layout(specs, config=BufferConfig(padding=padding), dp_size=3)
        slot, span = layout.slots[-1], layout.buckets[-1]
        found.add((slot.start_elems - span.start_elems, span.numel_elems))
    assert len(found) == 1


# ------------------------------------------------------------------ order


def order_of(params: Any, count: int) -> list[int]:
    specs = [ParamSpec(numel_elems=i) for i in range(count)]
    return list(make_strategy('param_order', params).layout_order(specs, BufferTraits()))


def test_orders() -> None:
    assert order_of(cl.ForwardOrder(), 4) == [0, 1, 2, 3]
    assert order_of(cl.ReverseOrder(), 4) == [3, 2, 1, 0]
    # Written down once: a change would make a run of yesterday another run today.
    assert order_of(cl.RandomOrder(seed=0), 8) == [4, 1, 5, 2, 0, 3, 7, 6]
    assert order_of(cl.RandomOrder(seed=1), 8) != order_of(cl.RandomOrder(seed=0), 8)
    assert order_of(cl.RandomOrder(seed=5), 0) == []


@FAST
@given(seed=st.integers(0, 2**80), count=st.integers(0, 200))
def test_random_order_depends_on_seed_and_count_alone(seed: int, count: int) -> None:
    order = order_of(cl.RandomOrder(seed=seed), count)
    assert sorted(order) == list(range(count))
    assert order == order_of(cl.RandomOrder(seed=seed), count)


@pytest.mark.parametrize('answer', [[0], [0, 0], [0, 1, 2], [1, 2]])
def test_an_order_that_is_none_is_refused(answer: list[int]) -> None:
    class Broken:
        """A third party's."""

        def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> list[int]:
            return answer

    good = LayoutStrategies.from_config(BufferConfig())
    strategies = LayoutStrategies(
        param_order=Broken(),
        bucketing=good.bucketing,
        bucket_isolation=good.bucket_isolation,
        padding=good.padding,
    )
    specs = [ParamSpec(numel_elems=1), ParamSpec(numel_elems=2)]
    with pytest.raises(LayoutError, match=r'param_order: Broken returned .* exactly once'):
        compute_buffer_layout(
            specs, strategies, bucket_size_elems=None, dist_opt=True, buffer=BufferTraits()
        )


# ------------------------------------------------------------------ grouping

RULES = load_config(
    {
        'buffer_grouping': {
            'name': 'grad_dtype_rules',
            'rules': [
                {'pattern': '*.router.*', 'grad_dtype': 'fp32'},
                {'pattern': '*router*', 'grad_dtype': 'fp16'},
                {'pattern': '*.mlp.*', 'grad_dtype': 'bf16'},
            ],
        }
    }
)


@pytest.mark.parametrize(
    ('name', 'fp32', 'expected'),
    [
        ('a.router.weight', False, torch.float32),
        ('a.router_bias', False, torch.float16),
        ('a.mlp.weight', True, torch.bfloat16),
        ('a.mlp.router.weight', True, torch.float32),
        ('a.attn.weight', True, torch.float32),
        ('a.attn.weight', False, torch.bfloat16),
        ('', False, torch.bfloat16),
        ('', True, torch.float32),
    ],
)
def test_the_first_rule_that_matches_counts(name: str, fp32: bool, expected: torch.dtype) -> None:
    grouping = make_strategy('buffer_grouping', RULES.buffer_grouping)
    for quantized, expert, layer_wise in itertools.product([False, True], repeat=3):
        traits = ParamTraits(name, torch.bfloat16, quantized, expert, layer_wise)
        storage = torch.uint8 if quantized else torch.bfloat16
        assert grouping.key(traits, fp32) == (storage, expected, expert, layer_wise)


@pytest.mark.parametrize('stem', ['', 'module.', 'module.language_model.'])
@pytest.mark.parametrize(
    'pattern', ['*word_embeddings*', 'module.*output_layer.*', '*output_layer*']
)
def test_a_rule_holds_for_both_ends_of_a_tied_embedding(stem: str, pattern: str) -> None:
    """The first and the last stage add up their gradients of it, under two names."""
    rule = cl.GradDtypeRule(pattern=pattern, grad_dtype='fp16')
    grouping = make_strategy('buffer_grouping', cl.GradDtypeRules(rules=(rule,)))
    found = {tied: set() for tied in (False, True)}
    for name, tied in itertools.product(
        ('embedding.word_embeddings.weight', 'output_layer.weight'), (False, True)
    ):
        traits = ParamTraits(stem + name, torch.bfloat16, False, False, False, tied)
        found[tied].add(grouping.key(traits, True).grad_dtype)
    matched = bool(stem) or not pattern.startswith('module')
    assert found[True] == {torch.float16 if matched else torch.float32}
    assert found[False] == ({torch.float16, torch.float32} if matched else {torch.float32})


def chunk_of(*rows: tuple[str, torch.dtype]) -> ModelChunk:
    """Parameters on the meta device, with names."""
    return ModelChunk(
        {
            torch.nn.Parameter(torch.empty(64, dtype=dtype, device='meta')): name
            for name, dtype in rows
        }
    )


def test_indices_count_among_parameters_of_one_logical_and_one_gradient_dtype() -> None:
    """Loading a bf16 checkpoint into fp8 parameters wants 0 to n-1 over the buffers that it splits."""
    bf16, fp32 = torch.bfloat16, torch.float32
    chunk = chunk_of(
        ('a.attn', bf16),
        ('a.mlp.fc1', bf16),
        ('a.router.w', bf16),
        ('a.norm', fp32),
        ('b.attn', bf16),
        ('b.mlp.fc1', bf16),
    )
    with scope(Runtime(RULES), chunk):
        grouped = param_layout.group_params_for_buffers(list(chunk.names), True)
    assert {
        (key.param_dtype, key.grad_dtype): ([chunk.names[param] for param in params], indices)
        for key, (params, indices) in grouped.items()
    } == {
        (bf16, fp32): (['a.attn', 'a.router.w', 'b.attn'], [0, 1, 2]),
        (bf16, bf16): (['a.mlp.fc1', 'b.mlp.fc1'], [0, 1]),
        (fp32, fp32): (['a.norm'], [0]),
    }
    with scope(Runtime(RULES)):  # before DDP exists, nobody knows a name
        assert len(param_layout.group_params_for_buffers(list(chunk.names), True)) == 2


@pytest.mark.parametrize(
    ('order', 'expected'),
    [
        ({'name': 'reverse'}, [0, 1, 2, 3, 4, 5]),
        ({'name': 'forward'}, [5, 4, 3, 2, 1, 0]),
        # [3, 1, 2, 5, 4, 0] or whatever the generator says, backwards: upstream walks the list backwards.
        ({'name': 'random', 'seed': 3}, None),
    ],
)
def test_an_order_permutes_parameters_and_indices_together(
    order: dict[str, Any], expected: list[int] | None
) -> None:
    config = load_config({'param_order': order})
    chunk = chunk_of(*[(f'p{i}', torch.bfloat16) for i in range(6)])
    if expected is None:
        expected = order_of(config.param_order, 6)[::-1]
    with scope(Runtime(config), chunk):
        (grouped,) = param_layout.group_params_for_buffers(list(chunk.names), False).values()
    assert [chunk.names[param] for param in grouped[0]] == [f'p{i}' for i in expected]
    assert grouped[1] == expected


def test_real_parameters_are_laid_out_by_name_and_by_bytes() -> None:
    """What DDP asks for: the list that grouping permuted, walked backwards, cut and aligned by config."""
    config = load_config(
        {
            'param_order': 'forward',
            'bucketing': {'name': 'explicit', 'boundaries': ['b']},
            'bucket_isolation': {'name': 'patterns', 'patterns': ['d']},
            'padding': {'name': 'byte_aligned', 'param_start_bytes': 512, 'bucket_end_bytes': 4},
            'buffer_grouping': {
                'name': 'grad_dtype_rules',
                'rules': [{'pattern': '*', 'grad_dtype': 'bf16'}],
            },
        }
    )
    ddp_config = SimpleNamespace(pad_buckets_for_high_nccl_busbw=False, grad_reduce_in_fp32=True)
    chunk = chunk_of(*[(name, torch.bfloat16) for name in 'abcde'])
    with scope(Runtime(config), chunk):
        ((key, (params, indices)),) = param_layout.group_params_for_buffers(
            list(chunk.names), True
        ).items()
        layout = param_layout.compute_per_buffer_param_layout(params, 10, 3, ddp_config, indices)
        plain = param_layout.compute_default_per_buffer_param_layout(params, 10)
    assert key.grad_dtype == torch.bfloat16
    named = {chunk.names[param]: span for param, span in layout.param_index_map.items()}
    # 512 bytes are 256 bf16; buckets end at multiples of lcm(3 shards x 2, 256) = 768.
    assert named == {
        'a': (0, 64, 0),
        'b': (256, 320, 0),
        'c': (768, 832, 1),
        'd': (1536, 1600, 2),
        'e': (2304, 2368, 3),
    }
    assert layout.bucket_indices == [(0, 768), (768, 1536), (1536, 2304), (2304, 3072)]
    assert layout.per_bucket_numel_unpadded == [320, 64, 64, 64]
    assert layout.param_indices == indices == [4, 3, 2, 1, 0]
    assert plain.bucket_indices == [(0, 128), (128, 192), (192, 256), (256, 320)]


# ------------------------------------------------------------------ names and patterns


@pytest.mark.parametrize(
    ('axis', 'params', 'expected'),
    [
        (
            'buffer_grouping',
            RULES.buffer_grouping,
            [
                ('rules[0].pattern', '*.router.*'),
                ('rules[1].pattern', '*router*'),
                ('rules[2].pattern', '*.mlp.*'),
            ],
        ),
        ('bucketing', cl.PerModuleBucketing(), [('pattern', '*layers.*')]),
        (
            'bucketing',
            cl.ExplicitBucketing(boundaries=('a', 'b*')),
            [('boundaries[0]', 'a'), ('boundaries[1]', 'b*')],
        ),
        ('bucket_isolation', cl.PatternIsolation(patterns=('x',)), [('patterns[0]', 'x')]),
    ],
)
def test_strategies_that_go_by_names_say_so(
    axis: str, params: Any, expected: list[tuple[str, str]]
) -> None:
    made = make_strategy(axis, params)
    assert made.needs_names
    assert made.patterns() == expected


def test_the_others_need_no_names() -> None:
    for params in (cl.CountBucketing(num_buckets=2), cl.FixedSizeBucketing()):
        assert not getattr(make_strategy('bucketing', params), 'needs_names', False)


def test_unknown_names_match_nothing() -> None:
    specs = [ParamSpec(numel_elems=numel) for numel in (5, 1, 3)]
    layouts = {
        plan_layout(specs, config=BufferConfig(bucketing=bucketing), bucket_size_elems=1)
        for bucketing in (
            cl.PerModuleBucketing(pattern='*'),
            cl.ExplicitBucketing(boundaries=('*',)),
        )
    }
    isolated = BufferConfig(bucket_isolation=cl.PatternIsolation(patterns=('*',)))
    layouts.add(plan_layout(specs, config=isolated))
    assert layouts == {plan_layout(specs)}

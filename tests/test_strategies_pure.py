"""Strategies as pure functions and small state machines, without a model and without Megatron."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer.config import AXES, BufferConfig, load_config
from megatron_buffer.config_layout import MegatronPadding as MegatronPaddingParams
from megatron_buffer.config_layout import RecordedOrder, TimeOptimalBucketing
from megatron_buffer.config_runtime import (
    AllReduceGrads,
    AllToAllFp32Sum,
    ReduceScatterGrads,
    UpstreamReduce,
)
from megatron_buffer.errors import LayoutError, ReadinessError, RegistryError
from megatron_buffer.layout import (
    BucketSpan,
    BufferLayout,
    LayoutStrategies,
    ParamSlot,
    ParamSpec,
    compute_buffer_layout,
    plan_layout,
)
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies import registry
from megatron_buffer.strategies.gather import by_dtype
from megatron_buffer.strategies.padding import UNPADDED, Alignment, MegatronPadding, round_up
from megatron_buffer.strategies.readiness import CountTracker
from megatron_buffer.strategies.specs import BufferTraits
from tests.config_values import example_of

UPSTREAM = Runtime(BufferConfig())
PROPERTY = settings(max_examples=400, deadline=None, derandomize=True, database=None)


# ------------------------------------------------------------------ readiness


class DictionaryModel:
    """Upstream's rule, word for word: the counts of this window equal the first counted window's."""

    def __init__(self) -> None:
        self.counts: dict[Hashable, int] = {}
        self.golden: dict[Hashable, int] = {}
        self.is_first_batch = True

    def register(self, param: Hashable) -> bool:
        self.counts = {**self.counts, param: self.counts.get(param, 0) + 1}
        return not self.is_first_batch and self.counts == self.golden

    def reset(self) -> None:
        if self.is_first_batch and self.counts:
            self.golden = self.counts
            self.is_first_batch = False
        self.counts = {}

    def missing(self, params: Sequence[Hashable]) -> list[Hashable]:
        expected = dict.fromkeys(params, 1) if self.is_first_batch else self.golden
        return [p for p in params if self.counts.get(p, 0) < expected.get(p, 0)]

    def surplus(self, params: Sequence[Hashable]) -> list[Hashable]:
        if self.is_first_batch:
            return []
        return [p for p in params if self.counts.get(p, 0) > self.golden.get(p, 0)]


def assert_same(tracker: CountTracker, model: DictionaryModel, params: Sequence[str]) -> None:
    assert tracker.counts == model.counts
    assert tracker.golden == model.golden
    assert tracker.is_first_batch == model.is_first_batch
    assert tracker.missing() == model.missing(params)
    assert tracker.surplus() == model.surplus(params)


@st.composite
def windows(draw: st.DrawFn) -> tuple[str, list[list[str]]]:
    """Parameters and windows of registrations: exact repeats, shuffled ones, near misses, empty ones."""
    params = 'abcdef'[: draw(st.integers(1, 6))]
    anything = st.lists(st.sampled_from(params), max_size=12)
    first = draw(anything | st.permutations(params))
    later = draw(st.lists(st.sampled_from(('same', 'shuffled', 'less', 'more', 'any')), max_size=6))
    made: list[list[str]] = [[]] * draw(st.integers(0, 2)) + [list(first)]
    for kind in later:
        window = list(first) if kind == 'same' else list(draw(st.permutations(list(first))))
        if kind == 'less':
            window = window[1:]
        elif kind == 'more':
            window.insert(draw(st.integers(0, len(window))), draw(st.sampled_from(params)))
        elif kind == 'any':
            window = draw(anything)
        made.append(window)
    return params, made


@PROPERTY
@given(windows())
def test_golden_lazy_equals_dictionary_comparison(case: tuple[str, list[list[str]]]) -> None:
    params, made = case
    tracker, model = CountTracker(params), DictionaryModel()
    for window in made:
        for param in window:
            assert tracker.register(param) == model.register(param)
            assert_same(tracker, model, params)
        tracker.reset()
        model.reset()
        assert_same(tracker, model, params)


@PROPERTY
@given(windows(), st.data())
def test_golden_counts_given_from_outside(
    case: tuple[str, list[list[str]]], data: st.DataObject
) -> None:
    """Counts known beforehand, set at any moment, as upstream's attribute allows."""
    params, made = case
    golden = dict(Counter(data.draw(st.lists(st.sampled_from(params), min_size=1, max_size=8))))
    tracker, model = CountTracker(params), DictionaryModel()
    at = data.draw(st.integers(0, 4))
    for step, param in enumerate(itertools.chain(*made)):
        if step == at:
            tracker.is_first_batch = model.is_first_batch = False
            tracker.golden = model.golden = dict(golden)
        assert tracker.register(param) == model.register(param)
        assert_same(tracker, model, params)


def test_counts_assigned_from_outside() -> None:
    tracker, model = CountTracker('ab'), DictionaryModel()
    for each in (tracker, model):
        for param in 'ab':
            each.register(param)
        each.reset()
        each.register('a')
        each.counts = {}
    assert tracker.register('a') == model.register('a') == False  # noqa: E712
    assert tracker.register('b') == model.register('b') == True  # noqa: E712


def test_a_group_is_ready_once_per_window_and_again_in_the_next() -> None:
    tracker = CountTracker('ab')
    assert [tracker.register(param) for param in 'aba'] == [False] * 3
    tracker.reset()
    for _ in range(3):
        assert [tracker.register(param) for param in 'aab'] == [False, False, True]
        tracker.reset()
    assert [tracker.register(param) for param in 'aaba'] == [False, False, True, False]
    assert tracker.surplus() == ['a']
    tracker.reset()
    assert tracker.register('b') is False
    assert tracker.missing() == ['a']


# ------------------------------------------------------------------ unused parameters


@dataclass
class Window:
    """A group's window as a strategy sees it, with lists in the place of counts."""

    unused_: list[str] = field(default_factory=list)
    missing_: list[str] = field(default_factory=list)
    surplus_: list[str] = field(default_factory=list)
    late_: list[str] = field(default_factory=list)
    num_registered: int = 3
    num_params: int = 3
    is_first_batch: bool = False
    adapts: bool = False
    dispatched: bool = False
    level: int = logging.WARNING
    has_handle: bool = True

    def unused(self) -> list[str]:
        return self.unused_

    def missing(self) -> list[str]:
        return self.missing_

    def surplus(self) -> list[str]:
        return self.surplus_

    def late(self) -> list[str]:
        return self.late_

    def describe(self, name: str) -> str:
        return f'<{name}>'


def unused_params(name: str = 'upstream') -> Any:
    return Runtime(load_config({'unused_params': name})).unused_params


@pytest.mark.parametrize(
    ('dispatched', 'num_registered', 'is_first_batch'),
    list(itertools.product([False, True], [0, 1, 3], [False, True])),
)
def test_unused_is_an_error_only_where_stock_asserts(
    dispatched: bool, num_registered: int, is_first_batch: bool
) -> None:
    names = ['layers.0.weight', 'layers.1.weight', 'layers.2.weight'][num_registered:]
    state = Window(
        unused_=names,
        missing_=names,
        num_registered=num_registered,
        is_first_batch=is_first_batch,
        dispatched=dispatched,
    )
    stock_asserts = num_registered == 1 if is_first_batch else not dispatched
    if not stock_asserts:
        assert unused_params().check([state]) is None
        return
    with pytest.raises(ReadinessError) as error:
        unused_params().check([state])
    if num_registered:
        assert all(name in str(error.value) for name in names)
    elif not is_first_batch:
        assert 'no gradient arrived' in str(error.value)
    assert f'{num_registered} of 3' in str(error.value) or is_first_batch


def test_unused_names_what_is_too_few_and_too_many() -> None:
    check = unused_params().check
    with pytest.raises(ReadinessError, match=r'too few for a\.w; too many for b\.w, c\.w'):
        check([Window(missing_=['a.w'], surplus_=['b.w', 'c.w'])])
    with pytest.raises(ReadinessError, match=r': too many for b\.w\. '):
        check([Window(surplus_=['b.w'])])
    with pytest.raises(ReadinessError, match=r'2 of 5 .*: a\.w, b\.w\. .*requires_grad=False'):
        check([Window(unused_=['a.w', 'b.w'], num_params=5, is_first_batch=True)])


@pytest.mark.parametrize(
    'state', [{'has_handle': False, 'surplus_': ['b.w']}, {'dispatched': True, 'late_': ['b.w']}]
)
def test_unused_warns_once_where_stock_is_silently_wrong(
    state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    unused = unused_params()
    for _ in range(2):
        unused.check([Window(**state)])
    assert [record.levelname for record in caplog.records] == ['WARNING']
    assert 'b.w' in caplog.text


def test_unused_shortens_long_lists() -> None:
    names = [f'layers.{i}.w' for i in range(20)]
    for state in (
        Window(missing_=names),
        Window(unused_=names, num_registered=1, num_params=21, is_first_batch=True),
    ):
        with pytest.raises(ReadinessError, match=r'layers\.7\.w and 12 more') as error:
            unused_params().check([state])
        assert 'layers.8.w' not in str(error.value)


def test_counts_that_follow_the_window_before_are_no_fault() -> None:
    state = Window(missing_=['a.w'], surplus_=['b.w'], adapts=True)
    for name in ('upstream', 'error', 'zero_fill'):
        assert unused_params(name).check([state]) is None


def test_unused_as_an_error_names_all_groups() -> None:
    windows = [Window(unused_=['a.w']), Window(), Window(unused_=['b.w'], dispatched=True)]
    with pytest.raises(ReadinessError, match=r'2 parameters got no gradient.*<a.w>, <b.w>'):
        unused_params('error').check(windows)


def test_zero_fill_names_each_parameter_once(caplog: pytest.LogCaptureFixture) -> None:
    unused = unused_params('zero_fill')
    for names in (['a.w'], ['a.w'], ['a.w', 'b.w'], ['b.w']):
        unused.check([Window(unused_=names)])
    assert [r.getMessage().count('<') for r in caplog.records] == [1, 1]
    assert '<a.w>' in caplog.records[0].getMessage()
    assert '<b.w>' in caplog.records[1].getMessage()


# ------------------------------------------------------------------ padding


@PROPERTY
@given(value=st.integers(0, 2**200), divisor=st.integers(1, 2**80))
def test_round_up_is_exact(value: int, divisor: int) -> None:
    rounded = round_up(value, divisor)
    assert rounded % divisor == 0
    assert 0 <= rounded - value < divisor
    assert type(rounded) is int


def test_round_up_where_floats_are_not_exact() -> None:
    assert round_up(2**53 + 1, 1) == 2**53 + 1
    assert round_up(2**60 + 1, 64) == 2**60 + 64
    assert round_up(2**60, 64) == 2**60


@pytest.mark.parametrize(
    ('params', 'high_busbw', 'expected'),
    [
        ({}, False, (64, 384)),
        ({}, True, (64, 3 * 2**16)),
        ({'high_busbw': True}, False, (64, 3 * 2**16)),
        ({'high_busbw': False}, True, (64, 384)),
        ({'param_start_elems': 8, 'bucket_end_elems': 10}, False, (8, 30)),
        ({'param_start_elems': 1, 'bucket_end_elems': 1}, False, (1, 3)),
    ],
)
def test_padding_parameters(
    params: dict[str, Any], high_busbw: bool, expected: tuple[int, int]
) -> None:
    buffer = BufferTraits(dp_size=3, high_busbw=high_busbw)
    assert MegatronPadding(MegatronPaddingParams(**params)).alignment(buffer) == expected


SPECS = st.lists(
    st.builds(ParamSpec, numel_elems=st.integers(1, 500), shared_embedding=st.booleans()),
    max_size=12,
)


def config_with_padding(param_start_elems: int, bucket_end_elems: int) -> BufferConfig:
    return BufferConfig(
        padding=MegatronPaddingParams(
            param_start_elems=param_start_elems, bucket_end_elems=bucket_end_elems
        )
    )


def assert_aligned(layout: BufferLayout, start_elems: int, end_elems: int) -> None:
    for slot in layout.slots:
        assert slot.start_elems % start_elems == 0, slot
    for span in layout.buckets:
        assert span.end_elems % math.lcm(layout.dp_size, end_elems) == 0, span


@PROPERTY
@given(
    specs=SPECS,
    start_elems=st.integers(1, 100),
    factor=st.integers(1, 4),
    bucket_size=st.none() | st.integers(1, 2000),
    dp=st.integers(1, 40),
)
def test_any_padding_gives_a_layout_that_passes_its_check(
    specs: list[ParamSpec], start_elems: int, factor: int, bucket_size: int | None, dp: int
) -> None:
    """Here the bucket end is a multiple of the parameter start, as upstream's 128 is of its 64."""
    config = config_with_padding(start_elems, start_elems * factor)
    layout = plan_layout(specs, config=config, bucket_size_elems=bucket_size, dp_size=dp)
    assert_aligned(layout, start_elems, start_elems * factor)
    for slot in layout.slots:
        if specs[slot.param].shared_embedding:
            assert layout.slots_by_bucket()[slot.bucket] == [slot]


@pytest.mark.parametrize(('start_elems', 'end_elems', 'dp'), [(64, 1, 3), (256, 128, 3)])
def test_a_tied_embedding_starts_aligned_under_any_padding(
    start_elems: int, end_elems: int, dp: int
) -> None:
    specs = [ParamSpec(numel_elems=10, shared_embedding=True), ParamSpec(numel_elems=10)]
    config = config_with_padding(start_elems, end_elems)
    assert_aligned(plan_layout(specs, config=config, dp_size=dp), start_elems, end_elems)


# ------------------------------------------------------------------ the invariants of a layout

GOOD_SPECS = [ParamSpec(numel_elems=n, name=f'p{i}') for i, n in enumerate((6, 4, 5))]
GOOD = BufferLayout(
    slots=(ParamSlot(2, 0, 5, 0), ParamSlot(1, 8, 12, 0), ParamSlot(0, 16, 22, 1)),
    buckets=(BucketSpan(0, 16, 12), BucketSpan(16, 24, 6)),
    dp_size=4,
    alignment=Alignment(8, 8),
    names=('p0', 'p1', 'p2'),
)


def slot(index: int, **changes: Any) -> BufferLayout:
    """GOOD with one slot changed."""
    slots = list(GOOD.slots)
    slots[index] = dataclasses.replace(slots[index], **changes)
    return dataclasses.replace(GOOD, slots=tuple(slots))


def bucket(index: int, **changes: Any) -> BufferLayout:
    """GOOD with one bucket changed."""
    buckets = list(GOOD.buckets)
    buckets[index] = dataclasses.replace(buckets[index], **changes)
    return dataclasses.replace(GOOD, buckets=tuple(buckets))


def rebuilt(slots: Sequence[ParamSlot], *buckets: tuple[int, int, int]) -> BufferLayout:
    """GOOD with other slots and buckets."""
    spans = tuple(BucketSpan(*span) for span in buckets)
    return dataclasses.replace(GOOD, slots=tuple(slots), buckets=spans)


def test_a_good_layout_passes() -> None:
    GOOD.check(GOOD_SPECS)
    BufferLayout(slots=(), buckets=(), dp_size=3, alignment=UNPADDED).check([])


@pytest.mark.parametrize(
    'broken',
    [
        pytest.param(dataclasses.replace(GOOD, slots=GOOD.slots[:2]), id='a parameter is left out'),
        pytest.param(slot(0, param=1), id='a parameter is laid out twice'),
        pytest.param(slot(0, param=3), id='a parameter that does not exist'),
        pytest.param(
            dataclasses.replace(GOOD, slots=(*GOOD.slots, GOOD.slots[0])), id='one too many'
        ),
        pytest.param(slot(1, start_elems=4, end_elems=8), id='two overlap'),
        pytest.param(slot(0, start_elems=-5, end_elems=0), id='negative start'),
        pytest.param(slot(0, end_elems=6), id='too large'),
        pytest.param(slot(2, end_elems=21), id='too small'),
        pytest.param(slot(1, start_elems=13, end_elems=17), id='crosses into the next bucket'),
        pytest.param(slot(2, bucket=0), id='lies in another bucket than it says'),
        pytest.param(slot(1, bucket=1), id='lies before its bucket'),
        pytest.param(slot(1, bucket=-1), id='negative bucket'),
        pytest.param(bucket(0, start_elems=4), id='the first bucket does not start at 0'),
        pytest.param(bucket(1, start_elems=12), id='buckets overlap'),
        pytest.param(bucket(0, end_elems=12), id='buckets do not touch'),
        pytest.param(bucket(1, end_elems=23), id='an end does not divide by dp_size'),
        pytest.param(dataclasses.replace(GOOD, dp_size=3), id='divides by another dp_size'),
        pytest.param(
            rebuilt(GOOD.slots[::-1], (0, 16, 12), (16, 24, 6)), id='slots not in layout order'
        ),
        pytest.param(
            rebuilt(
                [*GOOD.slots[:2], dataclasses.replace(GOOD.slots[2], bucket=2)],
                *((0, 16, 12), (16, 16, 0), (16, 24, 6)),
            ),
            id='an empty bucket in the middle',
        ),
        pytest.param(slot(2, bucket=2), id='a bucket that does not exist'),
        pytest.param(dataclasses.replace(GOOD, buckets=()), id='no buckets'),
        pytest.param(
            rebuilt(
                [dataclasses.replace(s, bucket=s.bucket + 1) for s in GOOD.slots],
                *((0, 0, 0), (0, 16, 12), (16, 24, 6)),
            ),
            id='an empty bucket in front',
        ),
        pytest.param(
            rebuilt(GOOD.slots, (0, 16, 12), (16, 24, 6), (24, 28, 0)),
            id='an empty bucket at the end',
        ),
        pytest.param(
            rebuilt(GOOD.slots, (0, 16, 12), (16, 24, 6), (24, 20, 0)),
            id='a bucket that ends before it starts',
        ),
        pytest.param(bucket(0, numel_unpadded=11), id='numel_unpadded before the last end'),
        pytest.param(bucket(0, numel_unpadded=13), id='numel_unpadded behind the last end'),
        pytest.param(bucket(1, numel_unpadded=9), id='numel_unpadded behind the bucket'),
        pytest.param(
            rebuilt(
                [ParamSlot(2, 0, 5, 0), ParamSlot(1, 16, 20, 1), ParamSlot(0, 24, 30, 1)],
                *((0, 8, 5), (8, 32, 22)),
            ),
            id='a gap in front of a first parameter',
        ),
        pytest.param(
            dataclasses.replace(GOOD, alignment=Alignment(8, 12)), id='an end is not aligned'
        ),
    ],
)
def test_a_broken_layout_is_caught(broken: BufferLayout) -> None:
    with pytest.raises(LayoutError, match='layout: '):
        broken.check(GOOD_SPECS)


def tied(*indices: int) -> list[ParamSpec]:
    """GOOD's specs, some of them tied embeddings."""
    return [
        dataclasses.replace(spec, shared_embedding=index in indices)
        for index, spec in enumerate(GOOD_SPECS)
    ]


def test_a_tied_embedding_is_alone_and_sharded_as_anywhere_else() -> None:
    GOOD.check(tied(0), isolate=True)
    GOOD.check(tied(1, 2))  # without the distributed optimizer nobody minds
    for index in (1, 2):
        with pytest.raises(LayoutError, match=f'p{index} is a tied embedding and shares bucket 0'):
            GOOD.check(tied(index), isolate=True)
    with pytest.raises(LayoutError, match=r'bucket 1 has 16 elements for p0, .* must have 8'):
        bucket(1, end_elems=32).check(tied(0), isolate=True)


def test_the_unpadded_size_reaches_an_aligned_end_only_before_a_tied_embedding() -> None:
    """As upstream records it; checkpoints count on one or the other."""
    slots = (ParamSlot(1, 0, 4, 0), ParamSlot(2, 8, 13, 0), ParamSlot(0, 16, 22, 1))
    for numel_unpadded, is_right, is_right_before_tied in ((13, 1, 1), (16, 0, 1), (14, 0, 0)):
        layout = rebuilt(slots, (0, 16, numel_unpadded), (16, 24, 6))
        for specs, right in ((tied(0), is_right_before_tied), (tied(), is_right)):
            if right:
                layout.check(specs, isolate=True)
            else:
                with pytest.raises(LayoutError, match='bucket 0 records'):
                    layout.check(specs, isolate=True)


def test_a_broken_layout_names_the_parameter() -> None:
    with pytest.raises(LayoutError, match='p1 '):
        slot(1, start_elems=4, end_elems=8).check(GOOD_SPECS)
    nameless = [ParamSpec(numel_elems=spec.numel_elems) for spec in GOOD_SPECS]
    with pytest.raises(LayoutError, match='parameter 1 '):
        slot(1, start_elems=4, end_elems=8).check(nameless)


# ------------------------------------------------------------------ fingerprint


def test_the_fingerprint_changes_with_everything_that_ranks_must_agree_on() -> None:
    layouts = [
        GOOD,
        slot(0, start_elems=1),
        slot(0, end_elems=6),
        slot(1, bucket=1),
        slot(0, param=1),
        bucket(0, start_elems=1),
        bucket(0, end_elems=20),
        bucket(1, numel_unpadded=7),
        dataclasses.replace(GOOD, dp_size=2),
        dataclasses.replace(GOOD, names=('p0', 'p1', 'other')),
        dataclasses.replace(GOOD, slots=GOOD.slots[:2]),
        dataclasses.replace(GOOD, buckets=GOOD.buckets[:1]),
        dataclasses.replace(GOOD, slots=GOOD.slots[::-1]),
    ]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)


@PROPERTY
@given(specs=SPECS, bucket_size=st.none() | st.integers(1, 2000), dp=st.integers(1, 40))
def test_the_fingerprint_does_not_change_by_itself(
    specs: list[ParamSpec], bucket_size: int | None, dp: int
) -> None:
    prints = {
        plan_layout(
            [dataclasses.replace(spec) for spec in specs],
            config=BufferConfig(source=source),
            bucket_size_elems=bucket_size,
            dp_size=dp,
        ).fingerprint()
        for source in ('one.yaml', 'another.yaml')
    }
    assert len(prints) == 1
    assert prints.pop() == prints_of_slots(specs, bucket_size, dp)


def prints_of_slots(specs: list[ParamSpec], bucket_size: int | None, dp: int) -> str:
    """Fingerprint of the same layout, put together slot by slot."""
    layout = compute_buffer_layout(
        specs,
        UPSTREAM.layout,
        bucket_size_elems=bucket_size,
        dist_opt=True,
        buffer=BufferTraits(dp_size=dp),
    )
    return BufferLayout(
        slots=tuple(ParamSlot(*dataclasses.astuple(slot)) for slot in layout.slots),
        buckets=tuple(BucketSpan(*dataclasses.astuple(span)) for span in layout.buckets),
        dp_size=dp,
        alignment=Alignment(1, 1),
        names=tuple(spec.name for spec in specs),
    ).fingerprint()


class Forward:
    """A param_order of a third party: registration order."""

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        return range(len(params))


@pytest.mark.parametrize('names', [('a', 'b'), ('', '')])
def test_the_fingerprint_sees_the_order(names: tuple[str, str]) -> None:
    specs = [ParamSpec(numel_elems=64, name=name) for name in names]
    prints = {
        compute_buffer_layout(
            specs,
            LayoutStrategies(
                bucketing=UPSTREAM.layout.bucketing,
                bucket_isolation=UPSTREAM.layout.bucket_isolation,
                padding=UPSTREAM.layout.padding,
                param_order=order,
            ),
            bucket_size_elems=None,
            dist_opt=True,
            buffer=BufferTraits(dp_size=2),
        ).fingerprint()
        for order in (Forward(), UPSTREAM.layout.param_order)
    }
    assert len(prints) == 2


# ------------------------------------------------------------------ small ones


@PROPERTY
@given(st.lists(st.sampled_from(('uint8', 'bf16', 'fp32')), max_size=12))
def test_by_dtype(dtypes: list[str]) -> None:
    launches = by_dtype(dtypes)
    assert sorted(itertools.chain(*launches)) == list(range(len(dtypes)))
    assert all(launch == sorted(launch) for launch in launches)
    assert [{dtypes[i] for i in launch} for launch in launches] == [
        {dtype} for dtype in dict.fromkeys(dtypes)
    ]


BOTH = list(itertools.product((False, True), repeat=2))
NARROW = AllToAllFp32Sum(wire_dtype='bf16')


@pytest.mark.parametrize(
    ('params', 'dist_opt', 'fp32_accumulation', 'choice'),
    [
        (UpstreamReduce(), False, False, ('all_reduce', None)),
        (UpstreamReduce(), False, True, ('all_reduce', None)),
        (UpstreamReduce(), True, False, ('reduce_scatter', None)),
        (UpstreamReduce(), True, True, ('upstream_a2a', None)),
        *((AllReduceGrads(), *flags, ('all_reduce', None)) for flags in BOTH),
        *((ReduceScatterGrads(), *flags, ('reduce_scatter', None)) for flags in BOTH),
        *((AllToAllFp32Sum(), *flags, ('a2a', None)) for flags in BOTH),
        *((NARROW, *flags, ('a2a', 'bf16')) for flags in BOTH),
    ],
)
def test_reduce_choice(
    params: Any, dist_opt: bool, fp32_accumulation: bool, choice: tuple[str, str | None]
) -> None:
    """Flags that contradict a strategy are refused when a model is wrapped, not here."""
    reduce = Runtime(BufferConfig(grad_reduce=params)).grad_reduce
    assert reduce.choice(dist_opt=dist_opt, fp32_accumulation=fp32_accumulation) == choice


class Recorder:
    """A bucket group and a buffer that note what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self.calls.append(('start', force_all_reduce))

    def zero_grads(self) -> None:
        self.calls.append('zero')


def test_arrival_and_zero_then_add_act_at_once() -> None:
    recorder = Recorder()
    dispatcher = UPSTREAM.dispatch_order.dispatcher([recorder], [0])
    dispatcher.group_ready(recorder, False)
    dispatcher.group_ready(recorder, True)
    UPSTREAM.accumulation.begin_window(recorder)
    assert recorder.calls == [('start', False), ('start', True), 'zero']


# ------------------------------------------------------------------ registry


def test_every_built_strategy_of_every_axis_can_be_made() -> None:
    for axis, description in AXES.items():
        for params_type in description.strategies.values():
            params = example_of(params_type)
            if isinstance(params, RecordedOrder | TimeOptimalBucketing):
                continue  # read a file
            assert registry.make_strategy(axis, params).params == params
    assert set(registry._AXIS_MODULES) == set(AXES)


def test_a_second_class_for_the_same_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, '_BUILT_IN', dict(registry._BUILT_IN))

    class Params:
        """Parameters of nobody else."""

    class First:
        """Takes them."""

    class Second:
        """Wants them too."""

    assert registry.strategy('padding', Params)(First) is First
    with pytest.raises(RegistryError, match=r'padding: .*Second and .*First both act on .*Params'):
        registry.strategy('padding', Params)(Second)
    assert registry._BUILT_IN['padding', Params] is First
    assert registry.strategy('param_order', Params)(Second) is Second  # another axis


def test_an_unknown_axis_is_refused_with_the_list() -> None:
    with pytest.raises(RegistryError, match="unknown axis 'paddings'; there are buffer_grouping,"):
        registry.make_strategy('paddings', MegatronPaddingParams())


def test_parameters_of_nobody_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Params:
        name: str = 'nobody'

    with pytest.raises(RegistryError, match=r"padding: .*'nobody'"):
        registry.make_strategy('padding', Params())

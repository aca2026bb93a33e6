"""Which buckets communicate together: every strategy, any buffers, and what it means for their timing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer.config import AXES
from megatron_buffer.errors import LayoutError
from megatron_buffer.strategies.bucket_groups import BucketRef, BufferBuckets
from megatron_buffer.strategies.registry import make_strategy

FAST = settings(max_examples=300, deadline=None, derandomize=True, database=None)
THOROUGH = settings(max_examples=3000, deadline=None, database=None, print_blob=True)

STRATEGIES = AXES['bucket_groups'].strategies
ONE_FP8_BUFFER = ('merge_into_last_fp8', 'merge_into_first_fp8')


def partition(
    name: str, buffers: Sequence[BufferBuckets], *, single: bool = False, one: bool = False
) -> list[list[BucketRef]]:
    """The groups that strategy ``name`` makes."""
    made = make_strategy('bucket_groups', STRATEGIES[name]())
    return made.partition(buffers, single_group=single, one_bucket_per_group=one)


def ready_at(buffers: Sequence[BufferBuckets], group: Sequence[BucketRef]) -> int:
    """A group waits for the last of its buckets, and backward counts down."""
    return min(buffers[ref.buffer].ready_at[ref.bucket] for ref in group)


BUFFERS = st.lists(
    st.builds(
        BufferBuckets,
        is_fp8=st.booleans(),
        ready_at=st.lists(st.integers(0, 40), min_size=1, max_size=5),
        is_layer_wise=st.booleans(),
    ),
    max_size=5,
)


def check_partition(name: str, buffers: list[BufferBuckets], single: bool, one: bool) -> None:
    """Every bucket once; owners apart; flags honoured; the rule of each strategy in words."""
    if name in ONE_FP8_BUFFER and sum(buffer.is_fp8 for buffer in buffers) > 1:
        with pytest.raises(LayoutError, match=f'{name} found .* nearest_ready, separate or single'):
            partition(name, buffers, single=single, one=one)
        return
    groups = partition(name, buffers, single=single, one=one)
    every = [BucketRef(i, j) for i, buffer in enumerate(buffers) for j in range(buffer.num_buckets)]
    assert sorted(itertools.chain(*groups)) == every
    assert all(groups)
    if name == 'merge_into_last_fp8':
        return  # compared with the installed Megatron-Core's in test_layout_upstream
    kinds = [{buffers[ref.buffer].is_layer_wise for ref in group} for group in groups]
    assert all(len(kind) == 1 for kind in kinds)
    if one or (name == 'separate' and not single):
        assert groups == [[ref] for ref in every]
    elif single or name == 'single':
        assert len(groups) == len({buffer.is_layer_wise for buffer in buffers})
    else:
        check_joined(name, buffers, groups)


def check_joined(name: str, buffers: list[BufferBuckets], groups: list[list[BucketRef]]) -> None:
    """Each group is one fp8 bucket and its guests, or one other bucket where its kind has no fp8."""
    for group in groups:
        host, *guests = group
        is_layer_wise = buffers[host.buffer].is_layer_wise
        hosts = [
            other[0]
            for other in groups
            if buffers[other[0].buffer].is_fp8
            and buffers[other[0].buffer].is_layer_wise == is_layer_wise
        ]
        assert buffers[host.buffer].is_fp8 == bool(hosts)
        assert hosts or not guests
        for guest in guests:
            assert not buffers[guest.buffer].is_fp8
            if name == 'merge_into_first_fp8':
                assert host == min(hosts)
                continue
            mine, theirs = ready_at(buffers, [guest]), [ready_at(buffers, [h]) for h in hosts]
            chosen = ready_at(buffers, [host])
            if min(theirs) > mine:  # all fp8 buckets are complete before: the last of them
                assert chosen == min(theirs)
            else:  # nobody waits for the guest, and the guest waits as little as can be
                assert chosen <= mine
                assert not any(chosen < other <= mine for other in theirs)


@pytest.mark.parametrize('name', STRATEGIES)
@FAST
@given(buffers=BUFFERS, single=st.booleans(), one=st.booleans())
def test_partition(name: str, buffers: list[BufferBuckets], single: bool, one: bool) -> None:
    check_partition(name, buffers, single, one)


@pytest.mark.slow
@pytest.mark.parametrize('name', STRATEGIES)
@THOROUGH
@given(buffers=BUFFERS, single=st.booleans(), one=st.booleans())
def test_partition_thoroughly(
    name: str, buffers: list[BufferBuckets], single: bool, one: bool
) -> None:
    check_partition(name, buffers, single, one)


# An fp8 model of 30 parameters: matrices in three fp8 buckets that are complete at 20, 10 and 0, and small
# parameters of all layers in two bf16 buckets, complete at 15 and at 1.
FP8 = BufferBuckets(True, [20, 10, 0])
BF16 = BufferBuckets(False, [15, 1])


@pytest.mark.parametrize(
    ('name', 'buffers', 'expected'),
    [
        ('separate', [FP8, BF16], '00 | 01 | 02 | 10 | 11'),
        ('single', [FP8, BF16], '00 01 02 10 11'),
        ('merge_into_last_fp8', [FP8, BF16], '00 | 01 | 02 10 11'),
        ('merge_into_first_fp8', [FP8, BF16], '00 10 11 | 01 | 02'),
        # 15 comes before 10, so that bucket goes with it and makes nobody wait; 1 goes with 0.
        ('nearest_ready', [FP8, BF16], '00 | 01 10 | 02 11'),
        ('nearest_ready', [BF16, FP8], '10 | 11 00 | 12 01'),
        # Complete together.
        ('nearest_ready', [FP8, BufferBuckets(False, [10])], '00 | 01 10 | 02'),
        # After all fp8 buckets: with the last of them, which waits.
        ('nearest_ready', [BufferBuckets(True, [20, 10]), BF16], '00 | 01 10 11'),
        # In the order of registration (forward), the first bucket is the last to be complete.
        ('nearest_ready', [BufferBuckets(True, [0, 10, 20]), BF16], '00 11 | 01 10 | 02'),
        # Two fp8 buffers, of different gradient dtypes.
        ('nearest_ready', [FP8, BufferBuckets(True, [14]), BF16], '00 | 01 | 02 21 | 10 20'),
        ('separate', [FP8, BufferBuckets(True, [14])], '00 | 01 | 02 | 10'),
        ('single', [FP8, BufferBuckets(True, [14])], '00 01 02 10'),
        # No fp8 at all.
        ('nearest_ready', [BF16, BF16], '00 | 01 | 10 | 11'),
        ('merge_into_first_fp8', [BF16, BF16], '00 | 01 | 10 | 11'),
        # LayerWise's buckets stay by themselves.
        ('nearest_ready', [FP8, BufferBuckets(False, [15, 1], True)], '00 | 01 | 02 | 10 | 11'),
        (
            'merge_into_first_fp8',
            [FP8, BufferBuckets(False, [15], True), BF16],
            '00 20 21 | 01 | 02 | 10',
        ),
        ('single', [FP8, BufferBuckets(False, [15], True), BF16], '00 01 02 20 21 | 10'),
        ('separate', [], ''),
        ('single', [], ''),
        ('nearest_ready', [], ''),
    ],
)
def test_worked_examples(name: str, buffers: list[BufferBuckets], expected: str) -> None:
    groups = {
        tuple(BucketRef(int(ref[0]), int(ref[1])) for ref in group.split())
        for group in expected.split('|')
        if group.strip()
    }
    assert {tuple(group) for group in partition(name, buffers)} == groups


def test_only_nearest_ready_makes_nobody_wait() -> None:
    """When each fp8 bucket's group can start, by where backward has to be: higher is earlier."""
    starts = {}
    for name in ('separate', 'nearest_ready', 'merge_into_last_fp8', 'merge_into_first_fp8'):
        groups = partition(name, [FP8, BF16])
        starts[name] = [
            ready_at([FP8, BF16], next(g for g in groups if BucketRef(0, bucket) in g))
            for bucket in range(3)
        ]
    assert starts == {
        'separate': [20, 10, 0],
        'nearest_ready': [20, 10, 0],
        'merge_into_last_fp8': [20, 10, 0],
        'merge_into_first_fp8': [1, 10, 0],  # the first group waits for nearly all of backward
    }

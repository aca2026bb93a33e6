"""Same bits: stock and ours train the same tiny GPT in the same processes, and nothing differs.

Every parameter, every owned main_grad shard, every tensor of the optimizer's state, all losses and
gradient norms, after six steps of three micro-batches with clipping; and the layouts, field by field.
Here data parallelism alone; `test_parity_parallel`, `_options` and `_special` have the rest, and
`docs/parity.md` the table.
"""

from __future__ import annotations

import itertools

import pytest

from tests.parity_run import SMALL_BUCKET_ELEMS, check
from tests.tiny_gpt import TrainCase

# Without the distributed optimizer there is no gather to overlap.
PATHS = [path for path in itertools.product([False, True], repeat=3) if path[0] or not path[2]]
BOTH = ('upstream', 'recommended')


def _case(path: tuple[bool, bool, bool], dtype: str, in_fp32: bool) -> TrainCase:
    dist_opt, overlap_grad_reduce, overlap_param_gather = path
    return TrainCase(
        dist_opt=dist_opt,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        dtype=dtype,
        grad_reduce_in_fp32=in_fp32,
        bucket_size=SMALL_BUCKET_ELEMS,
    )


def _matrix(dist_opt: bool, *, chosen: bool) -> list[TrainCase]:
    """All cases, in two halves; in the chosen one every two values of two options meet."""
    return [
        _case(path, dtype, in_fp32)
        for i, path in enumerate(PATHS)
        for dtype, in_fp32 in itertools.product(['bf16', 'fp32'], [True, False])
        if path[0] == dist_opt and chosen == (in_fp32 == (i % 2 == (dtype == 'fp32')))
    ]


def test_the_chosen_half_has_every_pair() -> None:
    chosen = [vars(case) for dist_opt in (False, True) for case in _matrix(dist_opt, chosen=True)]
    other = [vars(case) for dist_opt in (False, True) for case in _matrix(dist_opt, chosen=False)]
    names = (
        'dist_opt',
        'overlap_grad_reduce',
        'overlap_param_gather',
        'dtype',
        'grad_reduce_in_fp32',
    )
    assert len(chosen) == len(other) == 12
    for a, b in itertools.combinations(names, 2):
        assert {(c[a], c[b]) for c in chosen} == {(c[a], c[b]) for c in chosen + other}


@pytest.mark.parametrize('dist_opt', [False, True], ids=['plain', 'dist_opt'])
def test_two_ranks(dist_opt: bool) -> None:
    check(2, _matrix(dist_opt, chosen=True))


@pytest.mark.slow
@pytest.mark.parametrize('chosen', [False, True], ids=['other half', 'chosen half'])
@pytest.mark.parametrize('dist_opt', [False, True], ids=['plain', 'dist_opt'])
def test_two_ranks_as_a_whole(dist_opt: bool, chosen: bool) -> None:
    check(2, _matrix(dist_opt, chosen=chosen), BOTH)


@pytest.mark.long
def test_four_ranks() -> None:
    """On four ranks the order of summation shows: bf16 sums, and fp32 ones that depend on the bucket."""
    check(4, [_case((True, True, True), 'bf16', False), _case((False, True, False), 'fp32', True)])


@pytest.mark.slow
@pytest.mark.parametrize('chosen', [False, True], ids=['other half', 'chosen half'])
@pytest.mark.parametrize('dist_opt', [False, True], ids=['plain', 'dist_opt'])
def test_four_ranks_as_a_whole(dist_opt: bool, chosen: bool) -> None:
    check(4, _matrix(dist_opt, chosen=chosen), BOTH)

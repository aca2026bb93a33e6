"""Same bits: stock and ours train the same tiny GPT in the same processes, and nothing differs.

Every parameter, every owned main_grad shard, every tensor of the optimizer's state, all losses and
gradient norms, after six steps of three micro-batches with clipping; and the layouts, field by field.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase, compare, flat_tensors, train

SMALL_BUCKET_ELEMS = 2000


def _parity(rank: int, world_size: int, case: TrainCase, config: Any) -> dict[str, Any]:
    from megatron.core import distributed

    import megatron_buffer

    stock = train(case)
    with megatron_buffer.activated(config):
        assert distributed.DistributedDataParallel is megatron_buffer.DistributedDataParallel
        ours = train(case, config)
    assert distributed.DistributedDataParallel is not megatron_buffer.DistributedDataParallel
    return {
        'differ': compare(stock, ours),
        'tensors': len(flat_tensors(stock)),
        'same_layout': stock['layout'] == ours['layout'],
        'buckets': sum(len(buffer['buckets']) for buffer in stock['layout']),
        'trained': stock['losses'][0] != stock['losses'][-1],
    }


def _check(case: TrainCase, world_size: int, config: Any = 'upstream') -> None:
    results = run_ranks(_parity, world_size, case, config, timeout_s=240)
    assert sum(found['tensors'] for found in results) > 100
    for rank, found in enumerate(results):
        assert found['differ'] == [], f'rank {rank}'
        assert found['same_layout'], f'rank {rank}'
        assert found['trained']
        if case.overlap_grad_reduce and case.bucket_size == SMALL_BUCKET_ELEMS and case.pp == 1:
            assert found['buckets'] > 4, 'several buckets, or the case shows little'


def _matrix() -> list[TrainCase]:
    cases = []
    for dist_opt, grad, gather in itertools.product([False, True], repeat=3):
        if gather and not dist_opt:
            continue  # without the distributed optimizer there is no gather to overlap
        for dtype, in_fp32 in itertools.product(['bf16', 'fp32'], [True, False]):
            cases.append(
                TrainCase(
                    dist_opt=dist_opt,
                    overlap_grad_reduce=grad,
                    overlap_param_gather=gather,
                    dtype=dtype,
                    grad_reduce_in_fp32=in_fp32,
                    bucket_size=SMALL_BUCKET_ELEMS,
                )
            )
    return cases


def _is_core(case: TrainCase) -> bool:
    """What the default run covers on 4 ranks: everything overlapped, and nothing."""
    overlaps = (case.overlap_grad_reduce, case.overlap_param_gather)
    return case.grad_reduce_in_fp32 and overlaps in ((True, case.dist_opt), (False, False))


# fp32 parameters have fp32 gradients anyway: the same buffers, once more.
TWO = [
    pytest.param(
        case, marks=[pytest.mark.slow] * (case.dtype == 'fp32' and not case.grad_reduce_in_fp32)
    )
    for case in _matrix()
]
FOUR = [
    pytest.param(case, marks=[] if _is_core(case) else [pytest.mark.slow]) for case in _matrix()
]


@pytest.mark.parametrize('case', TWO, ids=str)
def test_two_ranks(case: TrainCase) -> None:
    _check(case, 2)


@pytest.mark.parametrize('case', FOUR, ids=str)
def test_four_ranks(case: TrainCase) -> None:
    _check(case, 4)


FULL = TrainCase(
    bucket_size=SMALL_BUCKET_ELEMS,
    dist_opt=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    dtype='bf16',
)
OTHER_PATHS = [
    (2, replace(FULL, average_in_collective=True)),
    (2, replace(FULL, per_token_loss=True)),
    (2, replace(FULL, rs_fp32_accum=True, grad_reduce_in_fp32=False)),
    (2, replace(FULL, check_for_nan=True)),
    (2, replace(FULL, high_busbw=True)),
    (2, replace(FULL, bucket_size=None)),
    (2, replace(FULL, bucket_size=1)),
    (2, replace(FULL, tp=2, sp=True)),
    (2, replace(FULL, pp=2)),
    (2, replace(FULL, moe=True, ep=2)),
    (4, replace(FULL, moe=True, ep=2, average_in_collective=True)),
    (4, replace(FULL, pp=2, per_token_loss=True)),
    (4, replace(FULL, pp=2, align=False)),
    (4, replace(FULL, pp=2, vpp=2, layers=4, micro_batches=4)),
    (4, replace(FULL, instances=2)),
    (4, replace(FULL, instances=2, overlap_grad_reduce=False, overlap_param_gather=False)),
    (4, replace(FULL, tp=2, pp=2, tied=False)),
]


@pytest.mark.parametrize(
    ('world_size', 'case'), OTHER_PATHS, ids=[f'{n}-{case}' for n, case in OTHER_PATHS]
)
def test_other_paths(world_size: int, case: TrainCase) -> None:
    _check(case, world_size)


def test_recommended_trains_as_upstream_does() -> None:
    _check(FULL, 2, 'recommended')

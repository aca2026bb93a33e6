"""The tiny GPT and the oracle, on stock Megatron-Core alone: what the parity tests stand on."""

import pytest
import torch

from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase, compare, flat_tensors, oracle, same_bits, train


def train_and_ask_oracle(rank, world_size, case):
    stock = train(case)
    return stock, oracle(case)


def train_twice(rank, world_size, case):
    return compare(train(case), train(case))


def just_train(rank, world_size, case):
    return train(case)


ORACLE_CASES = [
    TrainCase(clip=0.0, optimizer='sgd'),
    TrainCase(overlap_grad_reduce=True, tied=False),
    TrainCase(dist_opt=True, overlap_grad_reduce=True, overlap_param_gather=True),
    TrainCase(dist_opt=True, overlap_grad_reduce=True, average_in_collective=True, bucket_size=1),
    TrainCase(dist_opt=True, per_token_loss=True, overlap_grad_reduce=True),
    TrainCase(dist_opt=True, overlap_grad_reduce=True, high_busbw=True, micro_batches=1),
]


@pytest.mark.long
@pytest.mark.parametrize(
    'case',
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (i > 2))
        for i, case in enumerate(ORACLE_CASES)
    ],
)
def test_stock_equals_the_oracle(case):
    results = run_ranks(train_and_ask_oracle, 2, case)
    owned: dict[str, int] = {}
    for stock, want in results:
        assert stock['losses'] == pytest.approx(want.losses, rel=1e-5)
        assert stock['grad_norms'] == pytest.approx(want.grad_norms, rel=1e-5)
        assert want.losses[-1] < want.losses[0]
        assert stock['params'].keys() == want.params.keys()
        for name, param in want.params.items():
            torch.testing.assert_close(stock['params'][name], param, rtol=1e-4, atol=1e-5)
        for name, (first, last) in stock['grad_ranges'].items():
            owned[name] = owned.get(name, 0) + last - first
    # All ranks together own every gradient exactly once, or on each rank without a distributed optimizer.
    copies = 1 if case.dist_opt else 2
    assert owned == {n: copies * p.numel() for n, p in results[0][1].params.items()}


def test_the_gradients_of_the_first_step_equal_the_oracles():
    case = TrainCase(dist_opt=True, overlap_grad_reduce=True, steps=1)
    for stock, want in run_ranks(train_and_ask_oracle, 2, case):
        for name, grad in stock['grads'].items():
            first, last = stock['grad_ranges'][name]
            expected = want.grads[name].reshape(-1)[first:last]
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-7)


def ask_oracle_for(rank, world_size, case, dp):
    return oracle(case, dp).grads


def test_the_oracle_would_notice_a_rank_that_is_left_out():
    case = TrainCase(steps=1)
    [one] = run_ranks(ask_oracle_for, 1, case, 1)
    [two] = run_ranks(ask_oracle_for, 1, case, 2)
    assert all((one[n] - grad).abs().max() > 1e-2 * grad.abs().max() for n, grad in two.items())


def test_two_runs_in_one_process_are_equal_to_the_bit():
    case = TrainCase(dist_opt=True, overlap_grad_reduce=True, dtype='bf16')
    assert run_ranks(train_twice, 2, case) == [[], []]


def test_the_comparison_sees_one_bit():
    case = TrainCase(dist_opt=True, overlap_grad_reduce=True, dtype='bf16', steps=2)
    a = run_ranks(just_train, 2, case)
    b = run_ranks(just_train, 2, case)
    assert compare(a, b) == []
    assert len(flat_tensors(a[0])) > 60
    assert any(name.endswith('/master') for name in a[0]['state'])
    name = 'decoder.final_layernorm.bias'
    b[1]['params'][name].view(torch.int16)[3] ^= 1
    assert compare(a, b) == [f'rank 1: params/{name}']
    del b[0]['state'][next(iter(b[0]['state']))]
    assert len(compare(a, b)) == 2


def test_nan_equals_itself_and_zero_has_a_sign():
    nan = torch.tensor([float('nan'), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))


def test_several_buckets_and_the_layout_that_was_used():
    [layout] = run_ranks(
        just_train, 2, TrainCase(dist_opt=True, overlap_grad_reduce=True, steps=1)
    )[0]['layout']
    buckets = layout['buckets']
    assert len(buckets) > 2
    offset = 0
    for start, elems, unpadded, names in buckets:
        assert (start, elems % 128) == (offset, 0)
        assert unpadded <= elems
        assert names
        offset += elems


PARALLEL_CASES = [
    (2, TrainCase(tp=2, sp=True, steps=2)),
    (2, TrainCase(pp=2, overlap_grad_reduce=True, dist_opt=True, steps=2)),
    (2, TrainCase(moe=True, ep=2, overlap_grad_reduce=True, dist_opt=True, steps=2)),
    (
        2,
        TrainCase(
            pp=2,
            vpp=2,
            layers=4,
            micro_batches=4,
            steps=2,
            dist_opt=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
    ),
    (
        2,
        TrainCase(
            dtype='bf16', grad_reduce_in_fp32=False, rs_fp32_accum=True, dist_opt=True, steps=2
        ),
    ),
    (4, TrainCase(tp=2, pp=2, dist_opt=True, overlap_grad_reduce=True, steps=2)),
    (4, TrainCase(instances=2, dist_opt=True, overlap_grad_reduce=True, steps=2)),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ('ranks', 'case'),
    [
        pytest.param(ranks, case, id=f'{ranks}-{case}', marks=[pytest.mark.slow] * (i > 1))
        for i, (ranks, case) in enumerate(PARALLEL_CASES)
    ],
)
def test_stock_trains_in_every_parallelism(ranks, case):
    for result in run_ranks(just_train, ranks, case):
        assert result['params']
        assert result['grads']
        assert result['state']
        assert all(norm > 0 for norm in result['grad_norms'])

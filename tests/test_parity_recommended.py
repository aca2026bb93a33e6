"""`recommended.yaml` against an unwrapped model that sees what all ranks see: no buffer, no collective.

The oracle stands for dense fp32 models under data parallelism. Where it cannot (other parallelisms,
experts, bf16), `recommended.yaml` is held against stock, bit for bit: that is the second config of
`test_parity_parallel`, `_options` and `_special`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity_run import full
from tests.tiny_gpt import TrainCase, init_parallel, oracle, seed_everything, train_in_scope

FP32: dict[str, Any] = {'dtype': 'fp32'}
PLAIN: dict[str, Any] = {'dist_opt': False, 'overlap_param_gather': False}
NO_OVERLAP: dict[str, Any] = {'overlap_grad_reduce': False, 'overlap_param_gather': False}
RECOMPUTE = {
    'recompute_granularity': 'full',
    'recompute_method': 'uniform',
    'recompute_num_layers': 1,
}


def fp32(**fields: Any) -> TrainCase:
    """Everything overlapped, in fp32."""
    return full(**{**FP32, **fields})


GROUPS: dict[str, tuple[int, list[TrainCase]]] = {
    'representative': (
        2,
        [fp32(), fp32(**PLAIN), fp32(per_token_loss=True), fp32(offload=True, bucket_size=1)],
    ),
    'paths': (
        2,
        [
            fp32(**NO_OVERLAP),
            fp32(**NO_OVERLAP, dist_opt=False),
            fp32(overlap_param_gather=False),
            fp32(tied=False),
            fp32(micro_batches=1),
        ],
    ),
    'options': (
        2,
        [
            fp32(average_in_collective=True),
            fp32(per_token_loss=True, **PLAIN),
            fp32(bucket_size=None),
            fp32(high_busbw=True),
            fp32(wrapped_by='training', bucket_size=None, ddp={'num_buckets': 5}),
            fp32(check_for_nan=True, ddp={'check_for_large_grads': True}),
            fp32(optimizer='sgd', **PLAIN),
            fp32(clip=0.0),
            fp32(force_all_reduce=True),
            fp32(random_init=True),
            fp32(model=RECOMPUTE),
            fp32(rs_fp32_accum=True),
        ],
    ),
    'four ranks': (4, [fp32(), fp32(**PLAIN), fp32(per_token_loss=True), fp32(rs_fp32_accum=True)]),
    'instances': (
        4,
        [
            fp32(instances=2),
            fp32(instances=2, **NO_OVERLAP),
            fp32(instances=2, average_in_collective=True),
            fp32(instances=2, force_all_reduce=True),
        ],
    ),
}


def _wrong(rank: int, world_size: int, cases: list[TrainCase]) -> dict[str, list[str]]:
    """Per case what differs from the oracle by more than the order of summation explains."""
    import gc

    import megatron_buffer

    init_parallel(cases[0])
    oracles = [oracle(case, world_size) for case in cases]
    results = []
    with megatron_buffer.activated('recommended'):
        for case in cases:
            seed_everything(case)
            results.append(train_in_scope(case, True))
        gc.collect()
    found = {}
    for case, wanted, ours in zip(cases, oracles, results, strict=True):
        wrong = [
            f'parameter {name}'
            for name, param in wanted.params.items()
            if not torch.allclose(ours['params'][name], param, rtol=1e-4, atol=1e-5)
        ]
        wrong += [
            f'gradient of {name}'
            for name, grad in wanted.grads.items()
            if not torch.allclose(ours['whole_grads'][0][name], grad.flatten(), 1e-4, 1e-6)
        ]
        for kind in ('losses', 'grad_norms'):
            if ours[kind] != pytest.approx(getattr(wanted, kind), rel=1e-5):
                wrong.append(kind)
        assert ours['params'].keys() == wanted.params.keys()
        assert wanted.losses[-1] < wanted.losses[0]
        found[str(case)] = wrong
    return found


@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=[pytest.mark.slow] * (n != 'representative')) for n in GROUPS]
)
def test_recommended_equals_an_unwrapped_model(name: str) -> None:
    ranks, cases = GROUPS[name]
    for found in run_ranks(_wrong, ranks, cases, timeout_s=280):
        assert len(found) == len(cases)
        assert {case: wrong for case, wrong in found.items() if wrong} == {}

"""Same bits where modules, optimizers or a restart do something of their own with a buffer's tensors.

Stock and ours train the same cases in the same processes (`tests.parity_run`). What Transformer Engine or
a GPU would do is stood in for by `tests.parity_modules`; the code between is Megatron's own.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import parity_modules
from tests.harness import run_ranks
from tests.parity_run import check, everywhere, full
from tests.tiny_gpt import TrainCase, compare

BOTH = ('upstream', 'recommended')
PLAIN: dict[str, Any] = {'dist_opt': False, 'overlap_param_gather': False}
NO_OVERLAP: dict[str, Any] = {'overlap_grad_reduce': False, 'overlap_param_gather': False}
BF16_GRADS: dict[str, Any] = {'grad_reduce_in_fp32': False}
FP32 = {'dtype': 'fp32'}
MATRICES = 10
"""Weights of two dimensions in the tiny GPT: eight linear layers, two embeddings."""
FUSED = 9
"""Of them, or beside them, with fused gradients: the linear layers, and the output's (a tied one: the
embedding, to which autograd adds as well)."""


def _modules(run: Any) -> Any:
    return [module for chunk in run.chunks for module in chunk.modules()]


# ------------------------------------------------------------- weights and gradients of TE-like modules


def _seen_of_te(run: Any) -> dict[str, int]:
    params = [param for chunk in run.chunks for param in chunk.parameters()]
    copies = [m.weight_tensor for m in _modules(run) if hasattr(m, 'weight_tensor')]
    return {
        'copies': len(copies),
        'copies kept': sum(copy is not None for copy in copies),
        'fused': sum(param.grad_added_to_main_grad for param in params),
        'zeroed': sum(getattr(param, 'zero_out_wgrad', False) for param in params),
    }


def test_second_copies_are_dropped_and_fused_gradients_are_added_once() -> None:
    cases = [full(), full()]
    alters = [parity_modules.second_copies, parity_modules.fused_wgrad]
    copies, fused = check(2, cases, alter=alters, observe=_seen_of_te)
    seen = everywhere(copies)
    assert (seen['copies'], seen['copies kept'], seen['fused']) == (MATRICES, 0, 0)
    assert (everywhere(fused)['fused'], everywhere(fused)['zeroed']) == (FUSED, 1)


@pytest.mark.slow
def test_second_copies_stay_without_remapped_weights() -> None:
    cases = [full(), full(**PLAIN), full(**FP32, **NO_OVERLAP)]
    found = check(2, cases, BOTH, alter=parity_modules.second_copies, observe=_seen_of_te)
    kept = [everywhere(results)['copies kept'] for results in found]
    assert kept == [0, MATRICES, 0]


@pytest.mark.slow
def test_fused_gradients() -> None:
    cases = [
        full(),
        full(tied=False),
        full(**NO_OVERLAP),
        full(**PLAIN),
        full(**BF16_GRADS),
        full(per_token_loss=True, **FP32),
        full(average_in_collective=True, micro_batches=1),
    ]
    found = check(2, cases, BOTH, alter=parity_modules.fused_wgrad, observe=_seen_of_te)
    for case, results in zip(cases, found, strict=True):
        assert everywhere(results)['fused'] == FUSED
        assert everywhere(results)['zeroed'] == case.tied


@pytest.mark.slow
def test_fused_gradients_over_a_pipeline() -> None:
    """On two stages nobody else adds to a tied weight on its last one, and nothing is zeroed."""
    cases = [full(pp=2), full(pp=2, tied=False)]
    for results in check(4, cases, BOTH, alter=parity_modules.fused_wgrad, observe=_seen_of_te):
        assert all(seen['fused'] > 3 for one in results for seen in one['observed'])


def _delayed(run: Any) -> int:
    return sum(m.computed for m in _modules(run) if isinstance(m, parity_modules.DelayedLinear))


@pytest.mark.slow
def test_delayed_weight_gradients() -> None:
    delays = {'ddp': {'delay_wgrad_compute': True}}
    cases = [
        full(**delays),
        full(**delays, **FP32),
        full(**delays, **PLAIN),
        full(**delays, **NO_OVERLAP),
        full(**delays, per_token_loss=True),
    ]
    for results in check(2, cases, BOTH, alter=parity_modules.delayed_wgrad, observe=_delayed):
        assert everywhere(results) == 3 * 6


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
def test_context_parallelism_with_attention(ranks: int) -> None:
    """Gradients are averaged over the ranks that share a sequence too."""
    # Megatron's own attention refuses to be built for cut sequences.
    context: dict[str, Any] = {'cp': 2, 'model': {'context_parallel_size': 1}}
    cases = [full(**context), full(**context, per_token_loss=True), full(**context, **PLAIN)]
    found = check(
        ranks, cases, BOTH, alter=parity_modules.context_parallel_attention, observe=_reduced_over
    )
    for results in found:
        assert everywhere(results) == (ranks, ranks // 2)


def _reduced_over(run: Any) -> tuple[int, int]:
    (chunk,) = run.chunks
    return chunk.dp_cp_group.size(), chunk.dp_group.size()


# ------------------------------------------------------------------ what finalize sums over other groups


def _replica(run: Any) -> list[float]:
    branches = [m for m in _modules(run) if hasattr(m, 'branch')]
    return [float(p.detach().double().sum()) for m in branches for p in m.branch.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    'alter', [parity_modules.conditional_embedder, parity_modules.flextron_router]
)
def test_replicas_on_every_stage(alter: Any) -> None:
    """Summed over stages, they stay equal. Under the distributed optimizer stock sums shards that do not
    match (`test_pipeline_synced`), which `upstream.yaml` does too, to the bit.
    """
    for results in check(
        4,
        [full(pp=2, **PLAIN), full(pp=2, tied=False, **PLAIN)],
        BOTH,
        alter=alter,
        observe=_replica,
    ):
        assert len(everywhere(results)) == 2
    check(4, [full(pp=2)], alter=alter)


@pytest.mark.slow
def test_replicas_on_every_virtual_stage() -> None:
    case = full(pp=2, vpp=2, layers=4, micro_batches=4, **PLAIN)
    alter = parity_modules.conditional_embedder
    (results,) = check(4, [case], BOTH, alter=alter, observe=_replica)
    seen = everywhere(results)
    assert seen[:2] == seen[2:]


@pytest.mark.slow
@pytest.mark.skipif(
    version('megatron-core').startswith('0.18'),
    reason='megatron-core 0.18 has no weight remat groups',
)
@pytest.mark.parametrize('ranks', [2, 4])
def test_weight_remat_peers(ranks: int) -> None:
    """Peers that share weights have data of their own; replicated gradients are averaged over them."""
    cases = [full(gtp=2), full(gtp=2, per_token_loss=True), full(gtp=2, **PLAIN)]
    found = check(
        ranks,
        cases,
        BOTH,
        prepare=parity_modules.replicate_over_weight_remat_peers,
        alter=parity_modules.weight_remat_peers,
        observe=_weights,
    )
    for results in found:
        everywhere(results)


def _weights(run: Any) -> float:
    return float(sum(p.detach().double().sum() for c in run.chunks for p in c.parameters()))


# ------------------------------------------------------------------------------------------ optimizers


def _decoupled(run: Any) -> int:
    params = [p for group in run.optimizer.param_groups for p in group['params']]
    return sum(getattr(param, 'decoupled_grad', None) is not None for param in params)


@pytest.mark.slow
def test_precision_aware_optimizer() -> None:
    """Gradients stay in the buffer: the optimizer reads them there, and writes parameters by itself."""
    aware = {'use_precision_aware_optimizer': True}
    half = {'main_grads_dtype': torch.bfloat16, 'exp_avg_dtype': torch.bfloat16}
    cases = [full(optim=aware), full(optim={**aware, **half}, **BF16_GRADS)]
    found = check(2, cases, BOTH, prepare=parity_modules.use_fused_adam, observe=_decoupled)
    for results in found:
        for one in results:
            assert all(seen == one['observed'][0] > 3 for seen in one['observed'])


MUON = {'use_layer_wise_distributed_optimizer': True, 'use_distributed_optimizer': False}


def _layer_wise(run: Any) -> list[str]:
    managed = {
        any(getattr(p, 'is_managed_by_layer_wise_optimizer', False) for p in buffer.params)
        for chunk in run.chunks
        for buffer in chunk.buffers
    }
    parts = getattr(run.optimizer, 'chained_optimizers', [])
    return [
        type(run.optimizer).__name__,
        *[type(part).__name__ for part in parts],
        *map(str, sorted(managed)),
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec('emerging_optimizers') is None,
    reason='Muon is in the package emerging-optimizers, which is not installed',
)
@pytest.mark.parametrize('layout', [True, False], ids=['with layout', 'without layout'])
@pytest.mark.parametrize('ranks', [2, 4])
def test_layer_wise_optimizer(layout: bool, ranks: int) -> None:
    muon = {'optimizer': 'muon', 'optim': MUON, 'wrapped_by': 'training', 'dist_opt': layout}
    muon['bucket_size'] = 4000 // ranks  # its layouts pad with the number of ranks
    cases = [
        full(**muon, **extra)
        for extra in ({'overlap_param_gather': False}, {'overlap_param_gather': True})
    ]
    for results in check(ranks, cases, BOTH, observe=_layer_wise):
        names = everywhere(results)
        assert any('LayerWise' in name for name in names)
        assert ('True' in names) == layout, 'buffers of its own, or all in one'


# -------------------------------------------------------------------------------------------- a restart


def _stop(rank: int, world_size: int, case: TrainCase, name: str, folder: str) -> dict[str, Any]:
    """All steps at once with stock, and with ours as far as the checkpoint."""
    from tests import checkpoint_gpt
    from tests.checkpoint_case import arm

    with arm('stock'):
        whole = checkpoint_gpt.train(case, name)
    with arm('upstream'):
        checkpoint_gpt.train(case, name, saves=folder)
    return whole


def _resume(rank: int, world_size: int, case: TrainCase, name: str, folder: str) -> dict[str, Any]:
    from tests import checkpoint_gpt
    from tests.checkpoint_case import arm

    with arm('upstream'):
        return checkpoint_gpt.train(case, name, loads=folder)


RESTARTS = [
    (full(), 'dp_reshardable'),
    (full(), 'fully_reshardable'),
    (full(**FP32), 'dp_reshardable'),
    (full(tp=2, sp=True), 'dp_reshardable'),
    (full(moe=True, ep=2), 'dp_reshardable'),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ('case', 'name'),
    [
        pytest.param(case, name, id=f'{case} {name}', marks=[pytest.mark.slow] * bool(i))
        for i, (case, name) in enumerate(RESTARTS)
    ],
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, case: TrainCase, name: str
) -> None:
    """Saved by ours, loaded by ours in other processes, equal to stock that never stopped."""
    folder = str(tmp_path / 'saved')
    whole = run_ranks(_stop, 2, case, name, folder, timeout_s=200)
    resumed = run_ranks(_resume, 2, case, name, folder, timeout_s=200)
    assert compare(whole, resumed) == []
    assert len(whole[0]['losses']) == len(resumed[0]['losses']) == 2

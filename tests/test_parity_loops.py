"""Same bits where micro-batches, steps, parameters or the model are not what the other parity tests have.

Stock and ours train the same cases in the same processes (`tests.parity_run`). Loops that Megatron's own
scripts have: evaluation, growing batches, skipped steps; and parameters that are frozen, unused or of
another dtype than the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_buffer.testing.tiny_gpt import run_schedule
from tests import parity_models
from tests.parity_run import check, everywhere, full
from tests.tiny_gpt import TrainCase

UPSTREAM = ('upstream',)
BOTH = ('upstream', 'recommended')
PLAIN: dict[str, Any] = {'dist_opt': False, 'overlap_param_gather': False}
NO_OVERLAP: dict[str, Any] = {'overlap_grad_reduce': False, 'overlap_param_gather': False}
BF16_GRADS: dict[str, Any] = {'grad_reduce_in_fp32': False}
VPP: dict[str, Any] = {'pp': 2, 'vpp': 2, 'layers': 4, 'micro_batches': 4}
MOE: dict[str, Any] = {'moe': True, 'ep': 2}
SCALE = 2.0**12
FP16: dict[str, Any] = {'dtype': 'fp16', 'optim': {'initial_loss_scale': SCALE, 'hysteresis': 1}}
OVERFLOWS = (1, 4)  # steps


def _around_backward(change: Callable[[Any, TrainCase, Any, int], float]) -> None:
    """Puts `change(usual, case, run, step)` in the place of a step's forward and backward passes."""
    tiny = vars(importlib.import_module('megatron_buffer.testing.tiny_gpt'))
    usual = tiny['run_backward']
    tiny['run_backward'] = lambda case, run, step: change(usual, case, run, step)


# ------------------------------------------------------------------ loops


def growing_batches() -> None:
    """Other numbers of micro-batches in every step, as `--rampup-batch-size` has them."""

    def change(usual: Any, case: TrainCase, run: Any, step: int) -> float:
        number = (1, 3, 5, 2, 1, 4)[step] * (case.vpp or 1)
        return usual(replace(case, micro_batches=number), run, step)

    _around_backward(change)


def evaluations() -> None:
    """Forward passes alone before some steps, with the hooks that gather off, as megatron.training does."""
    _around_backward(_evaluated)


def evaluations_with_hooks() -> None:
    """The same with the hooks left on."""
    _around_backward(lambda *given: _evaluated(*given, hooks=True))


def _evaluated(usual: Any, case: TrainCase, run: Any, step: int, hooks: bool = False) -> float:
    loss = 0.0
    if step in (2, 4):
        off = case.overlap_param_gather and not hooks
        for chunk in run.chunks if off else ():
            chunk.disable_forward_pre_hook()
        loss = _forward_only(case, run, step)
        for chunk in run.chunks if off else ():
            chunk.enable_forward_pre_hook()
    return usual(case, run, step) + loss


def _forward_only(case: TrainCase, run: Any, step: int) -> float:
    for chunk in run.chunks:
        chunk.eval()
    with torch.no_grad():
        reports = run_schedule(case, run, 100 + step, forward_only=True)
    for chunk in run.chunks:
        chunk.train()
    return float(sum(report['loss'] for report in reports))


def thrown_away_gradients() -> None:
    """Before step 2 all passes run once more and no step is made of them."""

    def change(usual: Any, case: TrainCase, run: Any, step: int) -> float:
        return (usual(case, run, 50) if step == 2 else 0.0) + usual(case, run, step)

    _around_backward(change)


def schedules() -> None:
    """Learning rates and weight decays that change with every step."""

    def change(usual: Any, case: TrainCase, run: Any, step: int) -> float:
        for group in run.optimizer.param_groups:
            group['lr'] = 1e-2 * (step + 1) / 6
            group['weight_decay'] = 0.01 * (step % 2) * group['wd_mult']
        return usual(case, run, step)

    _around_backward(change)


def only_gradients_aligned() -> None:
    """The schedule starts gradient reductions and leaves gathers to the hooks (`align_param_gather` off)."""
    tiny = vars(importlib.import_module('megatron_buffer.testing.tiny_gpt'))
    usual = tiny['_set_schedule_functions']

    def change(case: TrainCase, chunks: Any, optimizer: Any) -> None:
        usual(case, chunks, optimizer)
        for chunk in chunks:
            chunk.config.param_sync_func = None

    tiny['_set_schedule_functions'] = change


LOOPS: dict[str, tuple[Callable[[], None], int, list[TrainCase]]] = {
    'growing batches': (
        growing_batches,
        2,
        [full(), full(**PLAIN), full(per_token_loss=True, **BF16_GRADS)],
    ),
    'growing batches, pp2': (growing_batches, 4, [full(pp=2), full(pp=2, align=False)]),
    'growing batches, vpp2': (growing_batches, 4, [full(**VPP)]),
    'evaluations': (evaluations, 2, [full(), full(offload=True)]),
    'evaluations, vpp2': (evaluations, 4, [full(**VPP)]),
    'evaluations, instances': (evaluations, 4, [full(instances=2)]),
    'evaluations with hooks': (evaluations_with_hooks, 2, [full(), full(bucket_size=1)]),
    'thrown away': (thrown_away_gradients, 2, [full(), full(**NO_OVERLAP)]),
    'schedules': (
        schedules,
        2,
        [full(), full(optim={'decoupled_lr': 1e-3, 'decoupled_min_lr': 1e-3})],
    ),
    'gradients aligned': (
        only_gradients_aligned,
        4,
        [full(pp=2, ddp={'align_param_gather': False}), full(pp=2, tied=False, **BF16_GRADS)],
    ),
    'gradients aligned, vpp2': (
        only_gradients_aligned,
        4,
        [full(**VPP, ddp={'align_param_gather': False})],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', LOOPS)
def test_same_bits_in_other_loops(name: str) -> None:
    prepare, ranks, cases = LOOPS[name]
    check(ranks, cases, UPSTREAM, prepare=prepare)


# ------------------------------------------------------------------ parameters


def as_it_is(model: Any) -> None:
    """Nothing is changed."""


def frozen(model: Any) -> None:
    """Weights of the first MLP layers and the norms of the first layer do not learn."""
    for name, param in model.named_parameters():
        if 'linear_fc1.weight' in name or ('layernorm' in name and '.0.' in name):
            param.requires_grad_(False)


def norms_in_fp32(model: Any) -> None:
    """Norms keep fp32 parameters in a bf16 model: buffers of two dtypes."""
    for name, module in model.named_modules():
        if name.endswith('layernorm'):
            module.float()
            module._apply = lambda fn, recurse=True, module=module: module


def used_twice(model: Any) -> None:
    """One layer runs twice in every micro-batch."""
    _branch(model, lambda branch, output, call: output + branch(output + branch(output)))


def unused_at_first(model: Any) -> None:
    """A layer that the first of three micro-batches leaves out."""
    _branch(model, lambda branch, output, call: output + branch(output) if call % 3 else output)


def unused_at_last(model: Any) -> None:
    """A layer that the last of three micro-batches leaves out."""
    _branch(model, lambda branch, output, call: output + branch(output) if call % 3 < 2 else output)


def _branch(model: Any, forward: Callable[[Any, Any, int], Any]) -> None:
    from megatron.core import tensor_parallel

    size = model.config.hidden_size
    model.branch, model.calls = torch.nn.Linear(size, size, bias=False), 0
    with torch.no_grad():
        model.branch.weight.copy_(0.1 * torch.eye(size))
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(model.branch.weight)

    def hook(decoder: Any, inputs: Any, output: Any) -> Any:
        model.calls += 1
        return forward(model.branch, output, model.calls - 1)

    model.decoder.register_forward_hook(hook)


def infinite(model: Any) -> None:
    """A gradient of one rank overflows in two steps of three micro-batches."""
    calls = 0

    def hook(grad: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        bad = torch.distributed.get_rank() == 0 and (calls - 1) // 3 in OVERFLOWS
        return grad * float('inf') if bad else grad

    model.decoder.layers[0].self_attention.linear_qkv.weight.register_hook(hook)


PARAMETERS: dict[str, tuple[Callable[[Any], None], int, list[TrainCase]]] = {
    'frozen': (frozen, 2, [full(), full(**PLAIN), full(bucket_size=1), full(**NO_OVERLAP)]),
    'two dtypes': (
        norms_in_fp32,
        2,
        [full(), full(**PLAIN), full(average_in_collective=True, bucket_size=17, **BF16_GRADS)],
    ),
    'two dtypes, instances': (norms_in_fp32, 4, [full(instances=2)]),
    'used twice': (used_twice, 2, [full(), full(**PLAIN), full(bucket_size=1)]),
    'unused at first': (unused_at_first, 2, [full(), full(bucket_size=1), full(**NO_OVERLAP)]),
    'unused at last': (unused_at_last, 2, [full(**NO_OVERLAP)]),
    'odd sizes': (
        as_it_is,
        3,
        [
            full(bucket_size=17),
            full(bucket_size=10**9, dtype='fp32', **PLAIN),
            full(bucket_size=1, high_busbw=True, average_in_collective=True, **BF16_GRADS),
        ],
    ),
}


def _param_dtypes(run: Any) -> int:
    return len({buffer.param_dtype for chunk in run.chunks for buffer in chunk.buffers})


@pytest.mark.slow
@pytest.mark.parametrize('name', PARAMETERS)
def test_same_bits_with_other_parameters(name: str) -> None:
    alter, ranks, cases = PARAMETERS[name]
    for results in check(ranks, cases, UPSTREAM, alter=alter, observe=_param_dtypes):
        assert everywhere(results) == (2 if 'two dtypes' in name else 1)


def _loss_scale(run: Any) -> float:
    return run.optimizer.get_loss_scale().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('ranks', 'cases'),
    [
        pytest.param(
            2, [full(**FP16), full(**FP16, **PLAIN), full(**FP16, **BF16_GRADS)], id='dp2'
        ),
        pytest.param(4, [full(**FP16, tp=2, sp=True)], id='tp2'),
        pytest.param(4, [full(**FP16, **MOE, instances=2)], id='ep2, instances'),
    ],
)
def test_steps_that_overflow_are_skipped(ranks: int, cases: list[TrainCase]) -> None:
    """On all ranks, while the loss scale is halved; the others are made."""
    for results in check(ranks, cases, BOTH, alter=infinite, observe=_loss_scale):
        assert everywhere(results) == SCALE / 4
        made = [step not in OVERFLOWS for step in range(6)]
        assert all(one['updated'][0] == made for one in results)


# ------------------------------------------------------------------ models

MODELS: dict[str, tuple[Callable[[], None], int, list[TrainCase], str]] = {
    'further tokens': (
        parity_models.multi_token_prediction,
        2,
        [full(), full(per_token_loss=True, **PLAIN), full(tied=False)],
        'mtp',
    ),
    'further tokens, pp2': (
        parity_models.multi_token_prediction,
        4,
        [full(pp=2), full(pp=2, tied=False, align=False)],
        'mtp',
    ),
    'further tokens, ep2': (parity_models.multi_token_prediction, 4, [full(**MOE)], 'mtp'),
    'grouped queries, tp2': (
        parity_models.grouped_queries,
        4,
        [full(tp=2, sp=True), full(tp=2, sp=True, average_in_collective=True, **BF16_GRADS)],
        'k_layernorm',
    ),
    'latent attention, tp2': (
        parity_models.latent_attention,
        4,
        [full(tp=2, sp=True)],
        'linear_kv_up_proj',
    ),
}


def _names(run: Any) -> str:
    return ' '.join(name for chunk in run.chunks for name, _ in chunk.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize('name', MODELS)
def test_same_bits_of_other_models(name: str) -> None:
    prepare, ranks, cases, has = MODELS[name]
    for results in check(ranks, cases, BOTH, prepare=prepare, observe=_names):
        assert any(has in names for one in results for names in one['observed'])


@pytest.mark.slow
@pytest.mark.parametrize('tp', [1, 2])
def test_shared_experts(tp: int) -> None:
    shared = {'moe_shared_expert_intermediate_size': 32}
    overlapped = {**shared, 'moe_shared_expert_overlap': True}
    cases = [
        full(**MOE, tp=tp, sp=tp > 1, model=shared),
        full(**MOE, tp=tp, sp=tp > 1, model=overlapped, per_token_loss=True),
    ]
    for results in check(4, cases, BOTH, observe=_names):
        assert 'shared_experts' in everywhere(results)

"""The faults that ``docs/faults.md`` lists: stock, ``upstream`` and ``recommended`` in the same situation.

Stock is wrong or stops without a reason; the day it is right, the test says so and skips. Ours is right, says
something by name, or stops with a named error on every rank. What is right is worked out by an unwrapped
model. Checkpoints (F7) have `test_checkpoint_formats.py`, two buffers of quantized
parameters (F9) `test_bucket_group_strategies.py`, the order of gathers (F10) `test_recording.py`, the temporaries
of finalize (F11) `test_finalize.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.harness import RankOutcome, run_ranks
from tests.test_guards import _borrowed
from tests.test_window import _branching, _synced_backwards

DIST_OPT: dict[str, Any] = {
    'use_distributed_optimizer': True,
    'overlap_grad_reduce': True,
    'bucket_size': 100,
}
PLAIN: dict[str, Any] = {**DIST_OPT, 'use_distributed_optimizer': False}


@dataclass(frozen=True)
class Fault:
    """A situation, and what ours makes of it.

    Attributes:
        run: Called on each rank; returns what is wrong, and may raise.
        upstream: Words that ours says with ``upstream.yaml``, as a warning or an error; () if it is right.
        recommended: The same with ``recommended.yaml``, but as an error.
        world_size: Number of ranks.
        stops: Stock stops here, on one rank or all, and so does ours with ``upstream.yaml``, on all ranks.
        names: Stock's words name what is wrong, but not in time or not what to do.
        crashes: The backend may be handed buckets of other sizes than on other ranks: gloo then writes past the
            end of one, and sometimes the process dies of it before it can say anything.
    """

    run: Callable[[int, int], list[str]]
    upstream: tuple[str, ...] = ()
    recommended: tuple[str, ...] = ()
    world_size: int = 2
    stops: bool = False
    names: bool = False
    crashes: bool = False


def _right(model: Any, rank: int, world_size: int, step: int, **oracle: Any) -> list[str]:
    from tests import small_model as sm

    expected = sm.oracle_grads(rank, world_size, step, **oracle)
    return sm.differences(sm.owned_main_grads(model), expected)


def _windows(rank: int, world_size: int, numbers: tuple[int, ...], flags: Any) -> list[str]:
    from tests import small_model as sm

    model = sm.wrap(sm.make_net(), **flags)
    wrong = []
    for step, number in enumerate(numbers):
        _synced_backwards(model, rank, step, number)
        wrong += _right(model, rank, world_size, step, micro_batches=number)
    return wrong


def _shorter(rank: int, world_size: int) -> list[str]:
    return _windows(rank, world_size, (2, 1, 1), DIST_OPT)


def _longer(rank: int, world_size: int) -> list[str]:
    return _windows(rank, world_size, (2, 4, 3), PLAIN)


def _unused(rank: int, world_size: int) -> list[str]:
    """A layer that is never called, in a bucket with one that is."""
    from tests import small_model as sm

    model = sm.wrap(sm.make_net(unused=True), **{**DIST_OPT, 'bucket_size': 1_000_000})
    wrong = []
    for step in range(3):
        sm.run_window(model, rank, step)
        wrong += _right(model, rank, world_size, step, unused=True)
    return wrong


def _branches(rank: int, world_size: int) -> list[str]:
    """Rank 1 skips the middle layer."""
    return _branching(rank, world_size, 'stock', bucket_size=1)


def _second_model(rank: int, world_size: int) -> list[str]:
    """A model whose reduce-scatter accumulates in fp32, then one whose doesn't."""
    from tests import small_model as sm

    first = sm.wrap(sm.make_net(), **DIST_OPT, reduce_scatter_with_fp32_accumulation=True)
    second = sm.wrap(sm.make_net(), **DIST_OPT)
    wrong = []
    for step in range(2):
        for model in (first, second):
            sm.run_window(model, rank, step)
            wrong += _right(model, rank, world_size, step)
    return wrong


def _early_read(rank: int, world_size: int) -> list[str]:
    """A module that uses another one's weight, which is still being gathered."""
    found = _borrowed(rank, world_size, 'stock')
    pairs = zip(found['losses'], found['expected'], strict=True)
    return [f'{a} != {b}' for a, b in pairs if a != pytest.approx(b, rel=1e-5)]


def _nan(rank: int, world_size: int) -> list[str]:
    """A NaN in one parameter's gradient, on rank 1 only."""
    from tests import small_model as sm

    model = sm.wrap(sm.make_net(), **DIST_OPT, check_for_nan_in_grad=True)
    if rank == 1:
        model.module.second.weight.register_hook(lambda grad: grad * float('nan'))
    sm.run_window(model, rank, 0)
    return ['nothing was said']


def _two_dtypes(rank: int, world_size: int) -> list[str]:
    """One bucket group over bf16 and fp32 gradients, accumulated in fp32."""
    from tests import small_model as sm

    class Mixed(sm.Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.second(torch.tanh(self.first(x)).bfloat16())
            return self.third(torch.tanh(x.float()))

    torch.manual_seed(7)
    net = Mixed()
    net.second = net.second.bfloat16()
    config = sm.transformer_config()
    from megatron.core.distributed import DistributedDataParallelConfig

    sm.init_parallel()
    model = sm.ddp_class()(
        config,
        DistributedDataParallelConfig(**DIST_OPT, reduce_scatter_with_fp32_accumulation=True),
        net,
        disable_bucketing=True,
    )
    sm.run_window(model, rank, 0)
    return []


def _aligned_instances(rank: int, world_size: int) -> list[str]:
    """Two optimizer instances whose reduction the schedule starts, as on later pipeline stages."""
    from megatron.core import parallel_state

    from tests import small_model as sm

    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model = sm.wrap(sm.make_net(), **DIST_OPT, num_distributed_optimizer_instances=2)
    wrong = []
    for step in range(2):
        model.zero_grad_buffer()
        with model.no_sync():
            for micro_batch in range(3):
                model(sm.batch(rank, step, micro_batch)).square().mean().backward()
        model.start_grad_sync()
        model.finish_grad_sync()
        wrong += _right(model, rank, world_size, step)
    return wrong


def _whole_grads(rank: int, world_size: int) -> list[str]:
    """Gradients that are to be saved, with two optimizer instances: every rank should have all of them."""
    from megatron.core import parallel_state

    from tests import small_model as sm

    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model = sm.wrap(sm.make_net(), **DIST_OPT, num_distributed_optimizer_instances=2)
    wrong = []
    for step in range(2):
        model.force_all_reduce = True  # as training.py does in such a step
        model.zero_grad_buffer()
        model(sm.batch(rank, step, 0)).square().mean().backward()
        model.finish_grad_sync(force_all_reduce=True)
        grads = {n: p.main_grad.flatten().clone() for n, p in model.module.named_parameters()}
        expected = sm.oracle_grads(rank, world_size, step, micro_batches=1)
        wrong += sm.differences(grads, expected)
    return wrong


FAULTS = {
    'F1 a shorter window': Fault(_shorter, upstream=('third.weight', 'too few'), stops=True),
    'F1 a longer window': Fault(_longer, upstream=('third.bias', 'Gradients are wrong')),
    'F2 an unused layer': Fault(_unused, upstream=('spare.weight',), stops=True),
    'F3 branches': Fault(_branches, upstream=('middle.weight',), crashes=True),
    'F4 two models': Fault(_second_model),
    'aligned, several instances': Fault(_aligned_instances, world_size=4),
    'F13 whole gradients, several instances': Fault(
        _whole_grads, upstream=('force_all_reduce', 'checks.export'), world_size=4
    ),
    'F5 an early read': Fault(_early_read, upstream=('last.weight',)),
    'F6 a NaN': Fault(
        _nan, upstream=('second.weight',), recommended=('second.weight',), stops=True
    ),
    'F8 two dtypes in a group': Fault(
        _two_dtypes,
        upstream=('reduce_scatter_with_fp32_accumulation',),
        recommended=('reduce_scatter_with_fp32_accumulation',),
        stops=True,
        names=True,
    ),
}


def _run(rank: int, world_size: int, fault: str, arm: str) -> list[str]:
    """What is wrong in one arm; an error passes through."""
    import megatron_buffer

    run = FAULTS[fault].run
    if arm == 'stock':
        return run(rank, world_size)
    with megatron_buffer.errors.guard(), megatron_buffer.activated(arm):
        return run(rank, world_size)


def _arm(fault: str, arm: str) -> list[RankOutcome]:
    size = FAULTS[fault].world_size
    return run_ranks(_run, size, fault, arm, expect_failure=True, timeout_s=240)


def _words(outcome: RankOutcome) -> str:
    return f'{outcome.error_type}: {outcome.error}\n{outcome.output}'


@pytest.mark.stock_fault
@pytest.mark.parametrize('fault', FAULTS)
def test_stock(fault: str) -> None:
    outcomes = _arm(fault, 'stock')
    if all(o.status == 'ok' and not o.result for o in outcomes):
        pytest.skip(f'stock now right: {fault}')
    if FAULTS[fault].stops:
        assert any(o.failed for o in outcomes)
        if not FAULTS[fault].names:
            assert not all('weight' in o.error for o in outcomes)


@pytest.mark.parametrize('fault', FAULTS)
def test_upstream_choices_are_never_silently_wrong(fault: str) -> None:
    expected = FAULTS[fault].upstream
    outcomes = _arm(fault, 'upstream')
    if not expected:
        assert [(o.error, o.result) for o in outcomes] == [('', [])] * len(outcomes)
    if FAULTS[fault].crashes and any(o.status == 'died' for o in outcomes):
        return  # not silently
    said = '\n'.join(_words(o) for o in outcomes)
    for word in expected:
        assert word in said
    if FAULTS[fault].stops:
        for o in outcomes:
            assert o.failed
            assert all(word in o.error for word in expected), f'rank {o.rank}: {_words(o)}'


@pytest.mark.parametrize('fault', FAULTS)
def test_recommended_is_right_or_stops_by_name(fault: str) -> None:
    expected = FAULTS[fault].recommended
    for o in _arm(fault, 'recommended'):
        if expected:
            assert o.failed
            assert all(word in o.error for word in expected), f'rank {o.rank}: {_words(o)}'
        else:
            assert (o.error, o.result) == ('', []), f'rank {o.rank}: {_words(o)}'

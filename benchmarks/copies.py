"""The optimizer's copies: reduced gradients to main parameters, and updated ones back into the buffer.

Both ways on one optimizer of ours, with bf16 parameters and fp32 main ones: ours, and the bodies of stock's
methods. Gradients are handed over from an fp32 buffer, which copies nothing, and from one in bf16. Parameters
of 8 elements, so what is measured is looking them up and starting the copies.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

from benchmarks.compare import cpu_timed, interleave, per_param_case, quiet

HEADLINE = 'updated parameters into the buffer; the worst of the sizes'
SIZES = (100, 1_000, 10_000)
PARAM_ELEMS = 8
# The method, and whether the gradients are in fp32.
COPIES = {
    'updated parameters into the buffer': ('_copy_main_params_to_model_params', True),
    'fp32 gradients to main parameters': ('_copy_model_grads_to_main_grads', True),
    'bf16 gradients to main parameters': ('_copy_model_grads_to_main_grads', False),
}


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio`` and ``cases``."""
    from megatron_buffer.testing import run_ranks

    [cases] = run_ranks(measure, 1, reps, timeout_s=1800)
    first = next(iter(COPIES))
    ratio = max(case['ratio'] for case in cases if case['what'] == first)
    return {'ratio': ratio, 'headline': HEADLINE, 'cases': cases}


def measure(rank: int, world_size: int, reps: int) -> list[dict[str, Any]]:
    """All cases, in one process."""
    import megatron_buffer

    quiet()
    cases = []
    with megatron_buffer.activated('upstream'):
        for size in SIZES:
            cases += _of_size(size, reps)
            gc.collect()  # activated() refuses to end while a model of ours lives
    return cases


def _of_size(size: int, reps: int) -> list[dict[str, Any]]:
    optimizers = {fp32_grads: _optimizer(size, fp32_grads) for fp32_grads in (True, False)}
    cases = []
    for what, (method, fp32_grads) in COPIES.items():
        optimizer = optimizers[fp32_grads]
        arms = {'ours': cpu_timed(getattr(optimizer, method)), 'stock': _stocks(optimizer, method)}
        times = interleave(arms, reps)
        cases.append(per_param_case(what, size, times['ours'], times['stock']))
    return cases


def _stocks(optimizer: Any, method: str) -> Callable[[], float]:
    """Stock's method, called on this optimizer as its step does, without gradients."""
    import torch

    from megatron_buffer.checkpointing import CheckpointedOptimizer

    return cpu_timed(torch.no_grad()(getattr(super(CheckpointedOptimizer, optimizer), method)))


def _optimizer(size: int, fp32_grads: bool) -> Any:
    """The distributed optimizer of a model of so many bf16 parameters, their gradients reduced."""
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_buffer.testing import small_model

    small_model.init_parallel()
    module = torch.nn.ParameterList(torch.zeros(PARAM_ELEMS) for _ in range(size)).bfloat16()
    flags = {'grad_reduce_in_fp32': fp32_grads, 'bucket_size': 40 * PARAM_ELEMS}
    model = small_model.wrap(module, use_distributed_optimizer=True, **flags)
    config = OptimizerConfig(
        optimizer='adam',
        lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    with contextlib.redirect_stdout(None):
        chained = get_megatron_optimizer(config, [model])
    model.zero_grad_buffer()
    model.finish_grad_sync()
    [optimizer] = getattr(chained, 'chained_optimizers', [chained])
    return optimizer

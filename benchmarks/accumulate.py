"""The gradients' way through the buffer in one iteration: zeroing, adding, scaling. No collective.

The real classes play an iteration of one micro-batch on one rank, from ``zero_grad_buffer`` to what
``finish_grad_sync`` leaves, with gradients that are there already; the data-parallel size that decides how much
is scaled is pretended, since nothing is sent. The headline is bf16 gradients into an fp32 buffer, with
``accumulation: first_write`` and ``scaling: shard_postscale`` against stock.

Bytes per element are those that each pass has to read and write: stock zeroes (4), adds (2 read, 4 read, 4
written) and scales (4 read, 4 written); first_write reads 2 and writes 4, and shard_postscale reads and writes 8
on 1/dp of the elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.compare import cpu_timed, interleave, quiet, ratio_case

HEADLINE = 'one micro-batch, bf16 gradients into an fp32 buffer, first_write and shard_postscale'
DP_SIZE = 8
NUM_PARAMS, PARAM_ELEMS = 16, 1 << 20
ARMS: dict[str, dict[str, Any]] = {
    'first_write, shard_postscale': {'accumulation': 'first_write', 'scaling': 'shard_postscale'},
    'first_write, average': {'accumulation': 'first_write', 'scaling': 'average'},
    'first_write': {'accumulation': 'first_write'},
    'upstream': {},
}


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio`` and ``cases``."""
    from megatron_buffer.testing import run_ranks

    [cases] = run_ranks(measure, 1, reps, timeout_s=1800)
    return {'ratio': cases[0]['ratio'], 'headline': HEADLINE, 'cases': cases}


def measure(rank: int, world_size: int, reps: int) -> list[dict[str, Any]]:
    """All cases, in one process."""
    quiet()
    cases = []
    for grads in ('bf16', 'fp32'):
        for micro_batches in (1, 4):
            cases += _of_dtype(grads, micro_batches, reps)
    return cases


def floor_bytes(arm: str, grads: str, micro_batches: int, dp_size: int) -> float:
    """Bytes per element that an arm moves; each pass reads and writes what it must, caches aside."""
    read = 2 if grads == 'bf16' else 4
    more = (micro_batches - 1) * (read + 8)
    if arm == 'stock' or arm == 'upstream':
        return 4 + read + 8 + more + 8
    scaling = {
        'first_write': 8.0,
        'first_write, average': 0.0,
        'first_write, shard_postscale': 8 / dp_size,
    }
    return read + 4 + more + scaling[arm]


def _of_dtype(grads: str, micro_batches: int, reps: int) -> list[dict[str, Any]]:
    arms = {'stock': arm(None, grads, micro_batches)}
    arms |= {name: arm(config, grads, micro_batches) for name, config in ARMS.items()}
    times = interleave({name: cpu_timed(body) for name, body in arms.items()}, reps)
    return [
        ratio_case(
            times[name],
            times['stock'],
            what=name,
            size=f'{grads}, {micro_batches} micro-batch' + 'es' * (micro_batches > 1),
            elements=NUM_PARAMS * PARAM_ELEMS,
            dp_size=DP_SIZE,
            bytes_per_element_ours=floor_bytes(name, grads, micro_batches, DP_SIZE),
            bytes_per_element_stock=floor_bytes('stock', grads, micro_batches, DP_SIZE),
        )
        for name in ARMS
    ]


def arm(
    config: dict[str, Any] | None,
    grads: str,
    micro_batches: int,
    *,
    num_params: int = NUM_PARAMS,
    param_elems: int = PARAM_ELEMS,
    device: str = 'cpu',
) -> Callable[[], None]:
    """One iteration without its collective, as a function; None is stock."""
    import torch

    import megatron_buffer
    from megatron_buffer.testing import small_model

    dtype = {'bf16': torch.bfloat16, 'fp32': torch.float32}[grads]
    module = torch.nn.ParameterList(
        torch.nn.Parameter(torch.zeros(param_elems, dtype=dtype, device=device))
        for _ in range(num_params)
    )
    more: dict[str, Any] = {} if config is None else {'buffer_config': config}
    cls: Any = (
        small_model.ddp_class() if config is None else megatron_buffer.DistributedDataParallel
    )
    model = small_model.wrap(
        module, cls, use_distributed_optimizer=True, grad_reduce_in_fp32=True, **more
    )
    params: list[Any] = list(module)
    hooks = [model._make_backward_post_hook(param) for param in params]
    if config is not None:
        _follow(model)
    grad = torch.full((param_elems,), 0.5, dtype=dtype, device=device)
    [buffer] = model.buffers
    scale = _scaling(buffer.grad_data, (config or {}).get('scaling', 'prescale'))

    def iteration() -> None:
        model.zero_grad_buffer()
        for _ in range(micro_batches):
            for param, hook in zip(params, hooks, strict=True):
                param.grad = grad
                hook()
        scale()

    iteration()
    return iteration


def _follow(model: Any) -> None:
    """The hooks that were made here follow the buffer's writes, as the model's own do."""
    for writes in model.grad_writes:
        for rare in model._rare_cases:
            rare.follow(writes, writes.index[rare.param])


def _scaling(grad_data: Any, name: str) -> Any:
    """What the strategies do to the gradients at a data-parallel size of ``DP_SIZE``."""
    from megatron_buffer.config import load_config
    from megatron_buffer.runtime import Runtime
    from megatron_buffer.strategies.scaling import ScalingContext

    strategy = Runtime(load_config({'scaling': name})).scaling
    plan = strategy.plan(ScalingContext(DP_SIZE, DP_SIZE, False, False, False))
    owned = grad_data[: grad_data.numel() // DP_SIZE]

    def scale() -> None:
        if plan.bucket_factor != 1.0:
            grad_data.mul_(plan.bucket_factor)
        if plan.post_factor != 1.0:
            owned.mul_(plan.post_factor)

    return scale

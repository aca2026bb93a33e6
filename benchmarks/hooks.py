"""What readiness costs per parameter and micro-batch, beside the addition itself.

The hooks of the real classes are called as autograd calls them, on models of 100, 1,000 and 10,000
parameters of 8 elements. From each turn the time of the bare additions, measured in the same turn, is taken
off. One parameter of each bucket group is left out, so that no collective is started.
"""

from __future__ import annotations

from typing import Any

from benchmarks.compare import cpu_timed, interleave, per_param_case, quiet

SIZES = (100, 1_000, 10_000)
PARAM_ELEMS = 8
HEADLINE = (
    'bookkeeping of a gradient in the last micro-batch, without the add; the worst of the sizes'
)


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio`` and ``cases``."""
    from megatron_buffer.testing import run_ranks

    [cases] = run_ranks(measure, 1, reps, timeout_s=1800)
    headline = [case for case in cases if case['what'] == 'last micro-batch']
    return {'ratio': max(case['ratio'] for case in headline), 'headline': HEADLINE, 'cases': cases}


def measure(rank: int, world_size: int, reps: int) -> list[dict[str, Any]]:
    """All cases, in one process."""
    quiet()
    cases = []
    for size in SIZES:
        cases += _of_size(size, reps)
    return cases


def arms_of(size: int) -> dict[str, dict[str, Any]]:
    """By class, ours and stock's: what is measured on a model of ``size`` parameters, and how many hooks that is."""
    import torch

    import megatron_buffer
    from megatron_buffer.testing import small_model

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(PARAM_ELEMS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight

    def wrapped(cls: Any) -> Any:
        return small_model.wrap(
            torch.nn.Sequential(*(Layer() for _ in range(size))),
            cls,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=40 * PARAM_ELEMS,
        )

    models = {
        'ours': wrapped(megatron_buffer.DistributedDataParallel),
        'stock': wrapped(small_model.ddp_class()),
    }
    grad = torch.ones(PARAM_ELEMS)
    return {name: _arms(model, grad) for name, model in models.items()}


def _of_size(size: int, reps: int) -> list[dict[str, Any]]:
    arms = arms_of(size)
    cases = []
    for what in ('last micro-batch', 'earlier micro-batch'):
        bodies = {name: of_model[what] for name, of_model in arms.items()}
        bodies['bare'] = arms['ours']['bare']
        times = interleave(bodies, reps)
        net = {
            name: [t - b for t, b in zip(times[name], times['bare'], strict=True)]
            for name in ('ours', 'stock')
        }
        cases.append(per_param_case(what, size, net['ours'], net['stock']))
    for what in ('forward pre-hooks, all gathered', 'no_sync', 'zero_grad_buffer'):
        times = interleave({name: of[what] for name, of in arms.items()}, reps)
        cases.append(per_param_case(what, size, times['ours'], times['stock']))
    return cases


def _arms(model: Any, grad: Any) -> dict[str, Any]:
    """What is measured on one model, after one whole iteration."""
    params = list(model.module.parameters())
    hooks = [(param, model._make_backward_post_hook(param)) for param in params]

    def call(pairs: Any) -> None:
        for param, hook in pairs:
            param.grad = grad
            hook(None, None)

    model.zero_grad_buffer()
    call(hooks)
    model.finish_grad_sync()
    model.zero_grad_buffer()
    left_out = {next(iter(group.params)) for group in model.bucket_groups}
    counted = [(param, hook) for param, hook in hooks if param not in left_out]

    def reset() -> None:
        for group in model.bucket_groups:
            group.per_param_grad_ready_counts = {}

    def last() -> float:
        seconds = cpu_timed(lambda: call(counted))()
        reset()
        return seconds

    def earlier() -> None:
        with model.no_sync():
            call(counted)

    def bare() -> None:
        for param, _ in counted:
            param.grad = grad
            param.main_grad.add_(param.grad)
            param.grad = None

    model.start_param_sync(force_sync=True)
    pre_hooks = [(module, model._make_forward_pre_hook()) for module in model.module]

    def forward() -> None:
        for module, hook in pre_hooks:
            hook(module)

    def no_sync() -> None:
        with model.no_sync():
            pass

    return {
        'last micro-batch': last,
        'earlier micro-batch': cpu_timed(earlier),
        'bare': cpu_timed(bare),
        'reset': cpu_timed(reset),
        'hooks': len(counted),
        'forward pre-hooks, all gathered': cpu_timed(forward),
        'no_sync': cpu_timed(no_sync),
        'zero_grad_buffer': cpu_timed(model.zero_grad_buffer),
    }

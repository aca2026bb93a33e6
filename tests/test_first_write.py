"""`accumulation: first_write`: nobody ever sees what the last step left. Stock is the reference, bit for bit.

Each scene is played by stock and by ours in the same processes and shows tensors on its way: gradients before
and after they are reduced. Whole training runs follow below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.harness import run_ranks
from tests.parity_run import SMALL_BUCKET_ELEMS, check, full
from tests.tiny_gpt import TrainCase

FIRST_WRITE = {'accumulation': 'first_write'}
DIST_OPT: dict[str, Any] = {'use_distributed_optimizer': True, 'bucket_size': 100}
OVERLAP: dict[str, Any] = {**DIST_OPT, 'overlap_grad_reduce': True}
PLAIN: dict[str, Any] = {}
ALL = (PLAIN, DIST_OPT, OVERLAP)

Shown = list[torch.Tensor]
Wrap = Callable[..., Any]
Scene = Callable[[Wrap, int], Shown]
SCENES: dict[str, tuple[Scene, tuple[dict[str, Any], ...], bool]] = {}
TOLERANT = {'unused_params': 'zero_fill'}


def scene(*flags: dict[str, Any], stock_stops: bool = False) -> Callable[[Scene], Scene]:
    """Registers a scene, to be played with each of ``flags`` as the DDP config.

    With ``stock_stops`` stock asserts under overlap, and ours with zeroing is the reference there.
    """

    def register(play: Scene) -> Scene:
        SCENES[play.__name__] = (play, flags, stock_stops)
        return play

    return register


def _window(model: Any, rank: int, step: int, micro_batches: int = 2, **how: Any) -> Shown:
    from tests import small_model as sm

    sm.run_window(model, rank, step, micro_batches, **how)
    return _reduced(model)


def _backward(model: Any, rank: int, step: int) -> None:
    from tests import small_model as sm

    model(sm.batch(rank, step, 0)).square().mean().backward()


def _reduced(model: Any) -> Shown:
    from tests import small_model as sm

    return list(sm.owned_main_grads(model).values())


def _mains(model: Any) -> Shown:
    return [param.main_grad.clone() for param in model.module.parameters()]


def _pads(model: Any) -> Shown:
    """What lies between and behind parameters."""
    found = []
    for buffer in model.buffers:
        outside = torch.ones_like(buffer.grad_data, dtype=torch.bool)
        for start, end, _ in buffer.param_index_map.values():
            outside[start:end] = False
        found.append(buffer.grad_data[outside].clone())
    return found


@scene(*ALL)
def several_steps(wrap: Wrap, rank: int) -> Shown:
    from tests import small_model as sm

    model, shown = wrap(sm.make_net()), []
    for step, micro_batches in enumerate((1, 4, 1)):
        shown += _window(model, rank, step, micro_batches) + _pads(model)
    return shown


@scene(*ALL, stock_stops=True)
def a_layer_that_is_skipped(wrap: Wrap, rank: int) -> Shown:
    """Looked at as soon as backward is over, before anything is reduced; in buckets of their own."""

    class Skips(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.skip = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) if self.skip else self.one(torch.tanh(self.two(x)))

    torch.manual_seed(3)
    model, shown = wrap(Skips(), bucket_size=1), []
    for step, skips in enumerate([(False,), (True,), (False,), (True, False), (False, True)]):
        model.zero_grad_buffer()
        for model.module.skip in skips:
            with model.no_sync():
                _backward(model, rank, step)
            shown += _mains(model)
        model.finish_grad_sync()
        shown += _reduced(model)
    return shown


@scene(*ALL, stock_stops=True)
def nothing_at_all(wrap: Wrap, rank: int) -> Shown:
    """A rank without data."""
    from tests import small_model as sm

    model = wrap(sm.make_net())
    shown = _window(model, rank, 0)
    model.zero_grad_buffer()
    model.finish_grad_sync()
    return shown + _reduced(model) + _mains(model) + _window(model, rank, 1)


@scene(*ALL)
def filled_by_hand(wrap: Wrap, rank: int) -> Shown:
    from tests import small_model as sm

    model = wrap(sm.make_net())
    shown = _window(model, rank, 0)
    for fill in (
        lambda: model.buffers[0].grad_data.fill_(rank + 1.0),
        lambda: model.buffers[0].grad_data.data.fill_(rank + 1.0),
        lambda: model.module.second.weight.main_grad.fill_(rank + 3.0),
        lambda: model.module.second.bias.main_grad.copy_(torch.full((16,), rank + 3.0)),
    ):
        model.zero_grad_buffer()
        fill()
        if model.ddp_config.overlap_grad_reduce:
            model.start_grad_sync()  # without overlap stock would reduce twice
        model.finish_grad_sync()
        shown += _reduced(model) + _window(model, rank, 1) + _pads(model)
    return shown


@scene(*ALL)
def filled_by_hand_and_added_to(wrap: Wrap, rank: int) -> Shown:
    from tests import small_model as sm

    model = wrap(sm.make_net())
    shown = _window(model, rank, 0)
    model.zero_grad_buffer()
    model.module.third.weight.main_grad.fill_(2.0)
    _backward(model, rank, 1)
    shown += _mains(model)[:-1]
    model.finish_grad_sync()
    return shown + _reduced(model)


@scene(*ALL)
def an_exception_between_micro_batches(wrap: Wrap, rank: int) -> Shown:
    from tests import small_model as sm

    model = wrap(sm.make_net())
    shown = _window(model, rank, 0)
    for when in (0, 1):
        model.zero_grad_buffer()
        with contextlib.suppress(ZeroDivisionError), model.no_sync():
            for _ in range(when):
                _backward(model, rank, 1)
            hook = model.module.second.weight.register_hook(lambda grad: 1 // 0)
            try:
                _backward(model, rank, 2)
            finally:
                hook.remove()
        model.module.zero_grad()
        shown += _window(model, rank, 3)
    return shown


@scene(*ALL)
def offloaded_between_steps(wrap: Wrap, rank: int) -> Shown:
    from tests import small_model as sm

    model = wrap(sm.make_net())
    shown = _window(model, rank, 0)
    for zero_first in (False, True):
        if zero_first:
            model.zero_grad_buffer()
        model.offload_grad_buffers()
        model.restore_grad_buffers()
        if zero_first:
            _backward(model, rank, 1)
            model.finish_grad_sync()
            shown += _reduced(model)
        shown += _window(model, rank, 1) + _pads(model)
    return shown


@scene(*ALL)
def used_twice_in_a_backward_pass(wrap: Wrap, rank: int) -> Shown:
    """Once within one node of the graph, once in two re-entrant checkpoints: the hook is called twice."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(torch.tanh(self.layer(x)))
            for _ in range(2):
                x = checkpoint(self.layer, torch.tanh(x), use_reentrant=True)
            return self.last(x)

    torch.manual_seed(3)
    model, shown = wrap(Twice()), []
    for step in range(3):
        shown += _window(model, rank, step)
    return shown


@scene(*ALL)
def scaled_by_infinity(wrap: Wrap, rank: int) -> Shown:
    from tests import small_model as sm

    model = wrap(sm.make_net())
    _window(model, rank, 0)
    model.scale_gradients(float('inf'))
    shown = _window(model, rank, 1) + _pads(model)
    model.zero_grad_buffer()
    model.scale_gradients(2.0)
    return shown + _mains(model)


@scene(*ALL)
def odd_gradients(wrap: Wrap, rank: int) -> Shown:
    """Sparse ones, and ones that have a graph."""

    class Sparse(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(8, 8, sparse=True)
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.table(torch.arange(4)) * x)

    torch.manual_seed(3)
    model, shown = wrap(Sparse()), []
    for step in range(3):
        model.zero_grad_buffer()
        output = model(torch.ones(4, 8) * (rank + step + 1))
        output.square().mean().backward(create_graph=step == 1)
        shown += _mains(model)[:1] if not model.ddp_config.overlap_grad_reduce else []
        model.finish_grad_sync()
        shown += _reduced(model)
    return shown


@scene(*ALL)
def negative_zeros(wrap: Wrap, rank: int) -> Shown:
    from tests import small_model as sm

    model = wrap(sm.make_net())
    for param in model.module.parameters():
        param.register_hook(lambda grad: grad * -0.0)
    return _window(model, rank, 0, 1) + _window(model, rank, 1, 1)


@scene(OVERLAP)
def started_by_the_schedule(wrap: Wrap, rank: int) -> Shown:
    """As under align_grad_reduce: all backward passes without synchronisation."""
    from tests import small_model as sm

    model, shown = wrap(sm.make_net(unused=True)), []
    for step in range(3):
        model.zero_grad_buffer()
        with model.no_sync():
            _backward(model, rank, step)
            _backward(model, rank, step + 1)
        model.start_grad_sync()
        model.finish_grad_sync()
        shown += _reduced(model)
    return shown


@scene(*({**flags, 'check_for_nan_in_grad': True} for flags in ALL))
def checked_with_unused_parameters(wrap: Wrap, rank: int) -> Shown:
    """The mark of what is not written is a NaN, which no check may find."""
    from tests import small_model as sm

    model, shown = wrap(sm.make_net(unused=True), bucket_size=1), []
    for step in range(3):
        shown += _window(model, rank, step) + _mains(model)[-2:]
    return shown


class _FusedLinear(torch.autograd.Function):
    """As a kernel that adds a weight's gradient to main_grad itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.main_grad.data.add_(grads[0].t() @ x)
        weight.grad_added_to_main_grad = True
        return grads[0] @ weight, torch.zeros_like(weight)


class _Fused(torch.nn.Module):
    """A fused layer, and one that is fused or not from step to step; both know main_grad."""

    def __init__(self, says_so: bool = True, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.one.fuse_wgrad_accumulation = self.two.fuse_wgrad_accumulation = says_so
        self.tied, self.fuses = tied, True
        if tied:
            self.one.weight.zero_out_wgrad = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(_FusedLinear.apply(x, self.one.weight) + self.one.bias)
        if self.tied:
            x = torch.tanh(self.one(x))
        if not self.fuses:
            return self.two(x)
        return _FusedLinear.apply(x, self.two.weight) + self.two.bias


@scene(*ALL)
def fused_weight_gradients(wrap: Wrap, rank: int) -> Shown:
    model, shown = wrap(_Fused(), bucket_size=1), []
    for step, model.module.fuses in enumerate((True, True, False, True)):
        shown += _window(model, rank, step)
    return shown


@scene(*ALL)
def a_tied_weight_on_one_stage(wrap: Wrap, rank: int) -> Shown:
    """The kernel writes, then the hook has to add."""
    model, shown = wrap(_Fused(tied=True), bucket_size=1), []
    for step in range(3):
        shown += _window(model, rank, step)
    return shown


@scene(*({**flags, 'delay_wgrad_compute': True} for flags in ALL))
def delayed_weight_gradients(wrap: Wrap, rank: int) -> Shown:
    class Delayed(torch.nn.Linear):
        def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
            self.hooks = [*getattr(self, 'hooks', []), hook]

        def backward_dw(self, grad: torch.Tensor) -> None:
            self.weight.grad = grad
            for hook in self.hooks:
                hook()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.late, self.last = Delayed(8, 8, bias=False), torch.nn.Linear(8, 8)
            self.late.weight.skip_backward_post_hook = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(torch.nn.functional.linear(x, self.late.weight.detach())))

    model, shown = wrap(Net(), bucket_size=1), []
    for step in range(3):
        model.zero_grad_buffer()
        with model.no_sync():
            for _ in range(2):
                _backward(model, rank, step)
                model.module.late.backward_dw(torch.full((8, 8), rank + step + 1.0))
        model.finish_grad_sync()
        shown += _reduced(model)
    return shown


def _played(rank: int, world_size: int) -> dict[str, Any]:
    """Per scene and flags: what differs, and how much was shown."""
    import megatron_buffer
    from megatron_buffer.testing.tiny_results import same_bits
    from tests import small_model as sm

    stock = sm.ddp_class()
    found = {}
    for name, (play, all_flags, stock_stops) in SCENES.items():
        for number, flags in enumerate(all_flags):

            def reference(
                net: Any, flags: Any = flags, stops: bool = stock_stops, **more: Any
            ) -> Any:
                if stops and flags.get('overlap_grad_reduce'):
                    return ours(net, flags, 'zero_then_add', **more)
                return sm.wrap(net, stock, **{**flags, **more})

            def ours(
                net: Any, flags: Any = flags, accumulation: str = 'first_write', **more: Any
            ) -> Any:
                config = {**TOLERANT, 'accumulation': accumulation}
                cls = megatron_buffer.DistributedDataParallel
                return sm.wrap(net, cls, buffer_config=config, **{**flags, **more})

            try:
                theirs, own = play(reference, rank), play(ours, rank)
            except Exception as error:
                error.add_note(f'in {name}, {flags}')
                raise
            pairs = enumerate(zip(theirs, own, strict=True))
            found[f'{name} {number}'] = (
                [i for i, (a, b) in pairs if not same_bits(a, b)],
                len(theirs),
            )
    return found


def test_every_scene_shows_stocks_bits() -> None:
    for found in run_ranks(_played, 2, timeout_s=240):
        assert len(found) == sum(len(flags) for _, flags, _ in SCENES.values()) > 40
        assert {name: differ for name, (differ, _) in found.items() if differ} == {}
        assert all(shown > 1 for _, shown in found.values())


def _surprised(rank: int, world_size: int) -> str:
    import megatron_buffer
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    model = sm.wrap(
        _Fused(says_so=False), megatron_buffer.DistributedDataParallel, buffer_config=FIRST_WRITE
    )
    with pytest.raises(ReadinessError) as caught:
        _window(model, rank, 0)
    return str(caught.value)


def test_a_fused_kernel_that_nobody_knew_of_is_an_error_by_name() -> None:
    for message in run_ranks(_surprised, 2):
        assert 'two.weight' in message
        assert 'accumulation: zero_then_add' in message


def _late(rank: int, world_size: int) -> list[Any]:
    """More synchronised backward passes than expected: kept aside, and reduced at finish."""
    import megatron_buffer
    from tests import small_model as sm
    from tests.test_window import _synced_backwards

    shown = []
    for accumulation in ('zero_then_add', 'first_write'):
        model = sm.wrap(
            sm.make_net(),
            megatron_buffer.DistributedDataParallel,
            buffer_config={'readiness': 'golden_checked', 'accumulation': accumulation},
            **OVERLAP,
        )
        of_arm = []
        for step, number in enumerate((1, 3, 2)):
            _synced_backwards(model, rank, step, number)
            of_arm += [grad.tolist() for grad in _reduced(model)]
        shown.append(str(of_arm))
    return shown


def test_late_gradients() -> None:
    for zeroed, overwritten in run_ranks(_late, 2):
        assert zeroed == overwritten


def _memory(rank: int, world_size: int) -> list[Any]:
    """How many elements a window's beginning writes: none but the marks, or all."""
    import megatron_buffer
    from tests import small_model as sm

    found = []
    for config, module in ((FIRST_WRITE, sm.make_net()), (FIRST_WRITE, _Fused())):
        model = sm.wrap(module, megatron_buffer.DistributedDataParallel, buffer_config=config)
        _window(model, rank, 0)
        before = model.buffers[0].grad_data.clone()
        model.zero_grad_buffer()
        changed = model.buffers[0].grad_data != before
        found.append((int(changed.sum()), len(list(model.module.parameters()))))
    return found


def test_only_marks_are_written_when_a_window_begins() -> None:
    for plain, fused in run_ranks(_memory, 2):
        assert plain[0] == plain[1] == 6
        assert fused[0] > 64


# ------------------------------------------------------------------------------- whole training runs

FP32_LOCAL = {'param_name_patterns_for_fp32_local_accumulation': ('*linear_fc1*', '*layernorm*')}
NO_OVERLAP: dict[str, Any] = {'overlap_grad_reduce': False, 'overlap_param_gather': False}
NO_SHARDS: dict[str, Any] = {'dist_opt': False, 'overlap_param_gather': False}
RECOMPUTE = {
    'recompute_granularity': 'full',
    'recompute_method': 'uniform',
    'recompute_num_layers': 1,
}
WITH_RECOMMENDED = {
    'readiness': 'golden_checked',
    'dispatch_order': 'in_order',
    'unused_params': 'zero_fill',
    **FIRST_WRITE,
}


def test_training_runs_of_stocks_bits() -> None:
    cases = [
        full(),
        full(micro_batches=1, **NO_OVERLAP, grad_reduce_in_fp32=False),
        full(ddp=FP32_LOCAL, grad_reduce_in_fp32=False, **NO_SHARDS),
    ]
    check(2, cases, [FIRST_WRITE])


PARALLEL: dict[str, tuple[int, list[TrainCase]]] = {
    'paths': (
        2,
        [
            full(micro_batches=1),
            full(dtype='fp32'),
            full(offload=True),
            full(force_all_reduce=True),
            full(per_token_loss=True),
            full(average_in_collective=True),
            full(model=RECOMPUTE),
            full(micro_batches=4, **NO_SHARDS),
            full(**{**NO_SHARDS, **NO_OVERLAP}),
            full(check_for_nan=True),
            full(rs_fp32_accum=True, grad_reduce_in_fp32=False),
        ],
    ),
    'stages': (4, [full(pp=2), full(pp=2, align=False), full(pp=2, micro_batches=1)]),
    'chunks': (4, [full(pp=2, vpp=2, layers=4, micro_batches=4)]),
    'tensor parallel': (4, [full(tp=2, sp=True), full(tp=2, **NO_SHARDS)]),
    'experts': (4, [full(ep=2, moe=True), full(ep=2, moe=True, **NO_SHARDS)]),
    'instances': (4, [full(instances=2), full(instances=2, force_all_reduce=True)]),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PARALLEL)
def test_parallel_training_runs_of_stocks_bits(name: str) -> None:
    ranks, cases = PARALLEL[name]
    assert all(case.bucket_size == SMALL_BUCKET_ELEMS for case in cases)
    check(ranks, cases, [FIRST_WRITE, WITH_RECOMMENDED])

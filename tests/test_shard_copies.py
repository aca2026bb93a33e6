"""The optimizer's copies between buffers and main parameters are upstream's: same slices, same bits, same aliases."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase, init_parallel, run_backward, same_bits, seed_everything, wrap

OPTIONS: dict[str, Any] = {
    'bucket_size': 2000,
    'dist_opt': True,
    'overlap_grad_reduce': True,
    'overlap_param_gather': True,
}
CASES = {
    'fp32': TrainCase(**OPTIONS, dtype='fp32'),
    'bf16': TrainCase(**OPTIONS, dtype='bf16'),
    'bf16 gradients': TrainCase(**OPTIONS, dtype='bf16', grad_reduce_in_fp32=False),
    'fp16': TrainCase(**OPTIONS, dtype='fp16'),
    'experts': TrainCase(**OPTIONS, dtype='bf16', moe=True, ep=2),
}


def _upstreams(optimizer: Any) -> Any:
    """The optimizer with upstream's method bodies."""
    from megatron_buffer.checkpointing import CheckpointedOptimizer

    return super(CheckpointedOptimizer, optimizer)


def _trained(case: TrainCase) -> Any:
    """A run of ours with gradients reduced, and its optimizers."""
    import megatron_buffer

    megatron_buffer.install('upstream')
    init_parallel(case)
    seed_everything(case)
    run = wrap(case)
    run_backward(case, run, 0)
    chained = getattr(run.optimizer, 'chained_optimizers', [run.optimizer])
    return run, [one for one in chained if not one.is_stub_optimizer]


def _mains(optimizer: Any) -> list[Any]:
    groups = (*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups)
    return [main for group in groups for main in group]


def _grads(optimizer: Any) -> list[tuple[Any, torch.Tensor]]:
    """Where each main gradient lies, if in the buffer, and a copy of it."""
    inside = {buffer.grad_data.untyped_storage().data_ptr() for buffer in optimizer.buffers}
    grads = [main.grad for main in _mains(optimizer)]
    return [
        (grad.data_ptr() if grad.untyped_storage().data_ptr() in inside else None, grad.clone())
        for grad in grads
    ]


def _handed_over_alike(optimizer: Any) -> bool:
    """Our gradients against those that upstream's method body hands over."""
    found = []
    for copy in (optimizer._copy_model_grads_to_main_grads, None):
        for main in _mains(optimizer):
            main.grad = None
        if copy is None:
            _upstreams(optimizer)._copy_model_grads_to_main_grads()
        else:
            copy()
        found.append(_grads(optimizer))
    ours, stock = found
    assert ours, 'nothing to compare'
    return all(
        of_ours == of_stock and same_bits(grad, other)
        for (of_ours, grad), (of_stock, other) in zip(ours, stock, strict=True)
    )


def _written_alike(optimizer: Any) -> bool:
    """What main parameters of new values leave in the whole parameter buffers, against upstream's method body."""
    buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
    found = []
    for copy in (optimizer._copy_main_params_to_model_params, None):
        with torch.no_grad():
            for bucket in buckets:
                bucket.param_data.fill_(7.0)
            for index, main in enumerate(_mains(optimizer)):
                main.copy_(torch.linspace(-3.0, 3.0 + index, main.numel()).view_as(main))
        if copy is None:
            _upstreams(optimizer)._copy_main_params_to_model_params()
        else:
            copy()
        found.append([bucket.param_data.clone() for bucket in buckets])
    assert any(bool((data != 7.0).any()) for data in found[0]), 'nothing was written'
    return all(torch.equal(ours, stock) for ours, stock in zip(*found, strict=True))


def _compare(rank: int, world_size: int, case: TrainCase) -> list[bool]:
    _, optimizers = _trained(case)
    alike = []
    for optimizer in optimizers:
        alike += [_handed_over_alike(optimizer), _written_alike(optimizer)]
        known = optimizer._copies
        assert known is not None, 'the short way was not taken'
        alike += [_handed_over_alike(optimizer), optimizer._copies is known]
    return alike


@pytest.mark.parametrize('name', CASES)
def test_slices_and_bits_are_upstreams(name: str) -> None:
    for alike in run_ranks(_compare, 2, CASES[name], timeout_s=200):
        assert len(alike) >= 4
        assert all(alike)


def _replace(rank: int, world_size: int, case: TrainCase) -> dict[str, bool]:
    """After each thing that can be replaced, upstream's method body is the judge again."""
    _, [optimizer] = _trained(case)
    alike = {'at first': _handed_over_alike(optimizer) and _written_alike(optimizer)}
    owner = next(group[0] for group in optimizer.model_float16_groups if group)
    owner.main_grad = owner.main_grad.clone().mul_(2.0)
    alike['a gradient'] = _handed_over_alike(optimizer)
    bucket = optimizer.buffers[0].buckets[0]
    bucket.param_data = bucket.param_data.clone()
    alike['the data of a bucket'] = _written_alike(optimizer)
    mains = next(group for group in optimizer.shard_fp32_from_float16_groups if group)
    mains[0] = mains[0].clone()
    alike['a main parameter'] = _handed_over_alike(optimizer) and _written_alike(optimizer)
    mains[0].data = mains[0].data.clone()
    alike['the data of a main parameter'] = _written_alike(optimizer)
    mains[0].grad.data = torch.zeros_like(mains[0])
    alike['the data of a gradient handed over'] = _handed_over_alike(optimizer)
    return alike


def test_what_was_replaced_is_looked_up_again() -> None:
    for alike in run_ranks(_replace, 2, CASES['bf16'], timeout_s=200):
        assert alike == dict.fromkeys(alike, True)


def _kept_graph(rank: int, world_size: int, case: TrainCase) -> bool:
    """A graph that reads a parameter and is kept over a step: its backward pass runs, as with upstream."""
    run, [optimizer] = _trained(case)
    param = next(run.chunks[0].module.parameters())
    product = (param.float() * param.float()).sum()
    versions = [p._version for p in run.chunks[0].module.parameters()]
    optimizer._copy_main_params_to_model_params()
    product.backward()
    return versions == [p._version for p in run.chunks[0].module.parameters()]


def test_a_step_is_no_in_place_change_to_a_kept_graph() -> None:
    assert run_ranks(_kept_graph, 2, CASES['fp32'], timeout_s=200) == [True, True]


def _left_to_upstream(rank: int, world_size: int, case: TrainCase) -> list[bool]:
    _, [optimizer] = _trained(case)
    copies = importlib.import_module('megatron_buffer.shard_copies')
    plain = [copies.copies_plainly(optimizer)]
    for holder, name in (
        (optimizer, 'is_stub_optimizer'),
        (optimizer.ddp_config, 'use_megatron_fsdp'),
        (optimizer.ddp_config, 'fp8_param_gather'),
        (optimizer.config, 'use_precision_aware_optimizer'),
    ):
        setattr(holder, name, True)
        plain.append(copies.copies_plainly(optimizer))
        setattr(holder, name, False)
    dtype, optimizer.buffers[0].param_dtype = optimizer.buffers[0].param_dtype, torch.uint8
    plain.append(copies.copies_plainly(optimizer))
    optimizer.buffers[0].param_dtype = dtype
    return plain


def test_other_weights_are_left_to_upstream() -> None:
    [plain] = run_ranks(_left_to_upstream, 1, CASES['bf16'], timeout_s=200)
    assert plain == [True, False, False, False, False, False]

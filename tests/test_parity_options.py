"""Same bits under every option, of the buffer and of training, that a buffer can feel.

Stock and ours train the same cases in the same processes (`tests.parity_run`); each case also says how
one sees, in stock and in ours alike, that its option took effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.parity_run import check, full
from tests.tiny_gpt import TrainCase

Facts = dict[str, Any]
UPSTREAM = ('upstream',)
BOTH = ('upstream', 'recommended')

FP32_LOCAL = 'param_name_patterns_for_fp32_local_accumulation'
BF16_GRADS: dict[str, Any] = {'grad_reduce_in_fp32': False}
PLAIN: dict[str, Any] = {'dist_opt': False, 'overlap_param_gather': False}
NO_OVERLAP: dict[str, Any] = {'overlap_grad_reduce': False, 'overlap_param_gather': False}
NUM_BUCKETS: dict[str, Any] = {'wrapped_by': 'training', 'bucket_size': None}
DROPOUT = {'hidden_dropout': 0.1, 'attention_dropout': 0.1}
RECOMPUTE = {
    'recompute_granularity': 'full',
    'recompute_method': 'uniform',
    'recompute_num_layers': 1,
}
FP16_SCALE = 2.0**12
"""Stock starts at 2**32, where each of the first steps overflows and is skipped."""
FP16: dict[str, Any] = {'dtype': 'fp16', 'optim': {'initial_loss_scale': FP16_SCALE}}
VPP: dict[str, Any] = {'pp': 2, 'vpp': 2, 'layers': 4, 'micro_batches': 4}
PARAMS, FORWARDS = 28, 2 * 3 * 6  # of the tiny GPT; layers, micro-batches, steps


@dataclass(frozen=True)
class Option:
    """A case, and what shows that its option took effect.

    `shows` gets what `_facts` saw on a rank, the same in stock and in ours. Without it the case
    has to train otherwise than the first of its group.
    """

    case: TrainCase
    shows: Callable[[Facts], bool] | None = None


def _is(**wanted: Any) -> Callable[[Facts], bool]:
    return lambda facts: {name: facts[name] for name in wanted} == wanted


def _moe(bias: str, dist_opt: bool) -> TrainCase:
    options = {
        'none': {},
        'bias': {'moe_router_enable_expert_bias': True, 'moe_router_score_function': 'sigmoid'},
        'quantile': {'moe_router_load_balancing_type': 'quantile_balancing'},
    }
    return full(moe=True, model=options[bias], **({} if dist_opt else PLAIN))


GROUPS: dict[str, tuple[int, list[Option], tuple[str, ...]]] = {
    'dropout, recompute, offload': (
        2,
        [
            Option(full(), _is(layer_forwards=FORWARDS)),
            Option(full(model={**DROPOUT, **RECOMPUTE}), _is(layer_forwards=2 * FORWARDS)),
            Option(full(offload=True), _is(grad_bytes=0)),
        ],
        UPSTREAM,
    ),
    'averages': (
        2,
        [
            Option(full(), _is(factors=[0.5])),
            Option(full(average_in_collective=True), _is(factors=[1.0])),
            Option(full(average_in_collective=True, **PLAIN), _is(factors=[1.0])),
            Option(full(per_token_loss=True)),
            Option(full(per_token_loss=True, **PLAIN)),
        ],
        BOTH,
    ),
    'sizes of buckets': (
        2,
        [
            Option(full(), _is(buckets=7)),
            Option(full(bucket_size=None), _is(buckets=1)),
            Option(full(bucket_size=1), _is(buckets=PARAMS)),
            Option(full(high_busbw=True), lambda facts: facts['divisor'] % 2**16 == 0),
            Option(full(wrapped_by='training'), _is(buckets=7)),
            # Stock counts every parameter, and cuts where the size is reached: fewer buckets than asked.
            Option(
                full(**NUM_BUCKETS, ddp={'num_buckets': 5}),
                lambda facts: facts['bucket_size'] == facts['elems'] // 5 and facts['buckets'] > 2,
            ),
            Option(
                full(**NUM_BUCKETS, ddp={'num_buckets': 3}, **PLAIN),
                lambda facts: facts['bucket_size'] == facts['elems'] // 3 and facts['buckets'] > 1,
            ),
        ],
        BOTH,
    ),
    'fp32 beside the buffer': (
        2,
        [
            Option(full(**BF16_GRADS), _is(extra_main_grads=0)),
            Option(
                full(ddp={FP32_LOCAL: ('*linear_fc1*', '*layernorm*')}, **BF16_GRADS),
                _is(extra_main_grads=2 * 2 + 5 * 2),
            ),
            Option(
                full(ddp={FP32_LOCAL: ('all',)}, **BF16_GRADS, **PLAIN),
                _is(extra_main_grads=PARAMS),
            ),
            Option(full(ddp={FP32_LOCAL: ('all',)}, average_in_collective=True, **BF16_GRADS)),
        ],
        BOTH,
    ),
    # Stock keeps the choice of this collective for the whole process, so it stands alone.
    'sums in fp32, of bf16 gradients': (
        4,
        [Option(full(rs_fp32_accum=True, **BF16_GRADS), _is(a2a=True))],
        BOTH,
    ),
    'sums in fp32, without overlap': (
        4,
        [Option(full(rs_fp32_accum=True, **BF16_GRADS, **NO_OVERLAP), _is(a2a=True))],
        BOTH,
    ),
    'sums in fp32, per token': (
        2,
        [Option(full(rs_fp32_accum=True, per_token_loss=True, **BF16_GRADS), _is(a2a=True))],
        BOTH,
    ),
    'checks': (
        2,
        [
            Option(full(), _is(checked=0)),
            Option(full(check_for_nan=True), _is(checked=0)),
            Option(
                full(check_for_nan=True, ddp={'check_for_large_grads': True}), _is(checked=7 * 6)
            ),
            Option(
                full(ddp={'check_for_large_grads': True}, **PLAIN, overlap_grad_reduce=False),
                _is(checked=6),
            ),
        ],
        BOTH,
    ),
    'optimizers': (
        2,
        [
            Option(full()),
            # Under the distributed optimizer stock wants Adam.
            Option(full(optimizer='sgd', **PLAIN)),
            Option(full(clip=0.0)),
            Option(full(**FP16), _is(loss_scale=FP16_SCALE)),
            Option(full(**FP16, **BF16_GRADS), _is(loss_scale=FP16_SCALE)),
            Option(full(clip=1e-6, optim={'weight_decay': 0.0, 'log_num_zeros_in_grad': True})),
            Option(full(optim={'decoupled_weight_decay': False})),
        ],
        BOTH,
    ),
    'gradients that are saved': (
        2,
        [
            Option(full(force_all_reduce=True), _is()),
            Option(full(force_all_reduce=True, **NO_OVERLAP), _is()),
            Option(full(force_all_reduce=True, per_token_loss=True, **BF16_GRADS), _is()),
            Option(full(force_all_reduce=True, **PLAIN), _is()),
        ],
        BOTH,
    ),
    'saved, two instances': (
        4,
        [Option(full(force_all_reduce=True, instances=2), _is())],
        UPSTREAM,  # stock's are not whole (F13); recommended's are
    ),
    'offload': (
        2,
        [
            Option(full(offload=True), _is(grad_bytes=0)),
            Option(full(offload=True, **NO_OVERLAP), _is(grad_bytes=0)),
            Option(full(offload=True, **PLAIN), _is(grad_bytes=0)),
            Option(full(offload=True, moe=True), _is(grad_bytes=0)),
        ],
        BOTH,
    ),
    'random start': (
        4,
        [
            Option(full()),
            Option(full(random_init=True), lambda facts: True),
            Option(full(random_init=True, **PLAIN), lambda facts: True),
            Option(full(random_init=True, moe=True), lambda facts: True),
        ],
        BOTH,
    ),
    'recompute': (
        2,
        [
            Option(full(), _is(layer_forwards=FORWARDS)),
            Option(full(model=DROPOUT)),
            Option(full(model=RECOMPUTE), _is(layer_forwards=2 * FORWARDS)),
            Option(full(model={**DROPOUT, **RECOMPUTE}, **PLAIN), _is(layer_forwards=2 * FORWARDS)),
            Option(
                full(model={**DROPOUT, **RECOMPUTE, 'recompute_method': 'block'}),
                _is(layer_forwards=FORWARDS + FORWARDS // 2),
            ),
        ],
        BOTH,
    ),
    'bias of routers': (
        2,
        [
            Option(_moe('none', True), _is(biased=False)),
            Option(_moe('bias', True), _is(biased=True)),
            Option(_moe('bias', False), _is(biased=True)),
        ],
        BOTH,
    ),
    'quantile bias of routers': (2, [Option(_moe('quantile', True), _is(biased=True))], BOTH),
    'gather with the step': (
        4,
        [
            Option(full(**VPP), _is(steps_apart=1)),
            Option(
                full(**VPP, optim={'overlap_param_gather_with_optimizer_step': True}),
                _is(steps_apart=2),
            ),
            Option(
                full(**VPP, tied=False, optim={'overlap_param_gather_with_optimizer_step': True}),
                _is(steps_apart=2),
            ),
        ],
        BOTH,
    ),
}
DEFAULT = 'dropout, recompute, offload'
SINCE_019 = ('quantile bias of routers',)


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[pytest.mark.slow] * (name != DEFAULT)) for name in GROUPS]
)
def test_same_bits(name: str) -> None:
    if name in SINCE_019:
        _needs_019()
    ranks, options, configs = GROUPS[name]
    results = check(ranks, [o.case for o in options], configs, alter=_watch, observe=_facts)
    for option, found in zip(options, results, strict=True):
        case = option.case
        seen = [one['observed'] for one in found]
        assert all(facts == stocks for stocks, *ours in seen for facts in ours), f'{case}: {seen}'
        if option.shows is None and case is not options[0].case:
            assert all(one['changed'] for one in found), f'{case} trains as {options[0].case}'
        assert all(
            option.shows is None or option.shows(stocks) for stocks, *_ in seen
        ), f'{case}: {seen}'
        if case.force_all_reduce and case.instances == 1:
            _assert_whole(found)
        if case.random_init:
            starts = {stocks['start'] for stocks, *_ in seen}
            assert len(starts) == len(found), f'{case}: ranks start alike'


def _needs_019() -> None:
    from importlib.metadata import version

    if version('megatron-core').startswith('0.18'):
        pytest.skip('megatron-core 0.18 has no such router')


def _assert_whole(found: list[dict[str, Any]]) -> None:
    """Gradients that are saved are whole, and the same on all data-parallel ranks."""
    first = found[0]['saved']
    assert {name.partition('/')[0] for name in first} == {'1', '3', '5'}
    assert len(first) == 3 * PARAMS
    for one in found[1:]:
        assert all(torch.equal(one['saved'][name], grad) for name, grad in first.items())


def _watch(model: Any) -> None:
    """Counts the forward passes of layers, and starts Megatron's statistics afresh."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    machine.large_value_counts.clear()
    machine.max_values.clear()
    model.layer_forwards = 0
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    model.start = weight.detach().float().sum().item()

    def count(*unused: Any) -> None:
        model.layer_forwards += 1

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(count)


def _facts(run: Any) -> Facts:
    """What shows that an option took effect."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.core.utils import unwrap_model

    buffers = [b for chunk in run.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    groups = [
        g for chunk in run.chunks for g in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    biases = [
        buffer
        for chunk in run.chunks
        for name, buffer in chunk.named_buffers()
        if name.endswith(('expert_bias', 'qb_beta'))
    ]
    optimizers = getattr(run.optimizer, 'chained_optimizers', [run.optimizer])
    return {
        'buckets': len(buckets),
        'bucket_size': run.chunks[0].bucket_size,
        'elems': sum(p.numel() for chunk in run.chunks for p in chunk.parameters()),
        'divisor': min(bucket.grad_data.numel() for bucket in buckets) if buckets else 0,
        'factors': sorted({bucket.gradient_scaling_factor for bucket in buckets}),
        'extra_main_grads': sum(len(b.params_with_extra_main_grads) for b in buckets),
        'grad_bytes': sum(buffer.grad_data.untyped_storage().size() for buffer in buffers),
        'a2a': all(g.ddp_config.reduce_scatter_with_fp32_accumulation for g in groups),
        'checked': get_rerun_state_machine().large_value_counts.get('grads', 0),
        'layer_forwards': sum(unwrap_model(chunk).layer_forwards for chunk in run.chunks),
        'biased': bool(biases) and all(bool(bias.any()) for bias in biases),
        'steps_apart': len(optimizers),
        'start': unwrap_model(run.chunks[0]).start,
        'loss_scale': run.optimizer.get_loss_scale().item(),
    }

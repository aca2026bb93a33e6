"""Layout strategies under training, on real ranks: gradients and updates are those of the plain model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase, compare, train

PATHS = {
    'plain': {'overlap_grad_reduce': True, 'bucket_size': 100},
    'dist_opt': {
        'use_distributed_optimizer': True,
        'overlap_grad_reduce': True,
        'overlap_param_gather': True,
        'bucket_size': 100,
    },
}
# The small model: first (8 x 16 + 16), second (16 x 16 + 16), third (16 x 8 + 8).
CONFIGS: dict[str, dict[str, Any]] = {
    'forward': {'param_order': 'forward'},
    'random': {'param_order': {'name': 'random', 'seed': 4}},
    'count': {'bucketing': {'name': 'count', 'num_buckets': 3}},
    'first_last': {
        'bucketing': {'name': 'first_last', 'first_size_elems': 1, 'last_size_elems': 1}
    },
    'balanced': {'bucketing': 'balanced'},
    'per_module': {'bucketing': {'name': 'per_module', 'pattern': '*'}},
    'explicit': {'bucketing': {'name': 'explicit', 'boundaries': ['second.*']}},
    'isolated': {'bucket_isolation': {'name': 'patterns', 'patterns': ['*.bias']}},
    'byte_aligned': {'padding': {'name': 'byte_aligned', 'param_start_bytes': 512}},
    'minimal': {'padding': 'minimal'},
    'separate': {'bucket_groups': 'separate'},
    'single': {'bucket_groups': 'single'},
    'nearest_ready': {'bucket_groups': 'nearest_ready'},
    'all': {
        'param_order': {'name': 'random', 'seed': 1},
        'bucketing': {'name': 'per_module', 'pattern': '*'},
        'bucket_isolation': {'name': 'patterns', 'patterns': ['first.bias']},
        'padding': {'name': 'byte_aligned', 'param_start_bytes': 12, 'bucket_end_bytes': 20},
        'bucket_groups': 'separate',
    },
}


def _wrong_gradients(rank: int, world_size: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Per config what differs from the unwrapped model, and the parameters of each bucket."""
    import megatron_buffer
    from tests import small_model as sm

    oracles = [sm.oracle_grads(rank, world_size, step) for step in range(2)]
    found = {}
    for name, config in CONFIGS.items():
        model = sm.wrap(
            sm.make_net(), megatron_buffer.DistributedDataParallel, buffer_config=config, **flags
        )
        wrong = []
        for step, expected in enumerate(oracles):
            sm.run_window(model, rank, step)
            owned = sm.owned_main_grads(model)
            if not sm.covered(model, owned):
                wrong.append(f'step {step}: not every element has exactly one owner')
            wrong += sm.differences(owned, expected)
        names = sm.names_of(model)
        buckets = [
            ' '.join(names[param] for param in bucket.params_list)
            for bucket in model.buffers[0].buckets
        ]
        found[name] = (wrong, buckets, len(model.bucket_groups))
    return found


@pytest.mark.parametrize('path', PATHS)
def test_gradients_equal_an_unwrapped_models(path: str) -> None:
    for found in run_ranks(_wrong_gradients, 2, PATHS[path]):
        assert {name: wrong for name, (wrong, _, _) in found.items() if wrong} == {}
        buckets = {name: laid_out for name, (_, laid_out, _) in found.items()}
        assert buckets['forward'][0] == 'first.weight'
        assert buckets['forward'][-1].endswith('third.bias')
        assert len(buckets['count']) == 3
        assert (buckets['first_last'][0], buckets['first_last'][-1]) == (
            'third.bias',
            'first.weight',
        )
        assert buckets['per_module'] == [
            f'{layer}.bias {layer}.weight' for layer in ('third', 'second', 'first')
        ]
        assert buckets['explicit'] == [
            'third.bias third.weight second.bias',
            'second.weight',
            'first.bias first.weight',
        ]
        assert [bucket for bucket in buckets['isolated'] if 'bias' in bucket] == [
            'third.bias',
            'second.bias',
            'first.bias',
        ]
        assert found['single'][2] == 1
        assert found['separate'][2] == len(buckets['separate']) > 2


# ------------------------------------------------------------------ gradient dtypes by name


def rules(**dtypes: str) -> dict[str, Any]:
    """A grouping that gives parameters of these layers (or '_': all) a gradient dtype."""
    found = [
        {'pattern': '*' if layer == '_' else f'*{layer}*', 'grad_dtype': dtype}
        for layer, dtype in dtypes.items()
    ]
    return {'buffer_grouping': {'name': 'grad_dtype_rules', 'rules': found}}


def _exact_sums(rank: int, world_size: int, flags: dict[str, Any], config: Any) -> dict[str, Any]:
    """A bf16 model, second layer in fp32: each dtype accumulated and summed as itself, bit for bit."""
    import megatron_buffer
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(dtype=torch.bfloat16),
        megatron_buffer.DistributedDataParallel,
        buffer_config=config,
        **flags,
    )
    plain = sm.make_net(dtype=torch.bfloat16)
    sums: dict[str, list[torch.Tensor]] = {}
    for other in range(world_size):
        for name, param in plain.named_parameters():
            dtype = torch.float32 if 'second' in name else torch.bfloat16
            sums.setdefault(name, []).append(torch.zeros_like(param, dtype=dtype))
        for micro_batch in range(3):
            x = sm.batch(other, 0, micro_batch).bfloat16()
            plain.zero_grad()
            plain(x).float().square().mean().backward()
            for name, param in plain.named_parameters():
                assert param.grad is not None
                sums[name][-1] += param.grad
    model.zero_grad_buffer()
    for micro_batch in range(3):
        x = sm.batch(rank, 0, micro_batch).bfloat16()
        if micro_batch == 2:
            model(x).float().square().mean().backward()
        else:
            with model.no_sync():
                model(x).float().square().mean().backward()
    model.finish_grad_sync()
    owned = sm.owned_main_grads(model)
    wrong = []
    for name, (one, two) in sums.items():
        expected = (one / 2 + two / 2).float().flatten()
        mine = owned[name]
        mask = ~mine.isnan()
        if not torch.equal(mine[mask], expected[mask]):
            wrong.append(name)
    return {
        'wrong': wrong,
        'covered': sm.covered(model, owned),
        'buffers': sorted((str(b.param_dtype), str(b.grad_dtype)) for b in model.buffers),
        'groups': len(model.bucket_groups),
    }


@pytest.mark.parametrize('grouping', ['merge_into_last_fp8', 'single'])
@pytest.mark.parametrize('path', PATHS)
def test_two_gradient_dtypes_of_one_parameter_dtype(path: str, grouping: str) -> None:
    config = rules(second='fp32') | {'bucket_groups': grouping}
    for found in run_ranks(_exact_sums, 2, PATHS[path], config):
        assert found['wrong'] == []
        assert found['covered']
        assert found['buffers'] == [
            ('torch.bfloat16', 'torch.bfloat16'),
            ('torch.bfloat16', 'torch.float32'),
        ]
        assert (found['groups'] == 1) == (grouping == 'single')


BF16 = TrainCase(
    dist_opt=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    dtype='bf16',
    bucket_size=2000,
    steps=4,
)


def _rule_for_all(rank: int, world_size: int, case: TrainCase) -> list[str]:
    stock = train(case)
    ours = train(replace(case, grad_reduce_in_fp32=False), rules(_='fp32'))
    return compare(stock, ours)


@pytest.mark.long
@pytest.mark.parametrize('dist_opt', [False, True])
def test_a_rule_for_all_parameters_is_what_grad_reduce_in_fp32_does(dist_opt: bool) -> None:
    case = replace(BF16, dist_opt=dist_opt, overlap_param_gather=dist_opt)
    assert run_ranks(_rule_for_all, 2, case, timeout_s=240) == [[], []]


def _two_buffers(rank: int, world_size: int, case: TrainCase) -> dict[str, Any]:
    stock = train(case)
    ours = train(case, rules(mlp='bf16'))
    worst = max(
        float((ours['params'][name].float() - param.float()).abs().max())
        for name, param in stock['params'].items()
    )
    dtypes = {
        (buffer['param_dtype'], buffer['grad_dtype'], 'mlp' in name)
        for buffer in ours['layout']
        for bucket in buffer['buckets']
        for name in bucket[3]
    }
    return {
        'losses': [stock['losses'], ours['losses']],
        'worst': worst,
        'states': len(ours['state']) > 0,
        'dtypes': sorted(dtypes),
    }


@pytest.mark.long
def test_training_with_two_gradient_dtypes_stays_beside_stock() -> None:
    """The optimizer's ranges, its fp32 masters and the gathers know two buffers of one parameter dtype."""
    for found in run_ranks(_two_buffers, 2, BF16, timeout_s=240):
        assert found['dtypes'] == [
            ('torch.bfloat16', 'torch.bfloat16', True),
            ('torch.bfloat16', 'torch.float32', False),
        ]
        stock, ours = found['losses']
        assert ours == pytest.approx(stock, rel=2e-2)
        assert ours[-1] < ours[0]
        # Four steps of Adam at 0.01 move a weight by 0.04; rounding must not turn one around.
        assert found['worst'] < 0.03
        assert found['states']


@pytest.mark.long
@pytest.mark.parametrize('layer', ['word_embeddings', 'output_layer'])
def test_a_tied_embedding_has_one_gradient_dtype_on_both_pipeline_stages(layer: str) -> None:
    """It has another name on the last stage; two dtypes would meet in one all-reduce."""
    case = replace(BF16, overlap_grad_reduce=False, overlap_param_gather=False, pp=2, steps=2)
    for found in run_ranks(_tied_dtype, 2, case, rules(**{layer: 'bf16'}), timeout_s=240):
        assert found == {('torch.bfloat16', 'torch.bfloat16')}


def _tied_dtype(rank: int, world_size: int, case: TrainCase, config: Any) -> set[tuple[str, str]]:
    ends = ('word_embeddings.weight', 'output_layer.weight')
    return {
        (buffer['param_dtype'], buffer['grad_dtype'])
        for buffer in train(case, config)['layout']
        for bucket in buffer['buckets']
        for name in bucket[3]
        if name.endswith(ends)
    }

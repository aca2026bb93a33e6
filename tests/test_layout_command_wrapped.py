"""`megatron-buffer layout --json` says what the DDP of a really wrapped model has, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import ROOT, run_ranks
from tests.test_layout_command import layouts
from tests.tiny_model import TrainCase

MOE = 'num_moe_experts: 4\nmoe_router_topk: 2\nadd_bias_linear: false\n'
# The tests' model takes its vocabulary as it is.
TINY = (ROOT / 'configs' / 'models' / 'gpt_tiny.yaml').read_text()
TINY += 'make_vocab_size_divisible_by: 1\n'

UPSTREAM: dict[str, Any] = {}
CONFIGS: dict[str, dict[str, Any]] = {
    'upstream': UPSTREAM,
    'in_order': {'dispatch_order': 'in_order'},
    'forward': {'param_order': 'forward'},
    'random': {'param_order': {'name': 'random', 'seed': 3}},
    'count': {'bucketing': {'name': 'count', 'num_buckets': 4}},
    'first_last': {
        'bucketing': {'name': 'first_last', 'first_size_elems': 100, 'last_size_elems': 3000}
    },
    'balanced': {'bucketing': 'balanced'},
    'per_module': {'bucketing': {'name': 'per_module', 'pattern': '*layers.*'}},
    'explicit': {'bucketing': {'name': 'explicit', 'boundaries': ['*linear_qkv.weight']}},
    'isolated': {'bucket_isolation': {'name': 'patterns', 'patterns': ['*layernorm.weight']}},
    'byte_aligned': {'padding': {'name': 'byte_aligned', 'param_start_bytes': 512}},
    'minimal': {'padding': 'minimal'},
    'single': {'bucket_groups': 'single'},
    'rules': {
        'buffer_grouping': {
            'name': 'grad_dtype_rules',
            'rules': [{'pattern': '*layernorm*', 'grad_dtype': 'fp32'}],
        },
        'dispatch_order': 'in_order',
    },
}


def _wrapped(
    rank: int, world_size: int, case: TrainCase, configs: dict[str, dict[str, Any]]
) -> dict[str, list[Any]]:
    """Per config what each chunk's DDP really has on this rank."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    import megatron_buffer
    from tests.tiny_gpt import init_parallel
    from tests.tiny_model import build_model

    init_parallel(case)
    found: dict[str, list[Any]] = {}
    for name, config in configs.items():
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=case.dist_opt,
            num_distributed_optimizer_instances=case.instances,
            overlap_grad_reduce=case.overlap_grad_reduce,
            overlap_param_gather=case.overlap_param_gather,
            grad_reduce_in_fp32=case.grad_reduce_in_fp32,
            bucket_size=case.bucket_size,
            pad_buckets_for_high_nccl_busbw=case.high_busbw,
        )
        found[name] = []
        models = [build_model(case, i if case.vpp else None) for i in range(case.vpp or 1)]
        for chunk, model in enumerate(models):
            if case.dtype != 'fp32':
                model = Float16Module(model.config, model)
            ddp = megatron_buffer.DistributedDataParallel(
                model.config, ddp_config, model, disable_bucketing=chunk > 0, buffer_config=config
            )
            found[name].append(_described(ddp))
    return found


def _described(ddp: Any) -> dict[str, Any]:
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    places = {
        id(bucket): (index, bucket.bucket_id)
        for index, buffer in enumerate(buffers)
        for bucket in buffer.buckets
    }
    groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
    sequence = getattr(groups[0].dispatcher, 'sequence', None)
    return {
        'buffers': [
            {
                'dtypes': [str(buffer.param_dtype), str(buffer.grad_dtype)],
                'numel': buffer.numel,
                'buckets': [
                    (b.offset, b.offset + b.grad_data.numel(), b.numel_unpadded)
                    for b in buffer.buckets
                ],
                'params': {
                    buffer.param_to_name[param]: list(place)
                    for param, place in buffer.param_index_map.items()
                },
                'ranks': buffer.data_parallel_world_size,
            }
            for buffer in buffers
        ],
        'groups': [[places[id(bucket)] for bucket in group.buckets] for group in groups],
        'dispatch': sequence and [groups.index(group) for group in sequence],
        'gather': _chains(groups) if ddp.ddp_config.overlap_param_gather else None,
    }


def _chains(groups: list[Any]) -> list[list[int]]:
    """The chains of gathers, each as indices of groups."""
    following = [group.next_param_gather_bucket_group for group in groups]
    chains = []
    for head in groups:
        if any(head is other for other in following):
            continue
        chain = []
        while head is not None:
            chain.append(groups.index(head))
            head = head.next_param_gather_bucket_group
        chains.append(chain)
    return chains


def _planned(text: str) -> dict[str, Any]:
    """The command's JSON in the same shape."""
    long = {'fp32': 'torch.float32', 'bf16': 'torch.bfloat16', 'fp16': 'torch.float16'}
    view = json.loads(text)
    overlap = view['ddp']['overlap'] and view['ddp']['use_distributed_optimizer']
    return {
        'buffers': [
            {
                'dtypes': [long[buffer['param_dtype']], long[buffer['grad_dtype']]],
                'numel': buffer['numel_elems'],
                'buckets': [
                    (b['start_elems'], b['end_elems'], b['numel_unpadded_elems'])
                    for b in buffer['buckets']
                ],
                'params': {
                    p['name']: [p['start_elems'], p['end_elems'], b['index']]
                    for b in buffer['buckets']
                    for p in b['params']
                },
                'ranks': buffer['num_ranks'],
            }
            for buffer in view['buffers']
        ],
        'groups': [[(b['buffer'], b['bucket']) for b in g['buckets']] for g in view['groups']],
        'dispatch': (
            view['dispatch']['order'] if 'same order' in view['dispatch']['strategy'] else None
        ),
        'gather': (
            [order for order in view['gather']['order'].values() if order] if overlap else None
        ),
    }


def _arguments(case: TrainCase, model: str, config: str) -> list[str]:
    """The command line for a case; the bucket size is one that the config does not set."""
    arguments = [config, '--json', '--model', model, f'--{case.dtype}']
    for option in ('tp', 'pp', 'ep', 'instances'):
        arguments += [f'--{option}', str(getattr(case, option))]
    if case.vpp:
        arguments += ['--vpp', str(case.vpp)]
    if case.bucket_size is not None:
        arguments += ['--bucket-size', str(case.bucket_size)]
    if not case.grad_reduce_in_fp32:
        arguments += ['--grad-dtype', case.dtype]
    arguments += ['--no-dist-opt'] * (not case.dist_opt)
    arguments += ['--no-overlap'] * (not case.overlap_grad_reduce)
    arguments += ['--high-busbw'] * case.high_busbw
    return arguments


def check_against_wrapped(
    tmp_path: Path, case: TrainCase, configs: dict[str, dict[str, Any]], ranks: int
) -> None:
    """Compares every stage and chunk; all ranks of a stage must have what the planner says of one."""
    model = tmp_path / 'model.yaml'
    text = TINY.replace('num_layers: 2', f'num_layers: {case.layers}')
    model.write_text(text + MOE if case.moe else text)
    really = run_ranks(_wrapped, ranks, case, configs)
    keys, runs = [], []
    stage_size = ranks // case.pp
    for name, config in configs.items():
        path = tmp_path / f'{name}.yaml'
        path.write_text(yaml.safe_dump({'schema_version': 1, **config}))
        for stage in range(case.pp):
            for chunk in range(case.vpp or 1):
                arguments = _arguments(case, str(model), str(path))
                arguments += ['--rank-stage', str(stage), '--chunk', str(chunk)]
                arguments += ['--dp', str(stage_size // case.tp)]
                keys.append((name, stage, chunk))
                runs.append(arguments)
    for (name, stage, chunk), (code, text) in zip(keys, layouts(runs), strict=True):
        assert code == 0
        planned = _planned(text)
        for rank in range(stage * stage_size, (stage + 1) * stage_size):
            found = really[rank][name][chunk]
            for key, value in planned.items():
                assert found[key] == value, (name, stage, chunk, rank, key)


OVERLAP: dict[str, Any] = {'overlap_grad_reduce': True, 'overlap_param_gather': True}


@pytest.mark.long
def test_plan_is_what_ddp_has_with_the_distributed_optimizer(tmp_path: Path) -> None:
    case = TrainCase(dist_opt=True, dtype='bf16', grad_reduce_in_fp32=False, **OVERLAP)
    check_against_wrapped(tmp_path, case, CONFIGS, 2)


def test_plan_is_what_ddp_has_without_it(tmp_path: Path) -> None:
    case = TrainCase(overlap_grad_reduce=True, bucket_size=3000)
    configs = {name: CONFIGS[name] for name in ('upstream', 'in_order', 'random', 'isolated')}
    check_against_wrapped(tmp_path, case, configs, 2)


def test_plan_is_what_ddp_has_without_overlap(tmp_path: Path) -> None:
    case = TrainCase(dist_opt=True, high_busbw=True, dtype='bf16', bucket_size=None)
    check_against_wrapped(tmp_path, case, {'upstream': {}, 'minimal': {'padding': 'minimal'}}, 2)


def test_plan_is_what_ddp_has_on_both_stages_of_a_tied_pipeline(tmp_path: Path) -> None:
    case = TrainCase(pp=2, dist_opt=True, dtype='bf16', bucket_size=2000, **OVERLAP)
    configs = {name: CONFIGS[name] for name in ('upstream', 'in_order', 'per_module', 'minimal')}
    check_against_wrapped(tmp_path, case, configs, 2)


def test_plan_is_what_ddp_has_with_experts(tmp_path: Path) -> None:
    case = TrainCase(moe=True, ep=2, dist_opt=True, bucket_size=3000, **OVERLAP)
    configs = {name: CONFIGS[name] for name in ('upstream', 'in_order', 'random', 'rules')}
    check_against_wrapped(tmp_path, case, configs, 2)


@pytest.mark.slow
def test_plan_is_what_ddp_has_in_every_chunk_of_4_ranks(tmp_path: Path) -> None:
    case = TrainCase(pp=2, vpp=2, layers=4, dist_opt=True, bucket_size=2000, **OVERLAP)
    configs = {name: CONFIGS[name] for name in ('upstream', 'in_order', 'rules')}
    check_against_wrapped(tmp_path, case, configs, 4)
    case = TrainCase(tp=2, dist_opt=True, bucket_size=2000, **OVERLAP)
    check_against_wrapped(tmp_path, case, configs, 4)
    case = TrainCase(instances=2, dist_opt=True, bucket_size=2000, **OVERLAP)
    check_against_wrapped(tmp_path, case, configs, 4)

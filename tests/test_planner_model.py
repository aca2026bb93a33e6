"""The planner's models: published sizes, Megatron's own arithmetic, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_buffer.errors import ConfigError, MegatronBufferError
from megatron_buffer.planner.architecture import Architecture, load_architecture, shipped_models
from megatron_buffer.planner.job import DdpOptions, Job
from tests.harness import run_ranks

# As published with each model: the totals of the safetensors files on the Hugging Face hub. DeepSeek-V3
# counts one routing bias per expert of 58 layers, which Megatron keeps outside of the parameters.
# The 7.5B GPT's paper (Narayanan et al. 2021) has a formula, without the two vectors of the last norm.
PUBLISHED = {
    'article_7b': 36 * (12 * 4096**2 + 13 * 4096) + (51200 + 2048) * 4096 + 2 * 4096,
    'llama3_8b': 8_030_261_248,
    'llama3_70b': 70_553_706_496,
    'llama3_405b': 405_853_388_800,
    'qwen3_32b': 32_762_123_264,
    'mixtral_8x7b': 46_702_792_704,
    'deepseek_v3': 671_026_419_200 - 58 * 256,
}


def _totals(rank: int, world_size: int) -> dict[str, int]:
    import torch

    from megatron_buffer.planner.model import build_params

    result = {}
    for name in PUBLISHED:
        architecture = load_architecture(name)
        ep = 64 if name == 'deepseek_v3' else 2 if 'num_moe_experts' in architecture.values else 1
        params = build_params(architecture, Job(ep=ep, dp=ep), torch.bfloat16)[0]
        assert all(p.numel_elems == _product(p.shape or ()) for p in params)
        assert {p.dtype for p in params} == {torch.bfloat16}
        result[name] = sum(p.numel_elems * (ep if p.is_expert_parallel else 1) for p in params)
    return result


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def test_shipped_models_have_their_published_sizes() -> None:
    assert run_ranks(_totals, 1, init=False) == [PUBLISHED]
    assert set(shipped_models()) == {*PUBLISHED, 'gpt_tiny'}


# Stages -------------------------------------------------------------------------------------------


def _stages(rank: int, world_size: int, sizes: dict[str, int], layers: int) -> list[int]:
    """Elements of every chunk of every stage of a tiny GPT, by pipeline order."""
    import torch

    from megatron_buffer.planner.model import build_params

    values = {**load_architecture('gpt_tiny').values, 'num_layers': layers}
    architecture = Architecture('x.yaml', values, {})
    found = {}
    for pp_rank in range(sizes['pp']):
        chunks = build_params(architecture, Job(**sizes, pp_rank=pp_rank), torch.float32)
        for chunk, params in chunks.items():
            tied = [p.name for p in params if p.shared_embedding]
            is_end = (pp_rank, chunk) in ((0, 0), (sizes['pp'] - 1, len(chunks) - 1))
            assert len(tied) == (1 if is_end else 0), (pp_rank, chunk, tied)
            found[chunk, pp_rank] = sum(p.numel_elems for p in params)
    return [found[key] for key in sorted(found)]


def test_chunks_of_a_pipeline_add_up() -> None:
    # Of the tiny GPT: a layer has 8,544 elements, the two norms at the end 64.
    layer = 2 * 64 + (96 * 32 + 96) + (32 * 32 + 32) + (64 * 32 + 64) + (32 * 64 + 32)
    ends = [128 * 32 + 16 * 32, 64 + 128 * 32]
    (found,) = run_ranks(_stages, 1, {'pp': 2}, 4, init=False)
    assert found == [ends[0] + 2 * layer, 2 * layer + ends[1]]
    (found,) = run_ranks(_stages, 1, {'pp': 2, 'vpp': 2}, 4, init=False)
    assert found == [ends[0] + layer, layer, layer, layer + ends[1]]
    assert sum(found) == 4 * layer + sum(ends)


# Sizes of groups ----------------------------------------------------------------------------------

JOBS = [
    {'tp': 2, 'pp': 2, 'dp': 4},
    {'tp': 2, 'pp': 4, 'dp': 4, 'cp': 2, 'instances': 2},
    {'tp': 4, 'pp': 2, 'dp': 16, 'ep': 8},
    {'tp': 4, 'pp': 2, 'dp': 16, 'ep': 8, 'etp': 1},
    {'tp': 2, 'dp': 8, 'ep': 4, 'etp': 2, 'cp': 2, 'instances': 2},
]


def _sizes_in_megatron(rank: int, world_size: int) -> list[Any]:
    """Per job the sizes of Megatron's own groups, in fake worlds of the whole job."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    for sizes in JOBS:
        job = Job(**sizes)
        dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=job.world_size)
        ps.initialize_model_parallel(
            job.tp,
            job.pp,
            context_parallel_size=job.cp,
            expert_model_parallel_size=job.ep,
            expert_tensor_parallel_size=job.etp,
            num_distributed_optimizer_instances=job.instances,
            create_gloo_process_groups=False,
        )
        found.append(
            (
                ps.get_data_parallel_world_size(with_context_parallel=True),
                ps.get_data_parallel_group(
                    with_context_parallel=True, partial_data_parallel=True
                ).size(),
                ps.get_expert_data_parallel_world_size(),
                ps.get_expert_data_parallel_group(partial_expert_data_parallel=True).size(),
                ps.get_expert_tensor_parallel_world_size(),
            )
        )
        ps.destroy_model_parallel()
        dist.destroy_process_group()
    return found


def test_job_sizes_are_megatrons() -> None:
    (found,) = run_ranks(_sizes_in_megatron, 1, init=False)
    jobs = [Job(**sizes) for sizes in JOBS]
    assert found == [
        (j.dp_cp_size, j.num_shards(False), j.expert_dp_size, j.num_shards(True), j.expert_tp)
        for j in jobs
    ]


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ({'tp': 0}, '--tp 0: must be at least 1'),
        ({'dp': -4}, '--dp -4: must be at least 1'),
        ({'pp_rank': -1}, '--rank-stage -1: must be at least 0'),
        ({'vpp': 2}, '--vpp 2: several model chunks per stage need a pipeline'),
        ({'pp': 4, 'pp_rank': 4}, '--rank-stage 4: with --pp 4 it is at most 3'),
        ({'pp': 2, 'vpp': 2, 'chunk': 2}, '--chunk 2: with --vpp 2 it is at most 1'),
        ({'ep': 8, 'dp': 4}, '--dp must be a multiple of 8'),
        ({'ep': 8, 'dp': 3, 'tp': 2, 'etp': 1}, '--dp must be a multiple of 4'),
        ({'dp': 6, 'instances': 4}, '--instances 4: does not divide the 6 data-parallel ranks'),
        (
            {'dp': 8, 'ep': 8, 'instances': 2},
            '--instances 2: does not divide the 1 expert data-parallel ranks',
        ),
    ],
)
def test_jobs_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(**sizes)
    assert message in str(caught.value)


def test_bucket_size_and_num_buckets_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match='--bucket-size and --num-buckets exclude each other'):
        DdpOptions(bucket_size=5, num_buckets=2)
    with pytest.raises(ConfigError, match='--num-buckets 0: must be at least 1'):
        DdpOptions(num_buckets=0)


# Model files --------------------------------------------------------------------------------------

TINY = """
num_layers: 2
hidden_size: 32
num_attention_heads: 4
vocab_size: 128
max_sequence_length: 16
"""


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('', ['x.yaml: found None, expected the sizes of a model']),
        ('- 1', ['expected the sizes of a model']),
        ('num_layers: [', ['x.yaml:1:', 'not a valid YAML']),
        (f'{TINY}num_layers: 4\n', ['x.yaml:7: num_layers: given twice', 'line 2']),
        (TINY.replace('hidden_size', 'hiden_size'), ['hidden_size: is missing', "Is 'hiden_size'"]),
        (TINY.replace(': 2', ': two'), ["x.yaml:2: num_layers: found 'two', expected a positive"]),
        (
            TINY.replace(': 128', ': -128'),
            ['x.yaml:5: vocab_size: found -128, expected a positive'],
        ),
    ],
)
def test_model_files_that_cannot_be_read(write, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_architecture(write(text))
    for word in words:
        assert word in str(caught.value)


def test_unknown_models() -> None:
    with pytest.raises(
        ConfigError, match=r"no model named 'llama3_7b'.*Did you mean 'llama3_.*b'\?"
    ):
        load_architecture('llama3_7b')
    with pytest.raises(ConfigError, match='no such file'):
        load_architecture('configs/models/none.yaml')
    assert load_architecture('llama3-8b').values == load_architecture('llama3_8b').values


REFUSED = {
    'hiden_dropout: 0.1': "hiden_dropout: unknown key: no field of TransformerConfig or GPTModel. "
    "Did you mean 'hidden_dropout'?",
    'tensor_model_parallel_size: 2': 'belongs to the job, not to the model: use --tp',
    'bf16: true': 'belongs to the job, not to the model: use --bf16',
    'perform_initialization: true': 'is set by the planner; leave it out',
    'add_bias_linear: 1': 'add_bias_linear: found 1, expected a valid boolean',
    'ffn_hidden_size: 64.5': 'ffn_hidden_size: found 64.5, expected a positive integer',
    'kv_channels: wide': "kv_channels: found 'wide', expected a valid integer",
    'normalization: Norm': "normalization: found 'Norm', expected 'LayerNorm' or 'RMSNorm'",
    'num_moe_experts: 4\nmoe_layer_freq: [1]': 'Megatron-Core cannot build stage 0, chunk 0 of this '
    'model: Invalid length of moe_layer_pattern: 1, expected 2',
    'activation_func: swish': "activation_func: found 'swish', expected one of gelu, quick_gelu,",
    'init_method: normal': 'init_method: takes a Python function, which a YAML file cannot hold',
    'num_query_groups: 3': 'num_query_groups: 3 does not divide 4 heads',
    'position_embedding_type: sine': "position_embedding_type: found 'sine', expected 'learned_",
}


def _refusals(rank: int, world_size: int, texts: list[str]) -> list[str]:
    import torch
    import yaml

    from megatron_buffer.planner.model import build_params

    found = []
    for text in texts:
        architecture = Architecture('x.yaml', yaml.safe_load(TINY + text), {})
        try:
            build_params(architecture, Job(), torch.bfloat16)
            found.append('accepted')
        except ConfigError as error:
            found.append(str(error))
    # After all that the process can still plan.
    assert build_params(load_architecture('gpt_tiny'), Job(), torch.bfloat16)[0]
    return found


def test_models_that_megatron_would_not_build() -> None:
    (found,) = run_ranks(_refusals, 1, list(REFUSED), init=False)
    for text, message, expected in zip(REFUSED, found, REFUSED.values(), strict=True):
        assert message.startswith('x.yaml: '), text
        assert expected in message, text


@pytest.mark.parametrize(
    ('values', 'sizes', 'message'),
    [
        ({}, {'tp': 3}, 'num_attention_heads: 4 cannot be divided over --tp 3'),
        ({'ffn_hidden_size': 6}, {'tp': 4}, 'ffn_hidden_size: 6 cannot be divided over --tp 4'),
        ({}, {'pp': 3}, 'num_layers: 2 cannot be divided over --pp 3'),
        ({}, {'pp': 2, 'vpp': 2}, 'num_layers: 2 cannot be divided over --pp 2 x --vpp 2'),
        ({}, {'ep': 2, 'dp': 2}, '--ep 2: x.yaml has no experts (num_moe_experts)'),
        (
            {'num_moe_experts': 6},
            {'ep': 4, 'dp': 4},
            'num_moe_experts: 6 cannot be divided over --ep 4',
        ),
        (
            {'num_attention_heads': 12, 'num_query_groups': 6},
            {'tp': 4},
            'num_query_groups: 6 cannot be divided over --tp 4, nor the reverse',
        ),
    ],
)
def test_jobs_that_the_model_does_not_fit(
    values: dict[str, int], sizes: dict[str, int], message: str
) -> None:
    from megatron_buffer.planner.model import check_divisions

    architecture = Architecture('x.yaml', {**load_architecture('gpt_tiny').values, **values}, {})
    with pytest.raises(ConfigError) as caught:
        check_divisions(architecture, Job(**sizes))
    assert message in str(caught.value)


def test_uneven_pipelines_are_megatrons_business() -> None:
    from megatron_buffer.planner.model import check_divisions

    check_divisions(load_architecture('llama3_405b'), Job(pp=16))


def test_vocabulary_is_padded_as_megatron_does() -> None:
    from megatron_buffer.planner.model import padded_vocab_size

    llama = load_architecture('llama3_8b')
    assert [padded_vocab_size(llama, tp) for tp in (1, 2, 4, 8)] == [
        128_256,
        128_256,
        128_512,
        129_024,
    ]


def _plan_inside_a_job(rank: int, world_size: int) -> None:
    import torch

    from megatron_buffer.planner.model import build_params

    with pytest.raises(MegatronBufferError, match='this process has one already'):
        build_params(load_architecture('gpt_tiny'), Job(), torch.bfloat16)


def test_no_plan_inside_a_job() -> None:
    run_ranks(_plan_inside_a_job, 1)

"""config.json files of public models: published sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_buffer import cli
from megatron_buffer.planner.architecture import plain_name
from megatron_buffer.planner.hf import FAMILIES, load_hf
from megatron_buffer.planner.job import Job
from tests.harness import run_ranks


def _decoder(kind: str, **sizes: Any) -> dict[str, Any]:
    return {'model_type': kind, 'hidden_act': 'silu', 'max_position_embeddings': 32768, **sizes}


def _sizes(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int
) -> dict[str, Any]:
    return {
        'num_hidden_layers': layers,
        'hidden_size': hidden,
        'intermediate_size': ffn,
        'num_attention_heads': heads,
        'num_key_value_heads': groups,
        'vocab_size': vocab,
    }


_MLA = {'kv_lora_rank': 512, 'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64, 'v_head_dim': 128}

# As published: sizes as in each model's config.json, totals of its safetensors files.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    'Llama-2-7b': (_decoder('llama', **_sizes(32, 4096, 11008, 32, 32, 32000)), 6_738_415_616),
    'Llama-3.2-1B': (
        _decoder(
            'llama',
            **_sizes(16, 2048, 8192, 32, 8, 128256),
            head_dim=64,
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
        ),
        1_235_814_400,
    ),
    'Mistral-7B-v0.1': (
        _decoder('mistral', **_sizes(32, 4096, 14336, 32, 8, 32000), sliding_window=4096),
        7_241_732_096,
    ),
    'Mixtral-8x7B': (
        _decoder(
            'mixtral',
            **_sizes(32, 4096, 14336, 32, 8, 32000),
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        46_702_792_704,
    ),
    'Qwen2.5-7B': (
        _decoder('qwen2', **_sizes(28, 3584, 18944, 28, 4, 152064), use_sliding_window=False),
        7_615_616_512,
    ),
    'Qwen2-0.5B': (
        _decoder('qwen2', **_sizes(24, 896, 4864, 14, 2, 151936), tie_word_embeddings=True),
        494_032_768,
    ),
    'Qwen3-0.6B': (
        _decoder(
            'qwen3', **_sizes(28, 1024, 3072, 16, 8, 151936), head_dim=128, tie_word_embeddings=True
        ),
        596_049_920,
    ),
    'Qwen3-8B': (
        _decoder('qwen3', **_sizes(36, 4096, 12288, 32, 8, 151936), head_dim=128),
        8_190_735_360,
    ),
    'Qwen3-30B-A3B': (
        _decoder(
            'qwen3_moe',
            **_sizes(48, 2048, 6144, 32, 4, 151936),
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        30_532_122_624,
    ),
    'Qwen1.5-MoE-A2.7B': (
        _decoder(
            'qwen2_moe',
            **_sizes(24, 2048, 5632, 16, 16, 151936),
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14_315_784_192,
    ),
    'DeepSeek-V2-Lite': (
        _decoder(
            'deepseek_v2',
            **_sizes(27, 2048, 10944, 16, 16, 102400),
            **_MLA,
            q_lora_rank=None,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
        ),
        15_706_484_224,
    ),
    'DeepSeek-V2': (
        _decoder(
            'deepseek_v2',
            **_sizes(60, 5120, 12288, 128, 128, 102400),
            **_MLA,
            q_lora_rank=1536,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            moe_intermediate_size=1536,
            n_routed_experts=160,
            n_shared_experts=2,
            num_experts_per_tok=6,
        ),
        235_741_434_880,
    ),
    # The routing bias of each expert of 58 layers is no parameter in Megatron.
    'DeepSeek-V3': (
        _decoder(
            'deepseek_v3',
            **_sizes(61, 7168, 18432, 128, 128, 129280),
            **_MLA,
            q_lora_rank=1536,
            first_k_dense_replace=3,
            moe_layer_freq=1,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            num_nextn_predict_layers=1,
        ),
        671_026_419_200 - 58 * 256,
    ),
    'gpt2': (
        {
            'model_type': 'gpt2',
            'n_layer': 12,
            'n_embd': 768,
            'n_head': 12,
            'n_positions': 1024,
            'n_inner': None,
            'vocab_size': 50257,
            'activation_function': 'gelu_new',
        },
        124_439_808,
    ),
}


def _totals(rank: int, world_size: int, folder: str) -> dict[str, int]:
    import torch

    from megatron_buffer.planner.model import build_params

    result = {}
    for name in PUBLISHED:
        architecture, _ = load_hf(f'{folder}/{name}')
        values = {**architecture.values, 'make_vocab_size_divisible_by': 1}
        experts = values.get('num_moe_experts', 1)
        ep = max(d for d in (1, 2, 4, 8, 16, 20, 32, 64) if experts % d == 0)
        job = Job(ep=ep, dp=ep)
        params = build_params(architecture._replace(values=values), job, torch.bfloat16)[0]
        result[name] = sum(p.numel_elems * (ep if p.is_expert_parallel else 1) for p in params)
    return result


def test_families_have_their_published_sizes(tmp_path: Path) -> None:
    for name, (config, _) in PUBLISHED.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / 'config.json').write_text(json.dumps(config))
    (found,) = run_ranks(_totals, 1, str(tmp_path), init=False)
    assert found == {name: total for name, (_, total) in PUBLISHED.items()}
    assert {config['model_type'] for config, _ in PUBLISHED.values()} == set(FAMILIES)
    notes = load_hf(str(tmp_path / 'DeepSeek-V3'))[1]
    assert [note.partition(' ')[0] for note in notes] == ['num_nextn_predict_layers']


GOOD = PUBLISHED['Llama-2-7b'][0]


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (json.dumps(GOOD)[:80], 'not JSON, line 1: the file ends in the middle'),
        ('{"model_type": "llama", }', 'not JSON, line 1'),
        ('[1]', 'found [1], expected the config.json of a model'),
        (json.dumps({**GOOD, 'model_type': 'qwen4'}), f'there are: {", ".join(FAMILIES)}'),
        ('{}', 'has no model_type'),
        (
            json.dumps({**GOOD, 'hidden_size': -4096}),
            'hidden_size: found -4096, expected a positive',
        ),
        (json.dumps({**GOOD, 'hidden_size': None}), 'hidden_size: is missing'),
        (json.dumps({**GOOD, 'hidden_act': 'tanh'}), "hidden_act: found 'tanh'"),
        (json.dumps({**GOOD, 'attention_bias': True}), 'attention_bias: true is not supported'),
        (json.dumps({**GOOD, 'num_attention_heads': 31}), '31 does not divide hidden_size 4096'),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    path = tmp_path / 'config.json'
    path.write_text(text)
    assert cli.main(['plan', '--hf', str(path)]) == 2
    out, error = capsys.readouterr()
    assert expected in error
    assert (out, error.count('\n')) == ('', 1)


def test_source_is_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / 'config.json').write_text(json.dumps(GOOD))
    by_file, by_folder = (load_hf(str(p))[0] for p in (tmp_path / 'config.json', tmp_path))
    assert by_file.values == by_folder.values
    assert plain_name(by_file.source) == plain_name(by_folder.source) == tmp_path.name

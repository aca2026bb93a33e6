"""The flags of a pretrain script as a model and as options of `megatron-buffer plan`."""

from __future__ import annotations

import argparse

import pytest

from megatron_buffer import cli
from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.architecture import load_architecture
from megatron_buffer.planner.megatron_args import apply_options, read_flags

COMMON = (
    '--seq-length 4096 --swiglu --normalization RMSNorm --disable-bias-linear --bf16 '
    '--untie-embeddings-and-output-weights --position-embedding-type rope --use-distributed-optimizer'
)
LLAMA = (
    '--num-layers 32 --hidden-size=4096 --ffn-hidden-size 14336 --num-attention-heads 32 '
    '--group-query-attention --num-query-groups 8 --max-position-embeddings 8192 '
    f'--vocab-size 128256 {COMMON}'
)
DEEPSEEK = (
    '--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 '
    '--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 '
    '--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --moe-layer-freq ([0]*3+[1]*58) '
    '--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 '
    f'--moe-shared-expert-intermediate-size 2048 --vocab-size 129280 {COMMON}'
)
# Keys that change no size, and have no flag here.
UNREAD = {'description', 'rotary_base', 'rope_type'}
UNREAD |= {'moe_router_score_function', 'moe_router_enable_expert_bias'}


@pytest.mark.parametrize(('name', 'text'), [('llama3_8b', LLAMA), ('deepseek_v3', DEEPSEEK)])
def test_flags_are_the_shipped_model(name: str, text: str) -> None:
    shipped = {k: v for k, v in load_architecture(name).values.items() if k not in UNREAD}
    assert read_flags(text).architecture.values == shipped


def test_what_megatron_derives() -> None:
    small = (
        '--num-layers 2 --hidden-size 1024 --num-attention-heads 4 --seq-length 8 --vocab-size 9'
    )
    values = read_flags(f'{small} --num-query-groups 2').architecture.values
    assert values['ffn_hidden_size'] == 4096
    assert 'num_query_groups' not in values  # without --group-query-attention it says nothing
    assert values['share_embeddings_and_output_weights'] is True
    assert read_flags(f'{small} --swiglu').architecture.values['ffn_hidden_size'] == 2688
    assert read_flags(f'{small} --num-experts 4').architecture.values['moe_ffn_hidden_size'] == 4096


def test_options() -> None:
    flags = read_flags(
        f'{LLAMA} --tensor-model-parallel-size 2 --pipeline_model_parallel_size 4 --lr 1e-4 '
        '--num-layers-per-virtual-pipeline-stage 2 --overlap-grad-reduce --ddp-bucket-size 1000 '
        '--fp8-recipe mxfp8 --fp8-param-gather --grad-reduce-in-bf16 --use-precision-aware-optimizer'
    )
    assert flags.ignored == ['--lr']
    assert flags.options == {
        'tp': 2,
        'pp': 4,
        'vpp': 4,
        'bucket_size': 1000,
        'precision_aware': True,
        'dtype': 'bf16',
        'grads': 'bf16',
        'no_dist_opt': False,
        'no_overlap': False,
        'recipe': 'mxfp8',
    }
    assert read_flags(LLAMA).options['grads'] == 'fp32'
    options = argparse.Namespace(**dict.fromkeys(flags.options), tp_other=1)
    options.tp = 4
    with pytest.raises(ConfigError, match=r'^--tp: --megatron-args says 2, and the option 4'):
        apply_options(options, flags.options)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('', '--num-layers is missing'),
        (LLAMA.replace('--vocab-size 128256', ''), '--vocab-size (the tokenizer has it'),
        (LLAMA.replace('32', 'many'), "--num-layers: found 'many', expected an integer"),
        (f'{LLAMA} --hidden-size', "--hidden-size: found 'nothing', expected an integer"),
        (f'{LLAMA} --hidden-size -1', 'hidden_size: found -1, expected a positive integer'),
        (f'{LLAMA} --num-layers -32', 'num_layers: found -32, expected a positive integer'),
        (f'{LLAMA} --tensor-model-parallel-size 3', '32 cannot be divided over --tp 3'),
        (f'{LLAMA} --moe-layer-freq [x]', '--moe-layer-freq [x]: expected a number or lists'),
        (f'{LLAMA} "', 'cannot be split into words'),
        (
            f'{LLAMA} --use-precision-aware-optimizer --exp-avg-dtype int4',
            "'int4' is none of fp32, fp16, bf16, fp8",
        ),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], text: str, expected: str) -> None:
    assert cli.main(['plan', f'--megatron-args={text}']) == 2
    out, error = capsys.readouterr()
    assert expected in error
    assert (out, error.count('\n')) == ('', 1)

"""`megatron-buffer plan`: the article's ledger to the digit, its perturbations, and what is refused."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer import cli
from megatron_buffer.errors import ConfigError
from megatron_buffer.layout import plan_layout
from megatron_buffer.planner import ledger
from megatron_buffer.planner.averages import parse_params
from tests.harness import ROOT

ARTICLE = ['--params', '7.5e9', '--tp', '2', '--pp', '2', '--dp', '64']


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(['plan', *arguments, '--json']) == 0
    return json.loads(capsys.readouterr().out)


# The article --------------------------------------------------------------------------------------

LEDGER = {
    'grad_data_bytes': 7_500_000_000,
    'param_data_bytes': 3_750_000_000,
    'optimizer_shard_bytes': 351_562_500,
    'optimizer_unsharded_bytes': 22_500_000_000,
    'bucket_size_elems': 64_000_000,
    'full_buckets': 29,
    'tail_bucket_elems': 19_000_000,
    'bucket_bytes': 256_000_000,
    'bucket_wire_bytes': 252_000_000,
    'grad_wire_bytes_per_iter': 7_382_812_500,
    'param_wire_bytes_per_iter': 3_691_406_250,
    'padding_bound_elems': 1_900_515,
}


def test_the_articles_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *ARTICLE)
    assert {key: value for key, value in found.items() if isinstance(value, int | float)} == LEDGER
    assert (found['rank']['shard_elems'], found['rank']['shard_bytes']) == (1_000_000, 4_000_000)
    assert found['rank']['padding_bound_bytes'] == 7_602_060  # 7.6 MB
    assert found['rank']['resident_bytes'] == 11_250_000_000 + 351_562_500
    assert found['job']['params_per_rank_elems'] == 1_875_000_000
    assert plan(capsys, '--params', '7.5B', '--tp', '2', '--pp', '2', '--world', '256') == found


PERTURBED = {
    # name: options, grad_data, param_data, optimizer, bytes of the module's or TE's own storage
    'bf16 gradients': (['--grads', 'bf16'], 3_750_000_000, 3_750_000_000, 351_562_500, 0),
    'no distributed optimizer (plain DDP)': (
        ['--no-dist-opt'],
        *(7_500_000_000, 0, 22_500_000_000, 3_750_000_000),
    ),
    'fp8 parameters': (['--fp8'], 7_500_000_000, 1_875_000_000, 351_562_500, 1_875_000_000),
    'MXFP8 parameters gathered in the gradient buffer': (
        ['--mxfp8'],
        # A byte for each element and one for each 32, rowwise and columnwise.
        *(7_500_000_000, 0, 351_562_500, 2 * (1_875_000_000 + 58_593_750)),
    ),
}


@pytest.mark.parametrize('name', PERTURBED)
def test_the_articles_perturbations(capsys: pytest.CaptureFixture[str], name: str) -> None:
    options, grads, params, optimizer, apart = PERTURBED[name]
    found = plan(capsys, *ARTICLE, *options)
    assert found['grad_data_bytes'] == grads
    assert found['param_data_bytes'] == params
    assert found['optimizer_shard_bytes'] == optimizer
    assert found['optimizer_unsharded_bytes'] == 22_500_000_000
    rank = found['rank']
    columns = ('module_param_bytes', 'te_rowwise_bytes', 'te_columnwise_bytes')
    assert sum(rank[column] for column in columns) == apart
    assert rank['resident_bytes'] == grads + params + optimizer + apart
    assert rank['shared_buffer_bytes'] == (grads if 'MXFP8' in name else 0)
    # The table of the command without these options has the same row.
    (row,) = [row for row in plan(capsys, *ARTICLE)['variants'] if row['name'] == name]
    assert {key: row[key] for key in rank if key in row} == {k: rank[k] for k in rank if k in row}
    assert row['grad_wire_bytes_per_iter'] == found['grad_wire_bytes_per_iter']
    assert row['param_wire_bytes_per_iter'] == found['param_wire_bytes_per_iter']


def test_the_articles_fsdp_row(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = [row for row in plan(capsys, *ARTICLE)['variants'] if 'FSDP' in row['name']]
    assert row['param_data_bytes'] == 3_750_000_000 // 64
    assert row['grad_data_bytes'] == 7_500_000_000 // 64


def test_wire_of_the_perturbations(capsys: pytest.CaptureFixture[str]) -> None:
    def wire(*options: str) -> tuple[int, int]:
        found = plan(capsys, *ARTICLE, *options)
        return found['grad_wire_bytes_per_iter'], found['param_wire_bytes_per_iter']

    reduced, gathered = 7_382_812_500, 3_691_406_250
    assert wire('--grads', 'bf16') == (reduced // 2, gathered)
    assert wire('--no-dist-opt') == (2 * reduced, 0)
    assert wire('--fp8') == (reduced, gathered // 2)
    assert wire('--mxfp8') == (reduced, gathered)  # bf16 travels, and is cast afterwards
    assert wire('--nvfp4') == (reduced, gathered // 4 + 1)  # rounded up
    # Two instances of 32 shards: shards of 1/32 are reduced between the two.
    rank = plan(capsys, *ARTICLE, '--instances', '2')['rank']
    assert rank['instance_wire_bytes_per_iter'] == 7_500_000_000 // 32
    assert rank['optimizer_bytes'] == 703_125_000


def test_precision_aware_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    def state(*options: str) -> int:
        found = plan(capsys, *ARTICLE, *options)
        return found['optimizer_unsharded_bytes'] // 1_875_000_000

    assert state('--precision-aware') == 10  # of bf16's main parameters the missing 16 bits
    moments = ['--exp-avg-dtype', 'bf16', '--exp-avg-sq-dtype', 'fp8']
    assert state('--precision-aware', *moments) == 2 + 2 + 1
    assert state('--precision-aware', '--main-params-dtype', 'fp16') == 10
    assert state('--precision-aware', '--mxfp8') == 12
    # Its kernel reads bf16 gradients as they are; otherwise a shard of them is cast for the step.
    for options, expected in ((['--precision-aware'], 0), ([], 4 * 1_875_000_000 // 64)):
        rank = plan(capsys, *ARTICLE, '--grads', 'bf16', *options)['rank']
        assert rank['temporary_bytes'] == expected


def test_averages_load_neither_torch_nor_megatron() -> None:
    code = (
        'import sys; from megatron_buffer import cli; '
        f'cli.main(["plan", *{ARTICLE!r}]); '
        'sys.exit("torch" in sys.modules or "megatron.core" in sys.modules)'
    )
    done = subprocess.run(
        [sys.executable, '-c', code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    shown = done.stdout
    assert '29 of 64,000,000 elements, and a tail of 19,000,000; 252.0 MB on the wire' in shown
    assert max(map(len, shown.splitlines())) <= 120


# The arithmetic -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=12),
    dp_size=st.integers(1, 6),
    bucket_size_elems=st.none() | st.integers(1, 900),
    config=st.sampled_from(['upstream', 'recommended']),
)
def test_shards_are_counted_as_element_by_element(
    sizes: list[int], dp_size: int, bucket_size_elems: int | None, config: str
) -> None:
    layout = plan_layout(
        sizes, config=config, dp_size=dp_size, bucket_size_elems=bucket_size_elems, param_bytes=2
    )
    owned = [0] * dp_size
    used = {e for slot in layout.slots for e in range(slot.start_elems, slot.end_elems)}
    for bucket in layout.buckets:
        shard = bucket.numel_elems // dp_size
        for rank, offset in itertools.product(range(dp_size), range(shard)):
            owned[rank] += bucket.start_elems + rank * shard + offset in used
    found = ledger.shard_params_elems(
        [(b.start_elems, b.end_elems) for b in layout.buckets],
        [(s.start_elems, s.end_elems) for s in layout.slots],
        dp_size,
    )
    assert found == owned


def test_storage_of_quantized_weights() -> None:
    elems = 4096 * 1024
    assert ledger.te_storage((4096, 1024), ledger.RECIPES['fp8']) == (elems + 4, elems)
    scales = elems // 32
    assert ledger.te_storage((4096, 1024), ledger.RECIPES['mxfp8']) == (elems + scales,) * 2
    scales = elems // 16
    assert (
        ledger.te_storage((4096, 1024), ledger.RECIPES['nvfp4']) == (elems // 2 + scales + 4,) * 2
    )
    # 192 x 160: rowwise scales 192 x 5 are padded to 256 x 8, columnwise 6 x 160 to 8 x 256.
    expected = (192 * 160 + 256 * 8, 192 * 160 + 8 * 256)
    assert ledger.te_storage((192, 160), ledger.RECIPES['mxfp8']) == expected


def test_numbers_of_parameters() -> None:
    assert [parse_params(t) for t in ('7.5e9', '7.5B', '7_500_000_000', '7500m')] == [
        7_500_000_000
    ] * 4
    for text in ('', 'b', '-7e9', '0', 'nan', 'inf', '1.5', '1e30', '7.5 GB', '8x7b'):
        with pytest.raises(ConfigError, match=r'^--params .*: expected a whole number'):
            parse_params(text)


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        ('--model llama3_8b --tp 3', 'num_attention_heads: 32 cannot be divided over --tp 3'),
        ('--model llama3_8b --pp 5', 'num_layers: 32 cannot be divided over --pp 5'),
        (
            '--model llama3_8b --pp 2 --vpp 3',
            'num_layers: 32 cannot be divided over --pp 2 x --vpp 3',
        ),
        ('--model llama3_8b --tp 8 --world 12', '--world 12: is not a multiple of tp x pp x cp'),
        ('--model llama3_8b --world -8', '--world -8: must be at least 1'),
        ('--model llama3_8b --dp -8', '--dp -8: must be at least 1'),
        ('--model llama3_8b --tp 0 --world 8', '--tp 0: must be at least 1'),
        ('--model llama3_8b --ep 2 --dp 2', '--ep 2: llama3_8b has no experts'),
        ('--model lama3_8b', "Did you mean 'llama3_8b'?"),
        ('--model mixtral_8x7b --ep 3 --dp 3', 'num_moe_experts: 8 cannot be divided over --ep 3'),
        ('--model llama3_8b --dp 6 --instances 4', '--instances 4: does not divide the 6'),
        ('--model llama3_8b --fp32 --fp8', '--fp8: quantized weights need --bf16'),
        ('--model llama3_8b --bf16 --grads fp16', '--grads fp16: gradients are fp32, or'),
        ('--model llama3_8b --mxfp8 --no-dist-opt', '--mxfp8: gathering in the gradient buffer'),
        ('--params 7e9 --exp-avg-dtype bf16', 'need --precision-aware'),
        ('--params 7e9 --precision-aware --no-dist-opt', '--precision-aware needs the distributed'),
        ('--params 7e9 --ep 2 --dp 2', '--params knows averages only, and no experts'),
        ('--params 7e9 --pp 2 --vpp 2', '--params knows averages only, and no model chunks'),
        ('--params 7e9 --bucket-size -1', '--bucket-size -1: must be at least 1'),
        ('--params 7e9 --config ablations/bucketing-balanced', 'bucketing is balanced in'),
        ('--params -7e9', '--params -7e9: expected a whole number'),
        ('--params seven', '--params seven: expected a whole number'),
        ('--params 7e9 --config nothing.yaml', 'nothing.yaml: no such file'),
        ('--hf nothing.json', 'nothing.json: no such file'),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: str, expected: str
) -> None:
    assert cli.main(['plan', *arguments.split()]) == 2
    out, error = capsys.readouterr()
    assert expected in error
    assert (out, error.count('\n')) == ('', 1)


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        ('--model llama3_8b --params 7e9', 'not allowed with argument --model'),
        ('--model llama3_8b --hf config.json', 'not allowed with argument --model'),
        ('--dp 8', 'one of the arguments --model --hf'),
        ('--params 7e9 --dp 2 --world 4', 'not allowed with argument --dp'),
        ('--params 7e9 --fp8 --nvfp4', 'not allowed with argument'),
        ('--params 7e9 --tp two', "invalid int value: 'two'"),
    ],
)
def test_what_argparse_refuses(
    capsys: pytest.CaptureFixture[str], arguments: str, expected: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(['plan', *arguments.split()])
    assert stopped.value.code == 2
    assert expected in capsys.readouterr().err

"""`megatron-buffer layout`: on one screen, as JSON, figure and diff."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_buffer import cli
from megatron_buffer.config import shipped_configs
from tests.harness import ROOT, run_ranks


def layout(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(['layout', *arguments])
    return code, out.getvalue()


def _layouts(rank: int, world_size: int, runs: list[list[str]]) -> list[tuple[int, str]]:
    return [layout(*run) for run in runs]


def layouts(runs: list[list[str]]) -> list[tuple[int, str]]:
    """The same in a process that may import Megatron, for several runs."""
    return run_ranks(_layouts, 1, runs, init=False)[0]


# One screen ---------------------------------------------------------------------------------------

BUCKETINGS = [
    'upstream',
    *(n for n in shipped_configs() if '/bucketing-' in n and 'time_optimal' not in n),
]


@pytest.mark.slow
def test_32_layers_on_one_screen_for_each_bucketing() -> None:
    jobs = {'llama3_8b': ['--dp', '8'], 'mixtral_8x7b': ['--dp', '16', '--ep', '8', '--tp', '2']}
    runs = [
        [config, '--model', model, *job]
        for model, job in jobs.items()
        for config in (*BUCKETINGS, 'ablations/param_order-random')
    ]
    assert len(BUCKETINGS) >= 6
    for arguments, (code, text) in zip(runs, layouts(runs), strict=True):
        shown = text.splitlines()
        assert code == 0
        assert len(shown) <= 60, arguments
        assert max(map(len, shown)) <= 120, arguments
        for word in ('output_layer.weight', 'groups: ', 'reduce ', 'gather '):
            assert word in text, arguments
        if 'random' not in arguments[0]:
            assert '…' not in text, arguments  # rich's mark on what it had to cut off


@pytest.mark.slow
def test_a_layer_per_bucket_is_two_lines_and_a_repetition() -> None:
    runs = [
        ['ablations/bucketing-per_module', '--model', 'llama3_8b', '--dp', '8'],
        ['ablations/bucketing-per_module', '--model', 'llama3_8b', '--buckets-only'],
        ['--model', 'llama3_8b', '--all-params', '--tp', '8'],
    ]
    (_, folded), (_, every_bucket), (_, every_param) = layouts(runs)
    # A layer: attention 4096 x (4096 + 2 x 1024) + 4096 x 4096, MLP 3 x 4096 x 14336, norms 2 x 4096.
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    (line,) = [line for line in folded.splitlines() if f'{layer:,}' in line]
    assert line.split()[0] == '1'
    assert f'{layer // 8:,}' in line
    (line,) = [line for line in folded.splitlines() if '... 29 more like it, layers 29-1' in line]
    assert line.split()[0] == '2-30'
    assert len([line for line in every_bucket.splitlines() if f'{layer:,}' in line]) == 30
    assert 'module.decoder.layers.17.self_attention.linear_qkv.weight' in every_param
    assert 'note: vocab_size 128,256 is padded to 129,024' in every_param
    assert len([line for line in every_param.splitlines() if 'layernorm.weight' in line]) == 65


# Parameter files, without Megatron ----------------------------------------------------------------

PARAMS = """
# name            elements
emb.weight        4096      shared_embedding
layers.0.fc.weight  2048
layers.0.fc.bias  64        fp32
layers.0.e.weight 1000      expert
layers.1.fc.weight  2048    quantized   # fp8
"""


@pytest.fixture
def params(tmp_path: Path) -> str:
    path = tmp_path / 'params.txt'
    path.write_text(PARAMS)
    return str(path)


def test_a_parameter_file_by_hand(params: str) -> None:
    code, text = layout(
        'upstream',
        '--params-file',
        params,
        '--dp',
        '4',
        '--ep',
        '2',
        '--bucket-size',
        '2048',
        '--json',
    )
    view = json.loads(text)
    assert code == 0
    assert [buffer['label'] for buffer in view['buffers']] == [
        'bf16/fp32',
        'fp32/fp32',
        'uint8/fp32',
        'bf16/fp32 expert',
    ]
    first = view['buffers'][0]
    assert [
        (b['start_elems'], b['end_elems'], b['shard_elems'], [p['name'] for p in b['params']])
        for b in first['buckets']
    ] == [(0, 2048, 512, ['layers.0.fc.weight']), (2048, 6144, 1024, ['emb.weight'])]
    expert = view['buffers'][3]
    assert (expert['numel_elems'], expert['padding_elems'], expert['num_shards']) == (1024, 24, 2)
    # The bf16 and fp32 buckets join the last (here only) fp8 bucket's group.
    assert [group['buckets'] for group in view['groups']] == [
        [
            {'buffer': 2, 'bucket': 0},
            {'buffer': 0, 'bucket': 0},
            {'buffer': 0, 'bucket': 1},
            {'buffer': 1, 'bucket': 0},
        ],
        [{'buffer': 3, 'bucket': 0}],
    ]
    assert [group['ready_at'] for group in view['groups']] == [0, 3]
    assert view['dispatch']['order'] == [1, 0]
    assert view['gather']['order'] == {'dense': [0], 'expert': [1]}
    assert view['totals'] == {
        'num_params': 5,
        'params_elems': 9256,
        'numel_elems': 6144 + 128 + 2048 + 1024,
        'padding_elems': 64 + 24,
        'num_buffers': 4,
        'num_buckets': 5,
        'num_groups': 2,
        'grad_bytes': 4 * 9344,
    }


def test_yaml_and_json_parameter_files_say_the_same(params: str, tmp_path: Path) -> None:
    entries = [
        {'name': 'emb.weight', 'numel': 4096, 'shared_embedding': True},
        {'name': 'layers.0.fc.weight', 'numel': 2048},
        {'name': 'layers.0.fc.bias', 'numel': 64, 'dtype': 'fp32'},
        {'name': 'layers.0.e.weight', 'numel': 1000, 'expert': True},
        {'name': 'layers.1.fc.weight', 'numel': 2048, 'quantized': True},
    ]
    path = tmp_path / 'params.json'
    path.write_text(json.dumps(entries))
    job = ('--dp', '4', '--ep', '2', '--json')
    views = [json.loads(layout('--params-file', name, *job)[1]) for name in (params, str(path))]
    assert views[0]['buffers'] == views[1]['buffers']
    assert views[0]['groups'] == views[1]['groups']
    path.write_text('{a.weight: 12, b.weight: 7}')
    (buffer,) = json.loads(layout('--params-file', str(path), '--json')[1])['buffers']
    assert [p['name'] for p in buffer['buckets'][0]['params']] == ['b.weight', 'a.weight']


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('', 'holds no parameters'),
        ('a.weight', "p.txt:1: found 'a.weight', expected NAME NUMEL"),
        ('a.weight many', "found 'a.weight many', expected NAME NUMEL"),
        ('a 5\nb -5', "p.txt:2: found 'b -5', expected NAME NUMEL"),
        ('a 5 bf61', "'bf61' is neither a dtype (fp32, bf16, fp16) nor a flag"),
        ('a 5 shared_embeding', "Did you mean 'shared_embedding'?"),
        ('a 5\na 6', 'parameter a is there twice'),
        ('- {name: a, numle: 5}', "entry 1: unknown key 'numle'"),
        ('- {name: a, numel: 5.5}', 'numel of a: found 5.5, expected a number of elements'),
        ('- {name: a, numel: 5, expert: 1}', 'expert of a: found 1, expected true or false'),
        ('[1', 'not a valid YAML'),
    ],
)
def test_bad_parameter_files(
    write: Callable[..., str], capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    assert cli.main(['layout', '--params-file', write(text, 'p.txt')]) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert err.startswith('megatron-buffer: error: ')
    assert words in err


@pytest.mark.long
def test_parameter_files_need_no_megatron(params: str) -> None:
    code = (
        'import sys; from megatron_buffer import cli\n'
        f'code = cli.main(["layout", "--params-file", {params!r}, "--dp", "2"])\n'
        'print(code, sorted(m for m in sys.modules if m.partition(".")[0] == "megatron"))'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.stdout.splitlines()[-1] == '0 []', done.stderr


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--model', 'gpt_tinny'], "Did you mean 'gpt_tiny'?"),
        (
            ['--model', 'gpt_tiny', '--tp', '3'],
            'num_attention_heads: 4 cannot be divided over --tp 3',
        ),
        (['upstraem', '--model', 'gpt_tiny'], "no config named 'upstraem'"),
        (['--diff', 'upstream', 'nope', '--model', 'gpt_tiny'], "no config named 'nope'"),
        (
            ['x.yaml', '--diff', 'upstream', 'upstream', '--model', 'gpt_tiny'],
            '--diff takes its two',
        ),
        (
            ['--model', 'gpt_tiny', '--fp32', '--grad-dtype', 'bf16'],
            'or have the dtype of the parame',
        ),
        (['--model', 'gpt_tiny', '--plot', 'x.jpg'], 'the name must end in .svg, .png, .pdf'),
        (['--model', 'gpt_tiny', '--plot', '/nowhere/x.svg'], 'there is no folder /nowhere'),
        (['--model', 'gpt_tiny', '--bucket-size', '0'], '--bucket-size 0: must be at least 1'),
        (['--model', 'gpt_tiny', '--dp', '0'], '--dp 0: must be at least 1'),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli.main(['layout', *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert words in err


def test_a_wrong_config_names_its_line(
    write: Callable[..., str], params: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write('schema_version: 1\npading: minimal\n')
    assert cli.main(['layout', path, '--params-file', params]) == 2
    assert 'line 2: pading: unknown key' in capsys.readouterr().err


def test_size_in_config_and_on_the_command_line(write: Callable[..., str], params: str) -> None:
    path = write('schema_version: 1\nbucketing: {name: fixed_size, bucket_size_elems: 2048}\n')
    common = (path, '--params-file', params, '--json')
    view = json.loads(layout(*common)[1])
    assert view['ddp']['bucket_size_elems'] == 2048
    assert layout(*common, '--bucket-size', '2048')[0] == 0
    assert layout(*common, '--bucket-size', '4096')[0] == 2


def test_patterns_that_match_nothing_are_said(write: Callable[..., str], params: str) -> None:
    path = write(
        'schema_version: 1\nbucket_isolation: {name: patterns, patterns: ["*.bias", "*.norm"]}\n'
        'bucketing: {name: per_module, pattern: "blocks.*"}\n'
    )
    notes = json.loads(layout(path, '--params-file', params, '--dp', '2', '--json')[1])['notes']
    assert notes == [
        "bucketing.pattern: 'blocks.*' matches no module of this model chunk",
        "bucket_isolation.patterns[1]: '*.norm' matches no parameter of this model chunk",
    ]


def test_num_buckets_counts_as_megatron_does(params: str) -> None:
    view = json.loads(layout('--params-file', params, '--num-buckets', '4', '--json')[1])
    assert view['ddp']['bucket_size_elems'] == 9256 // 4
    assert view['ddp']['bucket_size_reason'] == 'from num_buckets=4'


# Diff ---------------------------------------------------------------------------------------------


def test_diff_of_padding(params: str) -> None:
    common = ('--params-file', params, '--dp', '6', '--json', '--no-overlap')
    code, text = layout('--diff', 'upstream', 'ablations/padding-minimal', *common)
    diff = json.loads(text)
    assert code == 1
    assert diff['same'] is False
    # lcm(6, 128) = 384: 2048 -> 2304 behind fc.weight, 4096 -> 4224 more behind emb.weight; then 6 alone.
    assert diff['a']['buffers']['bf16/fp32']['numel_elems'] == 2304 + 4224
    assert diff['b']['buffers']['bf16/fp32']['numel_elems'] == 2052 + 4098
    assert diff['moved'] == [
        {
            'name': 'emb.weight',
            'change': 'offset',
            'a': {'buffer': 'bf16/fp32', 'bucket': 1, 'start_elems': 2304},
            'b': {'buffer': 'bf16/fp32', 'bucket': 1, 'start_elems': 2052},
        }
    ]
    assert diff['cuts'] == {'only_a': [], 'only_b': []}
    assert not diff['groups_differ']


def test_diff_of_cuts_orders_and_buffers(params: str, write: Callable[..., str]) -> None:
    explicit = write('schema_version: 1\nbucketing: {name: explicit, boundaries: []}\n')
    common = ('--params-file', params, '--bucket-size', '1', '--json')
    assert (
        layout('--diff', 'upstream', explicit, *common)[0] == 0
    )  # the tied embedding is alone in both
    plain = Path(write('a 10\nb 10\nc 10\n', 'abc.txt'))
    common = ('--params-file', str(plain), '--bucket-size', '1', '--json', '--no-dist-opt')
    diff = json.loads(layout('--diff', 'upstream', explicit, *common)[1])
    assert diff['cuts']['only_a'] == [
        {'buffer': 'bf16/fp32', 'before': 'c', 'behind': 'b'},
        {'buffer': 'bf16/fp32', 'before': 'b', 'behind': 'a'},
    ]
    assert [move['change'] for move in diff['moved']] == ['bucket', 'bucket']
    assert diff['groups_differ']
    diff = json.loads(layout('--diff', 'upstream', 'ablations/param_order-forward', *common)[1])
    assert {m['name']: m['b']['start_elems'] for m in diff['moved']} == {'a': 0, 'c': 20}
    rules = write(
        'schema_version: 1\nbuffer_grouping: {name: grad_dtype_rules, rules: '
        '[{pattern: b, grad_dtype: fp32}]}\n',
        'rules.yaml',
    )
    diff = json.loads(layout('--diff', 'upstream', rules, *common, '--grad-dtype', 'bf16')[1])
    assert [m['change'] for m in diff['moved']] == ['buffer', 'bucket']
    assert set(diff['b']['buffers']) == {'bf16/bf16', 'bf16/fp32'}


def test_configs_that_lay_out_alike(params: str) -> None:
    for other in ('upstream', 'ablations/dispatch_order-in_order', 'ablations/scaling-average'):
        code, text = layout('--diff', 'upstream', other, '--params-file', params)
        assert code == 0
        assert 'the same layout of 5 parameters' in text
    code, text = layout(
        '--diff', 'upstream', 'ablations/padding-minimal', '--params-file', params, '--dp', '6'
    )
    assert code == 1
    assert '6,528 -> 6,150' in text


# Figure -------------------------------------------------------------------------------------------


def test_figure(params: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip('matplotlib', reason='needs the plot extra')
    path = tmp_path / 'x.svg'
    common = ['--params-file', params, '--dp', '6', '--bucket-size', '2048']
    assert cli.main(['layout', *common, '--plot', str(path)]) == 0
    assert f'wrote {path}' in capsys.readouterr().err
    root = ElementTree.parse(path).getroot()
    ids = {node.get('id', '') for node in root.iter()}
    assert {'buffer-0-bucket-0', 'buffer-0-bucket-1', 'buffer-2-bucket-0'} <= ids
    assert {'buffer-0-bucket-0-padding-0', 'buffer-0-bucket-1-padding-0'} <= ids
    text = ' '.join(''.join(node.itertext()) for node in root.iter() if node.tag.endswith('text'))
    assert 'buffer 0 (bf16/fp32): 2 buckets, 6,528 elements, 5.9 % padding, 6 shards' in text
    for word in ('0 fc', 'emb', 'padding', "border of a rank's shard"):
        assert word in text


def _figure(rank: int, world_size: int, path: str) -> int:
    return layout('--model', 'llama3_8b', '--dp', '8', '--plot', path)[0]


@pytest.mark.slow
def test_figure_of_32_layers_shows_every_bucket(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib', reason='needs the plot extra')
    path = tmp_path / 'x.svg'
    assert run_ranks(_figure, 1, str(path), init=False) == [0]
    root = ElementTree.parse(path).getroot()
    ids = [node.get('id', '') for node in root.iter()]
    buckets = {name for name in ids if name.startswith('buffer-0-bucket-')}
    assert buckets == {f'buffer-0-bucket-{index}' for index in range(98)}
    texts = [''.join(node.itertext()) for node in root.iter() if node.tag.endswith('text')]
    assert {str(index) for index in range(98)} <= set(texts)
    assert {f'{layer} linear_fc1' for layer in range(32)} <= set(texts)

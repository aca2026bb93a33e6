"""What a config must not say, and in which words it is refused."""

import math
from typing import Any

import pytest
import yaml

from megatron_buffer import config_yaml
from megatron_buffer.config import load_config
from megatron_buffer.config_layout import MegatronPadding
from megatron_buffer.config_runtime import FinalizeSteps
from megatron_buffer.errors import ConfigError


@pytest.fixture
def refused(write):
    """Loads a YAML text (with schema_version, unless told) that must be refused; returns the error."""

    def load(text: str | bytes, version: bool = True) -> ConfigError:
        if version and isinstance(text, str):
            text = 'schema_version: 1\n' + text
        with pytest.raises(ConfigError) as caught:
            load_config(write(text))
        return caught.value

    return load


@pytest.mark.parametrize('source', [3, True, 1.5, ['upstream'], object(), b'upstream'])
def test_other_sources_are_refused(source):
    with pytest.raises(ConfigError, match='expected a shipped name, a path, a mapping or None'):
        load_config(source)


@pytest.mark.parametrize(
    ('source', 'words'),
    [
        (
            'upstrem',
            ["named 'upstrem'", 'recommended, upstream', "Did you mean 'upstream'?", "'/'"],
        ),
        ('', ["named ''", 'recommended, upstream']),
        ('x' * 10_000, ['named', '...', 'A path must contain']),
        ('schema_version: 1', ['A path must contain']),
        ('./upstream.yaml', ['no such file', "write 'upstream'"]),
        ('configs/recommended.yaml', ['no such file', "write 'recommended'"]),
        ('configs/ablations/scaling-average.yaml', ["write 'ablations/scaling-average'"]),
        ('ablations/scaling-avrage', ["mean 'ablations/scaling-average'?"]),
        ('scaling-average', ["mean 'ablations/scaling-average'?"]),
        ('ablations/nothing.yaml', ['no such file']),
        ('nowhere/at/all.yaml', ['no such file', 'nowhere/at/all.yaml']),
        ('nul\0byte.yaml', ['cannot be read']),
        ('y' * 300 + '.yaml', ['cannot be read', 'name too long']),
    ],
)
def test_unknown_names_and_missing_files(source, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    for word in words:
        assert word.lower() in str(caught.value).lower()
    assert len(str(caught.value)) < 1200


def test_a_misspelt_file_name_is_recognised(write, tmp_path):
    write('', 'mine.yaml')
    with pytest.raises(ConfigError, match=r"Did you mean 'mine.yaml'\?"):
        load_config(str(tmp_path / 'mime.yaml'))


def test_unreadable_files(write, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match='is a directory'):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r'not UTF-8 text \(byte 19\)'):
        load_config(write(b'schema_version: 1 #\xff\xfe'))
    with pytest.raises(ConfigError, match='larger than 1,048,576 bytes'):
        load_config(write(b'#' * (1 << 20) + b'\n'))

    def deny(*_args: Any) -> None:
        raise PermissionError(13, 'Permission denied')

    path = write('schema_version: 1')
    monkeypatch.setattr('builtins.open', deny)
    with pytest.raises(ConfigError, match='cannot be read: Permission denied') as caught:
        load_config(path)
    assert caught.value.source == path


@pytest.mark.parametrize(
    ('text', 'path', 'words'),
    [
        ('pading: megatron', 'pading', ['line 2: pading: unknown key', "'padding'?", 'checks']),
        ('layers: 3', 'layers', ['unknown key. Valid keys: schema_version, buffer_grouping']),
        ('padding: megatorn', 'padding', ["unknown strategy 'megatorn'", "mean 'megatron'?"]),
        ('padding: {name: x}', 'padding.name', ["strategy 'x'. Valid strategies: megatron"]),
        ('padding: ""', 'padding', ["unknown strategy ''"]),
        ('bucketing: time_optimal', 'bucketing', ['profile is missing, expected text']),
        (
            'accumulation: first_rite',
            'accumulation',
            [
                "strategy 'first_rite'. Did you mean 'first_write'?",
                'Valid strategies: zero_then_add,',
            ],
        ),
        ('padding: minimum', 'padding', ["strategy 'minimum'. Did you mean 'minimal'?"]),
        ('bucketing: count', 'bucketing', ['num_buckets is missing, expected an integer >= 1']),
        ('padding: [a, b]', 'padding', ['found a list, expected the name of a strategy']),
        ('padding: 3', 'padding', ['found 3, expected the name of a strategy']),
        ('padding: no', 'padding', ['found false, expected the name of a strategy']),
        ('padding: 2020-01-01', 'padding', ['found a value of type date']),
        ('padding: {}', 'padding', ['a mapping without a name', '{name: megatron}']),
        ('padding: {param_start_elems: 3}', 'padding', ['a mapping without a name']),
        ('padding: {name: null}', 'padding.name', ['found null, expected the name']),
        ('padding: {name: [megatron]}', 'padding.name', ['found a list']),
        ('padding: {name: {name: megatron}}', 'padding.name', ['found a mapping']),
        (
            'padding: {name: megatron, param_start_elem: 3}',
            'padding.param_start_elem',
            [
                "unknown parameter of strategy 'megatron'",
                "mean 'param_start_elems'?",
                'Valid: param_start_elems, bucket_end_elems, high_busbw, whole_bytes',
            ],
        ),
        ('param_order: {name: reverse, seed: 3}', 'param_order.seed', ['It has no parameters']),
        ('checks: {rank_agree: true}', 'checks.rank_agree', ["of 'checks'. Did", 'rank_agreement']),
        ('checks: {name: x}', 'checks.name', ["unknown parameter of 'checks'"]),
        (
            'checks: {stale_read: true}',
            'checks.stale_read',
            [
                "found true, expected 'ignore', 'warn', 'error', 'wait' or 'learn'; leave it out for the default, "
                'warn'
            ],
        ),
        (
            'checks: all',
            'checks',
            ["found 'all' (text), expected a mapping like {rank_agreement: t"],
        ),
        ('checkpoint: []', 'checkpoint', ['found an empty list', 'repair_fully_reshardable: auto']),
        ('1: x', '[1]', ['a key must be text, found 1; put it in quotes']),
        ('on: x', 'True', ['a key must be text, found true']),
        ('null: x', 'None', ['a key must be text, found null']),
        ('padding: {name: megatron, 2.5: x}', 'padding.2.5', ['must be text, found 2.5 (a float)']),
        ('"a.b\\ud800": 1', "'a.b\\ud800'", ['unknown key']),
    ],
)
def test_wrong_keys_and_strategies(text, path, words, refused):
    error = refused(text)
    message = str(error)
    assert error.yaml_path == path
    assert f'  line 2: {path}: ' in message
    for word in words:
        assert word in message
    message.encode()


@pytest.mark.parametrize(
    ('parameter', 'value', 'words'),
    [
        ('param_start_elems', 'true', 'found true, expected an integer >= 1; leave it out'),
        (
            'param_start_elems',
            '"64"',
            "found '64' (text), expected an integer >= 1; write 64, without quotes, or l",
        ),
        ('param_start_elems', '1e3', "found '1e3' (text), expected an integer >= 1; write 1000"),
        ('param_start_elems', '1.0', 'found 1.0 (a float), expected an integer >= 1; write 1, or'),
        ('param_start_elems', '1.5', 'found 1.5 (a float), expected an integer >= 1; leave it out'),
        ('param_start_elems', '0', 'found 0, expected an integer >= 1'),
        (
            'param_start_elems',
            '-64',
            'found -64, expected an integer >= 1; leave it out for the def',
        ),
        ('param_start_elems', 'null', 'found null, expected an integer >= 1; leave it out'),
        ('param_start_elems', '[64]', 'found a list, expected an integer >= 1'),
        ('param_start_elems', '{a: 1}', 'found a mapping, expected an integer >= 1'),
        ('param_start_elems', '.nan', 'found nan (a float), expected a plain YAML value'),
        ('param_start_elems', '-.inf', 'found -inf (a float), expected a plain YAML value'),
        ('param_start_elems', str(2**63), 'found an integer beyond 64 bits'),
        ('param_start_elems', '2020-01-01', 'found a value of type date'),
        ('param_start_elems', '!!binary aGk=', 'found a value of type bytes'),
        ('param_start_elems', '!!set {a, b}', 'found a value of type set'),
        (
            'high_busbw',
            '1',
            'found 1, expected true or false or null; leave it out for the default',
        ),
        ('high_busbw', '"true"', "found 'true' (text), expected true or false or null; write true"),
        ('high_busbw', '"yes"', "found 'yes' (text), expected true or false or null"),
        ('high_busbw', '"\\ud800"', 'expected a plain YAML value'),
        ('high_busbw', '{1: 2}', 'a key must be text, found 1'),
    ],
)
def test_wrong_values(parameter, value, words, refused):
    error = refused(f'padding:\n  name: megatron\n  {parameter}: {value}\n')
    assert words in str(error)
    assert '  line 4: padding.' + parameter in str(error)
    assert error.yaml_path.startswith(f'padding.{parameter}')


def test_wrong_choice_has_a_suggestion(refused):
    error = refused('checkpoint: {repair_fully_reshardable: alway}')
    assert (
        "found 'alway' (text), expected 'auto', 'always' or 'never'; leave it out for the default, "
        "auto. Did you mean 'always'?"
    ) in str(error)


@pytest.mark.parametrize(
    ('text', 'path', 'words'),
    [
        (
            'buffer_grouping:\n'
            '  name: grad_dtype_rules\n'
            '  rules:\n'
            '    - {pattern: a, grad_dtype: fp32}\n'
            '    - pattern: b\n'
            '      grad_dtype: fp8\n',
            'line 7: buffer_grouping.rules[1].grad_dtype',
            "found 'fp8' (text), expected 'fp32', 'bf16' or 'fp16'",
        ),
        (
            'buffer_grouping:\n'
            '  name: grad_dtype_rules\n'
            '  rules:\n'
            '    - {pattern: "", grad_dtype: fp32}\n',
            'line 5: buffer_grouping.rules[0].pattern',
            'found empty text, expected a shell-style pattern',
        ),
        (
            'buffer_grouping: {name: grad_dtype_rules, rules: [{pattern: a, grad_dtype: fp_32}]}',
            'line 2: buffer_grouping.rules[0].grad_dtype',
            "expected 'fp32', 'bf16' or 'fp16'. Did you mean 'fp32'?",
        ),
        (
            'buffer_grouping: {name: grad_dtype_rules, rules: []}',
            'line 2: buffer_grouping.rules',
            'found an empty list, expected a list of at least 1 item, each item a mapping with',
        ),
        (
            'buffer_grouping: grad_dtype_rules',
            'line 2: buffer_grouping',
            'rules is missing, expected a list of at least 1 item',
        ),
        (
            'buffer_grouping: {name: grad_dtype_rules, rules: {pattern: a, grad_dtype: fp32}}',
            'line 2: buffer_grouping.rules',
            "or 'fp16'); put [ ] around it",
        ),
        (
            'buffer_grouping: {name: grad_dtype_rules, rules: [a]}',
            'line 2: buffer_grouping.rules[0]',
            "found 'a' (text), expected a mapping with pattern (a shell-style pattern) and",
        ),
        (
            'buffer_grouping: {name: grad_dtype_rules, rules: [{pattern: a}]}',
            'line 2: buffer_grouping.rules[0]',
            "grad_dtype is missing, expected 'fp32', 'bf16' or 'fp16'",
        ),
        (
            'readiness: {name: golden_static, counts: [{pattern: a, cont: 1, count: 1}]}',
            'line 2: readiness.counts[0].cont',
            "unknown key. Did you mean 'count'? Valid: pattern, count",
        ),
        (
            'readiness: {name: golden_static, counts: [{pattern: a, count: "2"}]}',
            'line 2: readiness.counts[0].count',
            "found '2' (text), expected an integer >= 0; write 2, without quotes",
        ),
        (
            'readiness:\n'
            '  name: golden_static\n'
            '  counts:\n'
            '    - {pattern: a, count: 1}\n'
            '    - {pattern: b, count: 1}\n'
            '    - {pattern: a, count: 2}\n',
            'line 7: readiness.counts[2]',
            "the pattern 'a' is given already, as item [0]; keep one of the two",
        ),
        (
            'bucket_isolation: {name: patterns, patterns: [x, y, y]}',
            'line 2: bucket_isolation.patterns[2]',
            "the pattern 'y' is given already, as item [1]",
        ),
        (
            'bucket_isolation: {name: patterns, patterns: []}',
            'line 2: bucket_isolation.patterns',
            'found an empty list, expected a list of at least 1 item, each item a shell-style pattern',
        ),
        (
            "bucket_isolation: {name: patterns, patterns: '*embedding*'}",
            'line 2: bucket_isolation.patterns',
            "found '*embedding*' (text), expected a list of at least 1 item, each item a shell-style "
            'pattern; put [ ] around it',
        ),
        (
            'bucketing: {name: explicit, boundaries: [a, [b]]}',
            'line 2: bucketing.boundaries[1]',
            'found a list, expected a shell-style pattern',
        ),
        (
            'bucketing: {name: explicit, boundaries: [a, .nan]}',
            'line 2: bucketing.boundaries[1]',
            'found nan (a float), expected a plain YAML value',
        ),
        (
            'bucketing: {name: per_module, pattern: null}',
            'line 2: bucketing.pattern',
            'found null, expected a shell-style pattern; leave it out for the default, *layers.*',
        ),
        (
            "param_order: {name: recorded, profile: ''}",
            'line 2: param_order.profile',
            'found empty text, expected text that is not empty',
        ),
        (
            'grad_reduce: {name: a2a_fp32_sum, wire_dtype: bf61}',
            'line 2: grad_reduce.wire_dtype',
            "expected 'bf16', 'fp16', 'fp32' or null; leave it out for the default, null. Did you mean "
            "'bf16'?",
        ),
    ],
)
def test_wrong_nested_values(text, path, words, refused):
    message = str(refused(text))
    assert '1 problem in this config' in message
    assert f'  {path}: ' in message
    assert words in message


def test_every_wrong_item_of_a_list_is_named(refused):
    error = refused(
        'buffer_grouping:\n'
        '  name: grad_dtype_rules\n'
        '  rules:\n'
        '    - {pattern: a, grad_dtype: 3}\n'
        '    - 7\n'
        '    - {pattern: a, grad_dtype: fp32, x: 1}\n'
        '    - {}\n'
    )
    assert [line.split(': ')[:2] for line in str(error).splitlines()[1:]] == [
        ['  line 5', 'buffer_grouping.rules[0].grad_dtype'],
        ['  line 6', 'buffer_grouping.rules[1]'],
        ['  line 7', 'buffer_grouping.rules[2].x'],
        ['  line 8', 'buffer_grouping.rules[3]'],
        ['  line 8', 'buffer_grouping.rules[3]'],
    ]


# finalize -----------------------------------------------------------------------------------------


def test_a_bare_list_is_an_order_with_options(write):
    text = (
        'schema_version: 1\n'
        'finalize:\n'
        '  - finish_grad_sync\n'
        '  - {name: non_tp_grads, chunk_bytes: 4}\n'
        '  - {name: word_embedding_grads}\n'
    )
    config = load_config(write(text))
    assert config.finalize == FinalizeSteps(
        order=('finish_grad_sync', 'non_tp_grads', 'word_embedding_grads'),
        options={'non_tp_grads': {'chunk_bytes': 4}},
    )
    spelt_out = {
        'name': 'steps',
        'order': ['finish_grad_sync', 'non_tp_grads', 'word_embedding_grads'],
        'options': {'non_tp_grads': {'chunk_bytes': 4}},
    }
    assert load_config({'finalize': spelt_out}) == config
    assert load_config({'finalize': tuple(yaml.safe_load(text)['finalize'])}) == config


@pytest.mark.parametrize(
    ('finalize', 'path', 'words'),
    [
        ('[finish_grad_sync, 3]', 'finalize[1]', 'found 3, expected the name of a step, or a mapp'),
        ('[finish_grad_sync, {}]', 'finalize[1]', 'found an empty mapping, expected the name of a'),
        ('[{chunk_bytes: 4}]', 'finalize[0]', 'found a mapping without a name, expected the name'),
        ('[[finish_grad_sync]]', 'finalize[0]', 'found a list, expected the name of a step'),
        (
            '[finish_grad_sync, {name: non_tp_grads, chunk_bytes: .inf}]',
            'finalize[1].chunk_bytes',
            'found inf (a float), expected a plain YAML value',
        ),
        (
            '[finish_grad_sync, {name: non_tp_grads, chunk_bytes: x}]',
            'finalize[1].chunk_bytes',
            "found 'x' (text), expected an integer >= 1 or null; leave it out for the default, null",
        ),
        (
            '[finish_grad_sync, {name: non_tp_grads, chunk_byte: 4}]',
            'finalize[1].chunk_byte',
            "unknown parameter of step 'non_tp_grads'. Did you mean 'chunk_bytes'?",
        ),
        ('[finish_grad_sync, non_tp_grad]', 'finalize[1]', "mean 'non_tp_grads'?"),
        (
            '{name: steps, options: {non_tp_grads: {chunk_bytes: 0}}}',
            'finalize.options.non_tp_grads.chunk_bytes',
            'found 0, expected an integer >= 1 or null',
        ),
        (
            '{name: steps, options: {non_tp_grads: 4}}',
            'finalize.options.non_tp_grads',
            'found 4, expected a mapping',
        ),
        ('{name: steps, order: [3]}', 'finalize.order[0]', 'found 3, expected text'),
        (
            '{name: steps, order: [finish_grad_sync, non_tp_grad]}',
            'finalize.order[1]',
            "mean 'non_tp_grads'?",
        ),
    ],
)
def test_wrong_finalize_steps(finalize, path, words, refused):
    message = str(refused(f'finalize: {finalize}'))
    assert f'  line 2: {path}: ' in message
    assert words in message


def test_all_problems_come_at_once_in_the_order_of_the_file(refused):
    error = refused(
        'checks: {rank_agreement: 1}\n'
        'padding:\n'
        '  name: megatron\n'
        '  high_busbw: 3\n'
        '  param_start_elems: x\n'
        '  other: 1\n'
        'scaling: averaging\n'
        'nonsense: 1\n'
        'padding: {name: megatron}\n'
        'accumulation: {name: zero_then_ad}\n'
    )
    found = [line.split(': ')[:2] for line in str(error).splitlines()[1:]]
    assert found == [
        ['  line 2', 'checks.rank_agreement'],
        ['  line 8', 'scaling'],
        ['  line 9', 'nonsense'],
        ['  line 10', 'padding'],
        ['  line 11', 'accumulation.name'],
    ]
    assert 'x.yaml: 5 problems in this config' in str(error)
    assert error.yaml_path == 'checks.rank_agreement'
    error = refused('padding: {name: megatron, high_busbw: 3, other: 1, bucket_end_elems: true}')
    assert '3 problems' in str(error)


@pytest.mark.parametrize(
    ('text', 'path', 'lines'),
    [
        ('padding: megatron\nscaling: prescale\npadding: megatron', 'padding', '2 and 4'),
        ('padding: {name: megatron, name: megatron}', 'padding.name', '2 and 2'),
        ('schema_version: 1', 'schema_version', '1 and 2'),
        (
            'checks:\n  rank_agreement: true\n  "rank_agreement": true',
            'checks.rank_agreement',
            '3 and 4',
        ),
        ('x: [{a: 1, a: 2}]', 'x[0].a', '2 and 2'),
    ],
)
def test_duplicate_keys(text, path, lines, refused):
    message = str(refused(text))
    assert f'{path}: given twice, on lines {lines}; keep one' in message


def test_a_merged_key_may_be_overridden_by_an_aliased_mapping_too(write):
    text = (
        'schema_version: 1\n'
        'padding: &a {<<: {name: megatron, high_busbw: true}, high_busbw: false}\n'
        'bucketing: {<<: {name: fixed_size}, name: fixed_size}\n'
    )
    assert load_config(write(text)).padding == MegatronPadding(high_busbw=False)


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('a: [1, 2', ['x.yaml:1:9: not a valid YAML config', 'expected', 'flow sequence']),
        ('a:\n\tb: 1', [':2:1: ', r"'\t' that cannot start any token"]),
        ('a: b: c', [':1:5: ', 'mapping values are not allowed here']),
        ('a: *nowhere', [':1:4: ', "undefined alias 'nowhere'"]),
        ('a: !!python/object/apply:os.system [ls]', [':1:4: ', 'without YAML tags', 'os.system']),
        ('a: !mine 3', ['!mine', 'without YAML tags']),
        ('---\na: 1\n---\nb: 1', [':3:1: ', 'another document']),
        ('? [a, b]\n: 1', [':1:3: ', 'unhashable key']),
        ('a: 1\nb: "\x07"', [':2: ', 'U+0007 is not allowed']),
        (
            'a: 064',
            [':1:4: ', '064 would be read as octal or base 60; write the number in decimal'],
        ),
        ('a: 1:30', ['1:30 would be read as']),
        ('a: 2001-13-45', [':1:4: ', 'cannot read this value as timestamp']),
        ('a: ' + '9' * 5000, [':1:4: ', 'cannot read this value as int']),
        ('a: 0x_', [':1:4: ', 'cannot read this value as int']),
        ('a: !!bool maybe', ['cannot read this value as bool']),
        ('a: !!int ""', ['cannot read this value as int']),
        ('[' * 20_000, ['nested too deeply']),
        ('&a [*a]', ['found a list; a config is a mapping']),
        ('', ['the file is empty; a config is a mapping, the shortest is: schema_version: 1']),
        ('# only a comment\n', ['the file is empty']),
        ('---\n', ['the file is empty']),
        ('null', ['the file is empty']),
        ('- a', ['line 1: found a list; a config is a mapping']),
        ('text', ["line 1: found 'text' (text); a config is a mapping"]),
        ('3', ['line 1: found 3;']),
    ],
)
def test_what_is_no_config_at_all(text, words, refused):
    message = str(refused(text, version=False))
    for word in words:
        assert word in message
    assert len(message) < 1000


def test_aliases_that_multiply_are_refused_quickly(refused):
    bomb = 'a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n' + ''.join(
        f'a{i}: &a{i} [{", ".join([f"*a{i - 1}"] * 10)}]\n' for i in range(1, 12)
    )
    message = str(refused(bomb + 'padding: {name: megatron, high_busbw: *a11}\n'))
    assert (
        'padding.high_busbw: found more values, or deeper ones, than a config can need' in message
    )
    message = str(refused('padding: {name: megatron, high_busbw: &a [*a]}\n'))
    assert 'found more values, or deeper ones' in message
    assert 'found more values' in str(refused('padding: &a {name: megatron, high_busbw: *a}\n'))


@pytest.mark.parametrize(
    ('line', 'words'),
    [
        ('', 'schema_version is missing; add the line: schema_version: 1'),
        ('schema_version: 2', 'found 2, but this release of megatron-buffer reads 1 only'),
        ('schema_version: 0', 'found 0, but'),
        (f'schema_version: {10**30}', 'found an integer beyond 64 bits, but'),
        ('schema_version: "1"', "found '1' (text), expected an integer; write: schema_version: 1"),
        ('schema_version: 1.0', 'found 1.0 (a float), expected an integer'),
        ('schema_version: true', 'found true, expected an integer'),
        ('schema_version:', 'found null, expected an integer'),
        ('schema_verson: 1', "schema_verson: unknown key. Did you mean 'schema_version'?"),
    ],
)
def test_schema_version(line, words, refused):
    message = str(refused(f'padding: megatron\n{line}\n', version=False))
    assert words in message


def test_another_version_hides_what_else_is_wrong(refused):
    assert '1 problem ' in str(refused('schema_version: 2\nnonsense: 1', version=False))
    assert '2 problems ' in str(refused('schema_version: "1"\nnonsense: 1', version=False))


@pytest.mark.parametrize(
    ('data', 'words'),
    [
        ({1: 2}, '[1]: a key must be text'),
        ({('a',): 2}, "('a',): a key must be text"),
        (
            {'padding': {'name': 'megatron', 'param_start_elems': object()}},
            'a value of type object',
        ),
        ({'padding': {'name': 'megatron', 'param_start_elems': 10**5000}}, 'beyond 64 bits'),
        ({'padding': {'name': 'megatron', 'param_start_elems': math.inf}}, 'found inf (a float)'),
        ({'padding': {'name': 'megatron', 5: 1}}, 'a key must be text'),
        ({'schema_version': True}, 'schema_version: found true'),
        ({'padding': {1, 2}}, 'found a value of type set'),
    ],
)
def test_wrong_mappings(data, words):
    with pytest.raises(ConfigError) as caught:
        load_config(data)
    assert words in str(caught.value)
    assert str(caught.value).startswith('<mapping>: 1 problem')
    assert caught.value.source == '<mapping>'


@pytest.mark.parametrize(
    ('path', 'text'),
    [
        ((), ''),
        (('a', 'b'), 'a.b'),
        (('a', 2, 'b'), 'a[2].b'),
        (('a', 'x y'), "a.'x y'"),
        (('a', True), 'a.True'),
    ],
)
def test_dotted(path, text):
    assert config_yaml.dotted(path) == text

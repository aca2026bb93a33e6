"""Configs: what loads, what is refused and in which words, and what two spellings have in common."""

import dataclasses
import functools
import json
import random
import tempfile
import types
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from megatron_buffer import config_catalog, config_words
from megatron_buffer import config_layout as layout
from megatron_buffer import config_runtime as runtime
from megatron_buffer.config import (
    AXES,
    BufferConfig,
    CheckpointConfig,
    ChecksConfig,
    config_hash,
    dump_config,
    load_config,
    shipped_configs,
    to_dict,
)
from megatron_buffer.config_base import as_json
from megatron_buffer.config_layout import FixedSizeBucketing, MegatronPadding, ReverseOrder
from megatron_buffer.errors import ConfigError
from tests.config_values import choices_of, example_of, mappings_of

DEFAULT_HASH = '27b6f487b7c82e6a'


@pytest.fixture(scope='module')
def installed_once():
    """Reads the installed distributions once, not for each of thousands of configs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, 'entry_points', functools.cache(metadata.entry_points))
        yield


# The table of axes --------------------------------------------------------------------------------


def test_axes_are_the_fields_of_a_config_in_order():
    fields = [field.name for field in dataclasses.fields(BufferConfig)]
    assert fields == ['schema_version', *AXES, 'checkpoint', 'checks', 'source']
    assert next(iter(AXES)) == 'buffer_grouping'
    assert list(AXES)[-1] == 'finalize'


@pytest.mark.parametrize('key', AXES)
def test_each_axis_is_documented_and_its_default_is_built(key):
    axis = AXES[key]
    assert axis.key == key
    assert axis.meaning
    assert not set(axis.planned) & set(axis.strategies)
    assert getattr(BufferConfig(), key) == axis.strategies[axis.default]()
    for name, cls in axis.strategies.items():
        assert cls.name == example_of(cls).name == name
        assert cls.__dataclass_params__.frozen
        assert config_catalog.one_line_meaning(cls).endswith('.')
        assert cls.upstream_symbol.startswith('megatron/core/')
        assert all(doc.description for doc in config_catalog.param_docs(cls))


@pytest.mark.parametrize('cls', [cls for axis in AXES.values() for cls in axis.strategies.values()])
def test_a_config_is_dumped_as_pydantic_dumps_it(cls):
    params = example_of(cls)
    assert as_json(params) == TypeAdapter(cls).dump_python(params, mode='json')
    assert TypeAdapter(cls).validate_json(json.dumps(as_json(params)), strict=True) == params


def test_params_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MegatronPadding().param_start_elems = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        MegatronPadding('megatron')  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        MegatronPadding(param_start_elems=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        BufferConfig().source = 'x'  # type: ignore[misc]


@pytest.mark.parametrize(
    'values',
    [
        {'padding': 'megatron'},
        {'padding': ReverseOrder()},
        {'bucketing': None},
        {'checks': CheckpointConfig()},
        {'padding': MegatronPadding},
    ],
)
def test_a_config_built_in_python_needs_the_right_params(values):
    (key,) = values
    with pytest.raises(ConfigError, match=f'{key}: found .*expected parameters such as') as caught:
        BufferConfig(**values)
    assert caught.value.yaml_path == key


# Sources ------------------------------------------------------------------------------------------


def test_none_is_the_shipped_upstream():
    config = load_config()
    assert config == BufferConfig() == load_config('upstream')
    assert config.source == 'upstream'
    assert config_hash(config) == DEFAULT_HASH


def test_shipped_configs_load_and_are_complete():
    shipped = shipped_configs()
    assert {'upstream', 'recommended'} <= set(shipped)
    for name in ('upstream', 'recommended', 'ablations/scaling-average'):
        path = shipped[name]
        assert load_config(name) == load_config(path) == load_config(str(path))
        assert load_config(name).source == name
    for name in ('upstream', 'recommended'):
        said = yaml.safe_load(shipped[name].read_text())
        assert said == to_dict(load_config(name)), 'every value is written out'
        assert list(said) == ['schema_version', *AXES, 'checkpoint', 'checks']


def test_upstream_yaml_has_the_shape_that_the_dump_has():
    lines = shipped_configs()['upstream'].read_text().splitlines()
    said = [line for line in lines if line and not line.startswith('#')]
    axes = len(['schema_version', *AXES])
    assert said[:axes] == dump_config(BufferConfig()).splitlines()[:axes]


def test_configs_inside_the_package_come_first(monkeypatch, tmp_path):
    inside = tmp_path / 'package' / 'configs'
    (inside / 'ablations').mkdir(parents=True)
    (inside / 'models').mkdir()
    for name in ('upstream', 'ablations/one', 'models/llama'):
        (inside / f'{name}.yaml').write_text('schema_version: 1\n')
    monkeypatch.setattr('megatron_buffer.config.__file__', str(tmp_path / 'package' / 'config.py'))
    assert list(shipped_configs()) == ['ablations/one', 'upstream'], 'models are not configs'
    assert load_config('ablations/one').source == 'ablations/one'


def test_an_installation_without_configs_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr('megatron_buffer.config.__file__', str(tmp_path / 'package' / 'config.py'))
    with pytest.raises(ConfigError, match='this installation is incomplete'):
        load_config()


def test_mapping_may_leave_out_the_version():
    assert load_config({}) == BufferConfig()
    assert load_config({'schema_version': 1}) == BufferConfig()
    read_only = types.MappingProxyType({'padding': types.MappingProxyType({'name': 'megatron'})})
    assert load_config(read_only) == BufferConfig()


def test_mapping_may_hold_params_objects():
    padding = MegatronPadding(param_start_elems=8)
    config = load_config({'padding': padding, 'checks': ChecksConfig(rank_agreement=False)})
    assert config.padding is padding
    assert not config.checks.rank_agreement
    with pytest.raises(ConfigError, match='a value of type ReverseOrder'):
        load_config({'padding': ReverseOrder()})


def test_a_config_is_returned_as_it_is():
    config = BufferConfig(source='here')
    assert load_config(config) is config


def test_paths(write, monkeypatch, tmp_path):
    path = write('schema_version: 1\n', 'bare')
    monkeypatch.chdir(tmp_path)
    for source in (path, Path(path), 'bare', './bare'):
        assert load_config(source) == BufferConfig()
    (tmp_path / 'upstream').write_text('nonsense')
    assert load_config('upstream') == BufferConfig(), 'a shipped name wins over a file beside'
    with pytest.raises(ConfigError):
        load_config(Path('upstream'))
    monkeypatch.setenv('HOME', str(tmp_path))
    assert load_config('~/bare').source == '~/bare'


def test_byte_order_mark_and_crlf_are_fine(write):
    text = '\ufeffschema_version: 1\r\npadding: {name: megatron, param_start_elems: 8}\r\n'
    assert load_config(write(text)).padding == MegatronPadding(param_start_elems=8)


# What a file may say ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'text',
    [
        'padding: megatron',
        'padding: {name: megatron}',
        'padding:',
        'padding: null',
        'padding: "megatron"',
        'checks:\ncheckpoint: {}',
        'padding: {name: megatron, high_busbw: null}\nbucketing: {name: fixed_size}',
        'bucketing: {bucket_size_elems: ~, name: fixed_size}',
        '---\npadding: megatron\n...',
    ],
)
def test_spellings_of_upstream_are_equal(text, write):
    config = load_config(
        write(text + '\nschema_version: 1' if text[0] != '-' else '---\nschema_version: 1')
    )
    assert config == BufferConfig()
    assert hash(config) == hash(BufferConfig())
    assert config_hash(config) == DEFAULT_HASH


def test_anchors_and_merge_keys(write):
    config = load_config(
        write(
            'schema_version: 1\n'
            'padding: &p {name: megatron, param_start_elems: 32}\n'
            'bucketing: {<<: {name: fixed_size, bucket_size_elems: 5}, bucket_size_elems: 7}\n'
            'checks: &c {rank_agreement: false}\n'
        )
    )
    assert config.padding == MegatronPadding(param_start_elems=32)
    assert config.bucketing == FixedSizeBucketing(bucket_size_elems=7)


def test_numbers(write):
    text = 'schema_version: 1\nbucketing: {name: fixed_size, bucket_size_elems: %s}'
    for said, meant in [
        ('40_000_000', 40_000_000),
        ('0x10', 16),
        ('+7', 7),
        (2**63 - 1, 2**63 - 1),
    ]:
        config = load_config(write(text % said))
        assert config.bucketing == FixedSizeBucketing(bucket_size_elems=meant)


# Identity -----------------------------------------------------------------------------------------


def test_the_hash_depends_on_every_value():
    configs = [
        BufferConfig(),
        BufferConfig(padding=MegatronPadding(param_start_elems=1)),
        BufferConfig(padding=MegatronPadding(bucket_end_elems=1)),
        BufferConfig(padding=MegatronPadding(high_busbw=True)),
        BufferConfig(padding=MegatronPadding(high_busbw=False)),
        BufferConfig(bucketing=FixedSizeBucketing(bucket_size_elems=1)),
        BufferConfig(checks=ChecksConfig(rank_agreement=False)),
        BufferConfig(checkpoint=CheckpointConfig(layout_guard=False)),
        BufferConfig(checkpoint=CheckpointConfig(repair_fully_reshardable='never')),
    ]
    assert len({config_hash(config) for config in configs}) == len(configs)
    assert len({config.short_str() for config in configs}) == len(configs)


def test_the_source_is_no_part_of_the_identity():
    one, other = BufferConfig(source='a'), BufferConfig(source='b')
    assert one == other
    assert config_hash(one) == config_hash(other)
    assert dump_config(one) == dump_config(other)


def test_short_str():
    assert BufferConfig().short_str() == 'upstream'
    config = load_config(
        {
            'padding': {'name': 'megatron', 'param_start_elems': 1, 'high_busbw': True},
            'checks': {'rank_agreement': False},
        }
    )
    assert config.short_str() == (
        'padding=megatron(param_start_elems=1,high_busbw=true) checks(rank_agreement=false)'
    )


@pytest.mark.parametrize(
    ('said', 'short'),
    [
        ({'bucketing': 'balanced'}, 'bucketing=balanced'),
        ({'param_order': {'name': 'random', 'seed': 7}}, 'param_order=random(seed=7)'),
        (
            {
                'buffer_grouping': {
                    'name': 'grad_dtype_rules',
                    'rules': [
                        {'pattern': '*.router.*', 'grad_dtype': 'fp32'},
                        {'pattern': 'a b', 'grad_dtype': 'bf16'},
                    ],
                }
            },
            'buffer_grouping=grad_dtype_rules(rules=[{pattern:*.router.*,grad_dtype:fp32},'
            "{pattern:'a b',grad_dtype:bf16}])",
        ),
        (
            {'bucket_isolation': {'name': 'patterns', 'patterns': list('abcdefg')}},
            'bucket_isolation=patterns(patterns=[a,b,c,...4 more])',
        ),
        (
            {'param_order': {'name': 'recorded', 'profile': '/x' * 50 + '/last.json'}},
            'param_order=recorded(profile=/x/x/x/x/x/x/x/x/x/x/x/x/.../x/x/x/x/x/x/x/x/x/x/last.json,'
            'layout_by=grad_arrival,chain_gathers=true)',
        ),
        (
            {'finalize': ['finish_grad_sync', {'name': 'non_tp_grads', 'chunk_bytes': 4}]},
            'finalize=steps(order=[finish_grad_sync,non_tp_grads],'
            'options={non_tp_grads:{chunk_bytes:4}})',
        ),
        ({'readiness': 'golden_static'}, 'readiness=golden_static'),
    ],
)
def test_short_str_is_one_readable_line(said, short):
    assert load_config(said).short_str() == short


_CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        **{key: choices_of(key) for key in AXES},
        'checkpoint': st.none() | mappings_of(CheckpointConfig),
        'checks': st.none() | mappings_of(ChecksConfig),
        'schema_version': st.just(1),
    },
)


def _shuffled(data: Any, randomness: random.Random) -> Any:
    if not isinstance(data, dict):
        return data
    items = [(key, _shuffled(value, randomness)) for key, value in data.items()]
    randomness.shuffle(items)
    return dict(items)


@pytest.mark.usefixtures('installed_once')
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(said=_CONFIGS, randomness=st.randoms(use_true_random=False))
def test_round_trip(said, randomness):
    try:
        config = load_config(said)
    except ConfigError as error:
        if 'cannot be combined with' not in str(error):
            raise
        return
    assert '\n' not in config.short_str()
    assert hash(config) == hash(load_config(said))
    spelt_out = {
        key: {'name': value} if isinstance(value, str) else value for key, value in said.items()
    }
    dumped = dump_config(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'dumped.yaml'
        path.write_text(dumped)
        from_file = load_config(path)
        # JSON is YAML: another spelling, in another order.
        text = json.dumps(_shuffled({**spelt_out, 'schema_version': 1}, randomness))
        path.write_text(text, 'utf-8')
        from_json = load_config(path)
    for other in (from_file, from_json, load_config(_shuffled(to_dict(config), randomness))):
        assert other == config
        assert config_hash(other) == config_hash(config)
        assert dump_config(other) == dumped
    assert list(yaml.safe_load(dumped)) == ['schema_version', *AXES, 'checkpoint', 'checks']


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=6,
)

_RULES = st.lists(
    st.dictionaries(st.sampled_from(['pattern', 'grad_dtype', 'count', 'x']), _ANY), max_size=3
)
_STEP_NAMES = st.sampled_from(['finish_grad_sync', 'non_tp_grads', 'x'])
_STEPS = st.lists(
    _STEP_NAMES | st.dictionaries(st.sampled_from(['name', 'chunk_bytes']), _ANY | _STEP_NAMES),
    max_size=3,
)


def _wrong(name: str, **params: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A strategy's name with parameters that are hardly ever right, or anything at all."""
    return _ANY | st.fixed_dictionaries(
        {'name': st.just(name)}, optional={key: _ANY | value for key, value in params.items()}
    )


_NEARLY_CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        'padding': _wrong('megatron', high_busbw=st.booleans(), param_start_elems=st.integers()),
        'bucketing': _wrong('explicit', boundaries=st.lists(st.text())),
        'bucket_isolation': _wrong('patterns', patterns=st.lists(st.text())),
        'buffer_grouping': _wrong('grad_dtype_rules', rules=_RULES),
        'readiness': _wrong('golden_static', counts=_RULES),
        'finalize': _STEPS
        | _wrong('steps', order=_STEPS, options=st.dictionaries(_STEP_NAMES, _ANY)),
        'checks': st.dictionaries(st.sampled_from(['name', 'rank_agreement']), _ANY),
        'schema_version': _ANY,
    },
)
_ANY_CONFIGS = st.dictionaries(
    st.sampled_from(['schema_version', *AXES, 'checkpoint', 'checks']), _ANY
)


@pytest.mark.usefixtures('installed_once')
@settings(deadline=None)
@given(data=_NEARLY_CONFIGS | _ANY_CONFIGS)
def test_nothing_that_a_file_can_hold_makes_it_crash(data):
    try:
        text = yaml.safe_dump({'schema_version': 1, **data})
    except (yaml.YAMLError, ValueError):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'x.yaml'
        path.write_text(text, 'utf-8')
        for source in (path, data):
            try:
                config = load_config(source)
            except ConfigError as error:
                str(error).encode()
            else:
                assert load_config(to_dict(config)) == config


# Small parts --------------------------------------------------------------------------------------


def test_parameters_in_words():
    docs = {doc.name: doc for doc in config_catalog.param_docs(MegatronPadding)}
    assert docs['high_busbw'].expected == 'true or false or null'
    assert docs['high_busbw'].default_text == 'null'
    assert docs['high_busbw'].choices == ()
    (doc,) = config_catalog.param_docs(FixedSizeBucketing)
    assert doc.expected == 'an integer >= 1 or null'
    assert '\n' not in doc.description


@pytest.mark.parametrize(
    ('cls', 'name', 'expected', 'default'),
    [
        (
            layout.GradDtypeRules,
            'rules',
            'a list of at least 1 item, each item a mapping with pattern (a shell-style pattern) and '
            "grad_dtype ('fp32', 'bf16' or 'fp16')",
            'null',
        ),
        (layout.RecordedOrder, 'profile', 'text that is not empty', 'null'),
        (layout.RecordedOrder, 'layout_by', "'grad_arrival' or 'forward_use'", 'grad_arrival'),
        (layout.PerModuleBucketing, 'pattern', 'a shell-style pattern', '*layers.*'),
        (
            runtime.GoldenStatic,
            'counts',
            'a list, each item a mapping with pattern (a shell-style pattern) and '
            'count (an integer >= 0)',
            '[]',
        ),
        (runtime.AllToAllFp32Sum, 'wire_dtype', "'bf16', 'fp16', 'fp32' or null", 'null'),
        (runtime.FinalizeSteps, 'order', 'a list, each item text or null', 'null'),
        (runtime.FinalizeSteps, 'options', 'a mapping, each value a mapping', '{}'),
    ],
)
def test_nested_parameters_in_words(cls, name, expected, default):
    (doc,) = (doc for doc in config_catalog.param_docs(cls) if doc.name == name)
    assert doc.expected == expected
    assert doc.default_text == default


def test_words_for_schemas_that_are_not_ours():
    @dataclasses.dataclass(frozen=True)
    class Theirs:
        pair: tuple[int, str] = (1, '')
        some: dict[str, int] = dataclasses.field(default_factory=dict)
        limited: Annotated[float, Field(gt=0, le=1)] = 0.5
        mixed: int | list[Literal['a', 'b']] = 1
        const: Literal[True] = True
        anything: Any = None

    said = {doc.name: doc.expected for doc in config_catalog.param_docs(Theirs)}
    assert said == {
        'pair': 'a list of at least 2 items',
        'some': 'a mapping, each value an integer',
        'limited': 'a number > 0 and <= 1',
        'mixed': "an integer or a list, each item 'a' or 'b'",
        'const': 'true',
        'anything': 'a value',
    }
    schema = config_catalog.schema_of(Theirs)
    assert config_words.fragment_at(schema, ('pair', 1))['type'] == 'string'
    assert config_words.fragment_at(schema, ('some', 'x'))['type'] == 'integer'
    for nowhere in [('mixed', 0), ('const', 'x'), ('none',), ('pair', 2)]:
        assert config_words.fragment_at(schema, nowhere) is None
    assert config_words.keys_at(schema, ()) == tuple(said)
    assert config_words.keys_at(schema, ('mixed',)) == ()


def test_params_made_in_python_are_checked_too():
    for make in (
        lambda: layout.GradDtypeRules(rules=()),
        lambda: layout.PatternIsolation(patterns=('',)),
        lambda: layout.PatternIsolation(patterns=('a', 'a')),
        lambda: runtime.FinalizeSteps(options={'non_tp_grads': {'x': object()}}),
    ):
        with pytest.raises(ValidationError):
            make()

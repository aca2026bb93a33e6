"""Strategies that other distributions register: listed, loaded when named, refused when unusable."""

import sys

import pytest

from megatron_buffer.config import (
    BufferConfig,
    config_hash,
    dump_config,
    json_schema,
    load_config,
    third_party_strategies,
    third_party_strategy,
)
from megatron_buffer.errors import ConfigError, RegistryError


@pytest.fixture
def install_distribution(tmp_path, monkeypatch):
    """Makes a distribution with entry points of our group importable; returns its module's name."""

    def install(name: str, entry_points: dict[str, str], code: str = '') -> str:
        folder = tmp_path / name
        info = folder / f'{name}-1.2.dist-info'
        info.mkdir(parents=True)
        (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n')
        points = ''.join(f'{key} = {value}\n' for key, value in entry_points.items())
        (info / 'entry_points.txt').write_text(f'[megatron_buffer.strategies]\n{points}')
        (folder / f'{name}_code.py').write_text(code)
        monkeypatch.delitem(sys.modules, f'{name}_code', raising=False)
        monkeypatch.syspath_prepend(str(folder))
        return f'{name}_code'

    return install


_SORTED = """
import dataclasses

@dataclasses.dataclass(frozen=True, kw_only=True)
class SortedParams:
    name: str = 'sorted'
    keys: tuple[str, ...] = ('numel',)
    descending: bool = False
    weight: float = 1.0

    def __post_init__(self):
        if not self.keys:
            raise ValueError('sorted needs a key')

class Sorted:
    Params = SortedParams

    def __init__(self, params):
        self.params = params
"""


def test_third_party_strategy(install_distribution, write):
    install_distribution('vendor', {'param_order.sorted': 'vendor_code:Sorted'}, _SORTED)
    text = (
        'schema_version: 1\n'
        'param_order: {name: sorted, keys: [name, numel], weight: 2}\n'
    )  # fmt: skip
    config = load_config(write(text))
    assert config.param_order.keys == ('name', 'numel')
    assert config.short_str() == 'param_order=sorted(keys=[name,numel],descending=false,weight=2.0)'
    again = load_config(write(dump_config(config)))
    assert again == config
    assert config_hash(again) == config_hash(config)
    cls = third_party_strategy('param_order', 'sorted')
    assert cls(config.param_order).params is config.param_order
    assert load_config({'param_order': 'sorted'}).param_order.keys == ('numel',)
    for words, said in {
        'descending: found 1, expected true or false': {'descending': 1},
        'unknown parameter of strategy \'sorted\'. Did you mean \'keys\'?': {'key': 1},
        'param_order.keys[0]: found 1, expected text': {'keys': [1]},
        'param_order: sorted needs a key': {'keys': []},
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_config({'param_order': {'name': 'sorted', **said}})
        assert words in str(caught.value)
    with pytest.raises(
        ConfigError, match='Valid strategies: reverse, forward, random, recorded, sorted'
    ):
        load_config({'param_order': 'other'})


def test_foreign_code_is_imported_only_when_named(install_distribution):
    install_distribution(
        'vendor', {'param_order.broken': 'vendor_code:X'}, 'raise OSError("no libfoo")'
    )
    assert load_config() == BufferConfig()
    assert ('param_order', 'broken') in third_party_strategies()
    assert {'const': 'broken', 'description': 'From vendor 1.2.'} in json_schema()['properties'][
        'param_order'
    ]['oneOf']
    with pytest.raises(
        RegistryError,
        match=r"strategy 'broken' of vendor 1.2 \(vendor_code:X\) cannot be imported: OSError: no lib",
    ):
        load_config({'param_order': 'broken'})


def test_duplicate_names_are_refused(install_distribution):
    install_distribution('vendor', {'param_order.sorted': 'vendor_code:Sorted'}, _SORTED)
    install_distribution('rival', {'param_order.sorted': 'rival_code:Sorted'}, _SORTED)
    with pytest.raises(RegistryError, match="two strategies are named 'sorted'") as caught:
        load_config()
    assert 'vendor 1.2' in str(caught.value)
    assert 'rival 1.2' in str(caught.value)


def test_our_own_names_are_refused(install_distribution):
    install_distribution('vendor', {'padding.megatron': 'vendor_code:Sorted'}, _SORTED)
    with pytest.raises(
        RegistryError, match='one from megatron-buffer itself and one from vendor 1'
    ):
        load_config()


@pytest.mark.parametrize('name', ['sorted', 'no_axis.sorted', 'padding.', '.x'])
def test_entry_points_that_name_no_axis_are_ignored_with_a_warning(
    name, install_distribution, caplog
):
    install_distribution('vendor', {name: 'vendor_code:Sorted'}, _SORTED)
    assert load_config() == BufferConfig()
    assert f"ignoring {name!r} of vendor 1.2" in caplog.text
    assert 'must be named <axis>.<name>' in caplog.text


@pytest.mark.parametrize(
    ('code', 'words'),
    [
        ('X = 3', 'has no dataclass as its attribute Params'),
        ('class X: Params = int', 'has no dataclass as its attribute Params'),
        ('class Y: pass', 'cannot be imported: AttributeError'),
        (
            'import dataclasses\n@dataclasses.dataclass\nclass P:\n    name: str = "x"\n'
            'class X: Params = P',
            'must be a frozen dataclass',
        ),
        (
            'import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass P:\n    a: int = 3\n'
            'class X: Params = P',
            "must have a field `name` with default 'x', found None",
        ),
        (
            'import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass P:\n'
            '    name: str = "x"\n    a: "Unknown" = 3\nclass X: Params = P',
            'have a field of an unusable type',
        ),
        (
            'import dataclasses\nclass T: pass\n@dataclasses.dataclass(frozen=True)\nclass P:\n'
            '    name: str = "x"\n    a: T = None\nclass X: Params = P',
            'have a field of an unusable type',
        ),
    ],
)
def test_unusable_third_party_strategies(code, words, install_distribution):
    install_distribution('vendor', {'param_order.x': 'vendor_code:X'}, code)
    with pytest.raises(RegistryError) as caught:
        load_config({'param_order': 'x'})
    assert words in str(caught.value)
    assert 'vendor 1.2' in str(caught.value)


def test_a_name_that_no_distribution_provides():
    with pytest.raises(RegistryError, match="no installed distribution provides a strategy 'x'"):
        third_party_strategy('param_order', 'x')

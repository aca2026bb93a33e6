"""The config: YAML, a shipped name or a mapping in, a frozen :class:`BufferConfig` out.

This is the module to import. ``config_types`` holds the table of axes, ``config_layout`` and
``config_runtime`` the dataclasses of their strategies; ``config_yaml`` reads files, ``config_check``
checks what they say, ``config_compat`` which choices work together, and ``config_catalog`` knows
every parameter and the third-party strategies. None of them imports torch or megatron, and a third
party's code is imported only when a config names its strategy. Upstream has no counterpart.
"""

import copy
import difflib
import hashlib
import json
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from megatron_buffer.config_base import as_json
from megatron_buffer.config_catalog import (
    one_line_meaning,
    origin,
    schema_of,
    third_party_strategies,
    third_party_strategy,
)
from megatron_buffer.config_check import found, read_config
from megatron_buffer.config_types import (
    AXES,
    SCHEMA_VERSION,
    Axis,
    BufferConfig,
    CheckpointConfig,
    ChecksConfig,
    StrategyParams,
)
from megatron_buffer.config_yaml import Document, parse, read_file
from megatron_buffer.errors import ConfigError

__all__ = [
    'AXES',
    'SCHEMA_VERSION',
    'Axis',
    'BufferConfig',
    'CheckpointConfig',
    'ChecksConfig',
    'StrategyParams',
    'config_hash',
    'dump_config',
    'json_schema',
    'load_config',
    'shipped_configs',
    'shipped_names',
    'third_party_strategies',
    'third_party_strategy',
    'to_dict',
]


def load_config(
    source: BufferConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> BufferConfig:
    """Returns the resolved config that ``source`` stands for; axes left out are upstream's choices.

    Args:
        source: None for the shipped ``upstream``; a config, returned as it is; a mapping of the
            shape of the YAML, where ``schema_version`` may be left out; the name of a shipped
            config; or a path: a PathLike, or a string that has a '/', ends in .yaml or .yml, or
            names an existing file.

    Raises:
        ConfigError: If the config is wrong, with all its problems in one message.
        RegistryError: If an installed third-party strategy is unusable or clashes with another.
    """
    if isinstance(source, BufferConfig):
        return source
    if isinstance(source, Mapping):
        return read_config(Document(source, {}, []), '<mapping>', needs_version=False)
    if source is not None and not isinstance(cast(object, source), str | os.PathLike):
        raise ConfigError(
            f'config: found {found(source)}, expected a shipped name, a path, a mapping or None'
        )
    name = 'upstream' if source is None else os.fsdecode(source)
    path = os.path.expanduser(name) if isinstance(source, os.PathLike) else _find(name)
    return read_config(parse(read_file(path, name), name), name, needs_version=True)


def shipped_configs() -> dict[str, Path]:
    """The configs that come with the package, by name: ``upstream``, ``ablations/...``."""
    package = Path(__file__).resolve().parent
    inside, beside = package / 'configs', package.parent / 'configs'
    folder = inside if inside.is_dir() else beside
    if not (folder / 'upstream.yaml').is_file():
        return {}
    paths = {
        path.relative_to(folder).with_suffix('').as_posix(): path for path in folder.rglob('*.yaml')
    }
    # models/ holds architectures for the planner and sweeps/ runs for `ablate`: no configs of a buffer.
    others = ('models/', 'ablations/sweeps/')
    return {name: paths[name] for name in sorted(paths) if not name.startswith(others)}


def shipped_names() -> str:
    """The names of the shipped configs in a few words, however many there are."""
    names = list(shipped_configs())
    many = [name for name in names if name.startswith('ablations/')]
    short = [name for name in names if name not in many]
    if many:
        short.append(f'ablations/AXIS-STRATEGY ({len(many)}, such as {min(many, key=len)})')
    return ', '.join(short) or 'none, so this installation is incomplete'


def _find(name: str) -> str:
    """The file that a string given as config means: a shipped one first, then a path."""
    shipped = shipped_configs()
    if name in shipped:
        return str(shipped[name])
    path = os.path.expanduser(name)
    if '/' in name or name.endswith(('.yaml', '.yml')) or os.path.isfile(path):
        stem = re.sub(r'^(\./)?(configs/)?|\.ya?ml$', '', name)
        if stem in shipped and not os.path.lexists(path):
            raise ConfigError(
                f'{name}: no such file (looked for {os.path.abspath(path)}). To use the config of '
                f"that name that comes with the package, write {stem!r}, without 'configs/' and "
                'suffix',
                source=name,
            )
        if stem == name and name.startswith('ablations/') and not os.path.lexists(path):
            raise _no_such_config(name, shipped)
        return path
    raise _no_such_config(name, shipped)


def _no_such_config(name: str, shipped: Mapping[str, Path]) -> ConfigError:
    by_last_part = {path.rpartition('/')[2]: path for path in shipped}
    close = difflib.get_close_matches(name.rpartition('/')[2].lower(), by_last_part, n=1)
    near = f' Did you mean {by_last_part[close[0]]!r}?' if close else ''
    return ConfigError(
        f'no config named {reprlib.repr(name)} comes with the package; there are: '
        f"{shipped_names()}.{near} A path must contain a '/' or end in .yaml",
        source=name,
    )


def to_dict(config: BufferConfig) -> dict[str, Any]:
    """The whole config as plain data, every default filled in, in the order of the YAML."""
    plain: dict[str, Any] = {'schema_version': config.schema_version}
    for key in (*AXES, 'checkpoint', 'checks'):
        value: object = getattr(config, key)
        plain[key] = as_json(value)
    return plain


def dump_config(config: BufferConfig) -> str:
    """The whole config as YAML, which :func:`load_config` reads back to an equal config."""
    untyped: Any = yaml  # the stubs of safe_dump are incomplete
    return untyped.safe_dump(
        to_dict(config), sort_keys=False, default_flow_style=None, width=1 << 20
    )


def config_hash(config: BufferConfig) -> str:
    """16 hex digits that are equal for two configs exactly if they mean the same."""
    canonical = json.dumps(to_dict(config), sort_keys=True, separators=(',', ':'))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a config file; of third-party strategies the name only."""
    third_party = third_party_strategies()
    properties: dict[str, Any] = {
        'schema_version': {
            'type': 'integer',
            'const': SCHEMA_VERSION,
            'description': 'Version of the shape of this file.',
        }
    }
    defs: dict[str, Any] = {}
    for axis in AXES.values():
        forms: list[Mapping[str, Any]] = [_null_form()]
        for name, cls in axis.strategies.items():
            forms.append({'const': name, 'description': one_line_meaning(cls)})
            forms.append(_object_form(cls, defs, name))
        if axis.key == 'finalize':
            forms.append(_LIST_OF_STEPS)
        for (key, name), entry_point in third_party.items():
            if key == axis.key:
                description = f'From {origin(entry_point)}.'
                forms.append({'const': name, 'description': description})
                forms.append(
                    {
                        'type': 'object',
                        'description': description,
                        'properties': {'name': {'const': name}},
                        'required': ['name'],
                    }
                )
        properties[axis.key] = {
            'description': f'{axis.meaning} (upstream: {axis.upstream_symbol})',
            'default': axis.default,
            'oneOf': forms,
        }
    for key, cls in (('checkpoint', CheckpointConfig), ('checks', ChecksConfig)):
        properties[key] = {
            'description': one_line_meaning(cls),
            'oneOf': [_null_form(), _object_form(cls, defs)],
        }
    return {
        '$schema': 'https://json-schema.org/draft/2020-12/schema',
        'title': 'megatron-buffer config',
        'type': 'object',
        'properties': properties,
        'required': ['schema_version'],
        'additionalProperties': False,
        '$defs': defs,
    }


_LIST_OF_STEPS: Mapping[str, Any] = {
    'type': 'array',
    'description': 'Steps in the order they run in; options of a step stand beside its name.',
    'items': {
        'oneOf': [
            {'type': 'string'},
            {'type': 'object', 'properties': {'name': {'type': 'string'}}, 'required': ['name']},
        ]
    },
}


def _null_form() -> dict[str, Any]:
    return {'type': 'null', 'description': "Upstream's choice."}


def _object_form(cls: type[Any], defs: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    """The schema of a mapping; definitions that it refers to are added to ``defs``, at the root."""
    schema = copy.deepcopy(dict(schema_of(cls)))
    defs.update(schema.pop('$defs', {}))
    if name is not None:
        schema['properties']['name'] = {'const': name}
        schema['required'] = ['name', *schema.get('required', ())]
    return schema

"""The config: YAML, a shipped name or a mapping in, a frozen :class:`BufferConfig` out.

This is the module to import. ``config_types`` holds the dataclasses and the table of axes,
``config_yaml`` reads files, ``config_check`` checks what they say, ``config_catalog`` knows every
parameter and the third-party strategies. None of them imports torch or megatron, and a third
party's code is imported only when a config names its strategy. Upstream has no counterpart.
"""

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from megatron_buffer.config_catalog import (
    adapter,
    one_line_meaning,
    origin,
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
from megatron_buffer.config_yaml import Document, did_you_mean, parse, read_file
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
    # models/ holds architectures for the planner, not configs of a buffer.
    return {name: paths[name] for name in sorted(paths) if not name.startswith('models/')}


def _find(name: str) -> str:
    """The file that a string given as config means: a shipped one first, then a path."""
    shipped = shipped_configs()
    if name in shipped:
        return str(shipped[name])
    path = os.path.expanduser(name)
    if '/' in name or name.endswith(('.yaml', '.yml')) or os.path.isfile(path):
        stem = re.sub(r'^(\./)?(configs/)?|\.ya?ml$', '', name)
        if stem not in shipped or os.path.lexists(path):
            return path
        raise ConfigError(
            f'{name}: no such file (looked for {os.path.abspath(path)}). To use the config of that '
            f'name that comes with the package, write {stem!r}, without folder and suffix',
            source=name,
        )
    raise ConfigError(
        f'no config named {reprlib.repr(name)} comes with the package; there are: '
        f'{", ".join(shipped) or "none, so this installation is incomplete"}.'
        f"{did_you_mean(name, shipped)} A path must contain a '/' or end in .yaml",
        source=name,
    )


def to_dict(config: BufferConfig) -> dict[str, Any]:
    """The whole config as plain data, every default filled in, in the order of the YAML."""
    plain: dict[str, Any] = {'schema_version': config.schema_version}
    for key in (*AXES, 'checkpoint', 'checks'):
        value: object = getattr(config, key)
        plain[key] = adapter(type(value)).dump_python(value, mode='json')
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
    for axis in AXES.values():
        forms: list[dict[str, Any]] = [_null_form()]
        for name, cls in axis.strategies.items():
            forms.append({'const': name, 'description': one_line_meaning(cls)})
            forms.append(_object_form(cls, name))
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
            'oneOf': [_null_form(), _object_form(cls)],
        }
    return {
        '$schema': 'https://json-schema.org/draft/2020-12/schema',
        'title': 'megatron-buffer config',
        'type': 'object',
        'properties': properties,
        'required': ['schema_version'],
        'additionalProperties': False,
    }


def _null_form() -> dict[str, Any]:
    return {'type': 'null', 'description': "Upstream's choice."}


def _object_form(cls: type[Any], name: str | None = None) -> dict[str, Any]:
    schema = adapter(cls).json_schema()
    if name is not None:
        schema['properties']['name'] = {'const': name}
        schema['required'] = ['name', *schema.get('required', ())]
    return schema

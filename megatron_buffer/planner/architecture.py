"""Model files: YAML with the field names of Megatron's ``TransformerConfig`` and ``GPTModel``.

Here they are found and read; :mod:`megatron_buffer.planner.model` checks them against Megatron and builds
the model. Imports neither torch nor megatron.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_buffer.config_yaml import YamlPath, did_you_mean, parse, read_file
from megatron_buffer.errors import ConfigError

DEFAULT_VOCAB_DIVISOR = 128
"""Megatron's default of ``--make-vocab-size-divisible-by``."""

_REQUIRED = (
    'num_layers',
    'hidden_size',
    'num_attention_heads',
    'vocab_size',
    'max_sequence_length',
)


class Architecture(NamedTuple):
    """A model file.

    Attributes:
        source: Name or path that it was asked for by.
        values: What it says.
        lines: Line of each key.
    """

    source: str
    values: Mapping[str, Any]
    lines: Mapping[YamlPath, int]

    def problem(self, key: str, text: str) -> NoReturn:
        """Raises a ConfigError about ``key``, with its line."""
        line = self.lines.get((key,))
        where = f'{self.source}:{line}' if line else self.source
        raise ConfigError(f'{where}: {key}: {text}', yaml_path=key, source=self.source)

    def positive(self, key: str, default: int | None = None) -> int:
        """The positive integer under ``key``, or ``default`` where it is left out or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.problem(key, f'found {value!r}, expected a positive integer')
        return value


def shipped_models() -> dict[str, Path]:
    """The architectures that come with the package, by name."""
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / 'configs' / 'models', package.parent / 'configs' / 'models'
    folder = inside if inside.is_dir() else beside
    return {path.stem: path for path in sorted(folder.glob('*.yaml'))}


def load_architecture(source: str) -> Architecture:
    """Reads a model file.

    Args:
        source: Name of a shipped architecture (``-`` and ``_`` alike), or a path.

    Raises:
        ConfigError: If there is none, or it is not a YAML mapping with the sizes that every model has.
    """
    shipped = shipped_models()
    name = source.replace('-', '_')
    if name in shipped:
        path = str(shipped[name])
    elif '/' in source or source.endswith(('.yaml', '.yml')) or os.path.isfile(source):
        path = os.path.expanduser(source)
    else:
        raise ConfigError(
            f'no model named {reprlib.repr(source)} comes with the package; there are: '
            f'{", ".join(shipped) or "none, so this installation is incomplete"}.'
            f"{did_you_mean(name, shipped)} A path must contain a '/' or end in .yaml",
            source=source,
        )
    document = parse(read_file(path, source), source)
    if not isinstance(document.data, dict) or not document.data:
        raise ConfigError(
            f'{source}: found {reprlib.repr(document.data)}, expected the sizes of a model, such as '
            f'num_layers: 32',
            source=source,
        )
    for where, first, second in document.duplicates:
        raise ConfigError(
            f'{source}:{second}: {where[-1]}: given twice; the first is in line {first}',
            source=source,
        )
    odd = [key for key in document.data if not isinstance(key, str)]
    if odd:
        raise ConfigError(f'{source}: {odd[0]!r}: keys must be words', source=source)
    result = Architecture(source, document.data, document.lines)
    missing = [key for key in _REQUIRED if document.data.get(key) is None]
    # A misspelt key is both missing and unknown; the hint says which.
    for key in missing:
        near = [k for k in document.data if did_you_mean(k, [key]) and k not in _REQUIRED]
        hint = f' Is {near[0]!r} meant to be it?' if near else ''
        result.problem(key, f'is missing; every model needs {", ".join(_REQUIRED)}.{hint}')
    for key in _REQUIRED:
        result.positive(key)
    return result


def plain_name(source: str) -> str:
    """A short name for titles: the file's, without folder and suffix; of a config.json its folder's."""
    folder, name = os.path.split(source)
    if name == 'config.json':  # as all of Hugging Face's are called
        name = os.path.basename(os.path.abspath(folder)) or name
    return re.sub(r'\.ya?ml$', '', name)

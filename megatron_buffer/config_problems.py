"""The problems of one document, and the words for what was found in it.

Used by :mod:`megatron_buffer.config_check`, which finds them. Upstream has no counterpart.
"""

import math
import reprlib
from collections.abc import Mapping
from typing import Any, cast

from megatron_buffer.config_yaml import YamlPath, dotted
from megatron_buffer.errors import ConfigError

MAX_INT = 2**63 - 1
_MAX_VALUES = 10_000
_MAX_DEPTH = 20


def found(value: object) -> str:
    """How ``value`` is written in YAML, and of which kind it is, shortened."""
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    if isinstance(value, str):
        return f'{reprlib.repr(value)} (text)' if value else 'empty text'
    if isinstance(value, int):
        return str(value) if abs(value) <= MAX_INT else 'an integer beyond 64 bits'
    if isinstance(value, float):
        return f'{value!r} (a float)'
    if isinstance(value, Mapping):
        return 'a mapping' if value else 'an empty mapping'
    if isinstance(value, list | tuple):
        return 'a list' if value else 'an empty list'
    return f'a value of type {type(value).__name__}'


def what_to_write(value: object, expected: str) -> str:
    """What to write instead, where the mistake is a usual one; else nothing."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INT:
        return f'write {int(value)}' if 'integer' in expected else ''
    if expected.startswith('a list') and isinstance(value, str | Mapping) and value:
        return 'put [ ] around it'
    if not isinstance(value, str):
        return ''
    text = value.strip().lower().replace('_', '').replace(',', '')
    if 'integer' in expected:
        try:
            number = float(text)
        except ValueError:
            return ''
        if number.is_integer() and 0 < number <= MAX_INT:
            return f'write {int(number)}, without quotes'
    if 'true' in expected and text in ('true', 'false'):
        return f'write {text}, without quotes'
    return ''


class Problems:
    """What is wrong with one document, each thing with its YAML path and line."""

    def __init__(self, source: str, lines: Mapping[YamlPath, int]) -> None:
        self._source = source
        self._lines = lines
        self._found: list[tuple[int, YamlPath, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, path: YamlPath, text: str, line: int | None = None) -> None:
        """Notes a problem; its line is that of the longest part of ``path`` that the file has."""
        if line is None:
            starts = (path[:length] for length in range(len(path), -1, -1))
            line = next((self._lines[start] for start in starts if start in self._lines), 0)
        self._found.append((line, path, text))

    def add_bad_key(self, path: YamlPath) -> None:
        self.add(path, f'a key must be text, found {found(path[-1])}; put it in quotes')

    def raise_if_any(self) -> None:
        """Raises one error with all problems so far, in the order of the file."""
        if not self._found:
            return
        self._found.sort(key=lambda problem: problem[0])
        said: list[str] = []
        for line, path, text in self._found:
            head = f'line {line}: ' if line else ''
            said.append(f'  {head}{dotted(path)}{": " if path else ""}{text}')
        raise ConfigError(
            f'{self._source}: {len(said)} problem{"s" * (len(said) > 1)} in this config\n'
            + '\n'.join(said),
            yaml_path=dotted(self._found[0][1]),
            source=self._source,
        )


class _TooMuchError(Exception):
    """A value is deeper, or holds more values, than any config can need."""


def plain(path: YamlPath, value: Any, problems: Problems) -> Any:
    """``value`` as JSON can hold it; what JSON cannot hold is a problem and becomes None."""
    left = _MAX_VALUES

    def convert(where: YamlPath, value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or len(where) > _MAX_DEPTH:
            raise _TooMuchError
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and abs(value) <= MAX_INT:
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if isinstance(value, str) and not any('\ud800' <= letter <= '\udfff' for letter in value):
            return str(value)
        if isinstance(value, list | tuple):
            items = cast(list[Any], value)
            return [convert((*where, index), item) for index, item in enumerate(items)]
        if isinstance(value, Mapping):
            mapping: dict[str, Any] = {}
            for key, item in cast(Mapping[Any, Any], value).items():
                if isinstance(key, str):
                    mapping[key] = convert((*where, key), item)
                else:
                    problems.add_bad_key((*where, key))
            return mapping
        return problems.add(where, f'found {found(value)}, expected a plain YAML value')

    try:
        return convert(path, value)
    except _TooMuchError:
        return problems.add(path, 'found more values, or deeper ones, than a config can need')

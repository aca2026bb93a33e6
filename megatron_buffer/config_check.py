"""Checks one document, and makes the config that it says.

All problems are collected, each with its YAML path and line, what was found, what was expected and
what to do, and raised as one error. A strategy's name selects its dataclass here, axis by axis, and
pydantic checks the parameters. Used by :mod:`megatron_buffer.config`.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from pydantic import ValidationError

from megatron_buffer.config_catalog import (
    EntryPoints,
    ParamDoc,
    adapter,
    param_docs,
    third_party_strategies,
    third_party_strategy,
)
from megatron_buffer.config_types import (
    AXES,
    PLANNED_CHECKS,
    SCHEMA_VERSION,
    Axis,
    BufferConfig,
    CheckpointConfig,
    ChecksConfig,
)
from megatron_buffer.config_yaml import Document, YamlPath, did_you_mean, dotted
from megatron_buffer.errors import ConfigError

_GENERAL: Mapping[str, type[Any]] = {'checkpoint': CheckpointConfig, 'checks': ChecksConfig}
_VERSION_LINE = f'schema_version: {SCHEMA_VERSION}'
_MAX_VALUES = 10_000
_MAX_DEPTH = 20
_MAX_INT = 2**63 - 1


def found(value: object) -> str:
    """How ``value`` is written in YAML, and of which kind it is, shortened."""
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    if isinstance(value, str):
        return f'{reprlib.repr(value)} (text)'
    if isinstance(value, int):
        return str(value) if abs(value) <= _MAX_INT else 'an integer beyond 64 bits'
    if isinstance(value, float):
        return f'{value!r} (a float)'
    if isinstance(value, Mapping):
        return 'a mapping'
    if isinstance(value, list | tuple):
        return 'a list'
    return f'a value of type {type(value).__name__}'


def _what_to_write(value: object, doc: ParamDoc) -> str:
    """What to write instead, where the mistake is a usual one; else nothing."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_INT:
        return f'write {int(value)}' if 'integer' in doc.expected else ''
    if not isinstance(value, str):
        return ''
    text = value.strip().lower().replace('_', '').replace(',', '')
    if 'integer' in doc.expected:
        try:
            number = float(text)
        except ValueError:
            return ''
        if number.is_integer() and 0 < number <= _MAX_INT:
            return f'write {int(number)}, without quotes'
    if 'true' in doc.expected and text in ('true', 'false'):
        return f'write {text}, without quotes'
    return ''


class _TooMuchError(Exception):
    """A value is deeper, or holds more values, than any config can need."""


class _Problems:
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


def read_config(document: Document, source: str, needs_version: bool) -> BufferConfig:
    """Returns the config that a document says.

    Args:
        document: What was read from YAML, or given as a mapping.
        source: What to call it in messages.
        needs_version: Whether ``schema_version`` may not be left out.

    Raises:
        ConfigError: With every problem of the document.
        RegistryError: If an installed third-party strategy is unusable or clashes with another.
    """
    problems = _Problems(source, document.lines)
    for path, first, second in document.duplicates:
        problems.add(path, f'given twice, on lines {first} and {second}; keep one', second)
    value: object = document.data
    if not isinstance(value, Mapping):
        what = 'the file is empty' if value is None else f'found {found(value)}'
        problems.add((), f'{what}; a config is a mapping, the shortest is: {_VERSION_LINE}')
        problems.raise_if_any()
    data = cast(Mapping[Any, Any], value)
    _check_version(data, problems, needs_version)
    known = ('schema_version', *AXES, *_GENERAL)
    for key in data:
        if not isinstance(key, str):
            problems.add_bad_key((key,))
        elif key not in known:
            hint = did_you_mean(key, known)
            problems.add((key,), f'unknown key.{hint} Valid keys: {", ".join(known)}')
    third_party = third_party_strategies()
    values: dict[str, Any] = {
        key: _read_strategy(axis, data.get(key), problems, third_party)
        for key, axis in AXES.items()
    }
    for key, cls in _GENERAL.items():
        values[key] = _read_general(key, cls, data.get(key), problems)
    problems.raise_if_any()
    return BufferConfig(source=source, **values)


def _check_version(data: Mapping[Any, Any], problems: _Problems, needed: bool) -> None:
    version = data.get('schema_version')
    if 'schema_version' not in data:
        if needed:
            problems.add((), f'schema_version is missing; add the line: {_VERSION_LINE}')
        return
    path = ('schema_version',)
    if type(version) is not int:
        problems.add(path, f'found {found(version)}, expected an integer; write: {_VERSION_LINE}')
    elif version != SCHEMA_VERSION:
        problems.add(
            path,
            f'found {found(version)}, but this release of megatron-buffer reads {SCHEMA_VERSION} '
            'only; use the release that the file was written for, or bring the file up to date',
        )
        # Keys mean other things in another version: what else is wrong would only mislead.
        problems.raise_if_any()


def _read_strategy(axis: Axis, node: Any, problems: _Problems, third_party: EntryPoints) -> Any:
    """The parameters of the strategy that ``node`` names, or None after a problem."""
    if node is None:
        return axis.strategies[axis.default]()
    if type(node) in axis.strategies.values():
        return node
    path = (axis.key,)
    shape = f'expected the name of a strategy, or a mapping like {{name: {axis.default}}}'
    if isinstance(node, str):
        node, name_path = {'name': node}, path
    elif isinstance(node, list) and axis.key == 'finalize':
        node, name_path = {'name': 'steps'}, path
    else:
        name_path = (*path, 'name')
    if not isinstance(node, Mapping):
        return problems.add(path, f'found {found(cast(object, node))}, {shape}')
    node = cast(Mapping[Any, Any], node)
    if 'name' not in node:
        return problems.add(path, f'found a mapping without a name, {shape}')
    name = node['name']
    if not isinstance(name, str):
        return problems.add(name_path, f'found {found(name)}, {shape}')
    if name in axis.strategies:
        cls = axis.strategies[name]
    elif (axis.key, name) in third_party:
        cls = third_party_strategy(axis.key, name, third_party).Params
    else:
        names = [*axis.strategies, *(other for key, other in third_party if key == axis.key)]
        return problems.add(name_path, _no_such_strategy(axis, name, names))
    return _read_params(cls, path, node, f'strategy {name!r}', problems)


def _no_such_strategy(axis: Axis, name: str, names: list[str]) -> str:
    """Why ``name`` cannot be used: planned, or unknown; and what can."""
    usable = f'Valid strategies: {", ".join(names)}'
    planned = [other for other in axis.planned if other != name]
    unbuilt = f'. Not built yet: {", ".join(planned)}' if planned else ''
    if name in axis.planned:
        return (
            f'{name!r} ({axis.planned[name]}) is part of the design but is not built yet, so it '
            f'cannot be used in this release. {usable}{unbuilt}'
        )
    hint = did_you_mean(name, [*names, *planned])
    return f'unknown strategy {reprlib.repr(name)}.{hint} {usable}{unbuilt}'


def _read_general(key: str, cls: type[Any], node: Any, problems: _Problems) -> Any:
    if node is None:
        return cls()
    if type(node) is cls:
        return node
    if not isinstance(node, Mapping):
        shape = ', '.join(f'{doc.name}: {doc.default_text}' for doc in param_docs(cls))
        return problems.add((key,), f'found {found(node)}, expected a mapping like {{{shape}}}')
    return _read_params(cls, (key,), cast(Mapping[Any, Any], node), repr(key), problems)


def _read_params(
    cls: type[Any], path: YamlPath, node: Mapping[Any, Any], what: str, problems: _Problems
) -> Any:
    """``node`` as an instance of the dataclass ``cls``, or None after a problem."""
    docs = {doc.name: doc for doc in param_docs(cls)}
    known = {field.name for field in fields(cls)}
    planned: Mapping[str, str] = PLANNED_CHECKS if cls is ChecksConfig else {}
    values: dict[str, Any] = {}
    reported: set[str] = set()
    problems_before = len(problems)
    for key, value in node.items():
        where = (*path, key)
        if not isinstance(key, str):
            problems.add_bad_key(where)
        elif key in known:
            so_far = len(problems)
            values[key] = _plain(where, value, problems)
            if len(problems) > so_far:
                reported.add(key)
        elif key in planned:
            problems.add(
                where, f'{planned[key]}: part of the design, but not built yet; remove this line'
            )
        else:
            valid = f'Valid: {", ".join(docs)}' if docs else 'It has no parameters'
            problems.add(where, f'unknown parameter of {what}.{did_you_mean(key, docs)} {valid}')
    try:
        # JSON mode: strict about types, and yet a YAML list may fill a tuple.
        built = adapter(cls).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            name = str(item['loc'][0]) if item['loc'] else ''
            if name not in reported:
                reported.add(name)
                _add_param_problem(path, name, values, docs.get(name), item['msg'], problems)
        return None
    return built if len(problems) == problems_before else None


def _add_param_problem(
    path: YamlPath,
    name: str,
    values: Mapping[str, Any],
    doc: ParamDoc | None,
    message: str,
    problems: _Problems,
) -> None:
    """Says in our words what pydantic found wrong with one parameter."""
    if doc is None:
        problems.add(path, message)
        return
    if name not in values:
        problems.add(path, f'{name} is missing, expected {doc.expected}')
        return
    value: object = values[name]
    inner = f' ({message})' if type(value) in (list, dict) else ''
    text = f'found {found(value)}, expected {doc.expected}{inner}'
    default = '' if doc.required else f'leave it out for the default, {doc.default_text}'
    advice = ', or '.join(part for part in (_what_to_write(value, doc), default) if part)
    hint = did_you_mean(value, doc.choices) if isinstance(value, str) else ''
    problems.add(
        (*path, name), f'{text}{"; " if advice else ""}{advice}{"." if hint else ""}{hint}'
    )


def _plain(path: YamlPath, value: Any, problems: _Problems) -> Any:
    """``value`` as JSON can hold it; what JSON cannot hold is a problem and becomes None."""
    left = _MAX_VALUES

    def convert(where: YamlPath, value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or len(where) > _MAX_DEPTH:
            raise _TooMuchError
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and abs(value) <= _MAX_INT:
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if isinstance(value, str) and not any('\ud800' <= letter <= '\udfff' for letter in value):
            return str(value)
        if isinstance(value, list | tuple):
            items = cast(list[Any], value)
            return [convert((*where, index), item) for index, item in enumerate(items)]
        if isinstance(value, Mapping):
            plain: dict[str, Any] = {}
            for key, item in cast(Mapping[Any, Any], value).items():
                if isinstance(key, str):
                    plain[key] = convert((*where, key), item)
                else:
                    problems.add_bad_key((*where, key))
            return plain
        return problems.add(where, f'found {found(value)}, expected a plain YAML value')

    try:
        return convert(path, value)
    except _TooMuchError:
        return problems.add(path, 'found more values, or deeper ones, than a config can need')

"""Checks one document, and makes the config that it says.

All problems are collected, each with its YAML path and line, what was found, what was expected and
what to do, and raised as one error. A strategy's name selects its dataclass here, axis by axis, and
pydantic checks the parameters. Used by :mod:`megatron_buffer.config`.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_buffer.config_base import adapter
from megatron_buffer.config_catalog import (
    EntryPoints,
    param_docs,
    schema_of,
    third_party_strategies,
    third_party_strategy,
)
from megatron_buffer.config_compat import incompatibilities
from megatron_buffer.config_finalize import check_finalize, options_of_steps
from megatron_buffer.config_problems import Problems, found, plain, what_to_write
from megatron_buffer.config_runtime import FinalizeSteps
from megatron_buffer.config_types import (
    AXES,
    SCHEMA_VERSION,
    Axis,
    BufferConfig,
    CheckpointConfig,
    ChecksConfig,
)
from megatron_buffer.config_words import fragment_at, in_words, keys_at, words_of_choice
from megatron_buffer.config_yaml import Document, YamlPath, did_you_mean

_GENERAL: Mapping[str, type[Any]] = {'checkpoint': CheckpointConfig, 'checks': ChecksConfig}
Place = tuple[str | int, ...]
_VERSION_LINE = f'schema_version: {SCHEMA_VERSION}'


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
    problems = Problems(source, document.lines)
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
    if isinstance(values['finalize'], FinalizeSteps):
        _check_steps(values['finalize'], data.get('finalize'), problems, third_party)
    for rule in incompatibilities(values):
        problems.add(rule.path, rule.text)
    problems.raise_if_any()
    return BufferConfig(source=source, **values)


def _check_version(data: Mapping[Any, Any], problems: Problems, needed: bool) -> None:
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


def _read_strategy(axis: Axis, node: Any, problems: Problems, third_party: EntryPoints) -> Any:
    """The parameters of the strategy that ``node`` names, or None after a problem."""
    if node is None:
        return axis.strategies[axis.default]()
    if type(node) in axis.strategies.values():
        return node
    path = (axis.key,)
    shape = f'expected the name of a strategy, or a mapping like {{name: {axis.default}}}'
    if isinstance(node, str):
        node, name_path = {'name': node}, path
    elif isinstance(node, list | tuple) and axis.key == 'finalize':
        so_far = len(problems)
        node, name_path = _steps(path, cast(list[Any], node), problems), path
        if len(problems) > so_far:
            return None
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


def _steps(path: YamlPath, items: Sequence[Any], problems: Problems) -> dict[str, Any]:
    """A bare list under ``finalize``: names of steps, or mappings of a name and its options."""
    order: list[str] = []
    options: dict[str, Any] = {}
    for index, item in enumerate(items):
        where: YamlPath = (*path, index)
        named: Any = {'name': item} if isinstance(item, str) else item
        said = cast(Mapping[Any, Any], named if isinstance(named, Mapping) else {})
        name: object = said.get('name')
        if not isinstance(name, str):
            what = 'a mapping without a name' if said else found(cast(object, item))
            problems.add(
                where,
                f'found {what}, expected the name of a step, or a mapping of a name and options '
                'like {name: non_tp_grads, chunk_bytes: 268435456}',
            )
            continue
        own = plain(where, {k: v for k, v in said.items() if k != 'name'}, problems)
        order.append(name)
        if own:
            options[name] = own
    return {'name': 'steps', 'order': order, 'options': options}


def _check_steps(
    params: FinalizeSteps, node: Any, problems: Problems, third_party: EntryPoints
) -> None:
    """Checks names, order and options of finalize steps; ``node`` is how the config says them."""

    def place(path: YamlPath) -> YamlPath:
        """``path`` as it is in the config, where a bare list has neither `order` nor `options`."""
        if not isinstance(node, list | tuple) or len(path) < 3:
            return path
        axis, _, step, *rest = path
        index = params.order.index(step) if params.order and isinstance(step, str) else step
        return (axis, index, *rest)

    for path, text in check_finalize(params, third_party):
        problems.add(place(path), text)
    for step in options_of_steps(params, third_party):
        what = f'step {step.path[-1]!r}'
        _read_params(step.options, place(step.path), step.said, what, problems)


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


def _read_general(key: str, cls: type[Any], node: Any, problems: Problems) -> Any:
    if node is None:
        return cls()
    if type(node) is cls:
        return node
    if not isinstance(node, Mapping):
        shape = ', '.join(f'{doc.name}: {doc.default_text}' for doc in param_docs(cls))
        return problems.add((key,), f'found {found(node)}, expected a mapping like {{{shape}}}')
    return _read_params(cls, (key,), cast(Mapping[Any, Any], node), repr(key), problems)


def _read_params(
    cls: type[Any], path: YamlPath, node: Mapping[Any, Any], what: str, problems: Problems
) -> Any:
    """``node`` as an instance of the dataclass ``cls``, or None after a problem."""
    known = [field.name for field in fields(cls)]
    values: dict[str, Any] = {}
    reported: set[YamlPath] = set()
    problems_before = len(problems)
    for key, value in node.items():
        where = (*path, key)
        if not isinstance(key, str):
            problems.add_bad_key(where)
        elif key in known:
            so_far = len(problems)
            values[key] = plain(where, value, problems)
            if len(problems) > so_far:
                reported.add((key,))
        else:
            params = tuple(name for name in known if name != 'name')
            problems.add(where, _unknown(key, params, f'parameter of {what}'))
    try:
        # JSON mode: strict about types, and yet a YAML list may fill a tuple.
        built = adapter(cls).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            _explain(item, cls, path, values, reported, problems)
        return None
    return built if len(problems) == problems_before else None


def _unknown(key: str, valid: tuple[str, ...], what: str = 'key') -> str:
    names = f'Valid: {", ".join(valid)}' if valid else 'It has no parameters'
    return f'unknown {what}.{did_you_mean(key, valid)} {names}'


def _explain(
    item: ErrorDetails,
    cls: type[Any],
    path: YamlPath,
    values: dict[str, Any],
    reported: set[YamlPath],
    problems: Problems,
) -> None:
    """Says in our words, and at its place, what pydantic found wrong with parameters of ``cls``."""
    place, value = _reached(item['loc'], values)
    context = item.get('ctx', {})
    if item['type'] == 'missing':
        place = (*place, cast(str, item['loc'][-1]))
    elif item['type'] == 'given_twice':
        place = (*place, int(context['index']))
    # A list whose items are wrong is also called too short, and each branch of a union is an error.
    if any(done[: len(place)] == place or place[: len(done)] == done for done in reported):
        return
    reported.add(place)
    where: YamlPath = (*path, *place)
    schema = schema_of(cls)
    fragment = fragment_at(schema, place) if place else None
    if item['type'] == 'missing':
        expected = f', expected {in_words(fragment, schema)}' if fragment is not None else ''
        problems.add(where[:-1], f'{where[-1]} is missing{expected}')
    elif item['type'] == 'unexpected_keyword_argument':
        problems.add(where, _unknown(str(place[-1]), keys_at(schema, place[:-1])))
    elif fragment is None or item['type'] in ('value_error', 'assertion_error', 'given_twice'):
        problems.add(where, str(context.get('error', item['msg'])))
    else:
        choice = words_of_choice(fragment, schema)
        expected = in_words(fragment, schema)
        default = next((d for d in param_docs(cls) if (d.name,) == place and not d.required), None)
        leave = f'leave it out for the default, {default.default_text}' if default else ''
        advice = ', or '.join(part for part in (what_to_write(value, expected), leave) if part)
        hint = did_you_mean(value, choice) if isinstance(value, str) else ''
        text = f'found {found(value)}, expected {expected}{"; " if advice else ""}{advice}'
        problems.add(where, f'{text}{"." if hint else ""}{hint}')


def _reached(loc: tuple[int | str, ...], values: dict[str, Any]) -> tuple[Place, object]:
    """The place in ``values`` that pydantic means, and what is there.

    Pydantic's locations also name the branch of a union; such parts are left out.
    """
    at: Any = values
    place: Place = ()
    for key in loc:
        try:
            if not isinstance(at, str):
                at = at[key]
                place = (*place, key)
        except (LookupError, TypeError):
            continue
    return place, at

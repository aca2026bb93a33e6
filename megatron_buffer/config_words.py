"""A JSON schema in words: what a value at some place of a config must be.

Pydantic describes each class of parameters as a JSON schema; this module says in a few words what a
fragment of it asks for. Used by ``config_catalog`` and ``config_check``; upstream has no
counterpart.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

Schema = Mapping[str, Any]

_KINDS = {
    'integer': 'an integer',
    'number': 'a number',
    'boolean': 'true or false',
    'string': 'text',
    'null': 'null',
}
_BOUNDS = (
    ('minimum', '>='),
    ('exclusiveMinimum', '>'),
    ('maximum', '<='),
    ('exclusiveMaximum', '<'),
)


def in_words(fragment: Schema, schema: Schema) -> str:
    """What a value must be, such as ``an integer >= 1 or null``.

    Args:
        fragment: The part of the schema that describes the value.
        schema: The whole schema, which holds the definitions that ``fragment`` refers to.
    """
    return _join(_alternatives(fragment, schema), 'or')


def words_of_choice(fragment: Schema, schema: Schema) -> tuple[str, ...]:
    """The words that a value may be, where it is a choice of words (or null)."""
    return tuple(
        word
        for part in _parts(fragment, schema)
        for word in part.get('enum', (part['const'],) if 'const' in part else ())
        if isinstance(word, str)
    )


def fragment_at(schema: Schema, path: Sequence[str | int]) -> Schema | None:
    """The part of ``schema`` that describes the value at ``path``; None where that is not clear."""
    fragment: Schema = schema
    for key in path:
        parts = [part for part in _parts(fragment, schema) if part.get('type') != 'null']
        if len(parts) != 1:
            return None
        (part,) = parts
        if isinstance(key, int):
            in_order: Sequence[Any] = part.get('prefixItems', ())
            found: Any = in_order[key] if key < len(in_order) else part.get('items')
        else:
            found = part.get('properties', {}).get(key, part.get('additionalProperties'))
        if not isinstance(found, Mapping):
            return None
        fragment = cast(Schema, found)
    return fragment


def keys_at(schema: Schema, path: Sequence[str | int]) -> tuple[str, ...]:
    """The keys that a mapping at ``path`` may have; none if any, or if it is no mapping."""
    fragment = fragment_at(schema, path)
    parts = _parts(fragment, schema) if fragment is not None else ()
    return tuple(key for part in parts for key in part.get('properties', {}))


def _parts(fragment: Schema, schema: Schema) -> list[Schema]:
    """The alternatives of a fragment, with references resolved."""
    if '$ref' in fragment:
        name = str(fragment['$ref']).rpartition('/')[2]
        return _parts(schema.get('$defs', {}).get(name, {}), schema)
    for key in ('anyOf', 'oneOf'):
        if key in fragment:
            return [part for option in fragment[key] for part in _parts(option, schema)]
    return [fragment]


def _alternatives(fragment: Schema, schema: Schema) -> list[str]:
    said: list[str] = []
    for part in _parts(fragment, schema):
        if 'const' in part or 'enum' in part:
            values = part['enum'] if 'enum' in part else [part['const']]
            said += [repr(v) if isinstance(v, str) else json.dumps(v) for v in values]
        else:
            said.append(_one(part, schema))
    return said


def _one(fragment: Schema, schema: Schema) -> str:
    kind = str(fragment.get('type'))
    if kind == 'array':
        least = fragment.get('minItems', 0)
        size = f' of at least {least} item{"s" * (least > 1)}' if least else ''
        items = fragment.get('items')
        return f'a list{size}, each item {in_words(items, schema)}' if items else f'a list{size}'
    if kind == 'object':
        fields = [
            f'{key} ({in_words(value, schema)})'
            for key, value in fragment.get('properties', {}).items()
        ]
        if fields:
            return f'a mapping with {_join(fields, "and")}'
        values: Any = fragment.get('additionalProperties')
        inner = 'a value' if isinstance(values, bool | None) else in_words(values, schema)
        return 'a mapping' if inner == 'a value' else f'a mapping, each value {inner}'
    if fragment.get('format') == 'shell-pattern':
        return 'a shell-style pattern'
    if kind == 'string' and fragment.get('minLength'):
        return 'text that is not empty'
    limits = [f'{sign} {fragment[bound]}' for bound, sign in _BOUNDS if bound in fragment]
    return ' '.join([_KINDS.get(kind, 'a value'), ' and '.join(limits)]).strip()


def _join(words: Sequence[str], last: str) -> str:
    """``a, b or c``."""
    head = ', '.join(words[:-1])
    return f'{head} {last} {words[-1]}' if head else words[-1]

"""What the strings under the fields of a params dataclass say, for its JSON schema.

They are read from the source when a schema is asked for: pydantic would do so for every class at every start
(``use_attribute_docstrings``), which takes longer than all else of a config.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator, MutableMapping
from typing import Any


def describe_fields(schema: MutableMapping[str, Any], cls: type[Any]) -> None:
    """Adds descriptions to the properties of a JSON schema that have none.

    Args:
        schema: Of ``cls``; definitions under ``$defs`` go by the names of their classes.
        cls: A dataclass.
    """
    definitions = schema.get('$defs', {})
    for part in {cls, *_dataclasses_within(cls)}:
        of_part = schema if part is cls else definitions.get(part.__name__, {})
        properties = of_part.get('properties', {})
        for name, text in _docs_of_fields(part).items():
            if name in properties:
                properties[name].setdefault('description', text)


def _dataclasses_within(cls: type[Any]) -> Iterator[type[Any]]:
    """The dataclasses that the fields of a dataclass are made of."""
    for hint in typing.get_type_hints(cls, include_extras=True).values():
        for part in _parts(hint):
            yield part
            yield from _dataclasses_within(part)


def _parts(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from _parts(argument)


def _docs_of_fields(cls: type[Any]) -> dict[str, str]:
    """By field: the string that stands under it; of base classes, too."""
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(part):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(part))
        except (OSError, TypeError):  # made at run time, or without its file
            continue
        [definition] = ast.parse(source).body
        body = getattr(definition, 'body', [])
        for field, text in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                docs[field.target.id] = inspect.cleandoc(text.value.value)
    return docs

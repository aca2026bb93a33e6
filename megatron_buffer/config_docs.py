"""What the strings under the fields of a params dataclass say, for its JSON schema.

They are read from the source when a schema is asked for: pydantic would do so for every class at every start
(``use_attribute_docstrings``), which takes longer than all else of a config.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
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
    for part in _with_nested(cls):
        # A class that is made of itself is a definition, too.
        of_part = definitions.get(part.__name__, schema if part is cls else {})
        properties = of_part.get('properties', {})
        for name, text in _docs_of_fields(part).items():
            if name in properties:
                properties[name].setdefault('description', text)


def _with_nested(cls: type[Any]) -> list[type[Any]]:
    """A dataclass and those that its fields are made of, itself perhaps among them."""
    found = [cls]
    for part in found:
        hints = typing.get_type_hints(part, include_extras=True).values()
        found += {nested for hint in hints for nested in _parts(hint)} - {*found}
    return found


def _parts(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from _parts(argument)


def _docs_of_fields(cls: type[Any]) -> dict[str, str]:
    """By field: the string that stands under it; of base classes, too."""
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if dataclasses.is_dataclass(part):
            docs |= _docs_in_module(part.__module__).get(part.__qualname__, {})
    return docs


@functools.cache
def _docs_in_module(module: str) -> dict[str, dict[str, str]]:
    """By class, then by field: all such strings of a module; none of one that has no source."""
    docs: dict[str, dict[str, str]] = {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return docs
    _collect(tree.body, '', docs)
    return docs


def _collect(body: list[ast.stmt], prefix: str, docs: dict[str, dict[str, str]]) -> None:
    for node in body:
        if isinstance(node, ast.ClassDef):
            name = f'{prefix}{node.name}'
            docs[name] = dict(_strings_under_fields(node.body))
            _collect(node.body, f'{name}.', docs)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _collect(node.body, f'{prefix}{node.name}.<locals>.', docs)


def _strings_under_fields(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            yield field.target.id, inspect.cleandoc(text.value.value)

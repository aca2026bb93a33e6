"""Descriptions of parameters are the strings that stand under their fields."""

from __future__ import annotations

import json
from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from megatron_buffer import cli
from megatron_buffer.config_docs import describe_fields


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A part of another class."""

    pattern: str
    """Which ones."""
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Is made of itself."""

    branches: list[Tree] | None = None
    """More of them."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """What is described."""

    name: str
    rules: list[Annotated[Rule, Field()]] | None = None
    """Over two
    lines."""
    said: int = Field(default=1, description='in the field')
    """Not looked at."""


class Outer:
    """Holds a class of the same name."""

    @dataclass(frozen=True, kw_only=True)
    class Params(Params):
        """Has the fields of its base, and one of its own."""

        own: int = 0
        """Its own."""


def _described(cls: type) -> dict[str, str]:
    schema = TypeAdapter(cls).json_schema()
    describe_fields(schema, cls)
    parts = [schema, *schema.get('$defs', {}).values()]
    return {
        key: value['description']
        for part in parts
        for key, value in part['properties'].items()
        if 'description' in value
    }


def test_strings_under_fields_describe_them_in_nested_classes_too() -> None:
    texts = {'rules': 'Over two\nlines.', 'said': 'in the field', 'pattern': 'Which ones.'}
    assert _described(Params) == texts
    assert _described(Outer.Params) == {**texts, 'own': 'Its own.'}


def test_a_class_within_itself_is_described_once() -> None:
    schema = TypeAdapter(Tree).json_schema()
    describe_fields(schema, Tree)
    assert schema['$defs']['Tree']['properties']['branches']['description'] == 'More of them.'


def test_a_class_without_source_has_none() -> None:
    made = dataclass(type('Made', (), {'__annotations__': {'size': int}}))
    assert _described(made) == {}


def test_every_parameter_of_ours_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(['strategies', '--json']) == 0
    axes = json.loads(capsys.readouterr().out)['axes']
    params = [
        (axis['key'], strategy['name'], param['name'], param['description'])
        for axis in axes
        for strategy in axis['strategies']
        for param in strategy['params'] or ()
    ]
    assert len(params) > 20
    assert [param for param in params if not param[-1]] == []

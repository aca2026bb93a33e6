"""What can be named in a config beyond the table of axes, and which parameters each strategy takes.

Third-party strategies are entry points of the group ``megatron_buffer.strategies``: the entry's
name is ``<axis>.<name>``, its value a class whose attribute ``Params`` is a frozen dataclass with a
``name``. They are listed from installed metadata; their code is imported only when a config names
them. Used by :mod:`megatron_buffer.config` and the command line.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from importlib import metadata
from typing import Any, cast

from pydantic import PydanticUserError, TypeAdapter

from megatron_buffer.config_types import AXES
from megatron_buffer.errors import RegistryError

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = 'megatron_buffer.strategies'

EntryPoints = Mapping[tuple[str, str], metadata.EntryPoint]
"""Third-party strategies by axis and name."""


# Third-party strategies ---------------------------------------------------------------------------


def origin(entry_point: metadata.EntryPoint) -> str:
    """The distribution that an entry point comes from, as ``name version``."""
    dist = entry_point.dist
    return f'{dist.name} {dist.version}' if dist is not None else 'an unknown distribution'


def third_party_strategies() -> EntryPoints:
    """Every third-party strategy that is installed, without importing its code.

    Raises:
        RegistryError: If two distributions (or one and ourselves) give one axis the same name.
    """
    strategies: dict[tuple[str, str], metadata.EntryPoint] = {}
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        axis, _, name = entry_point.name.partition('.')
        if axis not in AXES or not name:
            logger.warning(
                'ignoring %r of %s: an entry point of the group %s must be named <axis>.<name>, '
                'with one of the axes %s',
                entry_point.name,
                origin(entry_point),
                ENTRY_POINT_GROUP,
                ', '.join(AXES),
            )
            continue
        other = strategies.get((axis, name))
        if other is not None or name in AXES[axis].strategies:
            first = origin(other) if other is not None else 'megatron-buffer itself'
            raise RegistryError(
                f'{axis}: two strategies are named {name!r}, one from {first} and one from '
                f'{origin(entry_point)}; uninstall one of them, or have it renamed'
            )
        strategies[axis, name] = entry_point
    return strategies


def third_party_strategy(axis: str, name: str, strategies: EntryPoints | None = None) -> type[Any]:
    """Imports a third-party strategy class, and checks that its ``Params`` can be used.

    Args:
        axis: Key of the axis.
        name: Name of the strategy, as a config gives it.
        strategies: What :func:`third_party_strategies` returned, if it is at hand.

    Raises:
        RegistryError: If there is none of that name, or it cannot be used.
    """
    entry_point = (third_party_strategies() if strategies is None else strategies).get((axis, name))
    if entry_point is None:
        raise RegistryError(f'{axis}: no installed distribution provides a strategy {name!r}')
    what = f'{axis}: strategy {name!r} of {origin(entry_point)} ({entry_point.value})'
    try:
        cls: Any = entry_point.load()
    except Exception as error:
        raise RegistryError(
            f'{what} cannot be imported: {type(error).__name__}: {error}'
        ) from error
    params: Any = getattr(cls, 'Params', None)
    if not isinstance(params, type) or not dataclasses.is_dataclass(params):
        raise RegistryError(f'{what} has no dataclass as its attribute Params')
    if not cast(Any, params).__dataclass_params__.frozen:
        raise RegistryError(f'{what}: its Params must be a frozen dataclass')
    if getattr(params, 'name', None) != name:
        raise RegistryError(
            f"{what}: its Params must have a field `name` with default {name!r}, found "
            f"{getattr(params, 'name', None)!r}"
        )
    try:
        param_docs(params)
    except (PydanticUserError, NameError) as error:
        raise RegistryError(
            f'{what}: its Params have a field of an unusable type: {error}'
        ) from error
    return cls


# Parameters ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamDoc:
    """One parameter of a strategy, for people.

    Attributes:
        name: Key in YAML.
        expected: What a value must be, such as ``an integer >= 1 or null``.
        required: Whether it has no default.
        default: Default, as JSON holds it.
        description: What it means, on one line.
        choices: The valid values, where it is a choice of words.
    """

    name: str
    expected: str
    required: bool
    default: Any
    description: str
    choices: tuple[str, ...]

    @property
    def default_text(self) -> str:
        """The default as YAML writes it."""
        return self.default if isinstance(self.default, str) else json.dumps(self.default)


@functools.cache
def adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """Pydantic's validator of a params dataclass."""
    return TypeAdapter(cls)


@functools.cache
def param_docs(cls: type[Any]) -> tuple[ParamDoc, ...]:
    """The parameters of a params dataclass in order, without its ``name``."""
    schema = adapter(cls).json_schema()
    required = schema.get('required', [])
    return tuple(
        ParamDoc(
            name=name,
            expected=_expected(fragment, schema),
            required=name in required,
            default=fragment.get('default'),
            description=' '.join(fragment.get('description', '').split()),
            choices=tuple(v for v in fragment.get('enum', ()) if isinstance(v, str)),
        )
        for name, fragment in schema.get('properties', {}).items()
        if name != 'name'
    )


def one_line_meaning(cls: type[Any]) -> str:
    """The first line of a params dataclass's docstring."""
    return (cls.__doc__ or '').strip().partition('\n')[0]


def _expected(fragment: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A JSON schema fragment in words."""
    if '$ref' in fragment:
        name = str(fragment['$ref']).rpartition('/')[2]
        return _expected(schema.get('$defs', {}).get(name, {}), schema)
    for key in ('anyOf', 'oneOf'):
        if key in fragment:
            return ' or '.join(_expected(part, schema) for part in fragment[key])
    if 'const' in fragment:
        return json.dumps(fragment['const'])
    if 'enum' in fragment:
        return 'one of ' + ', '.join(map(str, fragment['enum']))
    kind = fragment.get('type')
    if kind == 'array':
        return f'a list, each item {_expected(fragment.get("items", {}), schema)}'
    words = {
        'integer': 'an integer',
        'number': 'a number',
        'boolean': 'true or false',
        'string': 'text',
        'null': 'null',
        'object': 'a mapping',
    }
    bounds = (
        ('minimum', '>='),
        ('exclusiveMinimum', '>'),
        ('maximum', '<='),
        ('exclusiveMaximum', '<'),
    )
    limits = [f'{sign} {fragment[bound]}' for bound, sign in bounds if bound in fragment]
    return ' '.join([words.get(str(kind), 'a value'), ' and '.join(limits)]).strip()

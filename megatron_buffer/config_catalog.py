"""What can be named in a config beyond the table of axes, and which parameters each strategy takes.

Third-party strategies are entry points of the group ``megatron_buffer.strategies``: the entry's
name is ``<axis>.<name>``, its value a class whose attribute ``Params`` is a frozen dataclass with a
``name``. A finalize step is ``finalize_step.<name>``; its ``Params`` are its options. They are listed
from installed metadata; their code is imported only when a config names them. Used by
:mod:`megatron_buffer.config` and the command line.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any, cast

from pydantic import PydanticUserError
from pydantic_core import to_jsonable_python

from megatron_buffer.config_base import adapter
from megatron_buffer.config_docs import describe_fields
from megatron_buffer.config_steps import STEPS
from megatron_buffer.config_types import AXES
from megatron_buffer.config_words import in_words, words_of_choice
from megatron_buffer.errors import RegistryError

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = 'megatron_buffer.strategies'
FINALIZE_STEP = 'finalize_step'
"""What stands before the dot for a step of ``finalize``, in the place of an axis."""

EntryPoints = Mapping[tuple[str, str], metadata.EntryPoint]
"""Third-party strategies by axis and name; finalize steps under :data:`FINALIZE_STEP`."""


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
    own_names = _own_names()
    strategies: dict[tuple[str, str], metadata.EntryPoint] = {}
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        axis, _, name = entry_point.name.partition('.')
        if axis not in own_names or not name:
            logger.warning(
                'ignoring %r of %s: an entry point of the group %s must be named <axis>.<name>, '
                'with one of the axes %s',
                entry_point.name,
                origin(entry_point),
                ENTRY_POINT_GROUP,
                ', '.join(own_names),
            )
            continue
        other = strategies.get((axis, name))
        if other is not None or name in own_names[axis]:
            first = origin(other) if other is not None else 'megatron-buffer itself'
            what = 'finalize: two steps' if axis == FINALIZE_STEP else f'{axis}: two strategies'
            raise RegistryError(
                f'{what} are named {name!r}, one from {first} and one from '
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
    cls = _load(entry_point, what)
    if getattr(cls.Params, 'name', None) != name:
        raise RegistryError(
            f"{what}: its Params must have a field `name` with default {name!r}, found "
            f"{getattr(cls.Params, 'name', None)!r}"
        )
    return cls


def third_party_step(name: str, strategies: EntryPoints | None = None) -> type[Any]:
    """Imports a third-party finalize step, and checks that it can be used.

    Args:
        name: Name of the step, as ``finalize.order`` gives it.
        strategies: What :func:`third_party_strategies` returned, if it is at hand.

    Raises:
        RegistryError: If there is none of that name, or it cannot be used.
    """
    found = third_party_strategies() if strategies is None else strategies
    entry_point = found.get((FINALIZE_STEP, name))
    if entry_point is None:
        raise RegistryError(f'finalize: no installed distribution provides a step {name!r}')
    what = f'finalize: step {name!r} of {origin(entry_point)} ({entry_point.value})'
    cls = _load(entry_point, what)
    if not callable(getattr(cls, 'run', None)):
        raise RegistryError(f'{what} has no method run(self, ctx)')
    return cls


def third_party_origins(config: Any) -> list[str]:
    """Where each third-party strategy and step that a config names comes from, with its version.

    Ranks whose installations differ differ here, though their configs are equal.

    Args:
        config: A :class:`megatron_buffer.config.BufferConfig`.
    """
    named = [(axis, str(getattr(config, axis).name)) for axis in AXES]
    named += [(FINALIZE_STEP, name) for name in getattr(config.finalize, 'order', None) or ()]
    own_names = _own_names()
    others = [(axis, name) for axis, name in named if name not in own_names[axis]]
    found: EntryPoints = third_party_strategies() if others else {}
    return [f'{key[0]} {key[1]} of {origin(found[key])}' for key in others if key in found]


def _own_names() -> dict[str, Collection[str]]:
    """What is built in, of each axis and of finalize's steps."""
    return {**{key: axis.strategies for key, axis in AXES.items()}, FINALIZE_STEP: STEPS}


def _load(entry_point: metadata.EntryPoint, what: str) -> Any:
    """The class behind an entry point, whose ``Params`` a config can fill."""
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
def schema_of(cls: type[Any]) -> Mapping[str, Any]:
    """The JSON schema of a params dataclass."""
    schema = adapter(cls).json_schema()
    describe_fields(schema, cls)
    return schema


@functools.cache
def param_docs(cls: type[Any]) -> tuple[ParamDoc, ...]:
    """The parameters of a params dataclass in order, without its ``name``."""
    if all(field.name == 'name' for field in dataclasses.fields(cls)):
        return ()
    schema = schema_of(cls)
    required = schema.get('required', [])
    made = {
        field.name: to_jsonable_python(field.default_factory())
        for field in dataclasses.fields(cls)
        if field.default_factory is not dataclasses.MISSING
    }
    return tuple(
        ParamDoc(
            name=name,
            expected=in_words(fragment, schema),
            required=name in required,
            default=fragment.get('default', made.get(name)),
            description=' '.join(fragment.get('description', '').split()),
            choices=words_of_choice(fragment, schema),
        )
        for name, fragment in schema.get('properties', {}).items()
        if name != 'name'
    )


def one_line_meaning(cls: type[Any]) -> str:
    """The first line of a params dataclass's docstring."""
    return (cls.__doc__ or '').strip().partition('\n')[0]

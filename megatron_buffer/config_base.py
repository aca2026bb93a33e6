"""What all parameter classes of strategies share. Imports neither torch nor megatron."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter
from pydantic_core import ArgsKwargs, PydanticCustomError, to_jsonable_python

_STRICT = ConfigDict(strict=True, extra='forbid')


@functools.cache
def adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """Pydantic's validator of a params dataclass."""
    return TypeAdapter(cls)


def as_json(params: Any) -> Any:
    """The values of a params dataclass, of types that JSON has."""
    if getattr(params, '__pydantic_config__', None) is _STRICT:  # our own: plain as they are
        return to_jsonable_python(dataclasses.asdict(params))
    kind = cast(type[Any], type(params))
    return adapter(kind).dump_python(params, mode='json')


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def params_dataclass[T](cls: type[T]) -> type[T]:
    """Makes a frozen dataclass whose values pydantic checks strictly, wherever they come from.

    As with ``pydantic.dataclasses.dataclass``, a default is not checked and a wrong value is a
    ``ValidationError``. But the validator of a class is made when it is given its first value: a config
    needs few of them, and those of all classes take longer than all else of a command's start.
    """
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    made.__pydantic_config__ = _STRICT
    fill = made.__init__

    @functools.wraps(fill)
    def init(self: Any, *args: Any, **values: Any) -> None:
        if args or values:
            adapter(made).validator.validate_python(ArgsKwargs(args, values), self_instance=self)
        else:
            fill(self)

    made.__init__ = init
    return made


def _each_once(items: Sequence[Any]) -> Sequence[Any]:
    """Refuses a pattern that an earlier item has already."""
    first: dict[str, int] = {}
    for index, item in enumerate(items):
        pattern = item if isinstance(item, str) else item.pattern
        if pattern in first:
            raise PydanticCustomError(
                'given_twice',
                'the pattern {pattern} is given already, as item [{first}]; keep one of the two',
                {'pattern': repr(pattern), 'first': first[pattern], 'index': index},
            )
        first[pattern] = index
    return items


PositiveElems = Annotated[int, Field(ge=1)]
PositiveBytes = Annotated[int, Field(ge=1)]
PositiveCount = Annotated[int, Field(ge=1)]

Pattern = Annotated[str, Field(min_length=1, json_schema_extra={'format': 'shell-pattern'})]
"""A shell-style pattern (fnmatch) of a parameter's or module's full name; ``*`` matches dots."""

EachOnce = AfterValidator(_each_once)
"""For a list of patterns, or of rules with a ``pattern``: no pattern stands in it twice."""

PGB = 'megatron/core/distributed/param_and_grad_buffer.py'
DDP = 'megatron/core/distributed/distributed_data_parallel.py: DistributedDataParallel'
DIST_OPT = 'megatron/core/optimizer/distrib_optimizer.py'
LAYOUT = 'megatron/core/optimizer/param_layout.py'
FINALIZE = 'megatron/core/distributed/finalize_model_grads.py'
PER_BUFFER_LAYOUT = f'{DIST_OPT}: DistributedOptimizer._compute_per_buffer_param_layout'


class StrategyParams(Protocol):
    """What the parameters of all strategies have in common, ours and third parties'."""

    @property
    def name(self) -> str: ...

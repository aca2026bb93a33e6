"""What all parameter classes of strategies share. Imports neither torch nor megatron."""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(strict=True, extra='forbid')


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

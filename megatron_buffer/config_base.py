"""What all parameter classes of strategies share. Imports neither torch nor megatron."""

from typing import Annotated, Protocol

from pydantic import ConfigDict, Field

STRICT = ConfigDict(strict=True, extra='forbid', use_attribute_docstrings=True)

PositiveElems = Annotated[int, Field(ge=1)]
Pattern = Annotated[str, Field(min_length=1)]
"""A shell-style pattern (fnmatch) of a parameter's or module's full name; ``*`` matches dots too."""

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

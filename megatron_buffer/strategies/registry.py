"""From a config's parameters to the strategy object that acts on them.

A built-in strategy registers itself with :func:`strategy`; a third-party one comes through the
entry-point group ``megatron_buffer.strategies`` and is imported only when a config names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_buffer.config_base import StrategyParams
from megatron_buffer.errors import RegistryError

_AXIS_MODULES = {
    'buffer_grouping': ('grouping',),
    'param_order': ('order', 'recorded'),
    'bucketing': ('bucketing', 'time_optimal'),
    'bucket_isolation': ('isolation',),
    'padding': ('padding',),
    'bucket_groups': ('bucket_groups',),
    'readiness': ('readiness',),
    'dispatch_order': ('dispatch',),
    'unused_params': ('unused',),
    'scaling': ('scaling',),
    'accumulation': ('accumulation',),
    'grad_reduce': ('reduce',),
    'param_gather': ('gather',),
    'finalize': ('finalize',),
}

_BUILT_IN: dict[tuple[str, type], type] = {}
_T = TypeVar('_T', bound=type)


def strategy(axis: str, params_type: type) -> Callable[[_T], _T]:
    """Class decorator: this class acts on ``params_type`` of ``axis``.

    Args:
        axis: YAML key of the axis.
        params_type: The frozen dataclass of the config that selects the class.

    Raises:
        RegistryError: If another class already does.
    """

    def register(cls: _T) -> _T:
        key = (axis, params_type)
        if key in _BUILT_IN:
            raise RegistryError(
                f'{axis}: {cls.__qualname__} and {_BUILT_IN[key].__qualname__} both act on '
                f'{params_type.__name__}'
            )
        _BUILT_IN[key] = cls
        return cls

    return register


def make_strategy(axis: str, params: StrategyParams) -> Any:
    """Returns the strategy object for ``params``, as the config holds them for ``axis``.

    Raises:
        RegistryError: If nothing is registered for them.
    """
    if axis not in _AXIS_MODULES:
        raise RegistryError(f'unknown axis {axis!r}; there are {", ".join(_AXIS_MODULES)}')
    for module in _AXIS_MODULES[axis]:
        importlib.import_module(f'megatron_buffer.strategies.{module}')
    cls: type[Any] | None = _BUILT_IN.get((axis, type(params)))
    if cls is None:
        from megatron_buffer.config_catalog import third_party_strategy

        cls = third_party_strategy(axis, params.name)
    return cls(params)

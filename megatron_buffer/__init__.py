"""Megatron-Core's data-parallel buffer, with every decision in it chosen from a YAML config.

``install()`` rebinds Megatron-Core's classes to ours before a model is built; ``uninstall()`` puts
everything back. Importing this package imports neither torch nor Megatron and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = '0.1.0'

_EXPORTS = {
    'install': 'patching',
    'uninstall': 'patching',
    'activated': 'patching',
    'load_config': 'config',
    'dump_config': 'config',
    'plan_layout': 'layout',
    'ParamSpec': 'layout',
    'DistributedDataParallel': 'ddp',
    'DistributedOptimizer': 'optimizer',
    'report_loss': 'observe.session',
}
__all__ = [
    'DistributedDataParallel',
    'DistributedOptimizer',
    'ParamSpec',
    'activated',
    'dump_config',
    'install',
    'load_config',
    'plan_layout',
    'report_loss',
    'uninstall',
]

if TYPE_CHECKING:
    from megatron_buffer.config import dump_config, load_config
    from megatron_buffer.ddp import DistributedDataParallel
    from megatron_buffer.layout import ParamSpec, plan_layout
    from megatron_buffer.observe.session import report_loss
    from megatron_buffer.optimizer import DistributedOptimizer
    from megatron_buffer.patching import activated, install, uninstall


def __getattr__(name: str) -> Any:
    """Imports what is asked for (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module = importlib.import_module(f'{__name__}.{_EXPORTS[name]}')
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

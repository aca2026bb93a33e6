"""For tests of strategies, ours and third parties': the conformance kit, and a harness for several ranks.

    from megatron_buffer.testing import check_layout_strategy, check_runtime_strategy

    check_layout_strategy('bucketing', MyRule(MyRuleParams())).raise_if_failed()
    check_runtime_strategy({'bucketing': 'my_rule'}, world_sizes=(2, 4)).raise_if_failed()

Neither pytest nor Hypothesis is needed; any test runner will do, or none. Importing this package imports
neither torch nor Megatron. Upstream has no counterpart.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    'ConformanceError': 'report',
    'Problem': 'report',
    'Report': 'report',
    'check_layout_strategy': 'layout_kit',
    'Example': 'examples',
    'check_runtime_strategy': 'runtime_kit',
    'RuntimeCase': 'runtime_cases',
    'RankOutcome': 'harness',
    'RanksFailed': 'harness',
    'first_failure': 'harness',
    'free_port': 'harness',
    'run_ranks': 'harness',
}
__all__ = [
    'ConformanceError',
    'Example',
    'Problem',
    'RankOutcome',
    'RanksFailed',
    'Report',
    'RuntimeCase',
    'check_layout_strategy',
    'check_runtime_strategy',
    'first_failure',
    'free_port',
    'run_ranks',
]

if TYPE_CHECKING:
    from megatron_buffer.testing.examples import Example
    from megatron_buffer.testing.harness import (
        RankOutcome,
        RanksFailed,
        first_failure,
        free_port,
        run_ranks,
    )
    from megatron_buffer.testing.layout_kit import check_layout_strategy
    from megatron_buffer.testing.report import ConformanceError, Problem, Report
    from megatron_buffer.testing.runtime_cases import RuntimeCase
    from megatron_buffer.testing.runtime_kit import check_runtime_strategy


def __getattr__(name: str) -> Any:
    """Imports what is asked for (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_EXPORTS[name]}'), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

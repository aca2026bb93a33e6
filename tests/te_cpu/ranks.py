"""Test functions on several processes that have Transformer Engine loaded."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.harness import run_ranks

run_te_ranks: Callable[..., list[Any]] = partial(run_ranks, preload='tests.te_cpu.preload')

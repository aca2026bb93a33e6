"""As ``step``, on 4 ranks, which takes longer."""

from __future__ import annotations

from typing import Any

from benchmarks.step import run_on


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio`` and ``cases``."""
    return run_on(4, reps)

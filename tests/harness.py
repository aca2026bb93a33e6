"""The process harness, from the package: `megatron_buffer.testing.harness`; and where the checkout is."""

from pathlib import Path

from megatron_buffer.testing.harness import (
    RankOutcome,
    RanksFailed,
    first_failure,
    free_port,
    run_ranks,
)

__all__ = ['ROOT', 'RankOutcome', 'RanksFailed', 'first_failure', 'free_port', 'run_ranks']

ROOT = Path(__file__).resolve().parent.parent

"""Says on stderr how a sweep goes: a line per finished run, and on a terminal a bar with the time left.

Upstream has no counterpart.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from megatron_buffer.ablation.plan import Run
from megatron_buffer.ablation.runner import summary_line


class Progress:
    """Is told of runs that begin and end.

    Args:
        runs: All of the sweep.
        todo: Those that are to run now.
        stale: Finished runs in the folder that the sweep no longer asks for.
        folder: Of the results.
        warning: To be said first, or ''.
        quiet: Say nothing.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        todo: Sequence[Run],
        stale: int,
        folder: Path,
        warning: str,
        *,
        quiet: bool,
    ) -> None:
        self._total, self._left = len(runs), len(todo)
        self._stale, self._folder, self._warning = stale, folder, warning
        self._active: list[Run] = []
        self._seconds: list[float] = []
        self._since_s = 0.0
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn('{task.completed}/{task.total}'),
            BarColumn(),
            TextColumn('{task.description}', markup=False),
            console=self._console,
            transient=True,
            refresh_per_second=2,  # it must not disturb what is measured
            disable=quiet or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task('', total=self._total, completed=self._total - self._left)

    def __enter__(self) -> Progress:
        self._since_s = time.monotonic()
        if self._warning:
            self._say(f'note: {self._warning}')
        if self._left < self._total:
            self._say(
                f'{self._total - self._left} of {self._total} runs have finished before in {self._folder}'
            )
        if self._stale:
            self._say(
                f'{self._stale} finished runs there are of arms that have changed, or are not asked for now; '
                'they are left out'
            )
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def started(self, run: Run) -> None:
        """A run has begun."""
        self._active.append(run)
        self._show()

    def ended(self, run: Run, result: dict[str, Any]) -> None:
        """A run has ended and is stored."""
        self._active.remove(run)
        self._left -= 1
        self._seconds.append(result['wall_s'])
        number = f'[{self._total - self._left}/{self._total}]'
        seed = f'repeat {run.repeat}, seed {run.seed}'
        left = f'; {self._time_left()} left' if self._left else ''
        self._say(f'{number} {run.arm}, {seed}: {summary_line(result)}{left}')
        self._show()

    def _time_left(self) -> str:
        """From what runs took so far; several at a time shorten it."""
        elapsed_s = time.monotonic() - self._since_s
        at_a_time = max(1.0, sum(self._seconds) / max(elapsed_s, 1e-9))
        seconds = statistics.fmean(self._seconds) * self._left / at_a_time
        if seconds < 90:
            return f'{seconds:.0f} s'
        minutes = round(seconds / 60)
        return f'{minutes} min' if minutes < 120 else f'{minutes // 60} h {minutes % 60} min'

    def _show(self) -> None:
        names = ', '.join(run.arm for run in self._active)
        left = f'; {self._time_left()} left' if self._seconds and self._left else ''
        self._bar.update(
            self._task, completed=self._total - self._left, description=f'{names}{left}'
        )

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

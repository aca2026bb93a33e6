"""The folder of a sweep: what has run, and that nothing half-written counts.

    RUN_DIR/sweep.yaml      the sweep file
    RUN_DIR/sweep.json      the same, resolved, with the list of all runs
    RUN_DIR/results.jsonl   one line per finished run, in the order of the list
    RUN_DIR/runs/NAME/      result.json, log.txt, config.yaml, command.txt, stats/rank-<r>.jsonl

A run works in ``runs/.unfinished-NAME`` and gets its name when all of it is written. Upstream has no
counterpart.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_buffer.ablation.plan import Run
from megatron_buffer.errors import ConfigError

UNFINISHED = '.unfinished-'
RESULTS, SWEEP = 'results.jsonl', 'sweep.json'
_LOCK = '.lock'


class Store:
    """A sweep's folder, locked for one process at a time.

    Args:
        folder: Where it is; made if it is not there.

    Raises:
        ConfigError: If another sweep runs there, or it is a folder of something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.runs = self.folder / 'runs'
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / _LOCK).open('a+')  # held until the process ends
        except OSError as error:
            raise ConfigError(
                f'{folder} cannot be written: {error.strerror}', source=str(folder)
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            pid = self._lock.read().strip() or 'another one'
            self._lock.close()
            raise ConfigError(
                f'{folder}: a sweep runs there already (process {pid}); wait for it, or use another folder',
                source=str(folder),
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def close(self) -> None:
        """Lets go of the lock."""
        self._lock.close()

    def begin(self, run: Run) -> Path:
        """An empty folder for a run to work in; what an earlier try left there is gone."""
        folder = self.runs / f'{UNFINISHED}{run.name}'
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def finish(self, run: Run, result: dict[str, Any]) -> None:
        """Writes a run's result and gives its folder its name."""
        folder, final = self.runs / f'{UNFINISHED}{run.name}', self.runs / run.name
        write_whole(folder / 'result.json', json.dumps(result, allow_nan=False))
        if final.exists():  # a failed run that was tried again
            shutil.rmtree(final)
        folder.rename(final)
        _sync(self.runs)

    def write_results(self, runs: Sequence[Run], results: dict[str, dict[str, Any]]) -> None:
        """Writes ``results.jsonl`` anew."""
        lines = [
            json.dumps(results[run.name], allow_nan=False) for run in runs if run.name in results
        ]
        write_whole(self.folder / RESULTS, ''.join(f'{line}\n' for line in lines))

    def write_sweep(self, text: str, resolved: dict[str, Any]) -> None:
        """Keeps what the sweep file says, and what it means."""
        write_whole(self.folder / 'sweep.yaml', text)
        write_whole(self.folder / SWEEP, json.dumps(resolved, indent=1, default=str) + '\n')


def check_folder(folder: Path) -> None:
    """Refuses a folder that is in use for something else.

    Raises:
        ConfigError: In one sentence.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f'{folder} is a file; expected a folder for the results', source=str(folder)
        )
    if folder.is_dir() and not (folder / SWEEP).exists():
        others = [name for name in os.listdir(folder) if name not in (_LOCK, 'runs', 'sweep.yaml')]
        if others:
            raise ConfigError(
                f'{folder} holds other things ({", ".join(sorted(others)[:3])}) and no sweep; name a folder '
                'that is empty or not there yet',
                source=str(folder),
            )


def finished_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Results of all finished runs in a folder, also of those that the sweep no longer asks for, by name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / 'runs').glob('*/result.json')):
        if path.parent.name.startswith(UNFINISHED):
            continue
        try:
            found[path.parent.name] = json.loads(path.read_text(encoding='utf-8'))
        except (OSError, ValueError):
            continue  # damaged from outside: it runs again
    return found


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that there is the old one or the new one, and never a part."""
    beside = path.with_name(f'.{path.name}.new')
    with beside.open('w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

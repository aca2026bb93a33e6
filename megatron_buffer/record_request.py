"""Whether to record a profile: the flags say it to the launcher, the environment to the rest.

Imports neither torch nor megatron. Upstream has no counterpart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from megatron_buffer.errors import ConfigError, ConflictError

PATH_VARIABLE = 'MEGATRON_BUFFER_RECORD'
"""Environment variable with the path of the profile to write; ``--custom-buffer-record`` sets it."""
STEPS_VARIABLE = 'MEGATRON_BUFFER_RECORD_STEPS'
"""Environment variable with the number of iterations to record."""
WARMUP_STEPS = 2
"""Iterations before the first recorded one: caches fill, and gradients are not overlapped yet."""
DEFAULT_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """What is to be recorded."""

    path: str
    """Absolute path of the profile."""
    steps: int = DEFAULT_STEPS
    """Iterations to record."""

    @property
    def steps_needed(self) -> int:
        """Iterations until the profile is written."""
        return WARMUP_STEPS + self.steps


def requested() -> RecordRequest | None:
    """What the environment asks for; None for nothing.

    Raises:
        ConfigError: If the number of steps is none.
    """
    path, steps = os.environ.get(PATH_VARIABLE, ''), os.environ.get(STEPS_VARIABLE, '')
    if not path:
        return None
    if steps and not (steps.isascii() and steps.isdecimal() and int(steps) > 0):
        raise ConfigError(
            f'the environment variable {STEPS_VARIABLE} is {steps!r}; it must be a number of iterations, '
            'at least 1'
        )
    return RecordRequest(path=_absolute(path), steps=int(steps or DEFAULT_STEPS))


def request(path: str, steps: int | None = None) -> None:
    """Puts a request into the environment; absolute, because the script may change its folder."""
    os.environ[PATH_VARIABLE] = _absolute(path)
    os.environ[STEPS_VARIABLE] = str(steps or DEFAULT_STEPS)


def check_flags(path: str | None, steps: int | None) -> None:
    """Refuses a recording that could not be written at its end.

    Args:
        path: Value of ``--custom-buffer-record``, if given.
        steps: Value of ``--custom-buffer-record-steps``, if given.

    Raises:
        ConfigError: In one sentence; about the place of the file on rank 0 only, which writes it.
    """
    if steps is not None and path is None:
        raise ConfigError(
            f'--custom-buffer-record-steps {steps} has no effect without --custom-buffer-record PROFILE'
        )
    if steps is not None and steps < 1:
        raise ConfigError(f'--custom-buffer-record-steps is {steps}; it must be at least 1')
    if path == '':
        raise ConfigError('--custom-buffer-record is empty; it must be the path of a file to write')
    if path is not None and os.environ.get('RANK', '0') == '0':
        check_writable(path)


def check_length(args: Any) -> None:
    """Refuses a run that ends before its recording does.

    Args:
        args: Megatron's arguments.

    Raises:
        ConflictError: Naming both numbers.
    """
    wanted, iterations = requested(), getattr(args, 'train_iters', None)
    if wanted is not None and iterations is not None and iterations < wanted.steps_needed:
        raise ConflictError(
            f'--custom-buffer-record takes {wanted.steps_needed} iterations ({WARMUP_STEPS} to warm up, '
            f'{wanted.steps} recorded), and --train-iters is {iterations}: train longer, or record fewer '
            'with --custom-buffer-record-steps'
        )


def check_writable(path: str) -> None:
    """Refuses a path at which no file can be written.

    Raises:
        ConfigError: Naming the path, and what is wrong with it.
    """
    folder = os.path.dirname(_absolute(path))
    if os.path.isdir(os.path.expanduser(path)):
        problem = 'it is a folder; name a file in it'
    elif not os.path.isdir(folder):
        problem = f'the folder {folder} does not exist; make it first'
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f'the folder {folder} may not be written to'
    else:
        return
    raise ConfigError(f'the profile cannot be written to {path!r}: {problem}', source=path)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))

"""What is to be observed: the flags say it to the launcher, the environment to the rest.

Imports neither torch nor megatron. Upstream has no counterpart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_buffer.errors import ConfigError

STATS_VARIABLE = 'MEGATRON_BUFFER_STATS'
"""Environment variable with the folder for statistics; ``--custom-buffer-stats`` sets it."""
TRACE_VARIABLE = 'MEGATRON_BUFFER_TRACE'
"""Environment variable with the folder for traces; ``--custom-buffer-trace`` sets it."""
TRACE_STEPS_VARIABLE = 'MEGATRON_BUFFER_TRACE_STEPS'
"""Environment variable with the number of iterations to trace."""
METRICS_VARIABLE = 'MEGATRON_BUFFER_METRICS'
"""Environment variable that turns metrics on when it is 1; ``--custom-buffer-metrics`` sets it."""
DEFAULT_TRACE_STEPS = 5

_failed = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be observed in this process; at least one of the three."""

    stats: str | None = None
    """Absolute path of the folder for statistics."""
    trace: str | None = None
    """Absolute path of the folder for traces."""
    trace_steps: int = DEFAULT_TRACE_STEPS
    """Iterations to trace, from the first one on."""
    metrics: bool = False
    """Write to the TensorBoard and Weights & Biases writers of megatron.training."""


def requested() -> Request | None:
    """What the environment asks for; None for nothing.

    Raises:
        ConfigError: If the number of traced steps is none.
    """
    stats, trace = os.environ.get(STATS_VARIABLE), os.environ.get(TRACE_VARIABLE)
    metrics = os.environ.get(METRICS_VARIABLE, '0') not in ('', '0')
    if not (stats or trace or metrics):
        return None
    steps = os.environ.get(TRACE_STEPS_VARIABLE, '')
    if steps and not (steps.isascii() and steps.isdecimal() and int(steps) > 0):
        raise ConfigError(
            f'the environment variable {TRACE_STEPS_VARIABLE} is {steps!r}; it must be a number of '
            'iterations, at least 1'
        )
    return Request(
        stats=_absolute(stats) if stats else None,
        trace=_absolute(trace) if trace else None,
        trace_steps=int(steps or DEFAULT_TRACE_STEPS),
        metrics=metrics,
    )


def request(
    *,
    stats: str | None = None,
    trace: str | None = None,
    trace_steps: int | None = None,
    metrics: bool = False,
) -> None:
    """Puts a request into the environment; absolute, because the script may change its folder."""
    if stats is not None:
        os.environ[STATS_VARIABLE] = _absolute(stats)
    if trace is not None:
        os.environ[TRACE_VARIABLE] = _absolute(trace)
        os.environ[TRACE_STEPS_VARIABLE] = str(trace_steps or DEFAULT_TRACE_STEPS)
    if metrics:
        os.environ[METRICS_VARIABLE] = '1'


def check_flags(
    *, stats: str | None = None, trace: str | None = None, trace_steps: int | None = None
) -> None:
    """Refuses what could not be written; every rank writes, so every rank checks.

    Args:
        stats: Value of ``--custom-buffer-stats``, if given.
        trace: Value of ``--custom-buffer-trace``, if given.
        trace_steps: Value of ``--custom-buffer-trace-steps``, if given.

    Raises:
        ConfigError: In one sentence.
    """
    if trace_steps is not None and trace is None:
        raise ConfigError(
            f'--custom-buffer-trace-steps {trace_steps} has no effect without '
            '--custom-buffer-trace DIR'
        )
    if trace_steps is not None and trace_steps < 1:
        raise ConfigError(f'--custom-buffer-trace-steps is {trace_steps}; it must be at least 1')
    for flag, path in (('--custom-buffer-stats', stats), ('--custom-buffer-trace', trace)):
        if path == '':
            raise ConfigError(f'{flag} is empty; it must be the path of a folder to write to')
        if path is not None:
            make_folder(path, flag)


def make_folder(path: str, flag: str) -> str:
    """Makes the folder where it is missing, and checks that files can be written there.

    Returns:
        Its absolute path.

    Raises:
        ConfigError: Naming the flag, the folder and what is wrong with it.
    """
    folder = _absolute(path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        what = 'it is a file' if os.path.isfile(folder) else (error.strerror or str(error)).lower()
        raise ConfigError(
            f'{flag}: the folder {path!r} cannot be made: {what}; name a folder that can be written to',
            source=path,
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f'{flag}: the folder {path!r} may not be written to; name another one', source=path
        )
    return folder


@contextlib.contextmanager
def noting_failure() -> Iterator[None]:
    """Remembers that a script has ended by an exception or with another exit code than 0."""
    global _failed
    try:
        yield
    except SystemExit as error:
        _failed = error.code not in (None, 0)
        raise
    except BaseException:
        _failed = True
        raise


def has_failed() -> bool:
    """Whether :func:`noting_failure` has seen the script fail."""
    return _failed


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))

"""Why a run failed, from its exit code and its log. Upstream has no counterpart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_buffer import errors
from megatron_buffer.ablation import keeper

TAIL_LINES = 40
_MAX_LOG_BYTES = 1 << 20
_RAISED = re.compile(
    r'^(?:\[?\w*rank\d+\]?:\s*)?([\w.]*?)(\w+(?:Error|Failure|Exception|Interrupt))(?:: ?(.*))?$'
)
_TORCHRUN = re.compile(r'[EW]\d{4} [^\]]*torch/distributed/elastic/')
_ONE_SENTENCE = re.compile(r'^megatron-buffer: error: (.*)')
_OURS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.MegatronBufferError)
}


def describe(log: Path, code: int, time_limit_s: int) -> dict[str, Any]:
    """What is recorded of a run that failed.

    Args:
        log: Everything that it said.
        code: Exit code of the keeper.
        time_limit_s: The limit that it ran under.

    Returns:
        ``class`` (an error class of ours, or another one; '' if none was seen), ``message``,
        ``exit_code`` and ``log_tail``.
    """
    lines = _lines(log)
    kind, message = _error_in(lines)
    if code == keeper.TIME_IS_UP:
        kind, message = 'TimeLimit', f'stopped after {time_limit_s} s, the time limit of a run'
    elif not message:
        message = _how_it_ended(code)
    return {
        'class': kind,
        'message': message,
        'exit_code': code,
        'log_tail': _without_launcher(lines)[-TAIL_LINES:],
    }


def _lines(log: Path) -> list[str]:
    with log.open('rb') as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _MAX_LOG_BYTES))
        return file.read().decode('utf-8', 'replace').splitlines()


def _error_in(lines: list[str]) -> tuple[str, str]:
    """Class and message: of ours before others, the first one that is no echo of another rank's."""
    found: list[tuple[int, str, str]] = []
    before = ''
    for line in _without_launcher(lines):
        sentence = _ONE_SENTENCE.match(line)
        raised = _RAISED.match(line)
        if sentence:
            found.append((0, 'ConfigError', sentence[1]))
        elif raised:
            echo = raised[2] == 'RankFailure'
            rank = 2 if echo else 0 if raised[2] in _OURS else 1
            # A bare assertion says nothing but its code, on the line above.
            found.append((rank, raised[2], raised[3] or f'raised by: {before.strip()}'))
        before = line
    return min(found, key=lambda item: item[0])[1:] if found else ('', '')


def _how_it_ended(code: int) -> str:
    if code == keeper.NOT_FOUND:
        return 'the command could not be started'
    if code > 128:
        return f'ended by signal {code - 128}, without a word'
    return f'ended with exit code {code}, without an error that could be recognised'


def _without_launcher(lines: list[str]) -> list[str]:
    """The lines without torchrun's report at the end, which says no more."""
    reports = (i for i, line in enumerate(lines) if _TORCHRUN.match(line))
    end = next(reports, len(lines))
    return lines[:end] or lines

"""One file of upstream's tests in one arm: its ranks are started, watched, and started again where needed.

Upstream has no counterpart.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import megatron_buffer
from megatron_buffer.testing.upstream_plugin import (
    COLLECTIVE_LIMIT_VARIABLE,
    CONFIG_VARIABLE,
    DONE_VARIABLE,
    REPORT_VARIABLE,
    STOPPED_TOGETHER,
)
from megatron_buffer.testing.upstream_results import (
    FileResult,
    Outcome,
    RankRecord,
    merge_ranks,
    read_record,
)

_COLLECTIVE_LIMIT_S = 60
_POLL_S = 0.2
_GRACE_S = 10
_LAST_LINES = 3
_CONTAINER = '26.06'
_OWN_VARIABLES = (CONFIG_VARIABLE, DONE_VARIABLE, REPORT_VARIABLE, 'MEGATRON_BUFFER_RECORD')


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all files of a run have in common."""

    checkout: Path
    nproc: int
    timeout_s: float
    """For one file in one arm."""
    collective_limit_s: float = _COLLECTIVE_LIMIT_S

    @property
    def stall_s(self) -> float:
        """Without a sign of any rank for so long, a start is over."""
        return min(self.timeout_s, 4 * self.collective_limit_s)


def run_file(setting: Setting, file: str, config: str | None, folder: Path) -> FileResult:
    """Runs one file of tests.

    Where a test crashes or hangs, or fails on some ranks only, the ranks are stopped, and started again
    with the tests that are left.

    Args:
        setting: Where and how.
        file: Path relative to the checkout.
        config: Path or name of the config to install; None for stock.
        folder: An empty folder for records and logs.
    """
    result = FileResult()
    start_s = time.monotonic()
    while True:
        left_s = setting.timeout_s - (time.monotonic() - start_s)
        attempt = folder / f'start{result.starts}'
        attempt.mkdir(parents=True)
        result.starts += 1
        code = _start(setting, file, config, attempt, list(result.tests), left_s)
        records = [read_record(attempt / f'rank{i}.jsonl') for i in range(setting.nproc)]
        ended = 'timeout' if code in (None, STOPPED_TOGETHER) else 'crashed'
        new = merge_ranks(records, ended)
        result.tests.update(new)
        remaining = _remaining(records, result)
        if not new and (remaining or not _all_collected(records)):
            message = f'{ended} before the first test; {_last_words(attempt)}'
            for nodeid in remaining or [file]:
                result.tests[nodeid] = Outcome(ended, message)
            remaining = []
        if not remaining or time.monotonic() - start_s >= setting.timeout_s:
            break
    for nodeid in remaining:
        limit = f'the time limit of {setting.timeout_s:.0f} s for the file was over'
        result.tests[nodeid] = Outcome('not run', limit)
    result.seconds = round(time.monotonic() - start_s, 1)
    return result


def _all_collected(records: list[RankRecord]) -> bool:
    return all(record.collected is not None for record in records)


def _remaining(records: list[RankRecord], result: FileResult) -> list[str]:
    collected = (nodeid for record in records for nodeid in record.collected or ())
    return [nodeid for nodeid in dict.fromkeys(collected) if nodeid not in result.tests]


def _start(
    setting: Setting, file: str, config: str | None, folder: Path, done: list[str], left_s: float
) -> int | None:
    """Runs the ranks once; their exit code, or None if they had to be killed."""
    (folder / 'done.json').write_text(json.dumps(done), encoding='utf-8')
    launcher = (
        f'-m torch.distributed.run --standalone --nproc-per-node {setting.nproc} --redirects 3'
    )
    tests = '-m pytest -p megatron_buffer.testing.upstream_plugin -p no:cacheprovider -v --tb=short'
    command = [
        *(sys.executable, *launcher.split(), '--log-dir', str(folder / 'logs')),
        *(*tests.split(), '-o', 'addopts=', file),
    ]
    with (folder / 'torchrun.log').open('wb') as log:
        process = subprocess.Popen(
            command,
            cwd=setting.checkout,
            env=_environment(setting, config, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return _watch(process, setting, folder, left_s)
        finally:
            _kill(process)


def _environment(setting: Setting, config: str | None, folder: Path) -> dict[str, str]:
    """The environment of the ranks: modules come from the checkout first, then from ours."""
    kept = {key: value for key, value in os.environ.items() if key not in _OWN_VARIABLES}
    package = Path(megatron_buffer.__file__).resolve().parent.parent
    paths = [str(setting.checkout), str(package), kept.get('PYTHONPATH', '')]
    kept.update(
        {
            'PYTHONPATH': os.pathsep.join(filter(None, paths)),
            'PYTHONUNBUFFERED': '1',
            'PYTHONWARNINGS': 'ignore',
            'OMP_NUM_THREADS': '1',
            'GLOO_SOCKET_IFNAME': kept.get('GLOO_SOCKET_IFNAME', 'lo'),
            REPORT_VARIABLE: str(folder),
            DONE_VARIABLE: str(folder / 'done.json'),
            COLLECTIVE_LIMIT_VARIABLE: str(setting.collective_limit_s),
        }
    )
    # NVIDIA's containers set it; without it some tests take this for one that is too old.
    kept.setdefault('NVIDIA_PYTORCH_VERSION', _CONTAINER)
    if config is not None:
        kept[CONFIG_VARIABLE] = config
    return kept


def _watch(
    process: subprocess.Popen[bytes], setting: Setting, folder: Path, left_s: float
) -> int | None:
    """Waits until the ranks end; None if they take too long or show no sign of life."""
    now_s = time.monotonic()
    deadline_s, alive_s, seen = now_s + left_s, now_s, -1
    while process.poll() is None:
        now_s = time.monotonic()
        written = sum(path.stat().st_size for path in folder.glob('rank*.jsonl'))
        if written != seen:
            seen, alive_s = written, now_s
        if now_s > deadline_s or now_s - alive_s > setting.stall_s:
            return None
        time.sleep(_POLL_S)
    return STOPPED_TOGETHER if _stopped_together(folder) else process.returncode


def _stopped_together(folder: Path) -> bool:
    """torchrun's own exit code is 1 whatever the ranks' were; it names theirs in its report."""
    log = (folder / 'torchrun.log').read_text(encoding='utf-8', errors='replace')
    return f'(exitcode: {STOPPED_TOGETHER})' in log or f'exitcode  : {STOPPED_TOGETHER} ' in log


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun and its ranks, which torchrun put into sessions of their own."""
    if process.poll() is None:
        process.terminate()  # torchrun passes it on and kills what does not react
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    for group in {process.pid, *_children(process.pid)}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    process.wait()


def _children(pid: int) -> list[int]:
    """Children of a process that still runs."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f'/proc/{pid}/task/{pid}/children').read_text(encoding='ascii')
        return [int(child) for child in text.split()]
    return []


def _last_words(folder: Path) -> str:
    """The last lines of the log of the first rank, or of torchrun's."""
    logs = sorted(folder.glob('logs/**/stderr.log')) + sorted(folder.glob('logs/**/stdout.log'))
    for log in [*logs, folder / 'torchrun.log']:
        lines = [
            x for x in log.read_text(encoding='utf-8', errors='replace').splitlines() if x.strip()
        ]
        if lines:
            return f'{" / ".join(lines[-_LAST_LINES:])} ({log})'
    return f'no output ({folder})'

"""pytest plugin that runs upstream's unit tests unmodified: on the CPU if need be, through our buffer if asked.

``scripts/run_upstream_tests.sh`` starts it as ``pytest -p megatron_buffer.testing.upstream_plugin``, one
process per rank. It works before pytest reads upstream's conftest files, hence before Megatron is imported:
CPU mode where there is no GPU, limits on how long a collective may hang, and ``install()``. It writes
what became of each test as JSON lines, and keeps the ranks together: when a test fails on some ranks only,
collectives no longer match, so all ranks stop there and the runner starts anew with the tests that are left.
Upstream has no counterpart.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_buffer.testing import upstream_standins

CONFIG_VARIABLE = 'MEGATRON_BUFFER_UPSTREAM_CONFIG'
"""Config to install; stock Megatron without it."""
REPORT_VARIABLE = 'MEGATRON_BUFFER_UPSTREAM_REPORT'
"""Folder for ``rank<N>.jsonl``; the plugin does nothing without it."""
DONE_VARIABLE = 'MEGATRON_BUFFER_UPSTREAM_DONE'
"""JSON file with the ids of tests that are not to be run again."""
COLLECTIVE_LIMIT_VARIABLE = 'MEGATRON_BUFFER_UPSTREAM_COLLECTIVE_LIMIT'
"""Seconds after which a collective that waits for another rank is an error."""

STOPPED_TOGETHER = 75
"""Exit code when the ranks stop because a test ended differently on them."""

_WAIT_AFTER_FAILURE_S = 10  # the others fail soon, or hang because of this


class Recorder:
    """Writes what happens to ``rank<N>.jsonl`` and waits for the other ranks after each test.

    Args:
        folder: Where all ranks write.
        rank: This process.
        world_size: Number of ranks.
        limit_s: How long to wait for a rank that has not finished the same test.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, limit_s: float) -> None:
        self.paths = [folder / f'rank{i}.jsonl' for i in range(world_size)]
        self.file = self.paths[rank].open('a', encoding='utf-8')
        self.others = [path for i, path in enumerate(self.paths) if i != rank]
        self.limit_s = limit_s
        self.reports: list[Any] = []
        self.started_s = 0.0

    def write(self, **fields: Any) -> None:
        self.file.write(json.dumps(fields) + '\n')
        self.file.flush()

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != 'passed':
            self.write(id=report.nodeid, outcome=_collect_outcome(report), message=_message(report))

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        path = os.environ.get(DONE_VARIABLE)
        done = set(json.loads(Path(path).read_text(encoding='utf-8'))) if path else set()
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_collection_finish(self, session: Any) -> None:
        self.write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.reports, self.started_s = [], time.monotonic()
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        worst = max(self.reports, key=_severity)
        seconds = round(time.monotonic() - self.started_s, 2)
        outcome = _test_outcome(worst)
        self.write(id=nodeid, outcome=outcome, message=_message(worst), seconds=seconds)
        if not self._all_agree(nodeid, outcome):
            sys.stdout.flush()
            os._exit(STOPPED_TOGETHER)

    def _all_agree(self, nodeid: str, outcome: str) -> bool:
        """Waits until the test is over on all ranks; False if it ended differently, or never ends."""
        limit_s = self.limit_s if outcome in ('passed', 'skipped') else _WAIT_AFTER_FAILURE_S
        deadline = time.monotonic() + limit_s
        waiting = dict.fromkeys(self.others, 0)
        while waiting:
            for path in list(waiting):
                theirs = _outcome_in(path, nodeid)
                if theirs is not None:
                    del waiting[path]
                    if theirs != outcome:
                        return False
            if waiting and time.monotonic() > deadline:
                return False
            if waiting:
                time.sleep(0.005)
        return True


def _outcome_in(path: Path, nodeid: str) -> str | None:
    """The outcome of a test, if the rank that writes this file has finished it last."""
    try:
        lines = path.read_text(encoding='utf-8').splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines[-4:]):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:  # half written
            continue
        if fields.get('id') == nodeid:
            return fields['outcome']
    return None


def _severity(report: Any) -> tuple[bool, bool]:
    return report.outcome == 'failed', report.outcome == 'skipped'


def _test_outcome(report: Any) -> str:
    if report.outcome == 'failed':
        return 'failed' if report.when == 'call' else 'error'
    return report.outcome


def _collect_outcome(report: Any) -> str:
    return 'skipped' if report.outcome == 'skipped' else 'error'


def _message(report: Any) -> str:
    """The first line of what went wrong, or why a test was skipped."""
    if report.outcome == 'passed' or report.longrepr is None:
        return ''
    if report.outcome == 'skipped':
        where = report.longrepr
        text = str(where[2]) if isinstance(where, tuple) else str(where)
        return text.removeprefix('Skipped: ').partition('\n')[0]
    crash = getattr(report.longrepr, 'reprcrash', None)
    if crash is not None:
        return crash.message.partition('\n')[0]
    lines = str(report.longrepr).splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith('E  ')]
    return (errors or [line.strip() for line in lines if line.strip()] or [''])[-1]


def _limit_collectives(limit_s: float) -> None:
    """Makes a collective whose peer is gone an error after some time, instead of after half an hour."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=limit_s)

    def with_limit(function: Any) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments.get('timeout')
            bound.arguments['timeout'] = limit if given is None else min(given, limit)
            return function(*bound.args, **bound.kwargs)

        return limited

    for name in ('init_process_group', 'new_group'):
        limited = with_limit(getattr(c10d, name))
        for owner in (dist, c10d):
            setattr(owner, name, limited)


def _prepare(limit_s: float) -> None:
    import torch

    from megatron_buffer import cpu

    upstream_standins.skip_downloads()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        cpu.enable()
        upstream_standins.accept_adam_without_lr()
        upstream_standins.use_local_layers()
    _limit_collectives(limit_s)
    config = os.environ.get(CONFIG_VARIABLE)
    if config:
        from megatron_buffer import install

        install(config)


_recorder: Recorder | None = None
if REPORT_VARIABLE in os.environ:
    _limit_s = float(os.environ[COLLECTIVE_LIMIT_VARIABLE])
    _prepare(_limit_s)
    _recorder = Recorder(
        Path(os.environ[REPORT_VARIABLE]),
        int(os.environ['RANK']),
        int(os.environ['WORLD_SIZE']),
        limit_s=2 * _limit_s,
    )


def pytest_configure(config: Any) -> None:
    """Registers the recorder."""
    if _recorder is not None:
        config.pluginmanager.register(_recorder, 'megatron-buffer-recorder')

"""Runs one command, and sees to it that nothing of it is left: ``python keeper.py LIMIT_S COMMAND...``.

torchrun puts each rank into a session of its own, so that no process group holds them all. The keeper
makes itself the parent of whoever is orphaned below it, and ends all its descendants when the command
has ended, when the time limit is over, on SIGTERM, or when its stdin is closed: the sweep holds the other
end, so that a sweep that is killed takes its runs along. Linux only. Upstream has no counterpart.

Exit code: the command's; 128 plus the number of the signal that ended it; 124 after the time limit; 125 when
the sweep asked for the end; 127 if there is no such command. It imports nothing of the package, to start fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

TIME_IS_UP, STOPPED, NOT_FOUND = 124, 125, 127
"""Exit codes that are the keeper's own."""
GRACE_S = 10.0
"""How long a run may take to end itself after SIGTERM, which Slurm's srun passes on."""

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.1


def main(argv: list[str]) -> int:
    """Runs ``argv[1:]`` for at most ``argv[0]`` seconds; returns the exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: stopping.append(received))
    until = time.monotonic() + float(argv[0])
    try:
        child = subprocess.Popen(argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        _say(f'cannot start {argv[1]}: {error.strerror}')
        return NOT_FOUND
    code: int | None = None
    while code is None:
        code = _reap(child.pid)
        if code is not None:
            break
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if stopping or (readable and not os.read(0, 1)):
            _say('stopped: the sweep has ended')
            code = STOPPED
        elif time.monotonic() > until:
            _say(f'stopped after {argv[0]} s, the time limit of a run')
            code = TIME_IS_UP
    _end_all(child.pid)
    return code


def _reap(pid: int) -> int | None:
    """Collects children that have ended; the exit code of ``pid`` once it is among them."""
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if not ended:
            return code
        if ended == pid:
            result = os.waitstatus_to_exitcode(status)
            code = result if result >= 0 else 128 - result


def _end_all(pid: int) -> None:
    """SIGTERM for the command, so that a launcher can end its ranks; then SIGKILL for all that is left."""
    if pid in _descendants():
        _signal(pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while _reap(pid) is None and pid in _descendants() and time.monotonic() < until:
            time.sleep(_LOOK_S / 2)
    until = time.monotonic() + GRACE_S
    while (left := _descendants()) and time.monotonic() < until:
        for other in left:
            _signal(other, signal.SIGKILL)
        time.sleep(_LOOK_S / 5)
        _reap(0)


def _descendants() -> list[int]:
    """Living processes below this one."""
    parents: dict[int, int] = {}
    for name in os.listdir('/proc'):
        if name.isdigit():
            try:
                with open(f'/proc/{name}/stat', 'rb') as file:
                    state, parent = file.read().rpartition(b')')[2].split()[:2]
            except OSError:
                continue
            if state != b'Z':
                parents[int(name)] = int(parent)
    below: list[int] = []
    todo = [os.getpid()]
    while todo:
        parent = todo.pop()
        children = [pid for pid, above in parents.items() if above == parent]
        below += children
        todo += children
    return below


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _say(text: str) -> None:
    sys.stderr.write(f'megatron-buffer: {text}\n')
    sys.stderr.flush()


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

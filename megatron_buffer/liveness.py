"""Notices that another rank of this machine has died without a word, as by SIGKILL.

A process that is killed posts no reason. Each rank therefore enters its process in the job's store and
watches one neighbour on its machine, in a ring. Upstream has no counterpart: there the others see a closed
connection (gloo) or wait for a time limit (NCCL).
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

_RING_SETTLES_POLLS = 240  # the first of a machine looks so often for later arrivals


class Process(NamedTuple):
    """A rank's process: its number alone may be used again by the system."""

    rank: int
    pid: int
    started: str


def machine() -> str:
    """Identity of this machine and process namespace, the same for ranks that can see each other."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        namespace = Path('/proc/self/ns/pid').readlink()
    except OSError:
        return ''
    return f'{socket.gethostname()}/{boot}/{namespace}'


def start_time(pid: int) -> str:
    """Start time of a process in the kernel's ticks; '' if it is gone or only waits to be reaped."""
    try:
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return ''
    return '' if fields[0] in 'ZX' else fields[19]


class Neighbour:
    """Watches the process that entered before this one on this machine; the first watches the last.

    Args:
        store: Store of this process group alone.
        rank: This rank.
        pid: This process.
    """

    def __init__(self, store: Any, rank: int, pid: int) -> None:
        self._store = store
        self._here = machine()
        self._place = 0
        self._others = 0
        self._watched: Process | None = None
        self._polls = 0
        if self._here:
            self._place = store.add(f'{self._here}/count', 1)
            me = Process(rank, pid, start_time(pid))
            store.set(f'{self._here}/{self._place}', json.dumps(me))

    def leave(self, rank: int) -> None:
        """This rank ends on purpose."""
        if self._here:
            self._store.set(f'left/{rank}', '1')

    def vanished(self) -> Process | None:
        """The neighbour, if its process is gone and it did not leave on purpose; cheap, asked often."""
        if not self._here:
            return None
        self._find()
        watched = self._watched
        if watched is None or start_time(watched.pid) == watched.started:
            return None
        return None if self._store.check([f'left/{watched.rank}']) else watched

    def _find(self) -> None:
        self._polls += 1
        if self._place > 1:
            wanted = self._place - 1
            if self._watched is not None:
                return
        else:
            if self._polls > _RING_SETTLES_POLLS:
                return
            wanted = self._store.add(f'{self._here}/count', 0)
            if wanted in (1, self._others):
                return
            self._others = wanted
        key = f'{self._here}/{wanted}'
        if self._store.check([key]):
            self._watched = Process(*json.loads(self._store.get(key)))
        else:
            self._others = 0


def is_waiting_in_torch(main_thread_id: int | None) -> tuple[int, ...] | None:
    """Where the main thread is, if that is inside torch.distributed or another wait of torch's.

    Returns:
        Identity of its innermost frames, equal as long as it does not move; None anywhere else.
    """
    frame = sys._current_frames().get(main_thread_id or 0)
    position: list[int] = []
    inside = False
    while frame is not None and len(position) < 40:
        position += (id(frame), frame.f_lasti)
        inside = inside or '/torch/distributed/' in frame.f_code.co_filename
        frame = frame.f_back
    return tuple(position) if inside else None

"""Error types, and the watch that carries one rank's failure to all the others.

Every error for a user says what was wrong, where (YAML path, parameter, bucket), what was expected
and what to do. ``assert`` is kept for our own invariants.

The watch: a rank that fails posts ``(rank, reason)`` to a private connection of the default process
group's store and waits a moment until the others have seen it; a small thread in every process looks
there twice a second and raises :class:`RankFailure` in its main thread, or ends the process when the
main thread is stuck in a collective that can never complete. No collective is issued for this, and
nothing is done per step. Upstream has no counterpart.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron_buffer.liveness import Neighbour, Process, is_waiting_in_torch

logger = logging.getLogger(__name__)


class MegatronBufferError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MegatronBufferError, ValueError):
    """The YAML config (or the way it was named) is wrong.

    Attributes:
        yaml_path: Dotted path of the offending key, such as ``padding.param_start_elems``; may be ''.
        source: File or shipped name that the config came from; may be ''.
    """

    def __init__(self, message: str, *, yaml_path: str = '', source: str = '') -> None:
        super().__init__(message)
        self.yaml_path = yaml_path
        self.source = source


class ConflictError(ConfigError):
    """The config and a Megatron flag (or ``ddp_config`` field) say different things."""


class RegistryError(MegatronBufferError, ValueError):
    """A strategy cannot be registered or resolved."""


class LayoutError(MegatronBufferError, ValueError):
    """A layout breaks an invariant that Megatron-Core relies on, or was made by another config."""


class UnsupportedVersionError(MegatronBufferError, RuntimeError):
    """The installed megatron-core is not one that this package knows."""


class FingerprintError(MegatronBufferError, RuntimeError):
    """The installed source of a symbol that we replace or rely upon is not one that we know."""


class PatchError(MegatronBufferError, RuntimeError):
    """Installing or uninstalling cannot be done safely; nothing was changed."""


class LiveModelsError(PatchError):
    """``uninstall()`` was asked for while wrapped models are still alive."""


class ReadinessError(MegatronBufferError, RuntimeError, AssertionError):
    """Gradients of a bucket group are missing, or were synchronised twice; parameters are named.

    Also an ``AssertionError``: that is what stock raises, without a word, in the same places.
    """


class GradientValueError(MegatronBufferError, RuntimeError):
    """Gradients hold NaN or Inf; bucket, rank and parameters are named."""


class ParamStorageError(MegatronBufferError, ValueError):
    """Parameters share storage, or lie outside the buffer that they were mapped into."""


class StaleReadError(MegatronBufferError, RuntimeError):
    """A parameter was read before its gather had brought this step's values."""


class RankMismatchError(MegatronBufferError, RuntimeError):
    """Ranks that must agree (config, layout, bucket groups) do not; the first difference is named."""


class CheckpointError(MegatronBufferError, RuntimeError):
    """Optimizer state cannot be saved so that it equals memory."""


class CheckpointLayoutError(CheckpointError, ValueError):
    """Optimizer state was saved under a layout that differs in what its format depends on."""


class Failure(NamedTuple):
    """What a failing rank posts: its global rank and one line of reason."""

    rank: int
    reason: str


class RankFailure(MegatronBufferError, RuntimeError):
    """Another rank failed first; the message is that rank's reason.

    Without arguments it takes the failure that the watch saw last: this is how it is raised
    asynchronously in the main thread.
    """

    def __init__(self, failure: Failure | None = None) -> None:
        watch = _watch
        if failure is None and watch is not None and watch.seen is not None:
            failure = watch.seen
            watch.delivered.set()
        self.failure = failure
        if failure is None:
            super().__init__('another rank failed')
        else:
            super().__init__(f'rank {failure.rank} failed first: {failure.reason}')


_POLL_S = 0.5
_MAX_REQUESTS_PER_S = 2000  # of all ranks together, to the one process that hosts the store
_LINGER_S = 3.0
_GRACE_S = 5.0
_STUCK_S = 3.0  # how long a rank waits for a neighbour that was killed
_CAUSE_S = 5.0  # how long a rank whose connection was closed waits for the reason
_FAILURE_KEY = 'failure'
_ACK_KEY = 'ack'


class _FailureWatch:
    """Polls the store for a failure posted by any rank of the default process group."""

    def __init__(self, store: Any, rank: int, world_size: int, owner: object) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.owner = weakref.ref(owner)  # a destroyed group must be freed
        self.pid = os.getpid()
        self.seen: Failure | None = None
        self.delivered = threading.Event()
        self._delivery = threading.Lock()
        self._poll_s = max(_POLL_S, world_size / _MAX_REQUESTS_PER_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name='megatron-buffer-failure-watch', daemon=True
        )
        self._main_thread_id = threading.main_thread().ident
        self._neighbour = Neighbour(store, rank, self.pid)
        self._waits_at: tuple[int, ...] | None = None
        self._waits_since = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        with contextlib.suppress(Exception):  # the store's host may be gone
            self._neighbour.leave(self.rank)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_LINGER_S)

    def belongs_to(self, group: object) -> bool:
        """True when it watches this process group, from this process (a fork inherits the object)."""
        return self.owner() is group and self.pid == os.getpid()

    def post(self, failure: Failure) -> Failure:
        """Posts ``failure`` unless another rank was first; returns the one that counts."""
        try:
            found = self.store.compare_set(_FAILURE_KEY, '', json.dumps(failure))
            first = Failure(*json.loads(found)) if found else failure
            if first == failure:
                self._wait_for_acks()
            else:
                self._is_told(first)
            return first
        except Exception as error:  # the store's host may already be gone
            logger.debug('could not post a failure: %s', error)
            return self.seen or failure

    def _is_told(self, first: Failure) -> None:
        """The main thread has failed by itself, and learns here who was first: nothing is raised in it later,
        when it may be writing down its error.
        """
        with self._delivery:
            self.seen = first
            self.delivered.set()

    def _wait_for_acks(self) -> None:
        """Stays a moment, so that a store hosted by this process outlives the news."""
        pause = threading.Event()
        for _ in range(int(_LINGER_S / 0.1)):
            if self.store.add(_ACK_KEY, 0) >= self.world_size - 1:
                return
            pause.wait(0.1)

    def _run(self) -> None:
        import torch.distributed as dist

        while not self._stop.wait(self._poll_s):
            if not dist.is_initialized() or not self.belongs_to(dist.group.WORLD):
                return
            try:
                if not self.store.check([_FAILURE_KEY]):
                    self._look_after_neighbour()
                    continue
                failure = Failure(*json.loads(self.store.get(_FAILURE_KEY)))
                if failure.rank == self.rank:
                    return
                self.seen = failure
                self.store.add(_ACK_KEY, 1)
            except Exception as error:  # a store that closes at the end of a run is no failure
                logger.debug('failure watch ends: %s', error)
                return
            self._take_down(failure)
            return

    def _look_after_neighbour(self) -> None:
        """Says it for a neighbour that was killed.

        Somebody may end a process that has done its work in such a way, while others are still writing
        files. So it counts as a failure only if this rank waits in a collective, and keeps waiting.
        """
        gone = self._neighbour.vanished()
        if gone is None:
            return
        place = is_waiting_in_torch(self._main_thread_id)
        if place is None or place != self._waits_at:
            self._waits_at, self._waits_since = place, time.monotonic()
            return
        if time.monotonic() - self._waits_since >= _STUCK_S:
            self.store.compare_set(_FAILURE_KEY, '', json.dumps(_killed(gone)))

    def cause_of_closed_connection(self) -> Failure | None:
        """Waits a moment for the reason, which this rank or another may be about to find.

        Returns:
            The neighbour's death, if it was killed; None if another rank has posted, or nobody knows.
        """
        pause = threading.Event()
        with contextlib.suppress(Exception):  # the store's host may be the one that is gone
            for _ in range(int(_CAUSE_S / 0.1)):
                gone = self._neighbour.vanished()
                if gone is not None:
                    return _killed(gone)
                if self.store.check([_FAILURE_KEY]):
                    return None
                pause.wait(0.1)
        return None

    def _take_down(self, failure: Failure) -> None:
        """Raises in the main thread; ends the process if the main thread cannot be reached."""
        with self._delivery:
            if self.delivered.is_set():  # it failed too, and knows
                return
            sys.stderr.write(
                f'megatron-buffer: rank {failure.rank} failed: {failure.reason}; rank {self.rank} stops\n'
            )
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._main_thread_id or 0), ctypes.py_object(RankFailure)
            )
        if self.delivered.wait(_GRACE_S) or self._stop.is_set():
            return
        sys.stderr.write(
            f'megatron-buffer: rank {self.rank} is stuck in the call below and is ended\n'
        )
        with contextlib.suppress(Exception):  # stderr may be an object without a file descriptor
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(1)


def _killed(process: Process) -> Failure:
    return Failure(
        process.rank,
        f'its process {process.pid} ended without a word: killed by a signal, such as the '
        "system's for lack of memory",
    )


_watch: _FailureWatch | None = None
_excepthook: Callable[..., None] | None = None


def start_watch() -> bool:
    """Starts the watch on the default process group; once per group, nothing to do for one rank.

    Returns:
        True when a watch is running afterwards.
    """
    global _watch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    owner = dist.group.WORLD
    assert owner is not None
    if _watch is not None:
        if _watch.belongs_to(owner):
            return True
        stop_watch()
    store: Any = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    try:
        connection = dist.distributed_c10d.PrefixStore('megatron_buffer/watch', store.clone())
        # A store may outlive a process group: what was posted in an earlier one counts no more.
        epoch = connection.add(f'epoch/{rank}', 1)
    except Exception as error:  # a store kind that cannot be cloned
        logger.warning('no failure watch: %s cannot be cloned (%s)', type(store).__name__, error)
        return False
    private = dist.distributed_c10d.PrefixStore(str(epoch), connection)
    _watch = _FailureWatch(private, rank, dist.get_world_size(), owner)
    _watch.start()
    # A daemon thread inside the store's C++ code while the interpreter ends would abort the process.
    atexit.unregister(stop_watch)
    atexit.register(stop_watch)
    _hook_excepthook()
    return True


def stop_watch() -> None:
    """Stops the watch and restores ``sys.excepthook``, unless somebody else has wrapped ours."""
    global _watch, _excepthook
    if _watch is not None and _watch.pid == os.getpid():
        _watch.stop()
    _watch = None
    if _excepthook is not None and sys.excepthook is _excepthook:
        sys.excepthook = _excepthook.previous  # type: ignore[attr-defined]
        _excepthook = None


def _own_watch() -> _FailureWatch | None:
    return _watch if _watch is not None and _watch.pid == os.getpid() else None


def describe(error: BaseException) -> str:
    """One line for ``error``: its type and the first paragraph of its message."""
    text = str(error).strip().split('\n\n')[0].replace('\n', ' ')
    return f'{type(error).__name__}: {text}' if text else type(error).__name__


def post_failure(error: BaseException) -> Failure | None:
    """Tells the other ranks that this one failed.

    Args:
        error: What happened here.

    Returns:
        The failure that came first on any rank (this one's, if none was there), or None when no
        watch is running.
    """
    watch = _own_watch()
    if watch is None:
        return None
    if isinstance(error, RankFailure) and error.failure is not None:
        return error.failure
    failure = Failure(watch.rank, describe(error))
    if _is_closed_connection(error):
        failure = watch.cause_of_closed_connection() or failure
    return watch.post(failure)


def _is_closed_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ('connection closed', 'connection reset', 'broken pipe')
    )


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Posts an exception that leaves the block, and names the rank that failed first.

    An error that only follows from another rank's failure (a closed connection, a collective that
    timed out) is replaced by :class:`RankFailure` with that rank's reason, chained to the original.
    """
    try:
        yield
    except GeneratorExit:
        raise
    except SystemExit as error:
        # Other numbers mean something to whoever started us (Megatron's rerun codes, schedulers).
        if isinstance(error.code, str) or error.code == 1:
            post_failure(error)
        raise
    except BaseException as error:
        first = post_failure(error)
        if _is_elsewhere(first) and not isinstance(error, RankFailure):
            raise RankFailure(first) from error
        raise


def _is_elsewhere(failure: Failure | None) -> bool:
    watch = _own_watch()
    return failure is not None and watch is not None and failure.rank != watch.rank


def _hook_excepthook() -> None:
    """For scripts that do not run under :func:`guard`: posts, then prints as before."""
    global _excepthook
    if _excepthook is not None:
        return
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        first = post_failure(error)
        previous(kind, error, traceback)
        if first is not None and _is_elsewhere(first):
            sys.stderr.write(f'megatron-buffer: rank {first.rank} failed first: {first.reason}\n')

    excepthook.previous = previous  # type: ignore[attr-defined]
    sys.excepthook = _excepthook = excepthook

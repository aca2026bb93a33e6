"""The inside of a rank's process: run the function, leave its result or its error.

For :mod:`megatron_buffer.testing.harness`. A rank leaves files in the folder of its case: `result.N` or `error.N` when it has ended, `output.N` with
what it printed, `stack.N` with its stacks if the harness asked for them.
"""

import ctypes
import dataclasses
import datetime
import faulthandler
import importlib
import io
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class Settings:
    """What a rank is told besides the function."""

    folder: Path
    world_size: int
    init: bool
    timeout_s: float
    env: dict[str, str]
    preload: str


def run_rank(settings: Settings, payload: bytes, rank: int) -> None:
    """Run the function in a fork of the server and leave its result, or its error, in the folder."""
    folder = settings.folder
    _die_with_the_tests()
    output = os.open(folder / f'output.{rank}', os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stack = os.open(folder / f'stack.{rank}', os.O_WRONLY | os.O_CREAT, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=2)
    try:
        _set_environment(settings, rank)
        result = _call(settings, payload, rank)
        _write(folder / f'result.{rank}', pack(result))
    except BaseException as error:
        _write(folder / f'error.{rank}', pickle.dumps(_describe(error)))
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    # Nobody leaves while a peer may still be reading from it: a closed connection would look like a fault.
    while not all(_ended(folder, r) for r in range(settings.world_size)):
        time.sleep(0.005)


def _die_with_the_tests() -> None:
    """Tie this process to the fork server, and the fork server to the test process alone.

    The server ends when the last holder of its "alive" pipe is gone; each rank gets a copy of that pipe,
    for starting processes of its own, and would so keep the server, and itself, alive for ever.
    """
    server: Any = multiprocessing.forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _set_environment(settings: Settings, rank: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(settings.world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(settings.world_size),
        MASTER_ADDR='127.0.0.1',
    )
    os.environ.update(settings.env)


def _call(settings: Settings, payload: bytes, rank: int) -> Any:
    importlib.import_module(settings.preload).check()
    fn, args, kwargs = unpack(payload)
    if settings.init:
        import torch.distributed as dist

        store = dist.FileStore(str(settings.folder / 'store'), settings.world_size)
        dist.init_process_group(
            'gloo',
            store=store,
            rank=rank,
            world_size=settings.world_size,
            timeout=datetime.timedelta(seconds=settings.timeout_s),
        )
    return fn(rank, settings.world_size, *args, **kwargs)


def _describe(error: BaseException) -> dict[str, Any]:
    """The fields of `RankOutcome` that belong to an exception."""
    kept = error.__traceback__
    while kept is not None and kept.tb_frame.f_code.co_filename == __file__:
        kept = kept.tb_next
    text = ''.join(traceback.format_exception(type(error), error, kept or error.__traceback__))
    return {
        'error_type': type(error).__name__,
        'error': str(error),
        'traceback': text,
        'failed_at': time.monotonic(),
    }


def pack(value: Any) -> bytes:
    """Pickle a value; through torch.save, since Megatron changes how plain pickle restores a tensor."""
    import torch

    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def unpack(data: bytes) -> Any:
    """Restore a value from `pack`."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def _write(path: Path, data: bytes) -> None:
    """Write so that a file is there only when it is complete."""
    partial = path.with_suffix(path.suffix + '.partial')
    partial.write_bytes(data)
    partial.replace(path)


def _ended(folder: Path, rank: int) -> bool:
    return (folder / f'result.{rank}').exists() or (folder / f'error.{rank}').exists()

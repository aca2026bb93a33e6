"""What the harness's fork server imports once, so that every rank starts with it loaded.

For :mod:`megatron_buffer.testing.harness`. Nothing here may start a thread, open a socket or run a backward pass: the ranks are forks of this process.
"""

import contextlib
import gc
import importlib
import logging
import traceback
import warnings

_failure: str | None = None


def _load() -> None:
    import torch

    torch.set_num_threads(1)
    import megatron_buffer.cpu as cpu

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        cpu.enable()
        import megatron.core
        import megatron.core.models.gpt
        import megatron.training.training  # noqa: F401
    cpu.after_import()
    # Importing megatron.training set the root logger to INFO; Megatron's listings would bury a report.
    logging.getLogger('megatron').setLevel(logging.ERROR)
    # torch imports it for the first optimizer of a process, which takes longer than a small case.
    importlib.import_module('torch._dynamo')
    # Test modules import these, where they are installed; better once here than once in every rank.
    for name in ('hypothesis', 'pytest'):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def check() -> None:
    """Raise what went wrong while the fork server loaded this module, if anything did."""
    if _failure is not None:
        raise RuntimeError(
            f'megatron_buffer.testing.preload failed in the fork server:\n{_failure}'
        )


# An exception must not end the server: the ranks report it, with its traceback, through check().
try:
    _load()
except BaseException:
    _failure = traceback.format_exc()

# Objects made so far stay where they are: collections in the ranks then leave the shared pages alone.
gc.collect()
gc.freeze()

"""What the fork server of `tests.harness` imports once, so that every rank starts with it loaded.

Nothing here may start a thread, open a socket or run a backward pass: the ranks are forks of this process.
"""

import gc
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
    # Test modules import these; better once here than once in every rank.
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401


def check() -> None:
    """Raise what went wrong while the fork server loaded this module, if anything did."""
    if _failure is not None:
        raise RuntimeError(f'tests.preload failed in the fork server:\n{_failure}')


# An exception must not end the server: the ranks report it, with its traceback, through check().
try:
    _load()
except BaseException:
    _failure = traceback.format_exc()

# Objects made so far stay where they are: collections in the ranks then leave the shared pages alone.
gc.collect()
gc.freeze()

"""Python's garbage collector, paused where thousands of objects are made that all stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Nothing is collected until the block ends, unless somebody asks for it.

    Each few hundred new objects start a collection. Wrapping a model makes a dozen for every parameter and
    frees none of them, so that a third of its time went into looking for garbage.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

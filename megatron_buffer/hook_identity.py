"""Forward hooks that Megatron-Core takes for its own.

``CudaGraphManager`` (``megatron/core/transformer/cuda_graphs.py``) refuses a module with forward hooks that it
does not find defined in ``megatron/core/distributed/distributed_data_parallel.py``, and Transformer Engine's
fused modules warn of them. Ours wait for gathers, as upstream's do, or only take notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_UPSTREAM = 'megatron.core.distributed.distributed_data_parallel'


def as_upstreams(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``hook``, which ``inspect.getmodule`` now finds in upstream's module."""
    hook.__module__ = _UPSTREAM
    return hook

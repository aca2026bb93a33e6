"""Upstream's all-reduces of many small gradients, a limited number of bytes at a time.

Stands for the two functions of ``megatron/core/distributed/finalize_model_grads.py`` that flatten every
gradient they select into one temporary: ``_allreduce_non_tensor_model_parallel_grads`` and
``_allreduce_replicated_grads_over_gtp_remat_group``. Which gradients they select, and how those are
reduced, stays upstream's: its function is called once per chunk, on stand-ins for the model chunks that
show it some of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_attr_wrapped_model

_GRADIENTS = ('main_grad', 'grad')


class Named(NamedTuple):
    """A parameter (or what stands in for it) and the chunk that it is a part of."""

    chunk: int
    name: str
    param: Any


class Part:
    """Stands in for a model chunk, and has only some of its parameters."""

    def __init__(self, ddp_config: Any, params: Sequence[tuple[str, Any]]) -> None:
        self.ddp_config = ddp_config
        self._params = params

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """As ``torch.nn.Module.named_parameters``."""
        return iter(self._params)


class _Asked:
    """Stands in for a model chunk, and notes which parameters' gradients are asked for; none has any.

    The chunk is only walked if somebody asks for its parameters: upstream does not where nothing is to be
    reduced, as without tensor parallelism.
    """

    def __init__(self, index: int, chunk: Any, found: list[Named]) -> None:
        self.ddp_config = chunk.ddp_config
        self._index = index
        self._chunk = chunk
        self._found = found

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """As ``torch.nn.Module.named_parameters``."""
        for name, param in get_attr_wrapped_model(self._chunk, 'named_parameters')():
            probe = _Probe(param)
            yield name, probe
            if probe.asked:
                self._found.append(Named(self._index, name, param))


class _Probe:
    """Stands in for a parameter without a gradient, and remembers whether it was asked for one."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self._param = param
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        if name in _GRADIENTS:
            self.asked = True
            return None
        return getattr(self._param, name)


def reduce_in_chunks(
    model: Sequence[Any], chunk_bytes: int | None, reduce: Callable[[list[Any]], None]
) -> None:
    """Calls ``reduce`` on a part of the model's parameters after the other.

    Args:
        model: Model chunks.
        chunk_bytes: Most bytes of gradients per call; a larger gradient goes alone. None: one call, with
            the model itself.
        reduce: Upstream's function, as a function of the list of model chunks. It must pass over
            parameters whose gradient is None, and read ``ddp_config`` and ``named_parameters`` only.
    """
    if chunk_bytes is None:
        reduce(list(model))
        return
    for chunk in cut(_selected(model, reduce), chunk_bytes):
        reduce(_parts(model, chunk))


def cut(params: Iterable[Named], chunk_bytes: int) -> Iterator[list[Named]]:
    """Consecutive parameters whose gradients have at most ``chunk_bytes`` together, or single ones."""
    chunk: list[Named] = []
    filled_bytes = 0
    for named in params:
        grad = _gradient(named.param)
        size_bytes = 0 if grad is None else grad.numel() * grad.element_size()
        if chunk and filled_bytes + size_bytes > chunk_bytes:
            yield chunk
            chunk, filled_bytes = [], 0
        chunk.append(named)
        filled_bytes += size_bytes
    if chunk:
        yield chunk


def _selected(model: Sequence[Any], reduce: Callable[[list[Any]], None]) -> list[Named]:
    """The parameters that upstream would reduce: those whose gradient it asks for."""
    found: list[Named] = []
    reduce([_Asked(index, chunk, found) for index, chunk in enumerate(model)])
    return found


def _parts(model: Sequence[Any], params: Sequence[Named]) -> list[Any]:
    """Stand-ins for all model chunks that together have just ``params``."""
    return [
        Part(chunk.ddp_config, [(n.name, n.param) for n in params if n.chunk == index])
        for index, chunk in enumerate(model)
    ]


def _gradient(param: Any) -> torch.Tensor | None:
    """The gradient that upstream takes: main_grad where there is one."""
    return param.main_grad if hasattr(param, 'main_grad') else param.grad

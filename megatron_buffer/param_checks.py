"""Parameters that share storage, leave the buffer, or join training after they were wrapped.

Upstream has no counterpart: ``_ParamAndGradBuffer.__init__``
(``megatron/core/distributed/param_and_grad_buffer.py``) moves each parameter's data into its buffer, which
silently unties two parameters that were one tensor, and never looks again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from megatron_buffer.errors import ParamStorageError, ReadinessError
from megatron_buffer.param_layout import has_own_address

logger = logging.getLogger(__name__)

_AT_ONCE = 16


class Shared(NamedTuple):
    """Two tensors of a module that overlap in memory.

    Attributes:
        names: Their names; the first is a trainable parameter.
        tensors: The tensors.
        same: True if they are one tensor under two objects: equal start, shape and strides.
    """

    names: tuple[str, str]
    tensors: tuple[torch.Tensor, torch.Tensor]
    same: bool


def shared_storage(module: torch.nn.Module) -> list[Shared]:
    """Trainable parameters that overlap with another parameter or buffer of ``module``."""
    by_device: dict[torch.device, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, tensor in _tensors(module):
        start, end = _extent_bytes(tensor)
        if end > start:
            by_device.setdefault(tensor.device, []).append((start, end, name, tensor))
    found: list[Shared] = []
    for members in by_device.values():
        members.sort(key=lambda member: member[:2])
        if all(one[1] <= next_one[0] for one, next_one in itertools.pairwise(members)):
            continue
        for index, (start, end, name, tensor) in enumerate(members):
            for other_start, _, other_name, other in itertools.islice(members, index + 1, None):
                if other_start >= end:
                    break
                if not _in_one_storage(tensor, other):
                    continue
                pair = [(name, tensor), (other_name, other)]
                pair.sort(key=lambda item: not _is_trainable(item[1]))
                if _is_trainable(pair[0][1]):
                    same = (
                        start == other_start
                        and tensor.shape == other.shape
                        and tensor.stride() == other.stride()
                        and tensor.dtype == other.dtype
                    )
                    found.append(Shared((pair[0][0], pair[1][0]), (pair[0][1], pair[1][1]), same))
    return found


def settle_shared_storage(
    module: torch.nn.Module, policy: Literal['warn', 'error', 'tie'], source: str
) -> None:
    """Warns of, refuses or really ties parameters that share storage, before they are remapped.

    Args:
        module: The module that is about to be wrapped under the distributed optimizer; ``tie`` puts one
            parameter object in the place of two that are the same tensor.
        policy: ``checks.aliased_params``.
        source: The config's name, for messages.

    Raises:
        ParamStorageError: If the policy is ``error``, or ``tie`` cannot tie.
    """
    shared = shared_storage(module)
    if not shared:
        return
    if policy == 'tie':
        shared = [pair for pair in shared if not _tie(module, pair)]
        if not shared:
            return
    listed = '; '.join(f'{a} and {b}' for a, b in (pair.names for pair in shared[:8]))
    problem = (
        f'parameters share storage, and moving them into the buffer would untie them: {listed}. Assign '
        'the same Parameter object to both modules instead'
    )
    if policy == 'warn':
        logger.warning('%s, or set checks.aliased_params', problem)
        return
    way_out = ', or set checks.aliased_params: tie' if policy == 'error' else ''
    raise ParamStorageError(
        f'{problem}{way_out} (checks.aliased_params is {policy} in {source}; only tensors of equal '
        'start, shape and strides can be tied)'
    )


def _tie(module: torch.nn.Module, pair: Shared) -> bool:
    kept, dropped = pair.tensors
    if not (pair.same and isinstance(dropped, torch.nn.Parameter)):
        return False
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is dropped:
                child._parameters[name] = kept  # type: ignore[assignment]
    return True


class ParamData:
    """Looks whether every parameter still lies where its buffer put it.

    At most ``_AT_ONCE`` parameters of a buffer at a time, so that a window's beginning costs the same however
    many there are; all of them have had their turn after as many windows as it takes.

    Args:
        policy: ``checks.replaced_param_data``.
        buffers: Our buffers; those without ``param_data`` are left out, and so are quantized parameters,
            whose tensors are not views of it.
    """

    def __init__(self, policy: Literal['ignore', 'warn', 'error'], buffers: Iterable[Any]) -> None:
        self._policy = policy
        self._places = [
            _Places(buffer)
            for buffer in (buffers if policy != 'ignore' else ())
            if buffer.param_data is not None and buffer.param_dtype != torch.uint8
        ]

    def check(self) -> None:
        """Compares the addresses of the parameters whose turn it is, until it has warned.

        Raises:
            ParamStorageError: Naming the parameters whose ``data`` was replaced.
        """
        moved = [name for places in self._places for name in places.left()]
        if not moved:
            return
        message = (
            f'the data of {len(moved)} parameters was replaced after wrapping and lies outside the buffer, '
            f'so the optimizer no longer reaches it: {", ".join(moved[:8])}. Write into it in place '
            '(param.data.copy_()), or wrap the model after the change'
        )
        if self._policy == 'error':
            raise ParamStorageError(message)
        self._places = []
        logger.warning('%s', message)


class _Places:
    """Where the parameters of one buffer lie, relative to its start, which moves when it is offloaded."""

    def __init__(self, buffer: Any) -> None:
        size = buffer.param_data.element_size()
        self._buffer = buffer
        self._base = 0
        self._params: list[torch.Tensor] = []
        self._offsets: list[int] = []
        self._expected: list[int] = []
        self._next = 0
        for param, (start, _, _) in buffer.param_index_map.items():
            if has_own_address(param) and param.numel():  # an empty tensor has no address
                self._params.append(param)
                self._offsets.append(start * size)

    def left(self) -> list[str]:
        """Names of the parameters that are elsewhere."""
        base = self._buffer.param_data.data_ptr()
        if base == 0:  # offloaded
            return []
        if base != self._base:
            self._base, self._expected = base, [base + offset for offset in self._offsets]
        part = slice(self._next, self._next + _AT_ONCE)
        addresses = list(map(torch.Tensor.data_ptr, self._params[part]))
        self._next = part.stop if part.stop < len(self._params) else 0
        if addresses == self._expected[part]:
            return []
        addresses = list(map(torch.Tensor.data_ptr, self._params))  # now name them all
        triples = zip(self._params, addresses, self._expected, strict=True)
        names = self._buffer.param_to_name
        return [names[param] for param, address, expected in triples if address != expected]


class FrozenParams:
    """Parameters that were frozen when the model was wrapped, and so have no place in a buffer.

    Args:
        module: The wrapped module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._params = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        self._warned = False

    def check(self, is_error: bool) -> None:
        """Looks for any that requires a gradient now, which would be reduced by nobody.

        Args:
            is_error: Raise; otherwise warn once.

        Raises:
            ReadinessError: Naming them.
        """
        thawed = [name for name, param in self._params if param.requires_grad]
        if not thawed or (self._warned and not is_error):
            return
        message = (
            f'{len(thawed)} parameters require a gradient now but were frozen when the model was wrapped, '
            'so their gradients are neither reduced nor seen by the optimizer: '
            f'{", ".join(thawed[:8])}. Unfreeze before wrapping'
        )
        if is_error:
            raise ReadinessError(message)
        self._warned = True
        logger.warning('%s', message)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in module.named_parameters():
        if param.device.type != 'meta' and has_own_address(param):
            yield name, param
    for name, buffer in module.named_buffers():
        if isinstance(buffer, torch.Tensor) and buffer.device.type != 'meta':
            yield name, buffer


def _is_trainable(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


def _extent_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses where a tensor's first element starts and where its last one ends; equal if it has none."""
    start, elems = tensor.data_ptr(), tensor.numel()
    if elems and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elems = 1 + sum((size - 1) * stride for size, stride in steps)
    return start, start + elems * tensor.element_size()


def _in_one_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """False for storages that were freed, whose tensors only seem to have addresses."""
    address = tensor.untyped_storage().data_ptr()
    return address != 0 and address == other.untyped_storage().data_ptr()

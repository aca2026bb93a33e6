"""torch.distributed on gloo: NCCL groups become gloo groups, and gloo's gaps are filled.

gloo (torch 2.13) has every collective that Megatron uses natively, except: list collectives of
uneven sizes, split sizes given as tensors, and coalesced collectives of mixed dtypes, which it
corrupts without a word (all-gather) or refuses (all-reduce). Upstream has no counterpart.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_buffer.cpu.ledger import Ledger


def apply(ledger: Ledger) -> None:
    """Replaces the collectives that gloo lacks or gets wrong, recording them in ``ledger``."""
    if not dist.is_available():
        return
    for name, factory, reason in (
        ('init_process_group', _on_gloo, 'training/initialize.py: nccl is the default'),
        ('new_group', _on_gloo, 'parallel_state.py: create_group with nccl options'),
        ('all_to_all_single', _with_plain_splits, 'mappings.py: MoE splits are tensors'),
        ('all_gather', _all_gather_uneven, 'layer-wise param gather, data_schedule.py'),
        ('reduce_scatter', _reduce_scatter_uneven, 'tensor_parallel/mappings.py: uneven MoE'),
        ('_coalescing_manager', _coalesce_per_dtype, 'start_grad_sync, start_param_sync'),
    ):
        replacement = factory(getattr(c10d, name))
        for owner in (dist, c10d):
            ledger.replace(owner, name, replacement, reason)


def _on_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """A group constructor whose ``nccl`` means gloo, and whose NCCL options are dropped."""
    signature = inspect.signature(function)
    is_default_group = function.__name__ == 'init_process_group'

    @functools.wraps(function)
    def on_gloo(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        backend = bound.arguments.get('backend')
        if 'nccl' in str(backend) or (backend is None and is_default_group):
            bound.arguments['backend'] = 'gloo'
        for name in ('pg_options', 'device_id'):
            bound.arguments.pop(name, None)
        return function(**bound.arguments)

    return on_gloo


def _with_plain_splits(function: Callable[..., Any]) -> Callable[..., Any]:
    """``all_to_all_single`` that takes its split sizes as tensors too."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in ('output_split_sizes', 'input_split_sizes'):
            splits = bound.arguments.get(name)
            if isinstance(splits, torch.Tensor):
                bound.arguments[name] = splits.tolist()
        return function(**bound.arguments)

    return all_to_all_single


class _Done:
    """The handle of a collective that was emulated, hence is over when it is returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _is_uneven_gloo(tensors: list[torch.Tensor], group: Any) -> bool:
    if len({tensor.shape for tensor in tensors}) <= 1:
        return False
    return group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_backend(group) == 'gloo'


def _all_gather_uneven(function: Callable[..., Any]) -> Callable[..., Any]:
    """``all_gather`` of different shapes: one broadcast per rank, as gloo only has even ones."""

    @functools.wraps(function)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _is_uneven_gloo(tensor_list, group):
            return function(tensor_list, tensor, group=group, async_op=async_op)
        group = group or dist.group.WORLD
        for rank, target in zip(dist.get_process_group_ranks(group), tensor_list, strict=True):
            if rank == dist.get_rank():
                target.copy_(tensor)
            if target.numel():
                dist.broadcast(target, src=rank, group=group)
        return _Done() if async_op else None

    return all_gather


def _reduce_scatter_uneven(function: Callable[..., Any]) -> Callable[..., Any]:
    """``reduce_scatter`` of different shapes: one all-reduce per rank."""

    @functools.wraps(function)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _is_uneven_gloo(input_list, group):
            return function(output, input_list, op=op, group=group, async_op=async_op)
        group = group or dist.group.WORLD
        for rank, source in zip(dist.get_process_group_ranks(group), input_list, strict=True):
            reduced = source.clone()
            if reduced.numel():
                dist.all_reduce(reduced, op=op, group=group)
            if rank == dist.get_rank():
                output.copy_(reduced)
        return _Done() if async_op else None

    return reduce_scatter


def _coalesce_per_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    """A coalescing manager that issues mixed dtypes one dtype at a time on gloo.

    gloo's coalesced all-gather moves every tensor as if it had the first one's dtype: bf16 + fp32
    or uint8 + bf16 arrive corrupted, at any world size. Megatron coalesces the buckets of a group,
    and a group with fp8 and bf16 buckets is exactly that. The collectives that were recorded inside
    the block are therefore taken back before torch issues them, and issued per dtype.
    """

    @functools.wraps(function)
    @contextlib.contextmanager
    def _coalescing_manager(
        group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[Any]:
        group = group or dist.group.WORLD
        with function(group, device, async_ops) as manager:
            yield manager
            recorded = c10d._world.pg_coalesce_state[group]
            parts = _by_dtype(recorded) if dist.get_backend(group) == 'gloo' else []
            if len(parts) > 1:
                recorded.clear()
        if len(parts) > 1:
            for part in parts:
                with function(group, device, async_ops) as part_manager:
                    c10d._world.pg_coalesce_state[group].extend(part)
                manager.works.extend(part_manager.works)

    return _coalescing_manager


def _by_dtype(operations: list[Any]) -> list[list[Any]]:
    """The recorded collectives, split by dtype in the order in which dtypes appear first."""
    parts: dict[torch.dtype, list[Any]] = {}
    for operation in operations:
        parts.setdefault(operation.tensor.dtype, []).append(operation)
    return list(parts.values())

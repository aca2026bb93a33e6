"""Gradients that come after their bucket group was dispatched: kept aside, then reduced by agreement.

Such a gradient must not be added to a buffer that is being reduced. It is kept aside, and once backward is
over all ranks agree on the parameters that were late anywhere and reduce what was kept. Upstream has no
counterpart: it adds late gradients to the buffer (``DistributedDataParallel._make_backward_post_hook``), where
they are lost or scaled twice.

The agreement is one all-reduce (MAX) of a byte, and one more per bucket group where groups may be unused, for
each process group and iteration. It is under way while the reductions are. Only if a gradient was late on some
rank are the ranks asked which. On CUDA it goes over Megatron's gloo group of the same ranks where there is one,
so the device is not waited for; otherwise the host waits for the reductions here instead of in the optimizer
step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_buffer.errors import ReadinessError

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup


class Replicas:
    """Bucket groups whose gradients are reduced over the same ranks.

    Args:
        process_group: All ranks that hold these parameters, over all optimizer instances.
        groups: The bucket groups, in the same order on every rank.
        factor: What a sum over the ranks is multiplied by: 1/dp_size, or 1 with per-token loss.
    """

    def __init__(
        self, process_group: Any, groups: Sequence[ParamAndGradBucketGroup], factor: float
    ) -> None:
        self.process_group = process_group
        self.groups = groups
        self.factor = factor

    @cached_property
    def agrees_over(self) -> tuple[Any, torch.device]:
        """The process group for the agreement, and where its flags lie."""
        group = self.process_group
        if dist.get_backend(group) == 'gloo':
            return group, torch.device('cpu')
        ranks = dist.get_process_group_ranks(group)
        finders: tuple[Callable[[], Any], ...] = (
            lambda: parallel_state.get_data_parallel_group_gloo(with_context_parallel=True),
            parallel_state.get_expert_data_parallel_group_gloo,
        )
        for find in finders:
            with contextlib.suppress(Exception):  # not made, or not by this version
                gloo: Any = find()
                if gloo is not None and dist.get_process_group_ranks(gloo) == ranks:
                    return gloo, torch.device('cpu')
        return group, torch.device('cuda', torch.cuda.current_device())

    def largest(self, flags: Sequence[Any]) -> _Largest:
        """Begins to compare flags, as many on every rank."""
        return _Largest(flags, *self.agrees_over)


class _Largest:
    """The largest value of each flag on any rank; a collective that is under way."""

    def __init__(self, flags: Sequence[Any], process_group: Any, device: torch.device) -> None:
        self._flags = torch.tensor(flags, dtype=torch.uint8, device=device)
        self._work = None
        if process_group.size() > 1:
            self._work = dist.all_reduce(
                self._flags, op=dist.ReduceOp.MAX, group=process_group, async_op=True
            )

    def wait(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
        flags: list[int] = self._flags.tolist()
        return flags


class Agreement:
    """What the ranks agree on in one window of a chunk; begins with the last dispatch of a group.

    Every rank makes it at the same point among its collectives, when no gradient of the window is to come.

    Args:
        parts: Dense groups, then expert groups.
        on_used: Whether to ask which groups were used on any rank.
    """

    def __init__(self, parts: Sequence[Replicas], *, on_used: bool) -> None:
        self._on_used = on_used
        self._asked: list[tuple[Replicas, _Largest]] = []
        for part in parts:
            if part.groups:
                flags = [any(group.late_grads for group in part.groups)]
                if on_used:
                    flags += [group.num_counted > 0 for group in part.groups]
                self._asked.append((part, part.largest(flags)))

    def settle(self) -> list[ParamAndGradBucketGroup]:
        """Reduces late gradients; called on all ranks when all groups of the chunk are reduced.

        Returns:
            The groups of which any parameter got a gradient on any rank, if that was asked.
        """
        asked = [(part, flags.wait()) for part, flags in self._asked]
        for part, flags in asked:
            if flags[0]:
                _reduce_late(part)
        if not self._on_used:
            return []
        return [
            group
            for part, flags in asked
            for group, used in zip(part.groups, flags[1:], strict=True)
            if used
        ]


def _reduce_late(part: Replicas) -> None:
    """Sums what any rank has kept aside, one parameter after the other, and adds it to what was reduced."""
    params = [(group, param) for group in part.groups for param in group.param_to_bucket]
    late = part.largest([param in group.late_grads for group, param in params]).wait()
    with torch.no_grad():
        for (group, param), is_late in zip(params, late, strict=True):
            if not is_late:
                continue
            kept = group.late_grads.pop(param, None)
            if kept is None:
                kept = torch.zeros_like(param.main_grad)
            dist.all_reduce(kept, group=part.process_group)
            param.main_grad.add_(kept.mul_(part.factor))


def accumulate_late(
    group: ParamAndGradBucketGroup, param: Any, hook: Callable[..., None], *args: Any
) -> None:
    """Runs upstream's backward hook for a gradient that comes after its group was dispatched.

    Args:
        group: The group, dispatched in this window.
        param: A parameter of it.
        hook: Upstream's hook, which adds ``param.grad`` to ``param.main_grad``.
        args: What autograd handed over.

    Raises:
        ReadinessError: If the config wants late gradients to be errors, or if this one is already in the
            buffer because a fused kernel wrote it there.
    """
    name = group.names([param])[0]
    if group.on_late == 'warn':
        group.late_params.setdefault(param)
        hook(*args)
        return
    if group.on_late == 'error':
        raise ReadinessError(
            f'the gradient of {name} came after its bucket group was reduced. Every iteration must have '
            'as many backward passes without no_sync() as the one before, and the same parameters in '
            'each; or set readiness: {name: golden_checked, on_late: reduce}'
        )
    if param.grad_added_to_main_grad:
        raise ReadinessError(
            f'the gradient of {name} came after its bucket group was reduced, and a fused kernel has '
            'added it to the buffer already, so it cannot be kept aside. Turn gradient accumulation '
            'fusion off, or do not synchronise before the last backward pass (no_sync())'
        )
    in_buffer = param.main_grad
    if param not in group.late_grads:
        group.late_grads[param] = torch.zeros_like(in_buffer)
    param.main_grad = group.late_grads[param]
    try:
        hook(*args)
    finally:
        param.main_grad = in_buffer

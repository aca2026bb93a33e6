"""One model chunk's window (zero_grad_buffer to zero_grad_buffer): who lacks a gradient, and who is late.

A gradient that comes after its bucket group was dispatched must not be added to a buffer that is being
reduced. It is kept aside, and once backward is over all ranks agree on the parameters that were late
anywhere and reduce what was kept. Upstream has no counterpart: it adds late gradients to the buffer
(``DistributedDataParallel._make_backward_post_hook``), where they are lost or scaled twice.

The agreement is one all-reduce (MAX) of two bytes per parameter for each process group and iteration. On
CUDA it goes over Megatron's gloo group of the same ranks where there is one, so the device is not waited
for; otherwise the host waits for the reductions here instead of in the optimizer step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_buffer.errors import ReadinessError
from megatron_buffer.hook_identity import as_upstreams

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup

_LATE, _USED = 1, 2


class GroupWindow:
    """What a window of a group looks like when it is finished; see ``strategies.unused.Window``."""

    def __init__(
        self,
        group: ParamAndGradBucketGroup,
        describe: Callable[[str], str] = str,
        level: int = logging.WARNING,
    ) -> None:
        self._group = group
        self._tracker = group.readiness
        self._describe = describe
        self.level = level
        self._frozen: set[str] = set()
        self.num_params = len(group.params)
        self.num_registered = group.num_counted
        self.is_first_batch = self._tracker.is_first_batch
        self.adapts = self._tracker.adapts
        self.dispatched = group.grad_reduce_dispatched
        self.has_handle = group.ddp_config.num_distributed_optimizer_instances == 1

    def describe(self, name: str) -> str:
        """The name, with what is known of it."""
        if name in self._frozen:
            return f'{name} (frozen after wrapping)'
        return self._describe(name)

    def unused(self) -> list[str]:
        """Parameters without any gradient in this window, earlier micro-batches included."""
        counts = self._tracker.counts
        idle = [p for p in self._group.param_to_bucket if p not in counts]
        if not self.dispatched:
            # Micro-batches under no_sync() are not counted, but they leave something in main_grad.
            self._group.settle_grads()
            idle = [p for p in idle if not bool(p.main_grad.any())]
        self._frozen = {self._group.names([p])[0] for p in idle if not p.requires_grad}
        return self._group.names(idle)

    def missing(self) -> list[str]:
        """Parameters with no gradient, or fewer than expected."""
        return self._group.names(self._tracker.missing())

    def surplus(self) -> list[str]:
        """Parameters with more gradients than expected."""
        return self._group.names(self._tracker.surplus())

    def late(self) -> list[str]:
        """Parameters whose late gradient was added all the same."""
        return self._group.names(self._group.late_params)


class ForwardUse:
    """Remembers which modules ran in forward, for messages about parameters without a gradient."""

    def __init__(self, module: torch.nn.Module, once: bool) -> None:
        self._ran: set[str] = set()
        self._once = once
        self._handles = [
            child.register_forward_pre_hook(as_upstreams(self._hook(name)))
            for name, child in module.named_modules()
            if any(
                param is not None and param.requires_grad for param in child._parameters.values()
            )
        ]
        self._known = bool(self._handles)

    def _hook(self, name: str) -> Callable[..., None]:
        ran = self._ran

        def hook(*unused: Any) -> None:
            ran.add(name)

        return hook

    def describe(self, name: str) -> str:
        """The parameter's name, and whether its module ran."""
        if not self._known:
            return name
        ran = name.rpartition('.')[0] in self._ran
        return f'{name} (its module {"ran" if ran else "did not run"} in forward)'

    def end_window(self) -> None:
        """Forgets; and stops looking, if the first window was to be watched only."""
        if not self._ran:
            return
        self._ran.clear()
        if self._once:
            self._known = False
            for handle in self._handles:
                handle.remove()


class Replicas(NamedTuple):
    """Groups whose gradients are reduced over the same ranks.

    Attributes:
        process_group: All ranks that hold these parameters, over all optimizer instances.
        groups: The bucket groups, in the same order on every rank.
        factor: What a sum over the ranks is multiplied by: 1/dp_size, or 1 with per-token loss.
    """

    process_group: Any
    groups: Sequence[ParamAndGradBucketGroup]
    factor: float


def settle(parts: Sequence[Replicas], *, reduce_late: bool) -> list[ParamAndGradBucketGroup]:
    """Agrees on the window: reduces late gradients, and tells which groups were used on any rank.

    A collective over each part's process group, called when all its groups are reduced.

    Args:
        parts: Dense groups, then expert groups.
        reduce_late: Whether gradients were kept aside.

    Returns:
        The groups of which any parameter got a gradient on any rank.

    Raises:
        ReadinessError: If a gradient is late while a CUDA graph is captured.
    """
    used: list[ParamAndGradBucketGroup] = []
    for part in parts:
        if not part.groups:
            continue
        flags = _agree(part)
        position = 0
        for group in part.groups:
            params = list(group.param_to_bucket)
            of_group = flags[position : position + len(params)]
            position += len(params)
            if any(flag & _USED for flag in of_group):
                used.append(group)
            late = [p for p, flag in zip(params, of_group, strict=True) if flag & _LATE]
            if late and reduce_late:
                _reduce_late(group, late, part)
    return used


def _agree(part: Replicas) -> list[int]:
    """Per parameter of the part: whether it was late, or used, on any rank."""
    late, used = [], []
    for group in part.groups:
        counts = group.readiness.counts
        for param in group.param_to_bucket:
            late.append(param in group.late_grads)
            used.append(param in counts)
    process_group, device = _agreement_group(part.process_group)
    flags = torch.tensor([late, used], dtype=torch.uint8, device=device)
    if process_group.size() > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=process_group)
    on_any_rank = flags.tolist()
    return [_LATE * a + _USED * b for a, b in zip(*on_any_rank, strict=True)]


def _agreement_group(process_group: Any) -> tuple[Any, torch.device]:
    """The group to agree over: on CUDA, Megatron's gloo group of the same ranks, if it was made."""
    gloo: Any
    if dist.get_backend(process_group) == 'gloo':
        return process_group, torch.device('cpu')
    ranks = dist.get_process_group_ranks(process_group)
    finders: tuple[Callable[[], Any], ...] = (
        lambda: parallel_state.get_data_parallel_group_gloo(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group_gloo,
    )
    for find in finders:
        with contextlib.suppress(Exception):  # not made, or not by this version
            gloo = find()
            if gloo is not None and dist.get_process_group_ranks(gloo) == ranks:
                return gloo, torch.device('cpu')
    return process_group, torch.device('cuda', torch.cuda.current_device())


def _reduce_late(group: ParamAndGradBucketGroup, late: Sequence[Any], part: Replicas) -> None:
    """Sums what was kept aside, one parameter after the other, and adds it to the reduced gradients."""
    with torch.no_grad():
        for param in late:
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

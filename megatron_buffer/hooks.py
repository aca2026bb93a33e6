"""What runs once per parameter in backward and once per module in forward.

Stands for the closures of ``DistributedDataParallel._make_backward_post_hook`` and
``_make_forward_pre_hook`` (``megatron/core/distributed/distributed_data_parallel.py``), which look up the
group in dictionaries keyed by tensors, several times per call. Here everything that was known when the model
was wrapped is looked up then; whatever is out of the ordinary is left to upstream's closure.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megatron_buffer.hook_identity import as_upstreams
from megatron_buffer.window import accumulate_late

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup
    from megatron_buffer.ddp import DistributedDataParallel

_ddp = importlib.import_module('megatron.core.distributed.distributed_data_parallel')


class ParamSlot:
    """One parameter's place in backward. The wrapped model owns it; autograd gets a weak reference.

    Autograd's C++ node holds the hook, and upstream's closure holds the model. Any tensor whose graph
    reaches the node (an fp32 main_param, a kept auxiliary loss) would make a cycle that Python's collector
    cannot see, and the model and its buffers would never be freed.

    Args:
        ddp: The wrapped chunk.
        param: The parameter.
        upstream_hook: Upstream's closure for it.

    Attributes:
        count: Counts a gradient; True when the group became complete with it.
    """

    __slots__ = (
        '__weakref__',
        '_noted',
        'count',
        'ddp',
        'group',
        'param',
        'registers',
        'upstream_hook',
    )

    def __init__(
        self,
        ddp: DistributedDataParallel,
        param: torch.nn.Parameter,
        upstream_hook: Callable[..., None],
    ) -> None:
        self.ddp = ddp
        self.param: Any = param  # Megatron's attributes are not torch's
        self.group: ParamAndGradBucketGroup = ddp.param_to_bucket_group[param]
        self.upstream_hook = upstream_hook
        self.registers: bool = ddp.ddp_config.overlap_grad_reduce
        self.count = self.group.grad_counter(param)
        self._noted = False

    def out_of_the_ordinary(self, *args: Any) -> None:
        """Late, without a gradient, with a graph, or in a capture: as upstream does it.

        A gradient that comes after its group was dispatched is seen here, before it is added.
        """
        if self.param.grad_added_to_main_grad:
            self.note_fused()
        if self.group.grad_reduce_dispatched and not _ddp.is_graph_capturing():
            accumulate_late(self.group, self.param, self.upstream_hook, *args)
        else:
            self.upstream_hook(*args)

    def note_fused(self) -> None:
        """A fused kernel writes this gradient: zero_grad_buffer has to take its mark back."""
        if not self._noted:
            self._noted = True
            self.ddp.fused_params.append(self.param)

    def complete(self) -> None:
        """The last gradient of the group is in."""
        self.group.grads_complete(self.ddp.force_all_reduce)


def backward_hook(slot: ParamSlot) -> Callable[..., None]:
    """The hook that autograd calls when it has accumulated into ``param.grad``."""
    this = weakref.ref(slot)

    def hook(*unused: Any) -> None:
        slot = this()
        if slot is None:
            return
        param, group = slot.param, slot.group
        grad = param.grad
        if (
            grad is None
            or group.grad_reduce_dispatched
            or grad.requires_grad
            or _ddp.is_graph_capturing()
        ):
            slot.out_of_the_ordinary(*unused)
            return
        if not param.grad_added_to_main_grad:
            param.main_grad.add_(grad)
        else:
            slot.note_fused()
            if getattr(param, 'zero_out_wgrad', False):
                param.main_grad.add_(grad)
        param.grad = None
        if slot.registers and group.is_last_microbatch and slot.count():
            slot.complete()

    return hook


def forward_pre_hook(ddp: DistributedDataParallel) -> Callable[..., None]:
    """The hook of one module: its parameters' groups must be gathered before it runs.

    The groups are looked up again when the module's parameters are other ones than before.
    """
    this = weakref.ref(ddp)
    known: list[int] = []
    groups: tuple[ParamAndGradBucketGroup, ...] = ()

    def hook(module: torch.nn.Module, *unused: Any) -> None:
        nonlocal known, groups
        params = module._parameters
        if not params:
            return
        now = list(map(id, params.values()))
        if now != known:
            ddp = this()
            if ddp is None:
                return
            known, groups = now, _groups_of(ddp, params.values())
        for group in groups:
            if group.param_gather_dispatched and group.param_gather_handle is None:
                continue
            if _ddp.is_graph_capturing():
                return
            ddp = this()
            if ddp is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=ddp.skips_next_gather)

    return as_upstreams(hook)


def _groups_of(ddp: DistributedDataParallel, params: Any) -> tuple[ParamAndGradBucketGroup, ...]:
    found = {}
    for param in params:
        group = None if param is None else ddp.param_to_bucket_group.get(param)
        if group is not None:
            found[id(group)] = group
    return tuple(found.values())

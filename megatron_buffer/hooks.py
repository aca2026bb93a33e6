"""What runs once per parameter in backward and once per module in forward.

Stands for the closures of ``DistributedDataParallel._make_backward_post_hook`` and
``_make_forward_pre_hook`` (``megatron/core/distributed/distributed_data_parallel.py``), which look up the
group in dictionaries keyed by tensors, several times per call. Here everything that was known when the model
was wrapped is looked up then; whatever is out of the ordinary is left to upstream's closure.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_buffer.errors import ReadinessError
from megatron_buffer.hook_identity import as_upstreams
from megatron_buffer.window import accumulate_late

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup
    from megatron_buffer.ddp import DistributedDataParallel
    from megatron_buffer.grad_writes import GradWrites

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
        count: Counts a gradient, given ``counted``; True when the group became complete with it.
        counted: The parameter, as the counter knows it.
        flags: Which views may be added to, where the accumulation strategy overwrites; see ``GradWrites``.
        index: The parameter's place in ``flags``.
        overwrite: Writes the first gradient of a window over what the last one has left.
    """

    __slots__ = (
        '__weakref__',
        '_noted',
        '_writes',
        'count',
        'counted',
        'ddp',
        'flags',
        'group',
        'index',
        'overwrite',
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
        self.count, self.counted = self.group.grad_counter(param)
        self._noted = False
        self._writes: GradWrites | None = None
        self.flags, self.index = _WRITTEN, 0
        self.overwrite: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_

    def follow(self, writes: GradWrites, index: int) -> None:
        """From the next window on the first gradient overwrites, unless the view was zeroed."""
        self._writes = writes
        self.flags, self.index = writes.flags, index
        in_buffer = self.param.main_grad
        if in_buffer.is_cuda or in_buffer.dtype == self.param.dtype:
            self.overwrite = _writes_sum(in_buffer.dtype, in_buffer.device)

    def out_of_the_ordinary(self, *args: Any) -> None:
        """Late, without a gradient, with a graph, or in a capture: as upstream does it.

        A gradient that comes after its group was dispatched is seen here, before it is added.
        """
        if self.param.grad_added_to_main_grad:
            self.note_fused()
        if not self.flags[self.index] and not _ddp.is_graph_capturing():
            self.make_addable()
        if self.group.grad_reduce_dispatched and not _ddp.is_graph_capturing():
            accumulate_late(self.group, self.param, self.upstream_hook, *args)
        else:
            self.upstream_hook(*args)

    def note_fused(self) -> None:
        """A fused kernel writes this gradient: zero_grad_buffer has to take its mark back."""
        if not self._noted:
            self._noted = True
            self.ddp.fused_params.append(self.param)

    def make_addable(self) -> None:
        """Zeroes the view, unless it holds something of this window.

        Raises:
            ReadinessError: If a fused kernel has added to what the last window left.
        """
        assert self._writes is not None, 'only who follows the writes finds something not written'
        param = self.param
        if not param.grad_added_to_main_grad:
            self._writes.settle(self.index, self.index + 1)
        elif getattr(param, 'overwrite_main_grad', False):
            self.flags[self.index] = 1
        else:
            raise ReadinessError(
                f'a fused kernel has added to the gradient of {self.group.names([param])[0]}, which was not '
                'zeroed, because its module did not say when the model was wrapped that it fuses weight '
                'gradients. Set accumulation: zero_then_add, or turn gradient accumulation fusion on before '
                'wrapping'
            )

    def complete(self) -> None:
        """The last gradient of the group is in."""
        self.group.grads_complete(self.ddp.force_all_reduce)


def backward_hook(slot: ParamSlot, overwrites: bool = False) -> Callable[..., None]:
    """The hook that autograd calls when it has accumulated into ``param.grad``.

    What a hook is made of counts: with thousands of parameters each object that a hook touches is one that the
    processor's caches have forgotten since the last call.

    Args:
        slot: The parameter's.
        overwrites: The first gradient of a window overwrites what the last one left.
    """
    return partial(_write_first if overwrites else _add, weakref.ref(slot))


def _add(this: weakref.ref[ParamSlot], *unused: Any) -> None:
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
    if slot.registers and group.is_last_microbatch and slot.count(slot.counted):
        slot.complete()


def _write_first(this: weakref.ref[ParamSlot], *unused: Any) -> None:
    slot = this()
    if slot is None:
        return
    param, group = slot.param, slot.group
    grad = param.grad
    if (
        grad is None
        or group.grad_reduce_dispatched
        or grad.requires_grad
        or param.grad_added_to_main_grad
        or _ddp.is_graph_capturing()
    ):
        slot.out_of_the_ordinary(*unused)
        return
    flags, index = slot.flags, slot.index
    if flags[index]:
        param.main_grad.add_(grad)
    elif grad.is_sparse:
        slot.make_addable()
        param.main_grad.add_(grad)
    else:
        flags[index] = 1
        slot.overwrite(param.main_grad, grad)
    param.grad = None
    if slot.registers and group.is_last_microbatch and slot.count(slot.counted):
        slot.complete()


_WRITTEN = bytearray(b'\1')  # of a slot that follows no one


@functools.cache
def _writes_sum(
    dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """What writes ``0 + grad`` over main_grad in one pass, as zeroing and adding would: -0.0 becomes 0.0.

    On a CPU that takes a temporary where dtypes differ; there a copy is made, and zeros keep their sign.
    """
    zero = torch.zeros(1, dtype=dtype, device=device)
    return lambda main_grad, grad: torch.add(zero, grad, out=main_grad)


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

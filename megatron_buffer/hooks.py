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
from operator import is_
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from megatron_buffer.errors import ReadinessError
from megatron_buffer.grad_writes import captures_graphs
from megatron_buffer.hook_identity import as_upstreams
from megatron_buffer.late_grads import accumulate_late

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup
    from megatron_buffer.ddp import DistributedDataParallel
    from megatron_buffer.grad_writes import GradWrites

_ddp = importlib.import_module('megatron.core.distributed.distributed_data_parallel')


class ParamSlot:
    """One parameter's place in backward: what its hook needs each time. Autograd owns it.

    Autograd's C++ node holds the hook, and any tensor whose graph reaches the node (an fp32 main_param, a kept
    auxiliary loss) would make a cycle that Python's collector cannot see, so that the model and its buffers
    would never be freed. So a slot holds nothing of the model but the parameter, which the node holds too.

    Args:
        rare: What the parameter's hook falls back on; the wrapped model owns it.

    Attributes:
        counted: The parameter, as ``intake.count`` knows it.
        fused: A fused kernel writes the gradient; zero_grad_buffer knows of it.
        flags: Which views may be added to, where the accumulation strategy overwrites; see ``GradWrites``.
        index: The parameter's place in ``flags``.
        intake: The state of the parameter's bucket group.
        overwrite: Writes the first gradient of a window over what the last one has left.
    """

    __slots__ = ('counted', 'flags', 'fused', 'index', 'intake', 'overwrite', 'param', 'rare')

    def __init__(self, rare: RareCases) -> None:
        self.param: Any = rare.param  # Megatron's attributes are not torch's
        self.intake = rare.group.intake
        self.counted = rare.group.counted_as(rare.param)
        self.fused = False
        self.flags, self.index = _WRITTEN, 0
        self.overwrite: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_
        self.rare = weakref.ref(rare)


class RareCases:
    """What the hook of one parameter does when it is not simply adding. The wrapped model owns it.

    Args:
        ddp: The wrapped chunk.
        param: The parameter.
        upstream_hook: Upstream's closure for it, which holds the model.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        param: torch.nn.Parameter,
        upstream_hook: Callable[..., None],
    ) -> None:
        self.ddp = ddp
        self.param: Any = param
        self.group: ParamAndGradBucketGroup = ddp.param_to_bucket_group[param]
        self.upstream_hook = upstream_hook
        self.slot = ParamSlot(self)
        self._writes: GradWrites | None = None

    def follow(self, writes: GradWrites, index: int) -> None:
        """From the next window on the first gradient overwrites, unless the view was zeroed."""
        self._writes = writes
        self.slot.flags, self.slot.index = writes.flags, index
        in_buffer = self.param.main_grad
        if in_buffer.is_cuda or in_buffer.dtype == self.param.dtype:
            self.slot.overwrite = _writes_sum(in_buffer.dtype, in_buffer.device)

    def upstreams_way(self, *args: Any) -> None:
        """Late, without a gradient, with a graph, or in a capture: as upstream does it.

        A gradient that comes after its group was dispatched is seen here, before it is added.
        """
        if self.param.grad_added_to_main_grad:
            self.note_fused()
        if not self.slot.flags[self.slot.index] and not _ddp.is_graph_capturing():
            self.make_addable()
        if self.group.grad_reduce_dispatched and not _ddp.is_graph_capturing():
            accumulate_late(self.group, self.param, self.upstream_hook, *args)
        else:
            self.upstream_hook(*args)

    def note_fused(self) -> None:
        """A fused kernel writes this gradient: zero_grad_buffer has to take its mark back."""
        if not self.slot.fused:
            self.slot.fused = True
            self.ddp.fused_params.append(self.param)

    def make_addable(self) -> None:
        """Zeroes the view, unless it holds something of this window.

        Raises:
            ReadinessError: If a fused kernel has added to what the last window left.
        """
        assert self._writes is not None, 'only who follows the writes finds something not written'
        param, slot = self.param, self.slot
        if not param.grad_added_to_main_grad:
            self._writes.settle(slot.index, slot.index + 1)
        elif getattr(param, 'overwrite_main_grad', False):
            slot.flags[slot.index] = 1
        else:
            raise ReadinessError(
                f'a fused kernel has added to the gradient of {self.group.names([param])[0]}, which was not '
                'zeroed, because its module did not say when the model was wrapped that it fuses weight '
                'gradients. Set accumulation: zero_then_add, or turn gradient accumulation fusion on before '
                'wrapping'
            )


def backward_hook(rare: RareCases, overwrites: bool = False) -> Callable[..., None]:
    """The hook that autograd calls when it has accumulated into ``param.grad``.

    What a hook is made of counts, as in :class:`~megatron_buffer.bucket_groups.Intake`: a bound method and a slot
    are two objects.

    Args:
        rare: The parameter's.
        overwrites: The first gradient of a window overwrites what the last one left.
    """
    plain = _write_first if overwrites else _add
    if captures_graphs(rare.ddp.config):
        plain = _write_first_unless_capturing if overwrites else _add_unless_capturing
    return MethodType(plain, rare.slot)


def _add(slot: ParamSlot, inputs: Any = None, outputs: Any = None) -> None:
    param, intake = slot.param, slot.intake
    grad = param.grad
    if grad is None or intake.closed or grad.requires_grad:
        _rarely(slot, inputs, outputs)
        return
    if param.grad_added_to_main_grad:
        _after_fused(slot, param, grad)
    else:
        param.main_grad.add_(grad)
    param.grad = None
    if intake.is_last_microbatch and intake.count(slot.counted):
        _complete(slot)


def _write_first(slot: ParamSlot, inputs: Any = None, outputs: Any = None) -> None:
    param, intake = slot.param, slot.intake
    grad = param.grad
    if grad is None or intake.closed or grad.requires_grad:
        _rarely(slot, inputs, outputs)
        return
    flags, index = slot.flags, slot.index
    if flags[index]:
        if param.grad_added_to_main_grad:
            _after_fused(slot, param, grad)
        else:
            param.main_grad.add_(grad)
    elif param.grad_added_to_main_grad or grad.is_sparse:
        _rarely(slot, inputs, outputs)
        return
    else:
        flags[index] = 1
        slot.overwrite(param.main_grad, grad)
    param.grad = None
    if intake.is_last_microbatch and intake.count(slot.counted):
        _complete(slot)


def _complete(slot: ParamSlot) -> None:
    """The last gradient of the group is in."""
    rare = slot.rare()
    if rare is not None:
        rare.group.grads_complete(rare.ddp.force_all_reduce)


def _after_fused(slot: ParamSlot, param: Any, grad: torch.Tensor) -> None:
    """The backward pass has added the gradient itself; ``grad`` is a dummy, or a part that is still to be added."""
    if not slot.fused:
        rare = slot.rare()
        if rare is not None:
            rare.note_fused()
    if getattr(param, 'zero_out_wgrad', False):
        param.main_grad.add_(grad)


def _rarely(slot: ParamSlot, *args: Any) -> None:
    rare = slot.rare()
    if rare is not None:
        rare.upstreams_way(*args)


def _unless_capturing(plain: Callable[..., None]) -> Callable[..., None]:
    """The same for a model whose CUDA graphs are captured, in which nothing is counted."""

    def hook(slot: ParamSlot, inputs: Any = None, outputs: Any = None) -> None:
        (_rarely if _ddp.is_graph_capturing() else plain)(slot, inputs, outputs)

    return hook


_add_unless_capturing = _unless_capturing(_add)
_write_first_unless_capturing = _unless_capturing(_write_first)
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

    While everything is gathered it looks at one flag. The groups are looked up again when the module's
    parameters are other ones than before.
    """
    this, gathers = weakref.ref(ddp), ddp.gathers
    known: tuple[Any, ...] = ()
    groups: tuple[ParamAndGradBucketGroup, ...] = ()

    def hook(module: torch.nn.Module, inputs: Any = None) -> None:
        nonlocal known, groups
        if not gathers.waiting:
            return
        params = module._parameters
        if not params:
            return
        if len(known) != len(params) or not all(map(is_, known, params.values())):
            ddp = this()
            if ddp is None:
                return
            known = tuple(params.values())
            groups = _groups_of(ddp, known)
        for group in groups:
            if group.gathered:
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

"""What one window of a bucket group (zero_grad_buffer to zero_grad_buffer) looks like to its judge.

The strategies of ``unused_params`` decide from it. Upstream has no counterpart: it asserts an iteration later
(``_ParamAndGradBucketGroup.finish_grad_sync`` and ``reset``), without names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megatron_buffer.hook_identity import as_upstreams

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup


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

"""The windows of one wrapped model chunk: what its bucket groups decide together.

Stands for what ``DistributedDataParallel.finish_grad_sync`` and ``zero_grad_buffer``
(``megatron/core/distributed/distributed_data_parallel.py``) leave to each group on its own: the order of
dispatch, parameters without a gradient, late gradients, and what the first batch expects.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_buffer.bucket_groups import Drain, ParamAndGradBucketGroup, forward_index, ready_at
from megatron_buffer.errors import ReadinessError
from megatron_buffer.grad_writes import captures_graphs
from megatron_buffer.late_grads import Agreement, Replicas
from megatron_buffer.param_checks import FrozenParams
from megatron_buffer.prediction import predicted_counts, reach_of
from megatron_buffer.window import ForwardUse, GroupWindow

if TYPE_CHECKING:
    from megatron_buffer.ddp import DistributedDataParallel

_ddp = importlib.import_module('megatron.core.distributed.distributed_data_parallel')
logger = logging.getLogger(__name__)
_IN_FLIGHT = attrgetter('grad_reduce_handle')


class ChunkWindow:
    """Judges, dispatches and settles the windows of a chunk.

    Args:
        ddp: The wrapped chunk; its groups, process groups and runtime are set.
        config: Transformer config.
        names: Parameter to name.
    """

    def __init__(
        self, ddp: DistributedDataParallel, config: Any, names: dict[torch.nn.Parameter, str]
    ) -> None:
        self.runtime = ddp.runtime
        self.groups: list[ParamAndGradBucketGroup] = ddp._all_groups()
        self.overlaps: bool = ddp.ddp_config.overlap_grad_reduce
        self.names = names
        index = forward_index(names)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        # With delayed weight gradients a chunk's backward is not over when the next one's begins.
        takes_turns = chunks > 1 and not ddp.ddp_config.delay_wgrad_compute
        peers = self.runtime.peers(ddp.dp_cp_group) if takes_turns else None
        self.dispatcher = self.runtime.dispatch_order.dispatcher(
            self.groups, [ready_at(group.param_to_bucket, index) for group in self.groups], peers
        )
        drain = Drain()
        for group in self.groups:
            group.param_to_name = names
            group.graphs_write = captures_graphs(config)
            group.dispatcher = self.dispatcher
            if group.reduce_choice.kind in ('a2a', 'upstream_a2a'):
                group.drain = drain
        factor = 1.0 if config.calculate_per_token_loss else 1.0 / ddp.dp_cp_group.size()
        self.replicas = (
            Replicas(ddp.dp_cp_group, ddp.bucket_groups, factor),
            Replicas(ddp.expt_dp_group, ddp.expert_parallel_bucket_groups, factor),
        )
        self._frozen = FrozenParams(ddp.module)
        first = ddp.dp_cp_group.rank() == 0 and (ddp.tp_group is None or ddp.tp_group.rank() == 0)
        self._level = logging.WARNING if first else logging.INFO
        self._agreed_on_used_groups = False
        instances = ddp.ddp_config.num_distributed_optimizer_instances
        is_partial = ddp.ddp_config.use_distributed_optimizer and instances > 1
        self._warns_of_partial_sums = is_partial and self.runtime.config.checks.export == 'warn'
        self._predicted: dict[Any, int] = {}
        self._forward_use: ForwardUse | None = None
        tracks = getattr(self.runtime.unused_params, 'tracks_forward', 'never')
        if tracks != 'never' and self.overlaps:
            self._forward_use = ForwardUse(ddp.module, once=tracks == 'first_window')
        self._writes = ddp.grad_writes
        self._awaits_backward_end = False
        watched = self.overlaps and (self.runtime.readiness.predicts or peers is not None)
        if watched or self._writes:
            ddp.register_forward_hook(_forward_hook(weakref.ref(self)))

    def finish(self, wait: Callable[[], None], force_all_reduce: bool) -> None:
        """Ends backward: judges the groups, starts what is left, waits, reduces late gradients.

        Args:
            wait: Upstream's loop over the groups.
            force_all_reduce: Reduce whole buckets.

        Raises:
            ReadinessError: If parameters have no gradient, or late ones, and the config does not allow it.
        """
        self._frozen.check(is_error=getattr(self.runtime.unused_params, 'thawed_is_error', False))
        if force_all_reduce and self._warns_of_partial_sums:
            self._warn_of_partial_sums()
        repeated = any(group.grad_reduce_finished for group in self.groups)
        if self.overlaps:
            self._judge()
            self.dispatcher.flush(force_all_reduce)
        # Without overlap nothing can be late before the first finish of a window.
        agreement = self._agree() if self.overlaps or repeated else None
        for group in self.groups:
            group.reduces_once = True
        try:
            wait()
        finally:
            for group in self.groups:
                group.reduces_once = False
        if agreement is None:
            return
        used = agreement.settle()
        if used:
            self._agreed_on_used_groups = True
            self.dispatcher.hold(used)

    def _warn_of_partial_sums(self) -> None:
        self._warns_of_partial_sums = False
        logger.log(
            self._level,
            'whole gradients are asked for (force_all_reduce, save_wgrads_interval), and with several optimizer '
            'instances stock sums over all of them only what a rank owns: of the other gradients each rank has '
            "the sum of its own instance's ranks. Set checks.export to error or gather for the whole sum",
        )

    def begin(self) -> None:
        """Before the buffers are zeroed: what a broken-off iteration has started is waited for."""
        if not any(map(_IN_FLIGHT, self.groups)):
            return
        self.dispatcher.flush(False)
        for group in self.groups:
            group.abandon()
        logger.warning(
            'zero_grad_buffer() was called while gradients were being reduced, without '
            'finish_grad_sync(): the iteration is taken as broken off on all ranks, and its gradients '
            'are dropped'
        )

    def reset(self) -> None:
        """After the groups were reset: a new window."""
        self.dispatcher.reset()
        self._awaits_backward_end = False
        if self._forward_use is not None:
            self._forward_use.end_window()

    def after_forward(self, output: Any) -> None:
        """Predicts the gradients of the coming backward pass, and watches for its beginning."""
        if not torch.is_grad_enabled() or _ddp.is_graph_capturing():
            return
        predicts = self.overlaps and self.runtime.readiness.predicts
        if predicts and any(group.readiness.is_first_batch for group in self.groups):
            self._predict(output)
        this = weakref.ref(self)

        def backward_begins(gradient: torch.Tensor) -> None:
            window = this()
            if window is None:
                return
            if window._writes:
                window._watch_first_backward()
            if window.overlaps and all(group.is_last_microbatch for group in window.groups):
                window.dispatcher.begin_backward()

        for leaf in tree_leaves(output):
            # Also where the chunk has passed its input through on this rank: backward ends there.
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(backward_begins)

    def _watch_first_backward(self) -> None:
        """When the first backward pass ends, what it has not written is zeroed: anybody may look at it then."""
        for writes in self._writes:
            writes.backward_begins()
        if self._awaits_backward_end or all(writes.complete for writes in self._writes):
            return
        self._awaits_backward_end = True
        this = weakref.ref(self)

        def backward_ends() -> None:
            window = this()
            if window is not None:
                window._awaits_backward_end = False
                for writes in window._writes:
                    writes.settle()

        torch.autograd.Variable._execution_engine.queue_callback(backward_ends)

    def _judge(self) -> None:
        """Lets the unused_params strategy judge the groups where something is not as it should be."""
        # No count at all: aligned grad sync never registers, or there was no synchronised backward.
        registers = any(group.num_counted for group in self.groups)
        if self._predicted and registers:
            self._check_prediction()
        odd = [
            group
            for group in self.groups
            if group.late_params
            or (registers and (group.irregular or not group.num_counted))
            or (group.irregular and not group.readiness.adapts and not group.grad_reduce_dispatched)
        ]
        if odd:
            self.runtime.unused_params.check(
                [GroupWindow(group, self._describe, self._level) for group in odd]
            )

    def _describe(self, name: str) -> str:
        if self._forward_use is not None:
            name = self._forward_use.describe(name)
        return name

    def _agree(self) -> Agreement | None:
        """Asks the other ranks for late gradients, and for groups that nobody uses; None if neither matters."""
        reduce_late = self.runtime.on_late == 'reduce'
        must_agree_on_used = bool(self.dispatcher.holding) and not self._agreed_on_used_groups
        if not (reduce_late or must_agree_on_used):
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            late = [self.names[param] for group in self.groups for param in group.late_grads]
            if late:
                raise ReadinessError(
                    'gradients came after their bucket group was reduced, and cannot be reduced while '
                    f'a CUDA graph is captured: {", ".join(late[:8])}'
                )
            return None
        return Agreement(self.replicas, on_used=must_agree_on_used)

    def _predict(self, output: Any) -> None:
        known = self.runtime.readiness.known_counts(self.names)
        self._predicted = predicted_counts(reach_of(output), self.names) | known
        for group in self.groups:
            if group.readiness.is_first_batch:
                group.readiness.expect({p: self._predicted[p] for p in group.param_to_bucket})

    def _check_prediction(self) -> None:
        """Names what came otherwise than predicted; the late path has made it right."""
        predicted, self._predicted = self._predicted, {}
        counts = {p: n for group in self.groups for p, n in group.readiness.counts.items()}
        wrong = [
            f'{self.names[param]} ({predicted[param]} expected, {got} came)'
            for group in self.groups
            for param in group.param_to_bucket
            if (got := counts.get(param, 0)) != predicted[param]
        ]
        if wrong:
            logger.warning(
                'readiness: golden_static expected other gradients than came for %d parameters: %s%s. '
                'They were reduced all the same, at finish; readiness.counts can declare the right '
                'numbers',
                len(wrong),
                ', '.join(wrong[:8]),
                ' ...' if len(wrong) > 8 else '',
            )


def _forward_hook(this: weakref.ref[ChunkWindow]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        window = this()
        if window is not None:
            window.after_forward(output)

    return hook

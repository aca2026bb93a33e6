"""Optimizer checkpoints: guarded by the layout they were saved under, and equal to memory.

Stands for the checkpoint methods of ``DistributedOptimizer``
(``megatron/core/optimizer/distrib_optimizer.py``); the decisions are in ``checkpoint_layout``,
``checkpoint_guard`` and ``checkpoint_repair``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_buffer.checkpoint_guard import RECORD_KEY, LayoutGuard, attach_check
from megatron_buffer.checkpoint_layout import DP_RESHARDABLE, DP_ZERO, LAYOUT_FORMATS
from megatron_buffer.checkpoint_repair import (
    complete_buckets,
    keep_bucket_numbers,
    put_right,
    without_padding_warning,
)

_do = importlib.import_module('megatron.core.optimizer.distrib_optimizer')


class CheckpointedOptimizer(_do.DistributedOptimizer):
    """``DistributedOptimizer`` whose checkpoints carry a record of the layout.

    - ``state_dict()['optimizer']`` and the result of ``get_parameter_state_dp_zero`` get one entry more,
      which stock ignores. No collective is added to either.
    - Loading state of a format that depends on the layout compares the record, or for state that
      stock saved what stock would have laid out, and raises ``CheckpointLayoutError``.
    - ``fully_reshardable`` saves are compared with memory and put right.
    - Ranks that own only padding can save and load ``dp_reshardable``.
    """

    _gathered: dict[Any, Any] | None = None
    _for_fully_reshardable = False

    @functools.cached_property
    def _guard(self) -> LayoutGuard | None:
        """None for an optimizer without buffers (a frozen model's stub, Megatron-FSDP's)."""
        return LayoutGuard(self) if hasattr(self, 'gbuf_ranges') else None

    def state_dict(self) -> dict[str, Any]:
        """Variables that belong to no parameter, with the record; upstream: ``state_dict``."""
        with self._step_where_nothing_is_owned():
            state = super().state_dict()
        if self._guard is not None:
            state['optimizer'][RECORD_KEY] = self._guard.record
        return state

    @contextlib.contextmanager
    def _step_where_nothing_is_owned(self) -> Iterator[None]:
        """With torch's AdamW upstream takes the step from parameter states, and asserts without any.

        What such a rank reports is used nowhere: rank 0, which owns the first parameter, writes.
        """
        inner = self.optimizer
        if self._guard is None or self.model_param_gbuf_map or _do.HAVE_APEX_OR_TE:
            yield
            return
        step = float(inner.param_groups[0].get('step') or 0)
        inner.state['nothing is owned'] = {'step': torch.tensor(step)}
        try:
            yield
        finally:
            del inner.state['nothing is owned']

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The sharded state, with the record; upstream: ``sharded_state_dict``."""
        state = super().sharded_state_dict(*args, **kwargs)
        if self._guard is None:
            return state
        format_name = state['param_state_sharding_type']
        if format_name in LAYOUT_FORMATS:
            attach_check(self._guard, format_name, state)
        elif isinstance(state['optimizer'], dict):
            # Common to all ranks: pipeline stages must agree, and nothing depends on the layout.
            state['optimizer'][RECORD_KEY] = self._guard.summary
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks the record, then loads; upstream: ``load_state_dict``.

        Raises:
            CheckpointLayoutError: If the state depends on the layout, and that differs.
        """
        format_name = state_dict.get('param_state_sharding_type')
        if self._guard is not None and format_name == DP_RESHARDABLE:
            record = state_dict['optimizer'].get(RECORD_KEY)
            sizes = (state_dict['param_state'] or {}).get('per_bucket_numel_unpadded')
            self._guard.refuse(self._guard.difference(format_name, record, sizes))
        # The main parameters of an fp32 model are views of leaves, which upstream copies into.
        with torch.no_grad():
            super().load_state_dict(state_dict)

    def get_parameter_state_dp_zero(
        self,
        use_gloo_comm: bool = True,
        empty_data: bool = False,
        return_on_all_ranks: bool = False,
    ) -> dict[Any, Any] | None:
        """State gathered per buffer, with the record; upstream: ``get_parameter_state_dp_zero``."""
        state = super().get_parameter_state_dp_zero(
            use_gloo_comm=use_gloo_comm,
            empty_data=empty_data,
            return_on_all_ranks=return_on_all_ranks,
        )
        if self._for_fully_reshardable:
            self._gathered = state
        elif state is not None and self._guard is not None:
            state[RECORD_KEY] = {'record': self._guard.record}
        return state

    def load_parameter_state_from_dp_zero(
        self, state_dict: dict[Any, Any] | None, *, update_legacy_format: bool = False
    ) -> None:
        """Checks the record, which DP rank 0 holds, and loads; upstream: the method of that name.

        Raises:
            CheckpointLayoutError: On every DP rank, if the layouts differ.
        """
        guard = self._guard
        group = self.data_parallel_group_gloo
        if guard is not None and group is not None:
            verdict = ['']
            if group.rank() == 0 and state_dict is not None:
                verdict[0] = guard.dp_zero_difference(DP_ZERO, state_dict)
            source = dist.get_process_group_ranks(group)[0]
            dist.broadcast_object_list(verdict, source, group, device=torch.device('cpu'))
            guard.refuse(verdict[0])
        if state_dict is not None:
            state_dict = {key: value for key, value in state_dict.items() if key != RECORD_KEY}
        super().load_parameter_state_from_dp_zero(
            state_dict, update_legacy_format=update_legacy_format
        )

    def get_parameter_state_dp_reshardable(self) -> dict[Any, Any]:
        """Own shards, with the pads that upstream leaves out; upstream: the method of that name."""
        state = super().get_parameter_state_dp_reshardable()
        complete_buckets(self, state)
        return state

    def sharded_param_state_dp_reshardable(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Own shards as sharded tensors; upstream: the method of that name."""
        state = super().sharded_param_state_dp_reshardable(*args, **kwargs)
        keep_bucket_numbers(state)
        return state

    def sharded_param_state_fully_reshardable(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Whole parameters by name, equal to memory; upstream: the method of that name."""
        policy = (
            self._guard.runtime.config.checkpoint.repair_fully_reshardable
            if self._guard
            else 'never'
        )
        quiet = contextlib.nullcontext() if policy == 'never' else without_padding_warning()
        self._for_fully_reshardable = True
        try:
            with quiet:
                state = super().sharded_param_state_fully_reshardable(
                    model_sharded_state_dict, is_loading, metadata
                )
            if state is not None and not is_loading and self._gathered is not None:
                put_right(self, state, self._gathered, policy)
        finally:
            self._for_fully_reshardable = False
            self._gathered = None
        return state

    def _set_main_param_and_optimizer_states(
        self, model_param: Any, tensors: dict[str, Any]
    ) -> None:
        """Never touches ``step``; upstream: the method of that name.

        It is part of ``param_groups``. With torch's AdamW upstream looks for it among a parameter's
        tensors, where ``dp_reshardable`` has this run's own, and the other formats have none.
        """
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, 'step': None})

"""The layout guard: the record that travels with optimizer state, and what is refused when it is loaded.

Upstream has no counterpart. The record is one string in ``state_dict()['optimizer']`` and one entry of
the dict that ``get_parameter_state_dp_zero`` returns (``megatron/core/optimizer/distrib_optimizer.py``):
places that stock writes, reads back and ignores, so that stock loads our checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import log_single_rank
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_buffer import config_layout
from megatron_buffer import runtime as runtime_module
from megatron_buffer.checkpoint_layout import (
    LAYOUT_FORMATS,
    IndexedBuffer,
    compare,
    merge_quantized,
    place_as_stock,
    refusal,
)
from megatron_buffer.checkpoint_record import Placed, SavedBucket, SavedBuffer, StateLayout
from megatron_buffer.config import load_config
from megatron_buffer.errors import CheckpointLayoutError
from megatron_buffer.param_layout import compute_per_buffer_param_layout, group_params_for_buffers
from megatron_buffer.runtime import Runtime

logger = logging.getLogger(__name__)

RECORD_KEY = 'megatron_buffer_layout'
_QUANTIZED = 'torch.uint8'
_SETTING = 'checkpoint.layout_guard'
_OTHER_VERSION = (
    'the layout that this optimizer state was saved under was recorded by another version of '
    'megatron-buffer and cannot be compared: load it with that version, or load state of format '
    f'fully_reshardable. {_SETTING}: false loads it as it is.'
)


class LayoutGuard:
    """What one optimizer knows of its layout, and the check of a checkpoint against it.

    Args:
        optimizer: A ``DistributedOptimizer`` with buffers.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer: Any = weakref.proxy(optimizer)  # which holds this guard
        runtime = getattr(optimizer.model_chunks[0], 'runtime', None)
        self.runtime: Runtime = runtime or runtime_module.resolve()

    @property
    def enabled(self) -> bool:
        """``checkpoint.layout_guard``."""
        return self.runtime.config.checkpoint.layout_guard

    @functools.cached_property
    def layout(self) -> StateLayout:
        """This run's layout."""
        return self._with_buffers([self._saved_buffer(b) for b in self._optimizer.buffers])

    @functools.cached_property
    def record(self) -> str:
        """The text that is stored with state of a format that depends on the layout."""
        return self.layout.to_text()

    @property
    def summary(self) -> str:
        """The text for other formats; the same on all ranks."""
        return self._with_buffers([]).to_text(with_buffers=False)

    def difference(
        self, format_name: str, record: str | None, sizes: Sequence[Any] | None = None
    ) -> str:
        """Message of a refusal, or '' when the state may be loaded; no communication.

        Args:
            format_name: Megatron's name of the checkpoint format.
            record: What was stored with the state; None for state that stock saved.
            sizes: ``per_bucket_numel_unpadded`` from the checkpoint, where the format has it.
        """
        if format_name not in LAYOUT_FORMATS:
            return ''
        if record is None:
            return self._judge(format_name, *self._as_stock(sizes))
        saved = StateLayout.from_text(record)
        return _OTHER_VERSION if saved is None else self._judge(format_name, saved, '')

    def dp_zero_difference(self, format_name: str, state: Mapping[Any, Any]) -> str:
        """As :meth:`difference`, for what ``get_parameter_state_dp_zero`` returned; on its owner only.

        State of unquantized parameters may be loaded into quantized ones: upstream splits it.
        """
        record = state.get(RECORD_KEY, {}).get('record')
        dtypes = [
            dtype for buffer in state.values() if isinstance(buffer, dict) for dtype in buffer
        ]
        if not self._is_quantized() or any(_QUANTIZED in str(dtype) for dtype in dtypes):
            return self.difference(format_name, record)
        expected, found = merge_quantized(self.layout, self._indexed())
        saved = self._stock_layout([]) if record is None else StateLayout.from_text(record)
        if saved is None:
            return _OTHER_VERSION
        if expected is not None and saved.buffers:
            by_dtypes = dataclasses.replace(saved, buffers=tuple(sorted(saved.buffers)))
            found = compare(format_name, by_dtypes, expected).difference
        return refusal(format_name, found, saved, self.layout) if found else ''

    def refuse(self, message: str) -> None:
        """Raises, or warns where the config turns the guard off; nothing for ''.

        Raises:
            CheckpointLayoutError: With ``message``.
        """
        if not message:
            return
        if self.enabled:
            raise CheckpointLayoutError(message)
        log_single_rank(
            logger, logging.WARNING, f'{_SETTING} is false, loading all the same: {message}'
        )

    def _judge(self, format_name: str, saved: StateLayout, found: str) -> str:
        renamed: tuple[str, ...] = ()
        if not found and saved.buffers:
            found, renamed = compare(format_name, saved, self.layout)
        if found:
            return refusal(format_name, found, saved, self.layout)
        if renamed:
            log_single_rank(
                logger,
                logging.WARNING,
                f'{len(renamed)} parameters have another name in the checkpoint and are matched by '
                f'their position in the buffer: {", ".join(renamed[:4])}'
                f'{" ..." if len(renamed) > 4 else ""}',
            )
        return ''

    def _with_buffers(self, buffers: Sequence[SavedBuffer]) -> StateLayout:
        config = self.runtime.config
        return StateLayout(
            config=config.source or 'a config without a file',
            config_hash=self.runtime.hash,
            choices=config.short_str(),
            buffers=tuple(buffers),
        )

    @functools.cached_property
    def _names(self) -> dict[torch.nn.Parameter, str]:
        """Names in registration order, of all model chunks."""
        return {
            param: name
            for chunk in self._optimizer.model_chunks
            for name, param in chunk.module.named_parameters()
        }

    def _saved_buffer(self, buffer: Any) -> SavedBuffer:
        return _as_saved(
            (buffer.param_dtype, buffer.grad_dtype),
            buffer.param_index_map,
            [bucket.offset for bucket in buffer.buckets],
            [bucket.numel_unpadded for bucket in buffer.buckets],
            self._names,
        )

    def _is_quantized(self) -> bool:
        return any(_QUANTIZED in buffer.dtypes for buffer in self.layout.buffers)

    def _indexed(self) -> list[IndexedBuffer]:
        result = []
        for buffer, saved in zip(self._optimizer.buffers, self.layout.buffers, strict=True):
            index_of = dict(zip(buffer.params, buffer.param_indices, strict=True))
            in_order = sorted(buffer.param_index_map.items(), key=lambda item: item[1][0])
            logical = str((buffer.params[0].dtype, buffer.grad_dtype))
            indices = tuple(index_of[param] for param, _ in in_order)
            result.append(IndexedBuffer(saved.dtypes, logical, indices))
        return result

    # What stock would have laid out -------------------------------------------------------------

    def _is_upstream_layout(self) -> bool:
        """Whether stock could have laid this run's buffers out, given the right bucket size."""
        config = self.runtime.config
        padding: Any = config.padding
        return (
            type(config.buffer_grouping) is config_layout.UpstreamGrouping
            and type(config.param_order) is config_layout.ReverseOrder
            and type(config.bucketing) is config_layout.FixedSizeBucketing
            and type(config.bucket_isolation) is config_layout.SharedEmbeddingIsolation
            and type(padding) is config_layout.MegatronPadding
            and padding.param_start_elems == config_layout.MegatronPadding().param_start_elems
        )

    def _stock_layout(self, buffers: Sequence[SavedBuffer]) -> StateLayout:
        return StateLayout(
            config='stock Megatron-Core',
            config_hash='none',
            choices='upstream',
            buffers=tuple(buffers),
        )

    def _as_stock(self, sizes: Sequence[Any] | None) -> tuple[StateLayout, str]:
        """Layout that stock's state must have had; without buffers when there is nothing to compare."""
        groups = list(self._stock_groups())
        if sizes is None:
            if self._is_upstream_layout():
                return self._stock_layout([]), ''
            return self._stock_layout([self._computed(*group) for group in groups]), ''
        if len(sizes) != len(groups):
            return self._stock_layout([]), (
                f'stock has {len(groups)} buffers for these parameters, the checkpoint {len(sizes)}'
            )
        buffers: list[SavedBuffer] = []
        for (dtypes, params, _), saved in zip(groups, sizes, strict=True):
            ((saved_dtypes, bucket_sizes),) = saved.items()
            in_order = [(self._names[p], p.data.nelement()) for p in reversed(params)]
            placed = place_as_stock(in_order, bucket_sizes)
            if placed is None:
                more = ', ...' if len(bucket_sizes) > 8 else ''
                shown = f'[{", ".join(map(str, bucket_sizes[:8]))}{more}]'
                return self._stock_layout([]), (
                    f'no layout of stock puts the {dtypes} parameters of this run into buckets of '
                    f'{shown} elements, which buffer {saved_dtypes} of the checkpoint has'
                )
            buffers.append(SavedBuffer(str(saved_dtypes), placed.buckets))
        return self._stock_layout(buffers), ''

    def _stock_groups(self) -> Iterator[tuple[tuple[Any, Any], list[torch.nn.Parameter], int]]:
        """Per buffer of stock: its dtypes, its parameters in registration order, its chunk's index."""
        optimizer = self._optimizer
        with runtime_module.scope(_stock_runtime()):
            for index, buffers in enumerate(optimizer.per_model_buffers.values()):
                own = {param for buffer in buffers for param in buffer.params}
                groups = group_params_for_buffers(
                    [param for param in self._names if param in own],
                    optimizer.ddp_config.grad_reduce_in_fp32,
                )
                for key, (params, _) in groups.items():
                    yield (key.param_dtype, key.grad_dtype), params, index

    def _computed(
        self, dtypes: tuple[Any, Any], params: list[torch.nn.Parameter], index: int
    ) -> SavedBuffer:
        """Stock's layout for this run's bucket size."""
        optimizer = self._optimizer
        buffer = list(optimizer.per_model_buffers.values())[index][0]
        chunk = next(c for c in optimizer.model_chunks if _holds(c, buffer))
        with runtime_module.scope(_stock_runtime()):
            layout = compute_per_buffer_param_layout(
                params, chunk.bucket_size, buffer.data_parallel_world_size, optimizer.ddp_config
            )
        return _as_saved(
            dtypes,
            layout.param_index_map,
            [start for start, _ in layout.bucket_indices],
            layout.per_bucket_numel_unpadded,
            self._names,
        )


@functools.cache
def _stock_runtime() -> Runtime:
    return Runtime(load_config(None))


def _holds(chunk: Any, buffer: Any) -> bool:
    return any(buffer is own for own in chunk.buffers + chunk.expert_parallel_buffers)


def _as_saved(
    dtypes: tuple[Any, Any],
    param_index_map: Mapping[Any, tuple[int, int, int]],
    bucket_starts: Sequence[int],
    unpadded: Sequence[int],
    names: Mapping[Any, str],
) -> SavedBuffer:
    """From upstream's maps, whose offsets count from the start of the buffer."""
    params: list[list[Placed]] = [[] for _ in bucket_starts]
    in_order = sorted(param_index_map.items(), key=lambda item: item[1])
    for param, (start, end, bucket) in in_order:
        params[bucket].append(Placed(names[param], start - bucket_starts[bucket], end - start))
    return SavedBuffer(
        str(dtypes), tuple(SavedBucket(n, tuple(p)) for n, p in zip(unpadded, params, strict=True))
    )


# Loads that upstream ends before the optimizer sees them ------------------------------------------


class _PendingCheck:
    """Attached to the sharded object that will carry the record, so that a failed load is explained."""

    def __init__(self, guard: LayoutGuard, format_name: str, state: Any, sizes: Any) -> None:
        self.guard, self.format_name = guard, format_name
        self._state, self._sizes = state, sizes

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (
            type(None),
            (),
        )  # a copy of the sharded state, in memory or in a file, is not to be loaded

    def explain(self, checkpoint_dir: Any) -> str:
        """Reads the record by itself, without communication; '' when that is not what went wrong."""
        keys = [self._state.unique_key, *([self._sizes.unique_key] if self._sizes else [])]
        try:
            found = _read_objects(checkpoint_dir, keys)
        except Exception as error:  # the original error is the one to show
            logger.debug('no layout record could be read from %s: %s', checkpoint_dir, error)
            return ''
        if keys[0] not in found:
            return ''
        record = found[keys[0]].get(RECORD_KEY)
        return self.guard.difference(self.format_name, record, found.get(keys[-1]))


def attach_check(guard: LayoutGuard, format_name: str, sharded_state: Mapping[str, Any]) -> None:
    """Marks the sharded state of an optimizer, for :func:`wrap_load`."""
    holder, params = sharded_state['optimizer'], sharded_state['param_state']
    sizes = params.get('per_bucket_numel_unpadded') if isinstance(params, dict) else None
    holder.megatron_buffer_guard = _PendingCheck(guard, format_name, holder, sizes)


def wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load`` that says so when a load fails because the layouts differ.

    Upstream: ``megatron/core/dist_checkpointing/serialization.py: load``, which ends in a missing key or
    a shape that does not match when the buckets are cut elsewhere.
    """

    @functools.wraps(original)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        checks = list(_pending(sharded_state_dict))
        try:
            return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            for check in checks:
                if message := check.explain(checkpoint_dir):
                    raise CheckpointLayoutError(message) from error
            raise

    return load


def _pending(value: Any) -> Iterator[_PendingCheck]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _pending(item)
    elif (check := getattr(value, 'megatron_buffer_guard', None)) is not None:
        yield check


def _read_objects(checkpoint_dir: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Objects of a torch_dist checkpoint, by ``ShardedObject.unique_key``; this rank reads alone."""
    strategies = importlib.import_module('megatron.core.dist_checkpointing.strategies.torch')
    reader = strategies._get_filesystem_reader(checkpoint_dir)
    known = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {key: io.BytesIO() for key in keys if key in known}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return {key: value[0] for key, value in state.items()}

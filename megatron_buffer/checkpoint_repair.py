"""Saved optimizer state is made equal to memory, and complete on ranks that own only padding.

Stands for faults of ``DistributedOptimizer`` (``megatron/core/optimizer/distrib_optimizer.py``):

- ``sharded_param_state_fully_reshardable``, up to 0.19.2, looks a parameter up at its offset with the
  pads at bucket ends, in tensors that hold none: after such a pad it saves a neighbour's state
  (NVIDIA/Megatron-LM#5077).
- ``sharded_param_state_dp_reshardable`` asserts where a rank owns nothing of a bucket, and writes a pad
  beyond the end of what it declares where a bucket is recorded up to an aligned start.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.utils import log_single_rank

from megatron_buffer.errors import CheckpointError

logger = logging.getLogger(__name__)
_do = importlib.import_module('megatron.core.optimizer.distrib_optimizer')

_START, _END, _PADDING = 'gbuf_local_start', 'gbuf_local_end', 'padding'
_SETTING = 'checkpoint.repair_fully_reshardable'


@contextlib.contextmanager
def without_padding_warning() -> Iterator[None]:
    """Upstream warns of corruption that is put right afterwards (saving) or means nothing (loading)."""

    def keep(record: logging.LogRecord) -> bool:
        return 'padded with zeros' not in record.getMessage()

    _do.logger.addFilter(keep)
    try:
        yield
    finally:
        _do.logger.removeFilter(keep)


def spans_without_end_pads(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int]]:
    """Start and end of each parameter in the tensors of ``get_parameter_state_dp_zero``, in elements."""
    shifts: list[int] = []
    end = 0
    for bucket in buffer.buckets:
        shifts.append(bucket.offset - end)
        end += bucket.numel_unpadded
    return {
        param: (first - shifts[bucket], last - shifts[bucket])
        for param, (first, last, bucket) in buffer.param_index_map.items()
    }


def put_right(
    optimizer: Any, saved: dict[int, dict[str, Any]], gathered: dict[Any, Any], policy: str
) -> None:
    """Makes what ``sharded_param_state_fully_reshardable`` returned equal to memory, in place.

    Args:
        optimizer: The ``DistributedOptimizer``.
        saved: Per parameter, in the order of upstream's loops, the sharded tensor of each state.
        gathered: What ``get_parameter_state_dp_zero`` returned: per buffer and dtypes, one flat fp32
            tensor for each state.
        policy: ``checkpoint.repair_fully_reshardable``.

    Raises:
        CheckpointError: If the state would not equal memory all the same.
    """
    wrong: list[str] = []
    position = 0
    for index, buffer in enumerate(optimizer.buffers):
        (flat,) = gathered[index].values()
        for param, (start, end) in spans_without_end_pads(buffer).items():
            for key, tensor in saved[position].items():
                right = flat[key][start:end].reshape(tensor.data.shape)
                if policy == 'always' or not _same_bits(tensor.data, right):
                    wrong.append(tensor.key)
                    if policy != 'never':
                        tensor.data = right
            if policy != 'never':
                _check_own_shard(optimizer, param, saved[position])
            position += 1
    if not wrong:
        return
    named = f'{len(wrong)} tensors of fully_reshardable optimizer state ({", ".join(wrong[:3])}'
    named += ', ...)' if len(wrong) > 3 else ')'
    if policy == 'never':
        text = f'{named} are saved with values that differ from memory, and {_SETTING} is never'
        log_single_rank(logger, logging.WARNING, text)
    elif policy == 'auto':
        text = f'{named} were put right, which this megatron-core saves wrong (Megatron-LM#5077)'
        log_single_rank(logger, logging.INFO, text)


def _check_own_shard(optimizer: Any, param: torch.nn.Parameter, saved: dict[str, Any]) -> None:
    """The part that this rank owns is in the optimizer's memory too."""
    if param not in optimizer.model_param_gbuf_map:
        return
    span = optimizer._get_model_param_range_map(param)['param']
    memory = optimizer._get_main_param_and_optimizer_states(param)
    for key, tensor in saved.items():
        own = tensor.data.detach().reshape(-1)[span.start : span.end]
        if not _same_bits(own, torch.empty_like(own).copy_(memory[key].detach())):
            raise CheckpointError(
                f'{tensor.key} would be saved with values that differ from memory, in elements '
                f'[{span.start}, {span.end}). Save in format dp_reshardable and report this.'
            )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also true for equal NaNs; a look at the addresses is enough for two views of one tensor."""
    a, b = a.detach(), b.detach()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def complete_buckets(optimizer: Any, state: dict[Any, Any]) -> None:
    """Adds to ``get_parameter_state_dp_reshardable``'s result what upstream's own padding leaves out.

    Each bucket's state must cover ``numel_unpadded`` elements over all ranks, not more. Where a rank
    owns no parameter of a bucket, it gets an entry for the pad that it owns, or an empty one.

    Raises:
        CheckpointError: If the pad's dtypes can't be known because this rank owns no parameter at all.
    """
    size, rank = optimizer.data_parallel_group.size(), optimizer.data_parallel_group.rank()
    for index, buffer in enumerate(optimizer.buffers):
        (buckets_state,) = state[index].values()
        for bucket, bucket_state in zip(buffer.buckets, buckets_state, strict=True):
            shard = bucket.grad_data.numel() // size
            declared = min(max(bucket.numel_unpadded - rank * shard, 0), shard)
            end = bucket_state[-1][_END] if bucket_state else 0
            if bucket_state and (end >= declared or declared == shard):
                continue  # upstream's own pad is right
            pad = {_START: end, _END: max(end, declared), _PADDING: True}
            if declared > end:
                template = _template(state, index) or _fp32_template(optimizer, buffer)
                pad.update(_zeros_like(template, declared - end))
            bucket_state.append(pad)


def keep_bucket_numbers(state: dict[Any, Any]) -> None:
    """Turns lists of buckets into dicts by number, in place, where a bucket has no tensor here.

    ``dist_checkpointing.load`` (``extract_matching_values``) drops list members without tensors, and the
    buckets behind would move up.
    """
    for by_dtypes in state.values():
        for dtypes, buckets in by_dtypes.items() if isinstance(by_dtypes, dict) else ():
            if any(set(entry) == {_PADDING} for bucket in buckets for entry in bucket):
                by_dtypes[dtypes] = dict(enumerate(buckets))


def _template(state: dict[Any, Any], index: int) -> dict[str, Any] | None:
    """State of any parameter, best of the same buffer: pads have its keys and dtypes."""
    order = [index, *(key for key in state if isinstance(key, int) and key != index)]
    entries = (
        entry
        for key in order
        for buckets in state[key].values()
        for bucket in buckets
        for entry in bucket
        if not entry.get(_PADDING)
    )
    return next(entries, None)


def _fp32_template(optimizer: Any, buffer: Any) -> dict[str, Any]:
    """For a rank that owns no parameter at all: everything is fp32, unless the config says otherwise."""
    if optimizer.config.use_precision_aware_optimizer:
        raise CheckpointError(
            f'this rank owns no parameter, only padding between parameters of {buffer.param_dtype}, and '
            'with use_precision_aware_optimizer the dtypes of its part are not known: save in format '
            'fully_reshardable (--dist-ckpt-optim-fully-reshardable), or use fewer data-parallel ranks.'
        )
    keys = getattr(optimizer, 'optimizer_state_keys', ('exp_avg', 'exp_avg_sq'))
    return dict.fromkeys(('param', *keys), buffer.grad_data.new_empty(1, dtype=torch.float32))


def _zeros_like(template: dict[str, Any], elems: int) -> dict[str, Any]:
    return {
        key: torch.zeros(elems, dtype=value.dtype, device=value.device)
        for key, value in template.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }

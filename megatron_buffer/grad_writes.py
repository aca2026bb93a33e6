"""Which gradient views hold something of this window: what ``accumulation: first_write`` goes by.

Upstream zeroes the whole buffer (``_ParamAndGradBuffer.reset``,
``megatron/core/distributed/param_and_grad_buffer.py``) so that everybody may add. Here the first gradient of a
window overwrites what the last one left. Three things keep that from being seen:

- A view that nobody has written is zeroed when the first backward pass of the window ends, and at the latest
  before its bucket is reduced, scaled or checked. Alignment gaps and end pads are zero from the start.
- A view whose writer can only add is zeroed when the window begins (:func:`adding_params`).
- The first element of every other view is set to a NaN of a certain bit pattern when the window begins. Whoever
  has filled the view by hand has removed the mark, so it is left alone; whoever has added to it without a word
  gets a NaN, not a wrong number.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import log_single_rank

if TYPE_CHECKING:
    from megatron_buffer.buffer import ParamAndGradBuffer
    from megatron_buffer.ddp import DistributedDataParallel

logger = logging.getLogger(__name__)

# A quiet NaN that no arithmetic makes, as an integer of the same size.
_MARKS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF8_0000_0BAD_67AD),
    torch.float32: (torch.int32, 0x7FCB_AD67),
    torch.bfloat16: (torch.int16, 0x7FDB),
    torch.float16: (torch.int16, 0x7EDB),
}


class GradWrites:
    """What was written of one buffer's gradients in this window.

    Args:
        buffer: The buffer. Until the first :meth:`begin` everything counts as written.
        adding: Its parameters whose writers can only add.

    Attributes:
        flags: A byte per parameter: 1 once its view may be added to. Backward hooks set it.
        index: Place of each parameter in ``flags``; a bucket's parameters stand together.
        gaps_dirty: Gaps between parameters may hold something else than zeros.
    """

    def __init__(self, buffer: ParamAndGradBuffer, adding: Collection[torch.nn.Parameter]) -> None:
        self._grad_data = buffer.grad_data
        params: list[Any] = [param for bucket in buffer.buckets for param in bucket.params_list]
        self.index = {param: i for i, param in enumerate(params)}
        self.flags = bytearray(b'\1' * len(params))
        self.gaps_dirty = False
        bits_dtype, self._mark = _MARKS[buffer.grad_dtype]
        self._bits = buffer.grad_data.view(bits_dtype)
        self._places = places = [buffer.param_index_map[param][:2] for param in params]
        adds = [
            param in adding or start == end
            for param, (start, end) in zip(params, places, strict=True)
        ]
        self._at_begin = bytes(adds)
        # What lies beside the buffer is copied into it as a whole before the reduction.
        self._zeroed = list(buffer.extra_main_grads) + [
            buffer.grad_data[start:end]
            for (start, end), param, add in zip(places, params, adds, strict=True)
            if add and start < end and not hasattr(param, 'main_grad_copy_in_grad_buffer')
        ]
        self._starts = torch.tensor(
            [start for (start, _), add in zip(places, adds, strict=True) if not add],
            dtype=torch.int64,
            device=buffer.grad_data.device,
        )
        self._gaps = _gaps(buffer.grad_data, places)
        self._version = 0

    def begin(self) -> None:
        """A new window: nothing is written, and what can only be added to is zero."""
        self.flags[:] = self._at_begin
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)
        if self.gaps_dirty and self._gaps:
            torch._foreach_zero_(self._gaps)
        self.gaps_dirty = False
        self._bits.index_fill_(0, self._starts, self._mark)
        self._version = self._grad_data._version

    @property
    def complete(self) -> bool:
        """True when every view holds this window's gradients, or zeros."""
        return 0 not in self.flags

    def backward_begins(self) -> None:
        """Before the first gradient: what was filled in by hand is to be added to."""
        if self.flags == self._at_begin and self._grad_data._version != self._version:
            self.settle()

    def settle(self, first: int = 0, last: int | None = None) -> None:
        """Zeroes the views among ``flags[first:last]`` that nobody has written; the host does not wait."""
        flags = self.flags
        if 0 not in flags[first:last]:
            return
        self.gaps_dirty = True  # if the views were filled by hand, then likely as a whole
        with torch.no_grad():
            for index in range(first, len(flags) if last is None else last):
                if not flags[index]:
                    flags[index] = 1
                    start, end = self._places[index]
                    is_marked = self._bits[start : start + 1] == self._mark
                    self._grad_data[start:end].masked_fill_(is_marked, 0)


def _gaps(grad_data: torch.Tensor, places: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Views of what lies between parameters and behind them."""
    found, position = [], 0
    for start, end in [*sorted(places), (grad_data.numel(), grad_data.numel())]:
        if start > position:
            found.append(grad_data[position:start])
        position = max(position, end)
    return found


def watch_writes(ddp: DistributedDataParallel) -> list[GradWrites]:
    """Makes the buffers of a wrapped model, its groups and hooks, follow what is written.

    Buffers that have to be zeroed as a whole are left out: see :func:`_zeroed_whole`.

    Args:
        ddp: The wrapped chunk, with its hooks.

    Returns:
        One object per buffer that is not zeroed at the beginning of a window.
    """
    reasons = adding_params(ddp)
    made: list[GradWrites] = []
    for buffer in ddp._all_buffers():
        whole = _zeroed_whole(ddp, buffer)
        if whole or all(param in reasons for param in buffer.params):
            reasons.update({p: whole for p in buffer.params if whole})
            continue
        writes = buffer.grad_writes = GradWrites(buffer, reasons)
        made.append(writes)
        for bucket in buffer.buckets:
            first = writes.index[bucket.params_list[0]]
            group = ddp.param_to_bucket_group[bucket.params_list[0]]
            group.grad_writes.append((writes, first, first + len(bucket.params_list)))
        for rare in ddp._rare_cases:
            if rare.param in writes.index:
                rare.follow(writes, writes.index[rare.param])
    _log(ddp, reasons)
    return made


def _log(ddp: DistributedDataParallel, reasons: Mapping[Any, str]) -> None:
    if not reasons:
        return
    said = list(reasons.values())
    counts = ', '.join(f'{said.count(reason)} for {reason}' for reason in dict.fromkeys(said))
    log_single_rank(
        logger,
        logging.INFO,
        f'accumulation.name is first_write in {ddp.runtime.config.source}: {len(said)} of '
        f'{len(ddp._names())} parameters are zeroed before each step all the same ({counts})',
    )


def _zeroed_whole(ddp: DistributedDataParallel, buffer: ParamAndGradBuffer) -> str:
    """Why a buffer has to be zeroed as a whole; '' if it has not."""
    if captures_graphs(ddp.config):
        return 'CUDA graphs, which add to the buffer without a hook'
    if getattr(ddp.ddp_config, 'reuse_grad_buf_for_mxfp8_param_ag', False):
        return 'reuse_grad_buf_for_mxfp8_param_ag, which gathers into the buffer'
    if any(getattr(p, 'is_managed_by_layer_wise_optimizer', False) for p in buffer.params):
        return 'the layer-wise optimizer, which gathers into the buffer'
    if buffer.grad_dtype not in _MARKS:
        return f'gradients of {buffer.grad_dtype}'
    return ''


def captures_graphs(config: Any) -> bool:
    """Whether Megatron captures CUDA graphs; the names are those of core_v0.19 and core_v0.18."""
    return getattr(config, 'cuda_graph_impl', None) not in (None, 'none') or any(
        getattr(config, name, False) for name in ('enable_cuda_graph', 'external_cuda_graph')
    )


def adding_params(ddp: DistributedDataParallel) -> dict[Any, str]:
    """Parameters of a wrapped model whose gradients may be written by something that can only add.

    Returns:
        Parameter to the reason, in words.
    """
    found: dict[Any, str] = {}
    fused = [module for module in ddp.module.modules() if _fuses(module)]
    for module in fused:
        found.update(dict.fromkeys(module.parameters(recurse=False), 'fused weight gradients'))
    for param in ddp._names():
        if fused and getattr(param, 'is_embedding_or_output_parameter', False):
            found[param] = 'fused weight gradients'  # the output layer may use the embedding's
        if getattr(param, 'zero_out_wgrad', False):
            found[param] = 'zero_out_wgrad'
        if getattr(param, 'is_gtp_weight_remat', False):
            found[param] = 'weight rematerialization'
        if getattr(param, 'skip_backward_post_hook', False):
            found[param] = 'delayed weight gradients'
        if hasattr(param, 'main_grad_copy_in_grad_buffer'):
            found[param] = 'accumulation in fp32 beside the buffer'
    return {param: reason for param, reason in found.items() if param in ddp._names()}


def _fuses(module: torch.nn.Module) -> bool:
    """Whether a module's kernels write weight gradients into main_grad, as far as it says so."""
    return any(
        getattr(module, name, False)
        for name in (
            'gradient_accumulation_fusion',  # megatron/core/tensor_parallel/layers.py
            'fuse_wgrad_accumulation',  # Transformer Engine's modules
            '_accumulate_into_main_grad',  # Transformer Engine's operations
        )
    )

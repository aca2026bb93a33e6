"""torch.cuda, tensor factories, ``Tensor.cuda`` and friends: every CUDA device means the CPU.

On the CPU program order is the only order, so streams and events have nothing to do; there is one
device and one generator. Upstream has no counterpart.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import logging
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

from megatron_buffer.cpu.ledger import Ledger

_CPU = torch.device('cpu')
_TOTAL_MEMORY_BYTES = 16 << 30
# Blackwell: from there on megatron.training does not insist on CUDA_DEVICE_MAX_CONNECTIONS=1.
_CAPABILITY = (10, 0)

_FACTORIES = (
    *('arange', 'as_tensor', 'asarray', 'empty', 'empty_like', 'empty_strided', 'eye', 'full'),
    *('full_like', 'linspace', 'ones', 'ones_like', 'rand', 'rand_like', 'randint', 'randint_like'),
    *('randn', 'randn_like', 'randperm', 'scalar_tensor', 'tensor', 'tril_indices'),
    *('triu_indices', 'zeros', 'zeros_like'),
)
_TENSOR_FACTORIES = ('new_empty', 'new_full', 'new_ones', 'new_tensor', 'new_zeros')


class CpuEvent:
    """Stands for ``torch.cuda.Event``: everything before it has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds between the two records, as CUDA gives them."""
        return (end_event._recorded_s - self._recorded_s) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CpuStream:
    """Stands for ``torch.cuda.Stream``: work is done when the call returns."""

    device = _CPU
    device_index = 0
    stream_id = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = event or CpuEvent()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuDeviceContext(contextlib.AbstractContextManager['CpuDeviceContext']):
    """Stands for ``torch.cuda.device``: there is only one device to be on."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __exit__(self, *exception: object) -> None:
        pass


class CpuGenerators(tuple[torch.Generator, ...]):
    """Stands for ``torch.cuda.default_generators``: any index gives the CPU's generator."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def as_cpu(device: Any) -> Any:
    """The CPU for a CUDA device in any of its spellings; anything else unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    if isinstance(device, str | torch.device) and str(device).startswith('cuda'):
        return _CPU
    return device


def apply(ledger: Ledger) -> None:
    """Replaces the CUDA surface, recording everything in ``ledger``."""
    _replace_device(ledger)
    _replace_streams(ledger)
    _replace_rng(ledger)
    _replace_memory(ledger)
    _replace_factories(ledger)
    _replace_moves(ledger)
    _replace_compilers(ledger)


def _answer(name: str, value: Any) -> Callable[..., Any]:
    """A function of any arguments that returns ``value``."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    answer.__name__ = answer.__qualname__ = name
    return answer


def _replace_device(ledger: Ledger) -> None:
    cuda = torch.cuda
    properties = types.SimpleNamespace(
        name='CPU (megatron-buffer)',
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_TOTAL_MEMORY_BYTES,
        multi_processor_count=1,
        gcnArchName='',
    )
    for name, value, reason in (
        ('is_available', True, 'training/initialize.py: "Megatron requires CUDA"'),
        ('is_initialized', True, 'models/audio: goes with is_available'),
        ('device_count', 1, 'training/initialize.py: builds the groups only if a device is there'),
        ('current_device', 0, 'param_and_grad_buffer.py: device of the buffers'),
        ('set_device', None, 'training/initialize.py: _initialize_distributed'),
        ('get_device_properties', properties, 'training/utils: get_device_arch_version'),
        (
            'get_device_capability',
            _CAPABILITY,
            'training/arguments.py: is fp8/grouped gemm possible',
        ),
        ('get_device_name', properties.name, 'training/gpu_sniff_test.py'),
        ('synchronize', None, 'core/timers.py, schedules, checkpointing'),
        ('is_current_stream_capturing', False, 'token_dispatcher.py, torch.optim: no CUDA graphs'),
    ):
        ledger.replace(cuda, name, _answer(name, value), reason)
    # torch asks CUDA's is_available() too; its own code must go on finding a plain CPU.
    reason = 'torch.optim, DataLoader: not the accelerator that is_available() pretends'
    for name, value in (('current_accelerator', None), ('is_available', False)):
        ledger.replace(torch.accelerator, name, _answer(name, value), reason)
    ledger.replace(cuda, 'device', CpuDeviceContext, 'tensor_parallel/random.py: by value')
    for name in ('range_push', 'range_pop', 'mark'):
        ledger.replace(cuda.nvtx, name, _answer(name, None), 'core/utils.py: nvtx_range_push/pop')


def _replace_streams(ledger: Ledger) -> None:
    cuda = torch.cuda
    stream = CpuStream()

    def use_stream(used: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(used)

    ledger.replace(cuda, 'Stream', CpuStream, 'get_model, ddp with several optimizer instances')
    ledger.replace(cuda, 'Event', CpuEvent, 'core/timers.py, MoE dispatcher')
    ledger.replace(
        cuda, 'current_stream', _answer('current_stream', stream), 'start_grad_sync, get_model'
    )
    ledger.replace(
        cuda, 'default_stream', _answer('default_stream', stream), 'transformer/cuda_graphs.py'
    )
    ledger.replace(cuda, 'stream', use_stream, 'get_model, start_grad_sync: with torch.cuda.stream')
    ledger.replace(cuda, 'set_stream', _answer('set_stream', None), 'training/initialize.py')
    ledger.replace(
        torch.Tensor, 'record_stream', _answer('record_stream', None), 'combined_1f1b.py: p2p'
    )


def _replace_rng(ledger: Ledger) -> None:
    cuda = torch.cuda

    def get_rng_state(device: Any = 'cuda') -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = 'cuda') -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        manual_seed(seed)

    def lazy_call(callback: Callable[[], None], **kwargs: Any) -> None:
        callback()

    reason = 'tensor_parallel/random.py: the RNG tracker; torch.manual_seed, checkpointing'
    for owner in (cuda, cuda.random):
        ledger.replace(owner, 'get_rng_state', get_rng_state, reason)
        ledger.replace(owner, 'set_rng_state', set_rng_state, reason)
        ledger.replace(owner, 'manual_seed', manual_seed, reason)
        ledger.replace(owner, 'manual_seed_all', manual_seed_all, reason)
    ledger.replace(cuda, 'default_generators', CpuGenerators(), reason)
    ledger.replace(cuda, '_lazy_init', _answer('_lazy_init', None), reason)
    ledger.replace(cuda, '_lazy_call', lazy_call, reason)
    _silence_shared_generator_warning(ledger)


def _silence_shared_generator_warning(ledger: Ledger) -> None:
    """The tracker's fork() compares CPU and GPU states; here both are one generator."""
    log = logging.getLogger('megatron.core.tensor_parallel.random')

    def keep(record: logging.LogRecord) -> bool:
        return 'CPU RNG state changed' not in record.getMessage()

    log.addFilter(keep)
    ledger.on_undo(lambda: log.removeFilter(keep))


def _replace_memory(ledger: Ledger) -> None:
    cuda = torch.cuda
    reason = 'training_log, report_memory'
    for name in (
        'memory_allocated',
        'max_memory_allocated',
        'memory_reserved',
        'max_memory_reserved',
        'device_memory_used',
        'reset_peak_memory_stats',
    ):
        ledger.replace(cuda, name, _answer(name, 0), reason)

    def memory_stats(device: Any = None) -> dict[str, int]:
        return collections.defaultdict(int)

    ledger.replace(cuda, 'memory_stats', memory_stats, reason)
    ledger.replace(cuda, 'empty_cache', _answer('empty_cache', None), 'train(), checkpointing')


def _replace_factories(ledger: Ledger) -> None:
    # torch.device(...) as a context manager looks functions up in a set that is filled on first
    # use: fill it with the originals, because it is the originals that reach it.
    fill = getattr(torch.utils._device, '_device_constructors', None)
    if fill is not None:
        fill()
    reason = 'buffers, timers, loss reduction: device=torch.cuda.current_device() or "cuda"'
    for name in _FACTORIES:
        ledger.replace(torch, name, _with_cpu_keywords(getattr(torch, name)), reason)
    for name in _TENSOR_FACTORIES:
        ledger.replace(torch.Tensor, name, _with_cpu_keywords(getattr(torch.Tensor, name)), reason)


def _with_cpu_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with ``device=`` on the CPU and no pinned memory, which needs a driver."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if 'device' in kwargs:
            kwargs['device'] = as_cpu(kwargs['device'])
        if kwargs.get('pin_memory'):
            kwargs['pin_memory'] = False
        return function(*args, **kwargs)

    return on_cpu


def _replace_moves(ledger: Ledger) -> None:
    tensor, module = torch.Tensor, torch.nn.Module

    reason = 'get_model, get_batch, tied embeddings: .cuda()'
    ledger.replace(tensor, 'cuda', _stay('cuda'), reason)
    ledger.replace(module, 'cuda', _stay('cuda'), reason)
    ledger.replace(tensor, 'pin_memory', _stay('pin_memory'), 'cpu_offloading/hybrid_optimizer.py')
    for owner in (tensor, module):
        ledger.replace(owner, 'to', _with_cpu_target(owner.to), 'RoPE, MoE: .to("cuda")')
    ledger.replace(
        tensor, 'type', _type_with_cuda_names(tensor.type), 'distrib_optimizer.py, clip_grads.py'
    )


def _stay(name: str) -> Callable[..., Any]:
    """A method that leaves its object where it is."""

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    stay.__name__ = stay.__qualname__ = name
    return stay


def _with_cpu_target(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (as_cpu(args[0]), *args[1:])
        if 'device' in kwargs:
            kwargs['device'] = as_cpu(kwargs['device'])
        return function(self, *args, **kwargs)

    return to


def _type_with_cuda_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """The optimizers sort parameters by ``param.type() == 'torch.cuda.BFloat16Tensor'``."""

    @functools.wraps(function)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = function(self)  # of a subclass it comes through this wrapper, named already
            return (
                name if name.startswith('torch.cuda.') else name.replace('torch.', 'torch.cuda.', 1)
            )
        if isinstance(dtype, str):
            dtype = dtype.replace('torch.cuda.', 'torch.', 1)
        return function(self, dtype, *args, **kwargs)

    return type_


def _replace_compilers(ledger: Ledger) -> None:
    def compile_nothing(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    ledger.replace(
        torch, 'compile', compile_nothing, 'core/jit.py: jit_fuser would need a C++ compiler'
    )
    ledger.replace(
        torch.autocast,
        '__init__',
        _with_cpu_device_type(torch.autocast.__init__),
        'schedules.py: forward_step under --enable-autocast',
    )
    ledger.replace(
        torch,
        'load',
        _with_cpu_map_location(torch.load),
        'checkpoints saved with map_location=cuda',
    )


def _with_cpu_device_type(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        function(self, 'cpu' if device_type == 'cuda' else device_type, *args, **kwargs)

    return init


def _with_cpu_map_location(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def load(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if 'map_location' in bound.arguments:
            bound.arguments['map_location'] = as_cpu(bound.arguments['map_location'])
        return function(*bound.args, **bound.kwargs)

    return load

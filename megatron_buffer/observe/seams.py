"""Where observation reaches into megatron: the constructor of stock's wrapper, the optimizers' steps, the loop.

Wraps, for the rest of the process, ``DistributedDataParallel.__init__``
(``megatron/core/distributed/distributed_data_parallel.py``), ``step`` of the optimizers
(``megatron/core/optimizer/optimizer.py``, ``layer_wise_optimizer.py``) and ``train_step``
(``megatron/training/training.py``). Each wrapper passes everything on and changes nothing; no name that
``install()`` replaces is touched. Only there when something is observed.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_OPTIMIZERS = (
    ('megatron.core.optimizer.optimizer', 'MixedPrecisionOptimizer'),
    ('megatron.core.optimizer.optimizer', 'FP32Optimizer'),
    ('megatron.core.optimizer.optimizer', 'ChainedOptimizer'),
    ('megatron.core.optimizer.layer_wise_optimizer', 'LayerWiseDistributedOptimizer'),
)
_TRAINING = 'megatron.training.training'

_wrapped: set[str] = set()


def wrap_stock_constructor(built: Callable[[Any], None]) -> None:
    """Calls ``built`` with every model chunk that stock's ``DistributedDataParallel`` has wrapped.

    Ours subclasses it, and says so itself when its own constructor is done.
    """
    module = importlib.import_module('megatron.core.distributed.distributed_data_parallel')
    cls = module.DistributedDataParallel
    if cls.__module__ != module.__name__ or not _first_time('constructor'):
        return
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not any(base.__module__ == 'megatron_buffer.ddp' for base in type(self).__mro__):
            built(self)

    cls.__init__ = __init__


def wrap_steps(
    begin: Callable[[], None], end: Callable[[Any], None], plain_end: Callable[[], None]
) -> None:
    """Calls back around every step of Megatron's optimizers, and after each of a plain one of torch.

    Args:
        begin: Before a step.
        end: After it, with what it returned; None if it has raised.
        plain_end: After the step of a torch optimizer, also of one inside of Megatron's.
    """
    if not _first_time('steps'):
        return
    for module_name, class_name in _OPTIMIZERS:
        cls = getattr(importlib.import_module(module_name), class_name, None)
        if cls is not None and 'step' in vars(cls):
            cls.step = _around(cls.step, begin, end)
    register_optimizer_step_post_hook(lambda *unused: plain_end())


def wrap_train_step(begin: Callable[[], None], losses: Callable[[Any], None]) -> None:
    """Calls back around ``train_step`` of megatron.training, where that is loaded.

    Args:
        begin: Before it.
        losses: After it, with the losses that it returned.
    """
    training: Any = sys.modules.get(_TRAINING)
    if training is None or not _first_time('train_step'):
        return
    original = training.train_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        begin()
        result = original(*args, **kwargs)
        losses(result[0])
        return result

    training.train_step = train_step


def _around(
    step: Callable[..., Any], begin: Callable[[], None], end: Callable[[Any], None]
) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begin()
        result = None
        try:
            result = step(*args, **kwargs)
        finally:
            end(result)
        return result

    return wrapped


def _first_time(what: str) -> bool:
    first = what not in _wrapped
    _wrapped.add(what)
    return first

"""What megatron.core itself needs so that it runs without NVIDIA's libraries and without a GPU.

Everything here is either a fallback that upstream leaves unfinished because its own path goes
through Transformer Engine or NCCL, or a build step that a wheel has already done. Upstream symbols
are named at each function.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_buffer.cpu.ledger import Ledger

_DATASET_HELPERS = 'megatron.core.datasets.helpers_cpp'


def apply(ledger: Ledger) -> None:
    """Imports the parts of megatron.core concerned and replaces what CPU mode needs there."""
    _free_gloo_groups(ledger)
    _allow_sequence_parallel_norm(ledger)
    _finish_torch_adam(ledger)
    _skip_dataset_compilation(ledger)


def _free_gloo_groups(ledger: Ledger) -> None:
    """``parallel_state.destroy_model_parallel`` forgets its groups without destroying them.

    With NCCL that costs little; every gloo group keeps threads and descriptors (65 and 90 for one
    initialize_model_parallel). They are destroyed one generation late, because models of the last
    generation may still hold them.
    """
    parallel_state = importlib.import_module('megatron.core.parallel_state')
    original = parallel_state.destroy_model_parallel
    retired: list[Any] = []

    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        groups = [
            group for group in parallel_state._global_process_group_list or () if group is not None
        ]
        result = original(*args, **kwargs)
        if not dist.is_initialized():
            retired.clear()
        elif groups:
            for group in retired:
                with contextlib.suppress(Exception):  # upstream destroys some of them itself
                    dist.destroy_process_group(group)
            retired[:] = groups
        return result

    ledger.replace(
        parallel_state,
        'destroy_model_parallel',
        destroy_model_parallel,
        'parallel_state.destroy_model_parallel leaks gloo groups',
    )
    ledger.on_undo(retired.clear)


def _allow_sequence_parallel_norm(ledger: Ledger) -> None:
    """``WrappedTorchNorm`` asserts that sequence parallelism is off; only TE's norm supports it.

    What sequence parallelism asks of a norm is that its gradients be summed over the TP ranks,
    which finalize does for every parameter marked ``sequence_parallel``.
    """
    torch_norm = importlib.import_module('megatron.core.transformer.torch_norm').WrappedTorchNorm
    original = torch_norm.__new__

    @functools.wraps(original)
    def __new__(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = original(cls, without, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = True
        return norm

    ledger.replace(
        torch_norm, '__new__', staticmethod(__new__), 'WrappedTorchNorm: sequence parallel needs TE'
    )


def _finish_torch_adam(ledger: Ledger) -> None:
    """``DistributedOptimizer`` without TE and apex uses torch's AdamW, whose path has three faults.

    ``state_dict()`` asserts before the first step, because torch makes its state lazily;
    ``load_state_dict()`` gives all parameters one shared ``step`` tensor, which every parameter then
    advances; loading a parameter's state looks for a ``step`` among its tensors, which no checkpoint format
    holds, and copies into a leaf that requires a gradient.
    """
    module = importlib.import_module('megatron.core.optimizer.distrib_optimizer')
    optimizer_class = module.DistributedOptimizer
    state_dict, load_state_dict = optimizer_class.state_dict, optimizer_class.load_state_dict
    set_states = optimizer_class._set_main_param_and_optimizer_states

    def torch_adam(optimizer: Any) -> Any:
        inner = getattr(optimizer, 'optimizer', None)
        return inner if isinstance(inner, torch.optim.Adam | torch.optim.AdamW) else None

    @functools.wraps(state_dict)
    def state_dict_before_first_step(self: Any) -> Any:
        inner = torch_adam(self)
        if inner is not None and not inner.state:
            for group in inner.param_groups:
                for param in group['params']:
                    inner.state[param] = {
                        'step': torch.tensor(0.0),
                        'exp_avg': torch.zeros_like(param),
                        'exp_avg_sq': torch.zeros_like(param),
                    }
        return state_dict(self)

    @functools.wraps(load_state_dict)
    def load_state_dict_with_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        inner = torch_adam(self)
        if inner is None:
            return
        for param_state in inner.state.values():
            if isinstance(param_state.get('step'), torch.Tensor):
                param_state['step'] = param_state['step'].clone()

    @functools.wraps(set_states)
    def set_states_but_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if torch_adam(self) is not None:
            tensors = {**tensors, 'step': None}
        with torch.no_grad():
            set_states(self, model_param, tensors)

    reason = 'DistributedOptimizer: torch AdamW instead of FusedAdam'
    ledger.replace(optimizer_class, 'state_dict', state_dict_before_first_step, reason)
    ledger.replace(optimizer_class, 'load_state_dict', load_state_dict_with_own_steps, reason)
    ledger.replace(
        optimizer_class, '_set_main_param_and_optimizer_states', set_states_but_step, reason
    )


def _skip_dataset_compilation(ledger: Ledger) -> None:
    """``compile_helpers`` runs make in the package: a wheel has the result but no Makefile.

    In a source checkout without the compiled helper, the one from the installed wheel is used, so
    that no compiler is needed; failing that upstream's make is left to do its work.
    """
    utils = importlib.import_module('megatron.core.datasets.utils')
    if importlib.util.find_spec(_DATASET_HELPERS) is None and not _load_wheel_helpers(ledger):
        return

    def compile_helpers() -> None:
        pass

    ledger.replace(
        utils, 'compile_helpers', compile_helpers, 'initialize.py: _compile_dependencies'
    )


def _load_wheel_helpers(ledger: Ledger) -> bool:
    """Makes the wheel's compiled dataset helper stand for the checkout's; False if there is none."""
    path = _wheel_helpers()
    spec = importlib.util.spec_from_file_location(_DATASET_HELPERS, path) if path else None
    if spec is None or spec.loader is None:
        return False
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parent, _, name = _DATASET_HELPERS.rpartition('.')
    package = sys.modules[parent]
    sys.modules[_DATASET_HELPERS] = module
    setattr(package, name, module)

    def forget() -> None:
        sys.modules.pop(_DATASET_HELPERS, None)
        if getattr(package, name, None) is module:
            delattr(package, name)

    ledger.on_undo(forget)
    return True


def _wheel_helpers() -> str | None:
    """Path of the compiled dataset helper in the installed megatron-core, for this Python."""
    try:
        wheel = importlib.metadata.distribution('megatron-core')
    except importlib.metadata.PackageNotFoundError:
        return None
    stem = _DATASET_HELPERS.replace('.', '/')
    paths = (str(wheel.locate_file(stem + s)) for s in importlib.machinery.EXTENSION_SUFFIXES)
    return next(filter(os.path.exists, paths), None)

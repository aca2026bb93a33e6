"""What starting costs: ``install()`` and wrapping, the search for holders, and commands without torch.

The first case is a ratio against stock's wrapping of the same model of 10,000 parameters, the others against
a limit: a search through 3,000 loaded modules in 0.2 s; importing the package, and validating a config, in 0.5 s
of a new process, whose modules are compiled as those of any installed package. All times are CPU seconds, since
the limits are those of an idle machine.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.compare import cpu_timed, interleave, quiet, ratio_case

HEADLINE = 'install() and wrapping of a model of 10,000 parameters'
NUM_PARAMS = 10_000
NUM_MODULES, SWEEP_LIMIT_S = 3_000, 0.2
COMMAND_LIMIT_S = 0.5
COMMANDS = {
    'import megatron_buffer': ['-c', 'import megatron_buffer'],
    'megatron-buffer validate': ['-m', 'megatron_buffer', 'validate', 'recommended'],
    'megatron-buffer schema': ['-m', 'megatron_buffer', 'schema'],
    'megatron-buffer strategies': ['-m', 'megatron_buffer', 'strategies'],
}


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio`` and ``cases``."""
    from megatron_buffer.testing import run_ranks

    [cases] = run_ranks(measure, 1, min(reps, 7), timeout_s=1800)
    [sweep] = run_ranks(sweep_cases, 1, reps, timeout_s=600)
    commands = [_command(what, arguments, min(reps, 7)) for what, arguments in COMMANDS.items()]
    return {'ratio': cases[0]['ratio'], 'headline': HEADLINE, 'cases': [*cases, *sweep, *commands]}


def _command(what: str, arguments: list[str], reps: int) -> dict[str, Any]:
    command = [sys.executable, *arguments]
    keeps_bytecode = {k: v for k, v in os.environ.items() if k != 'PYTHONDONTWRITEBYTECODE'}

    def once() -> float:
        before = _children_s()
        subprocess.run(command, env=keeps_bytecode, check=True, capture_output=True, timeout=60)
        return _children_s() - before

    return _against_limit(what, once, COMMAND_LIMIT_S, reps)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _against_limit(what: str, arm: Any, limit_s: float, reps: int) -> dict[str, Any]:
    seconds = interleave({'ours': arm}, reps, warm_up=1)['ours']
    return ratio_case(seconds, [limit_s] * reps, what=what, size='of its limit', limit_s=limit_s)


def measure(rank: int, world_size: int, reps: int) -> list[dict[str, Any]]:
    """Installing and wrapping, against wrapping by stock."""
    import torch

    import megatron_buffer
    from megatron_buffer.testing import small_model

    quiet()
    small_model.init_parallel()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(8))

    def wrap() -> Any:
        module = torch.nn.Sequential(*(Layer() for _ in range(NUM_PARAMS)))
        flags = {'overlap_grad_reduce': True, 'overlap_param_gather': True, 'bucket_size': 320}
        begin = time.process_time()
        small_model.wrap(module, use_distributed_optimizer=True, **flags)
        return time.process_time() - begin

    def install() -> float:
        undo: list[Any] = []

        def enter() -> None:
            scope = megatron_buffer.activated('recommended')
            scope.__enter__()
            undo.append(scope)

        seconds = cpu_timed(enter)() + wrap()
        gc.collect()  # activated() refuses to end while a model of ours lives
        undo[0].__exit__(None, None, None)
        return seconds

    times = interleave({'ours': install, 'stock': wrap}, reps, warm_up=1)
    return [
        ratio_case(
            times['ours'], times['stock'], what='install() and wrap, recommended', params=NUM_PARAMS
        )
    ]


def sweep_cases(rank: int, world_size: int, reps: int) -> list[dict[str, Any]]:
    """The search for whoever holds what is to be replaced, with many modules loaded."""
    import importlib
    import types

    import megatron_buffer
    from megatron_buffer.patching.holders import find_holders

    quiet()
    upstream = importlib.import_module('megatron.core.distributed.distributed_data_parallel')
    for index in range(NUM_MODULES - len(sys.modules)):
        module = types.ModuleType(f'_filler_{index}')
        vars(module).update({f'name_{i}': object() for i in range(30)})
        sys.modules[module.__name__] = module
    stock = upstream.DistributedDataParallel
    pairs = {id(stock): (stock, megatron_buffer.DistributedDataParallel)}
    arm = cpu_timed(lambda: find_holders(pairs))  # finds, and changes nothing
    return [_against_limit(f'identity sweep, {len(sys.modules)} modules', arm, SWEEP_LIMIT_S, reps)]

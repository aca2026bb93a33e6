"""Instructions of the hook path, counted by valgrind's callgrind: they don't depend on the machine's neighbours.

The arms are those of ``hooks``, of the real classes. Each is run a few times and many times, in one process, and
the difference is divided by how many calls it is, so that what surrounds the calls cancels out; of the backward
hooks the bare additions are taken off. The whole steps are those of ``step``'s tiny GPT, on one rank, where no
collective waits for anybody. Counting begins when everything is loaded and warm. Loading torch and Megatron under
valgrind takes a minute or two of CPU.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.compare import CannotRun, quiet

PARAMS = 100
# Turns of the short count, and how many more the long one has for each repetition: telling valgrind is noise among them.
FEW, TURNS = 2, 20
STEPS = 3
TIME_LIMIT_S = 3600
HEADLINE = 'instructions of a hook in the last micro-batch, without the add'
# What is counted, what it is taken per, and by which count that is divided.
UNITS = {
    'last micro-batch': ('hook', 'hooks'),
    'earlier micro-batch': ('hook', 'hooks'),
    'forward pre-hooks, all gathered': ('hook', 'params'),
    'no_sync': ('call', 'one'),
    'zero_grad_buffer': ('parameter', 'params'),
}
STEP_ARMS = ('upstream', 'recommended')
BEYOND_THE_ADD = ('last micro-batch', 'earlier micro-batch')


def run(reps: int) -> dict[str, Any]:
    """Returns the benchmark's JSON: ``ratio`` and ``cases``.

    Raises:
        CannotRun: Where valgrind is not installed, or does not run the process to its end.
    """
    missing = [tool for tool in ('valgrind', 'vgdb') if shutil.which(tool) is None]
    if missing:
        raise CannotRun(
            f'{missing[0]} is not installed, and instructions are counted by it (Debian and Ubuntu: apt install '
            'valgrind)'
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *('valgrind', '--tool=callgrind', '--instr-atstart=no', '-q'),
            f'--callgrind-out-file={folder}/out',
            *(sys.executable, '-m', 'benchmarks.instructions', folder, str(reps)),
        ]
        env = {
            **os.environ,
            'CUDA_VISIBLE_DEVICES': '',
            'GLOO_SOCKET_IFNAME': 'lo',
            'OMP_NUM_THREADS': '1',
            'PYTHONHASHSEED': '1',
        }
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=TIME_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise CannotRun(
                f'the process under valgrind was stopped after {TIME_LIMIT_S} s'
            ) from None
        try:
            with open(os.path.join(folder, 'result.json')) as file:
                counts: dict[str, dict[str, float]] = json.load(file)
        except OSError:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [
                'no message'
            ]
            raise CannotRun(
                f'the process under valgrind ended with {done.returncode}: {last[0]}'
            ) from None
    cases = [_case(what, counts) for what in UNITS]
    cases += [_step_case(arm, counts['step']) for arm in STEP_ARMS]
    return {'ratio': cases[0]['ratio'], 'headline': HEADLINE, 'cases': cases}


def _case(what: str, counts: dict[str, dict[str, float]]) -> dict[str, Any]:
    per, divisor = UNITS[what]
    ours, stock = (_net(what, counts[name]) / counts[name][divisor] for name in ('ours', 'stock'))
    return {
        'what': what,
        'params': PARAMS,
        'per': per,
        'ratio': ours / stock,
        'ours_instructions': ours,
        'stock_instructions': stock,
    }


def _step_case(arm: str, of: dict[str, float]) -> dict[str, Any]:
    return {
        'what': f'whole step, {arm}',
        'params': int(of['params']),
        'per': 'step',
        'ratio': of[arm] / of['stock'],
        'ours_instructions': of[arm],
        'stock_instructions': of['stock'],
    }


def _net(what: str, of: dict[str, float]) -> float:
    """Without the bare additions, and without the clock that every arm reads."""
    if what not in BEYOND_THE_ADD:
        return of[what] - of['empty']
    net = of[what] - of['bare']
    return net - (of['reset'] - of['empty']) if what == 'last micro-batch' else net


# Under valgrind -----------------------------------------------------------------------------------


def count(folder: str, reps: int) -> dict[str, Any]:
    """Instructions of one turn of each arm; under ``step`` of one whole step, by config.

    Args:
        folder: Where callgrind puts its files.
        reps: How often ``TURNS`` turns are counted.
    """
    import gc

    import torch.distributed as dist

    from benchmarks import hooks
    from benchmarks.compare import cpu_timed
    from megatron_buffer.testing import preload

    preload.check()
    quiet()
    store = dist.FileStore(os.path.join(folder, 'store'), 1)
    dist.init_process_group('gloo', store=store, rank=0, world_size=1)
    arms = hooks.arms_of(PARAMS)
    counter = _Callgrind(folder)
    result: dict[str, Any] = {name: {} for name in arms}
    gc.disable()
    for name, of in arms.items():
        of['empty'] = cpu_timed(lambda: None)
        for what in (*UNITS, 'bare', 'reset', 'empty'):
            result[name][what] = counter.per_turn(of[what], FEW, TURNS * reps)
        result[name].update(hooks=of['hooks'], params=PARAMS, one=1)
    arms.clear()
    gc.collect()  # a config is only let go when its models are
    result['step'] = _count_steps(counter, STEPS * reps)
    return result


def _count_steps(counter: _Callgrind, turns: int) -> dict[str, float]:
    """By config: instructions of a step of the tiny GPT, and under ``params`` how many parameters it has."""
    import contextlib
    import gc

    from megatron.core import parallel_state

    import megatron_buffer
    from benchmarks import step
    from megatron_buffer.testing.tiny_gpt import init_parallel
    from megatron_buffer.testing.tiny_model import build_model

    case = step.case_of({})
    parallel_state.destroy_model_parallel()
    init_parallel(case)
    counts = {'params': float(len(list(build_model(case).parameters())))}
    for arm in ('stock', *STEP_ARMS):
        with contextlib.ExitStack() as scopes:
            if arm != 'stock':
                scopes.enter_context(megatron_buffer.activated(arm))
            counts[arm] = _per_step(counter, step.megatron_step(case), step.WARM_UP_STEPS, turns)
            gc.collect()
    return counts


def _per_step(counter: _Callgrind, step: Callable[[int], None], warm_up: int, turns: int) -> float:
    numbers = itertools.count()

    def body() -> None:
        step(next(numbers))

    for _ in range(warm_up):
        body()
    return counter.per_turn(body, 1, turns)


class _Callgrind:
    """Tells the valgrind that runs this process what to count."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._dumps = 0
        self._tell('instrumentation', 'on')

    def per_turn(self, body: Callable[[], Any], few: int, more: int) -> float:
        """What one call takes, from how much more it is for ``more`` calls beyond ``few``."""
        short, long = (self.instructions(body, times) for times in (few, few + more))
        return (long - short) / more

    def instructions(self, body: Callable[[], Any], times: int) -> int:
        """What ``times`` calls take, and telling valgrind."""
        body()
        self._tell('zero')
        for _ in range(times):
            body()
        self._tell('dump')
        self._dumps += 1
        return _total(os.path.join(self._folder, f'out.{self._dumps}'))

    def _tell(self, *words: str) -> None:
        command = ['vgdb', f'--pid={os.getpid()}', *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _total(path: str) -> int:
    with open(path) as file:
        lines = [line for line in file if line.startswith(('totals:', 'summary:'))]
    return int(lines[-1].split()[1])


def show(name: str, result: dict[str, Any]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f'{name}: ours / stock (headline: {result["ratio"]:.3f})', title_justify='left'
    )
    for title in ('case', 'parameters', 'per', 'ratio', 'ours', 'stock'):
        table.add_column(title, justify='left' if title in ('case', 'per') else 'right')
    for case in result['cases']:
        counts = (f'{case[key]:,.0f}' for key in ('ours_instructions', 'stock_instructions'))
        table.add_row(
            case['what'], str(case['params']), case['per'], f'{case["ratio"]:.3f}', *counts
        )
    console = Console(file=sys.stdout, width=130)
    console.print(table)
    console.print(f'{result["headline"]}; instructions')


if __name__ == '__main__':
    counted = count(sys.argv[1], int(sys.argv[2]))
    with open(os.path.join(sys.argv[1], 'result.json'), 'w') as out:
        json.dump(counted, out)

"""What this machine has, and how many runs at a time it can take without one slowing another.

Upstream has no counterpart.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from megatron_buffer.ablation.sweep import Sweep
from megatron_buffer.errors import ConfigError


class Machine(NamedTuple):
    """CPUs that this process may use, and GPUs that it sees, by number."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...]


def this_machine() -> Machine:
    """Looks; without asking torch, which takes seconds to import."""
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    if visible is not None:
        gpus = tuple(part.strip() for part in visible.split(',') if part.strip())
    elif Path('/dev/nvidiactl').exists():
        gpus = tuple(str(n) for n, _ in enumerate(Path('/dev').glob('nvidia[0-9]*')))
    else:
        gpus = ()
    return Machine(tuple(sorted(os.sched_getaffinity(0))), gpus)


def runs_on_cpu(sweep: Sweep, machine: Machine) -> bool:
    """Whether the sweep's runs use the CPU: as ``workload.device`` says, or where no GPU is visible."""
    device = sweep.workload.device
    return device == 'cpu' or (device == 'auto' and not machine.gpus)


def check_room(sweep: Sweep, machine: Machine, jobs: int, *, is_cpu: bool) -> str:
    """Refuses more runs at a time than there is room for.

    Args:
        sweep: The sweep.
        machine: This machine.
        jobs: Runs at a time.
        is_cpu: Whether they use the CPU.

    Returns:
        A warning, or ''.

    Raises:
        ConfigError: In one sentence.
    """
    work = sweep.workload
    if jobs < 1:
        raise ConfigError(f'--jobs is {jobs}; it must be at least 1')
    if sweep.max_jobs is not None:
        if jobs > sweep.max_jobs:
            raise ConfigError(
                f'--jobs {jobs}: the launcher of {sweep.source} may start {sweep.max_jobs} at a time; what it '
                'starts elsewhere cannot be counted from here. If the job has room for more, say so with '
                'max_jobs in the sweep file'
            )
        return ''
    what = 'CPU' if is_cpu else 'GPU'
    there = len(machine.cpus if is_cpu else machine.gpus)
    if not is_cpu and work.ranks > there:
        raise ConfigError(
            f'{sweep.source}: a run needs {work.ranks} GPUs, and {there or "none"} '
            f'{"is" if there < 2 else "are"} visible here; set workload.ranks, or workload.device: cpu'
        )
    threads = int(sweep.env.get('OMP_NUM_THREADS', '1') or 1) if is_cpu else 1
    needed = work.ranks * threads
    if jobs > 1 and jobs * needed > there:
        most = max(1, there // needed)
        raise ConfigError(
            f'--jobs {jobs}: {jobs} runs of {work.ranks} ranks need {jobs * needed} {what}s, and there are '
            f'{there}: they would slow each other, and no step time would mean anything. At most --jobs {most}'
        )
    if needed > there:
        return f'a run has {work.ranks} ranks on {there} {what}{"s" * (there != 1)}: step times will mean little'
    return ''


def share_of(
    machine: Machine, slot: int, jobs: int, ranks: int, *, is_cpu: bool
) -> tuple[str, ...]:
    """The CPUs or GPUs of one of several runs at a time; () for all, when there is one at a time."""
    if jobs == 1:
        return ()
    if is_cpu:
        each = len(machine.cpus) // jobs
        return tuple(str(cpu) for cpu in machine.cpus[slot * each : (slot + 1) * each])
    return machine.gpus[slot * ranks : (slot + 1) * ranks]

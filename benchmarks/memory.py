"""Peak memory of a whole step's arms: of their tensors, to the byte, and of the process around them.

What tensors hold is what grows with a model. torch's profiler sees every allocation and release from before the
model is built. That is measured on one rank, where it comes out the same in every run of an idle machine; among
several, how many copies gloo's reductions hold at once depends on who waits for whom. A process also has its
interpreter's memory: the resident set's growth from before the model was built, on two ranks, in other processes,
since the profiler has memory of its own.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.compare import quiet


def peaks_of(arm: str, what: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What an arm of ``step`` takes at most."""
    from megatron_buffer.testing import run_ranks

    return {
        'what': f'{arm}: {what}',
        'peak_tensor_bytes': tensor_bytes(arm, fields),
        'peak_growth_bytes': max(run_ranks(peak_of_process, 2, fields, arm, timeout_s=600)),
    }


def tensor_bytes(arm: str, fields: dict[str, Any]) -> int:
    """What an arm's tensors take at most, on one rank."""
    from megatron_buffer.testing import run_ranks

    alone = {**fields, 'ep': 1} if 'ep' in fields else fields
    # The profiler reports its own start and end.
    silent = {'KINETO_LOG_LEVEL': '99'}
    [peak] = run_ranks(peak_of_tensors, 1, alone, arm, env=silent, timeout_s=600)
    return peak


def peak_of_tensors(rank: int, world_size: int, fields: dict[str, Any], arm: str) -> int:
    """Bytes that tensors held at most while an arm was built and trained."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _train(fields, arm)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'trace.json'
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())['traceEvents']
    return max(e['args']['Total Allocated'] for e in events if e.get('name') == '[memory]')


def peak_of_process(rank: int, world_size: int, fields: dict[str, Any], arm: str) -> int:
    """Bytes by which the resident set has grown at most while an arm was built and trained."""
    before = _resident_bytes('VmRSS')
    _train(fields, arm)
    return _resident_bytes('VmHWM') - before


def _train(fields: dict[str, Any], arm: str) -> None:
    from benchmarks.step import WARM_UP_STEPS, case_of, start

    quiet()
    step = start(arm, case_of(fields))
    for number in range(WARM_UP_STEPS + 2):
        step(number)


def _resident_bytes(field: str) -> int:
    with open('/proc/self/status') as file:
        [line] = [line for line in file if line.startswith(field)]
    return int(line.split()[1]) * 1024

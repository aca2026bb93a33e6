"""The command that starts one run: the launcher's template, the script, its flags and ours.

Upstream has no counterpart.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_buffer.ablation.sweep import Arm, Sweep
from megatron_buffer.config_yaml import did_you_mean

TORCHRUN = (
    '{python}',
    '-m',
    'torch.distributed.run',
    '--standalone',
    '--nproc-per-node={ranks}',
    '{command}',
)
"""The default launcher: all ranks on this machine."""
PLACEHOLDERS = {
    'command': '-m megatron_buffer run SCRIPT FLAGS, as words of their own',
    'script': 'the script, for launchers that start a patched tree without our launcher',
    'arguments': "the script's flags and ours, as words of their own",
    'python': 'the Python that runs the sweep',
    'ranks': 'processes of a run',
    'nodes': 'machines of a run',
    'ranks_per_node': 'ranks / nodes',
    'port': 'a port, another one for each run',
    'run': 'the name of the run, for a rendezvous',
    'run_dir': "the run's folder",
}
"""What a launcher's template can hold, in braces."""

_PLACEHOLDER = re.compile(r'(?<!\$)\{(\w+)\}')
_VARIABLE = re.compile(r'\$\{(\w+)\}')
_WORDS = ('{command}', '{arguments}')
_FIRST_PORT, _PORTS = 29_600, 400


def launcher_problems(words: Sequence[str]) -> list[str]:
    """What is wrong with a launcher's template, each thing in a sentence."""
    problems: list[str] = []
    text = ' '.join(words)
    if '{command}' not in words and not ('{arguments}' in words and '{script}' in text):
        problems.append(
            'holds neither {command} nor {script} and {arguments}, each a word of its own, so it would '
            'start nothing of the sweep'
        )
    for name in _PLACEHOLDER.findall(text):
        if name not in PLACEHOLDERS:
            hint = did_you_mean(name, PLACEHOLDERS)
            problems.append(
                f'unknown placeholder {{{name}}}.{hint} Valid: {", ".join(PLACEHOLDERS)}'
            )
    problems += [
        f'the environment variable {name} is not set'
        for name in _VARIABLE.findall(text)
        if name not in os.environ
    ]
    program = _VARIABLE.sub(lambda match: os.environ.get(match[1], ''), words[0])
    if program != '{python}' and not problems and shutil.which(program) is None:
        problems.append(f'there is no program {program!r} on this machine')
    return problems


def names_placeholder(value: Any, name: str) -> bool:
    """Whether a flag's value holds ``{name}``."""
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, str) and f'{{{name}}}' in item for item in items)


def flag_words(flags: Mapping[str, Any], fill: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line.

    Args:
        flags: By name.
        fill: Values of ``{seed}`` and the like in text.
    """
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f'--{name}')
        if value is not True:
            words += [
                filled(item, fill) for item in (value if isinstance(value, list) else [value])
            ]
    return words


def filled(text: Any, fill: Mapping[str, Any]) -> str:
    """``text`` with the placeholders that ``fill`` knows replaced; other braces stay."""
    return _PLACEHOLDER.sub(lambda match: str(fill.get(match[1], match[0])), str(text))


def script_words(sweep: Sweep, arm: Arm, seed: int, *, is_cpu: bool) -> list[str]:
    """The script's own flags in one run."""
    fill = run_values(sweep, seed, is_cpu=is_cpu)
    return flag_words({**sweep.workload.flags, **arm.flags}, fill)


def run_values(sweep: Sweep, seed: int, *, is_cpu: bool) -> dict[str, Any]:
    """What flags and environment variables may hold in braces, with its values."""
    work = sweep.workload
    backend = 'gloo' if is_cpu else 'nccl'
    return {'seed': seed, 'steps': work.steps, 'ranks': work.ranks, 'backend': backend}


def our_words(arm: Arm, run_dir: Path, *, is_cpu: bool) -> list[str]:
    """Our flags in one run."""
    words = ['--custom-buffer-cpu'] if is_cpu else []
    if arm.config is not None:
        words += ['--use-custom-buffer', '--custom-buffer-config', str(run_dir / 'config.yaml')]
    return [*words, '--custom-buffer-stats', str(run_dir / 'stats')]


def command_of(
    sweep: Sweep, arm: Arm, seed: int, run_dir: Path, *, is_cpu: bool, number: int
) -> list[str]:
    """The whole command of one run.

    Args:
        sweep: The sweep.
        arm: Its arm.
        seed: Its seed.
        run_dir: Absolute path of the run's folder.
        is_cpu: Whether it runs on the CPU.
        number: Of the run in the sweep, from 0.
    """
    work = sweep.workload
    arguments = script_words(sweep, arm, seed, is_cpu=is_cpu)
    arguments += our_words(arm, run_dir, is_cpu=is_cpu)
    lists = {
        '{arguments}': arguments,
        '{command}': ['-m', 'megatron_buffer', 'run', str(work.script), *arguments],
    }
    fill = {
        'python': sys.executable,
        'script': work.script,
        'ranks': work.ranks,
        'nodes': work.nodes,
        'ranks_per_node': work.ranks // work.nodes,
        'port': _FIRST_PORT + number % _PORTS,
        'run': run_dir.name.lstrip('.'),
        'run_dir': run_dir,
    }
    words: list[str] = []
    for word in sweep.launcher:
        if word in _WORDS:
            words += lists[word]
        else:
            text = _VARIABLE.sub(lambda match: os.environ.get(match[1], match[0]), word)
            words.append(filled(text, fill))
    return words


def environment_of(sweep: Sweep, arm: Arm, seed: int, *, is_cpu: bool) -> dict[str, str]:
    """What a run's environment has beside that of the sweep's own process."""
    env = {'PYTHONUNBUFFERED': '1'}
    if is_cpu:
        env['CUDA_VISIBLE_DEVICES'] = ''
        if 'OMP_NUM_THREADS' not in os.environ:
            env['OMP_NUM_THREADS'] = '1'
        if sweep.workload.nodes == 1 and 'GLOO_SOCKET_IFNAME' not in os.environ:
            env['GLOO_SOCKET_IFNAME'] = 'lo'
    # A run starts in another folder: the package must be found from there too.
    root = str(Path(__file__).resolve().parents[2])
    env['PYTHONPATH'] = os.pathsep.join(filter(None, [root, os.environ.get('PYTHONPATH', '')]))
    fill = run_values(sweep, seed, is_cpu=is_cpu)
    return env | {key: filled(value, fill) for key, value in {**sweep.env, **arm.env}.items()}

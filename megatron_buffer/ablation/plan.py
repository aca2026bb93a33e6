"""Which runs a sweep has, in which order, and what tells one run from another.

Arms are interleaved, so that a machine that grows slower or warmer meets all of them alike, and each
round begins with another arm. Upstream has no counterpart.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from megatron_buffer.ablation.launcher import script_words
from megatron_buffer.ablation.sweep import Arm, Sweep
from megatron_buffer.config import config_hash, to_dict


class Run(NamedTuple):
    """One training.

    Attributes:
        arm: Name of its arm.
        seed: Its seed.
        repeat: Round, from 1.
        key: Equal for two runs exactly if they do the same.
        name: Of its folder.
    """

    arm: str
    seed: int
    repeat: int
    key: str
    name: str


def runs_of(sweep: Sweep, *, is_cpu: bool) -> list[Run]:
    """All runs of a sweep: A B C, B C A, C A B, and so on, once for each seed in every repeat."""
    arms = list(sweep.arms)
    script = hashlib.sha256(sweep.workload.script.read_bytes()).hexdigest()
    runs: list[Run] = []
    turn = 0
    for repeat in range(1, sweep.repeats + 1):
        for seed in sweep.seeds:
            for name in _rotated(arms, turn):
                key = _key(sweep, sweep.arms[name], seed, repeat, script, is_cpu=is_cpu)
                folder = f'r{repeat}-s{seed}-{_slug(name)}-{key}'
                runs.append(Run(name, seed, repeat, key, folder))
            turn += 1
    return runs


def _rotated(arms: list[str], turn: int) -> list[str]:
    start = turn % len(arms) if arms else 0
    return arms[start:] + arms[:start]


def _key(sweep: Sweep, arm: Arm, seed: int, repeat: int, script: str, *, is_cpu: bool) -> str:
    work = sweep.workload
    what: dict[str, Any] = {
        'arm': arm.name,
        'config': None if arm.config is None else to_dict(arm.config),
        'flags': script_words(sweep, arm, seed, is_cpu=is_cpu),
        'env': {**sweep.env, **arm.env},
        'script': [str(work.script.name), script],
        'ranks': [work.ranks, work.nodes, work.steps],
        'cwd': None if work.cwd is None else str(work.cwd),
        'launcher': sweep.launcher,
        'cpu': is_cpu,
        'run': [seed, repeat],
    }
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _slug(name: str) -> str:
    return re.sub(r'[^A-Za-z0-9_=]+', '-', name).strip('-')[:60] or 'arm'


def changes_of(sweep: Sweep, arm: Arm) -> dict[str, Any]:
    """What an arm has unlike the base config and the workload, by path: ``{'bucketing': [from, to]}``.

    Args:
        sweep: The sweep.
        arm: One of its arms. Of stock, which has no config, only flags and variables can differ.
    """
    changes: dict[str, Any] = {}
    if arm.config is not None:
        base, own = to_dict(sweep.base_config), to_dict(arm.config)
        changes = {key: [base[key], own[key]] for key in own if own[key] != base[key]}
    for kind, mine, theirs in (
        ('flags', arm.flags, sweep.workload.flags),
        ('env', arm.env, sweep.env),
    ):
        for key, value in mine.items():
            if value != theirs.get(key):
                changes[f'{kind}.{key}'] = [theirs.get(key), value]
    return changes


def as_yaml(value: Any) -> str:
    """A plain value on one line, as YAML's flow style has it."""
    if isinstance(value, dict):
        return f'{{{", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items())}}}'
    if isinstance(value, list):
        return f'[{", ".join(map(as_yaml, value))}]'
    return value if isinstance(value, str) else json.dumps(value)


def sweep_as_dict(sweep: Sweep, runs: list[Run], *, is_cpu: bool) -> dict[str, Any]:
    """What a report has to know about a sweep: ``sweep.json``."""
    work = sweep.workload
    return {
        'schema': 1,
        'name': sweep.name,
        'source': sweep.source,
        'question': sweep.question,
        'base': sweep.base,
        'base_hash': config_hash(sweep.base_config),
        'baseline': sweep.baseline,
        'arms': {
            arm.name: {
                'config_hash': None if arm.config is None else config_hash(arm.config),
                'short': 'stock Megatron-Core' if arm.config is None else arm.config.short_str(),
                'changes': changes_of(sweep, arm),
                'about': arm.about,
                'against': sweep.against(arm.name),
            }
            for arm in sweep.arms.values()
        },
        'expect': {
            name: [
                {'kind': e.kind, 'than': e.than, 'tolerance': e.tolerance, 'error': e.error}
                for e in expectations
            ]
            for name, expectations in sweep.expect.items()
        },
        'workload': {
            'script': str(work.script),
            'is_tiny': work.is_tiny,
            'flags': dict(work.flags),
            'ranks': work.ranks,
            'nodes': work.nodes,
            'steps': work.steps,
            'warmup_steps': work.warmup_steps,
            'device': 'cpu' if is_cpu else 'gpu',
        },
        'env': dict(sweep.env),
        'launcher': list(sweep.launcher),
        'seeds': list(sweep.seeds),
        'repeats': sweep.repeats,
        'runs': [
            {'name': run.name, 'arm': run.arm, 'seed': run.seed, 'repeat': run.repeat}
            for run in runs
        ],
    }

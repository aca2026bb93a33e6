"""What the ranks of a run wrote (``--custom-buffer-stats``), as one result of the whole run.

Of figures that ranks differ in the largest counts: the slowest rank sets the pace, the fullest one runs out of
memory. Upstream has no counterpart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1


class StatsProblem(Exception):
    """The files of a run are missing, incomplete, or of another run than was asked for."""


def read_stats(folder: Path, ranks: int, steps: int) -> dict[str, Any]:
    """Reads ``rank-<r>.jsonl`` of every rank.

    Args:
        folder: Where they are.
        ranks: How many ranks the run had.
        steps: How many steps it was to have.

    Returns:
        The keys of a result that come from the ranks, see ``docs/ablations.md``.

    Raises:
        StatsProblem: In one sentence.
    """
    files = [_read_rank(folder / f'rank-{rank}.jsonl', rank) for rank in range(ranks)]
    world = files[0].run.get('world_size')
    if world != ranks:
        raise StatsProblem(f'the run had {world} ranks, and the sweep asked for {ranks}')
    done = min(len(file.steps) for file in files)
    if done < steps:
        raise StatsProblem(f'the run ended well, but after {done} of {steps} steps')
    steps_of = [file.steps[:steps] for file in files]
    run = files[0].run
    kinds = sorted({kind for file in steps_of for step in file for kind in _collectives(step)})
    losses = sorted({name for file in steps_of for step in file for name in step.get('loss') or {}})
    return {
        'buffer': run.get('buffer'),
        'config_hash': run.get('config_hash'),
        'config': run.get('config'),
        'versions': run.get('versions') or {},
        'device': run.get('device'),
        'loss': {
            name: _same(steps_of, lambda s, name=name: (s.get('loss') or {}).get(name))
            for name in losses
        },
        'grad_norm': _same(steps_of, lambda s: s.get('grad_norm')),
        'updates_skipped': sum(step.get('update_successful') is False for step in steps_of[0]),
        'step_time_s': _largest(steps_of, 'time_s'),
        'exposed_grad_s': _largest(steps_of, 'exposed_grad_s'),
        'exposed_param_s': _largest(steps_of, 'exposed_param_s'),
        'exposed_s': _exposed(steps_of),
        'collectives': {
            kind: {
                key: [
                    max(_collectives(file[i]).get(kind, {}).get(key, 0) for file in steps_of)
                    for i in range(steps)
                ]
                for key in ('count', 'bytes', 'payload_bytes')
            }
            for kind in kinds
        },
        'peak_memory_bytes': max(
            (step.get('peak_memory_bytes') or 0 for file in steps_of for step in file), default=0
        ),
        'layout': _layout(files),
    }


class _Rank:
    """The lines of one file, by kind."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {}
        self.layout: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.is_finished = False


def _read_rank(path: Path, rank: int) -> _Rank:
    if not path.is_file():
        raise StatsProblem(
            f'rank {rank} wrote no statistics ({path.name} is missing): does the launcher start the script '
            'through megatron_buffer, and with as many ranks as the sweep says?'
        )
    result = _Rank()
    with path.open(encoding='utf-8') as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                kind = line['kind']
            except (ValueError, LookupError, TypeError):
                raise StatsProblem(
                    f'{path.name}: line {number} is not a line of statistics'
                ) from None
            if kind == 'run':
                if line.get('schema') != SCHEMA:
                    raise StatsProblem(f'{path.name} has schema {line.get("schema")}, not {SCHEMA}')
                result.run = line
            elif kind == 'layout':
                result.layout.append(line)
            elif kind == 'step':
                result.steps.append(line)
            elif kind == 'end':
                result.is_finished = True
    if not result.run or not result.is_finished:
        what = (
            'has no first line' if not result.run else 'wrote no last line, so it did not end well'
        )
        raise StatsProblem(f'rank {rank} {what} ({path.name})')
    return result


def _collectives(step: Mapping[str, Any]) -> Mapping[str, Any]:
    return step.get('collectives') or {}


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None


def _same(ranks: Sequence[Sequence[Mapping[str, Any]]], get: Any) -> list[float | None]:
    """A value per step that ranks should agree on: their mean where they do not; null for NaN and Inf."""
    result: list[float | None] = []
    for steps in zip(*ranks, strict=True):
        values = [value for value in map(get, steps) if value is not None]
        finite = [_finite(value) for value in values]
        if not values or None in finite:
            result.append(None)
        elif len(set(finite)) == 1:
            result.append(finite[0])
        else:
            result.append(math.fsum(value for value in finite if value is not None) / len(finite))
    return result


def _largest(ranks: Sequence[Sequence[Mapping[str, Any]]], key: str) -> list[float | None]:
    """The largest over the ranks, per step."""
    result: list[float | None] = []
    for steps in zip(*ranks, strict=True):
        values = [value for step in steps if (value := _finite(step.get(key))) is not None]
        result.append(max(values) if values else None)
    return result


def _exposed(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[float | None]:
    """Waiting for reductions and gathers together, of the rank that waited longest."""
    sums = [
        [
            {'sum': (s.get('exposed_grad_s') or 0.0) + (s.get('exposed_param_s') or 0.0)}
            for s in steps
        ]
        for steps in ranks
    ]
    return _largest(sums, 'sum')


def _layout(files: Sequence[_Rank]) -> dict[str, Any]:
    """Every chunk once, as its first rank has it, and the sums of the rank that has most of each."""
    chunks: dict[str, Any] = {}
    sums: dict[str, int] = {}
    for file in files:
        own = dict.fromkeys(('elems', 'padding_elems', 'buckets', 'bucket_groups'), 0)
        for chunk in file.layout:
            chunks.setdefault(
                chunk['chunk'],
                {'buffers': chunk['buffers'], 'bucket_groups': chunk.get('bucket_groups', 0)},
            )
            own['bucket_groups'] += chunk.get('bucket_groups', 0)
            for buffer in chunk['buffers']:
                for key in ('elems', 'padding_elems', 'buckets'):
                    own[key] += buffer.get(key, 0)
        sums = {key: max(value, sums.get(key, 0)) for key, value in own.items()}
    return {**sums, 'chunks': chunks}

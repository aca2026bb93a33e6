"""What traces say: who waited for which bucket group and why, and whether every group was communicated once.

Pure functions of the files. Imports neither torch nor megatron. Upstream has no counterpart.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_buffer.errors import ConfigError
from megatron_buffer.observe.trace_file import RankTrace

PHASES = ('reduce', 'gather')


def summarize(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Summarises the traces of all ranks.

    Means are over the traced iterations without the first one, which warms up (if there are others), and over
    the ranks. Times are in seconds.

    Returns:
        As JSON has it: ``ok`` (nothing violates the ledger), ``ranks``, ``steps``, ``clock``,
        ``clock_uncertainty_s``, ``iteration_s``, ``exposed`` (per phase), ``groups`` (those waited for longest
        first), ``by_rank``, ``slowest_rank``, ``imbalance_s`` and ``violations``.

    Raises:
        ConfigError: If no iteration was completed.
    """
    steps = min(int(trace.header['steps']) for trace in traces)
    if steps < 1:
        raise ConfigError(
            'the traces hold no complete iteration: did the run end before its first optimizer step?'
        )
    counted = range(2, steps + 1) if steps > 1 else range(1, 2)
    by_rank = [_of_rank(trace, counted) for trace in traces]
    compute = [rank['compute_s'] for rank in by_rank if rank['compute_s'] is not None]
    violations = [text for trace in traces for text in violations_of(trace)]
    return {
        'ok': not violations,
        'ranks': len(traces),
        'steps': steps,
        'counted_steps': [counted.start, counted.stop - 1],
        'clock': traces[0].header['clock'],
        'clock_uncertainty_s': max(t.header['offset_uncertainty_ns'] for t in traces) / 1e9,
        'iteration_s': _mean(rank['iteration_s'] for rank in by_rank),
        'exposed': {
            phase: _mean(rank[f'exposed_{phase}_s'] for rank in by_rank) for phase in PHASES
        },
        'groups': _groups(traces, counted),
        'by_rank': by_rank,
        'slowest_rank': max(by_rank, key=lambda rank: rank['compute_s'] or 0.0)['rank'],
        'imbalance_s': max(compute) - min(compute) if compute else None,
        'violations': violations,
    }


def violations_of(trace: RankTrace) -> list[str]:
    """What breaks the ledger: each group is reduced once per window and gathered once per step.

    A window is what ``zero_grad_buffer`` begins and ``finish_grad_sync`` ends. Gathers bring the values of an
    optimizer step, in it or before the next one; those of the last traced step may come after the trace, and a
    step that was skipped (overflow) needs none.
    """
    reduces: Counter[tuple[str, int]] = Counter()
    gathers: Counter[tuple[str, int]] = Counter()
    for event in _events(trace, 'dispatch'):
        args = event['args']
        if event['name'].startswith('reduce'):
            reduces[args['group'], args['window']] += 1
        else:
            gathers[args['group'], args['values_of_step']] += 1
    finishes: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for event in _events(trace, 'phase', 'finish'):
        args = event['args']
        finishes[args['chunk'], args['step']][args['window']] = 1
    skipped = {
        event['args']['step']
        for event in _events(trace, 'phase', 'optimizer step')
        if event['args']['update_successful'] is False
    }
    found = []
    for step in range(1, int(trace.header['steps']) + 1):
        for group in trace.header['groups']:
            name = group['name']
            where = f'rank {trace.rank}, step {step}: {name} ({_some_params(group)})'
            windows = finishes[group['chunk'], step]
            if not windows:
                found.append(f'{where} was not synchronised: finish_grad_sync was not called')
            for window in windows:
                if (times := reduces[name, window]) != 1:
                    found.append(f'{where} was reduced {_times(times)} instead of once')
            times = gathers[name, step]
            optional = step in skipped or (
                group['overlap_param_gather'] and step == trace.header['steps']
            )
            if not group['gathers']:
                if times:
                    found.append(f'{where} was gathered {_times(times)} instead of never')
            elif times != 1 and not (optional and times == 0):
                found.append(f'{where} was gathered {_times(times)} instead of once')
    return found


def _groups(traces: Sequence[RankTrace], counted: range) -> list[dict[str, Any]]:
    names: dict[str, dict[str, Any]] = {}
    for trace in traces:
        for group in trace.header['groups']:
            names.setdefault(group['name'], group)
    collected = {phase: _Waits(traces, phase, counted) for phase in PHASES}
    rows = []
    for name, header in names.items():
        row: dict[str, Any] = {
            'name': name,
            'is_expert': header['is_expert'],
            'buckets': len(header['buckets']),
            'params': sum(len(bucket['params']) for bucket in header['buckets']),
            'elems': sum(bucket['elems'] for bucket in header['buckets']),
            'reduce_bytes': header['grad_bytes'],
            'gather_bytes': header['param_bytes'] if header['gathers'] else 0,
        }
        for phase, waits in collected.items():
            row[phase] = waits.of_group(name)
        rows.append(row)
    return sorted(rows, key=lambda row: -sum(row[phase]['wait_s'] for phase in PHASES))


class _Waits:
    """The waits for all groups in one phase.

    Args:
        traces: Of all ranks.
        phase: ``reduce`` or ``gather``.
        counted: The iterations that count.
    """

    def __init__(self, traces: Sequence[RankTrace], phase: str, counted: range) -> None:
        self._num_samples = len(traces) * len(counted)
        self._waits: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
        self._starts: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[float, str]]] = (
            defaultdict(dict)
        )
        self._needed: dict[str, Counter[str]] = defaultdict(Counter)
        for trace in traces:
            members = {g['name']: tuple(g['ranks']) for g in trace.header['groups']}
            for event in _events(trace, 'wait'):
                args = event['args']
                if args['step'] in counted and event['name'].startswith(f'wait for {phase}'):
                    seconds = event['dur'] / 1e6
                    self._waits[args['group']].append((seconds, trace.rank, args['step']))
            for event in _events(trace, 'dispatch', f'{phase} dispatch'):
                args = event['args']
                if args['step'] in counted:
                    key = args['group'], members[args['group']], args['step']
                    start = event['ts'], args.get('last_gradient', '')
                    self._starts[key].setdefault(trace.rank, start)
            for event in _events(trace, 'use'):
                if event['args']['step'] in counted and phase == 'gather':
                    self._needed[event['args']['group']][event['args']['param']] += 1

    def of_group(self, name: str) -> dict[str, Any]:
        """How long the group was waited for, on a mean iteration of a mean rank, and why."""
        waits = self._waits[name]
        worst = max(waits, default=(0.0, 0, 0))
        spreads: list[float] = []
        last_ranks: Counter[int] = Counter()
        made_late: Counter[str] = Counter()
        for (group, _, _), starts in self._starts.items():
            if group != name:
                continue
            last = max(starts, key=lambda rank: starts[rank][0])
            spreads.append((starts[last][0] - min(start for start, _ in starts.values())) / 1e6)
            last_ranks[last] += 1
            made_late[starts[last][1]] += 1
        del made_late['']
        made_late = made_late or self._needed[name]
        return {
            'wait_s': sum(seconds for seconds, _, _ in waits) / self._num_samples,
            'worst_s': worst[0],
            'worst_rank': worst[1] if waits else None,
            'worst_step': worst[2] if waits else None,
            'param': made_late.most_common(1)[0][0] if made_late else None,
            'ranks_apart_s': statistics.fmean(spreads) if spreads else 0.0,
            'last_rank': last_ranks.most_common(1)[0][0] if last_ranks else None,
        }


def _of_rank(trace: RankTrace, counted: range) -> dict[str, Any]:
    ends = {
        event['args']['step']: event['ts'] + event['dur']
        for event in _events(trace, 'phase', 'optimizer step')
    }
    durations = [(ends[s] - ends[s - 1]) / 1e6 for s in counted if {s, s - 1} <= ends.keys()]
    exposed = dict.fromkeys(PHASES, 0.0)
    for event in _events(trace, 'wait'):
        if event['args']['step'] in counted:
            phase = 'reduce' if event['name'].startswith('wait for reduce') else 'gather'
            exposed[phase] += event['dur'] / 1e6 / len(counted)
    iteration_s = _mean(durations)
    return {
        'rank': trace.rank,
        'iteration_s': iteration_s,
        'exposed_reduce_s': exposed['reduce'],
        'exposed_gather_s': exposed['gather'],
        'compute_s': None if iteration_s is None else iteration_s - sum(exposed.values()),
    }


def _events(trace: RankTrace, category: str, name: str = '') -> Iterator[dict[str, Any]]:
    for event in trace.events:
        if event.get('cat') == category and (not name or event['name'] == name):
            yield event


def _some_params(group: Mapping[str, Any]) -> str:
    params = [param for bucket in group['buckets'] for param in bucket['params']]
    return ', '.join(params[:2]) + (f' and {len(params) - 2} more' if len(params) > 2 else '')


def _times(number: int) -> str:
    return {0: 'never', 1: 'once', 2: 'twice'}.get(number, f'{number} times')


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None

"""A simulated iteration in the trace format that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_buffer.planner.timeline import Timeline

_LANES = {
    'other': (0, 'compute'),
    'backward': (0, 'compute'),
    'forward': (0, 'compute'),
    'optimizer': (0, 'compute'),
    'reduce': (1, 'reductions'),
    'gather': (2, 'gathers'),
}
_WAITS = (3, 'exposed')


def write_trace(path: str, timeline: Timeline, name: str) -> None:
    """Writes the trace.

    Args:
        path: The file; its folder exists.
        timeline: What was simulated.
        name: What the process is called in the viewer.
    """
    with open(path, 'w', encoding='utf-8') as file:
        json.dump({'traceEvents': list(_events(timeline, name)), 'displayTimeUnit': 'ms'}, file)
        file.write('\n')


def waits(timeline: Timeline) -> Iterator[tuple[str, float, float]]:
    """What is exposed: the kind of collective that is waited for, start and end in seconds."""
    if timeline.reduce_end_s > timeline.backward_end_s:
        yield 'reduce', timeline.backward_end_s, timeline.reduce_end_s
    computing = sorted(
        (e.start_s, e.end_s)
        for e in timeline.events
        if e.kind == 'forward' or (e.kind == 'optimizer')
    )
    ends = [end for _, end in computing]
    starts = [start for start, _ in computing[1:]] + [timeline.end_s]
    for end, start in zip(ends, starts, strict=True):
        if start > end and end >= timeline.optimizer_end_s:
            yield 'gather', end, start


def _events(timeline: Timeline, name: str) -> Iterator[dict[str, Any]]:
    yield _meta('process_name', name)
    for thread, lane in sorted({*_LANES.values(), _WAITS}):
        yield _meta('thread_name', lane, thread)
        yield {**_meta('thread_sort_index', '', thread), 'args': {'sort_index': thread}}
    for event in timeline.events:
        arguments: dict[str, Any] = {'why': event.why}
        if event.bytes:
            arguments['bytes'] = event.bytes
        label = event.name if event.kind in ('reduce', 'gather') else f'{event.kind}: {event.name}'
        yield _stretch(
            label, event.kind, _LANES[event.kind][0], event.start_s, event.end_s, arguments
        )
    for kind, start, end in waits(timeline):
        yield _stretch(f'waits ({kind})', 'exposed', _WAITS[0], start, end, {})


def _stretch(
    name: str, category: str, thread: int, start: float, end: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Times in microseconds, to a thousandth."""
    return {
        'ph': 'X',
        'name': name,
        'cat': category,
        'pid': 0,
        'tid': thread,
        'ts': round(start * 1e6, 3),
        'dur': round((end - start) * 1e6, 3),
        'args': arguments,
    }


def _meta(what: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {'ph': 'M', 'name': what, 'pid': 0, 'tid': thread, 'args': {'name': name}}

"""The file of a trace: written, read and merged. Imports neither torch nor megatron.

The format is Chrome's, which Perfetto (https://ui.perfetto.dev) opens; what only ``megatron-buffer trace`` needs
is under ``megatron_buffer``. Upstream has no counterpart.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_buffer.errors import ConfigError

SCHEMA = 1
SUFFIX = '.trace.json'
COMPUTE_TRACK = 0

_NAME = re.compile(r'rank-(\d+)\.trace\.json(\.gz)?')


class TraceEvent(NamedTuple):
    """A span, or an instant if it has no end; times are marks."""

    category: str
    name: str
    track: int
    begin: Any
    end: Any
    args: dict[str, Any]


class ReadsMarks(Protocol):
    """What tells the time of a mark."""

    def at_ns(self, mark: Any) -> int:
        """On the host's clock."""
        ...


class RankTrace(NamedTuple):
    """One rank's file.

    Attributes:
        header: What is under ``megatron_buffer``.
        events: Of Chrome's format, on the common clock: microseconds.
    """

    header: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self.header['rank'])


def write_trace(
    path: Path, header: dict[str, Any], events: Sequence[TraceEvent], clock: ReadsMarks
) -> None:
    """Writes a rank's trace; a file that is there is complete.

    Args:
        path: Where to.
        header: About the rank and its bucket groups.
        events: With past marks; what was made in a CUDA graph's capture has none and is left out.
        clock: Tells their times.
    """
    rank = header['rank']
    tracks = {COMPUTE_TRACK: 'compute'} | {g['track']: g['name'] for g in header['groups']}
    described = [_named('process_name', rank, COMPUTE_TRACK, f'rank {rank}')]
    described += [_named('thread_name', rank, track, name) for track, name in tracks.items()]
    for event in events:
        if event.begin is None:
            continue
        begin_ns = clock.at_ns(event.begin)
        entry: dict[str, Any] = {
            'name': event.name,
            'cat': event.category,
            'ph': 'i',
            's': 't',
            'ts': begin_ns / 1e3,
            'pid': rank,
            'tid': event.track,
            'args': event.args,
        }
        if event.end is not None:
            del entry['s']
            entry |= {'ph': 'X', 'dur': max(0, clock.at_ns(event.end) - begin_ns) / 1e3}
        described.append(entry)
    _write(path, {'traceEvents': described, 'displayTimeUnit': 'ms', 'megatron_buffer': header})


def read_traces(folder: str) -> list[RankTrace]:
    """All ranks' traces, on rank 0's clock, beginning at 0.

    Raises:
        ConfigError: If the folder, or a file in it, is not what a traced run leaves, or a rank is missing.
    """
    path = Path(folder)
    if not path.is_dir():
        what = 'is a file' if path.exists() else 'does not exist'
        raise ConfigError(
            f'the folder of traces {folder!r} {what}; name the DIR of --custom-buffer-trace'
        )
    found = {}
    for file in sorted(path.iterdir()):
        match = _NAME.fullmatch(file.name)
        if match:
            found[int(match[1])] = file
    if not found:
        raise ConfigError(
            f'there is no trace in {folder!r} (rank-0{SUFFIX} and so on): a run with '
            '--custom-buffer-trace writes them when it has traced its iterations'
        )
    traces = [_read(file, rank) for rank, file in sorted(found.items())]
    world_size = int(traces[0].header['world_size'])
    other = [trace for trace in traces if trace.header['world_size'] != world_size]
    if other:
        raise ConfigError(
            f'the traces in {folder!r} are of different runs: rank {traces[0].rank} was one of '
            f'{world_size}, rank {other[0].rank} one of {other[0].header["world_size"]}; trace into an '
            'empty folder'
        )
    missing = sorted(set(range(world_size)) - set(found))
    if missing:
        ranks = 'rank' if len(missing) == 1 else 'ranks'
        shown = ', '.join(map(str, missing[:8])) + (' ...' if len(missing) > 8 else '')
        raise ConfigError(
            f'{folder!r} holds the traces of {len(found)} of {world_size} ranks, without {ranks} '
            f'{shown}: did the run fail there, or write to the disk of another host?'
        )
    return _aligned(traces)


def write_merged(path: str, traces: Sequence[RankTrace]) -> None:
    """Writes one trace with a process per rank; compressed if the name ends in .gz.

    Raises:
        ConfigError: If the file cannot be written.
    """
    events = [event for trace in traces for event in trace.events]
    headers = [trace.header for trace in traces]
    data = {'traceEvents': events, 'displayTimeUnit': 'ms', 'megatron_buffer': {'ranks': headers}}
    try:
        _write(Path(path), data)
    except OSError as error:
        raise ConfigError(
            f'the merged trace cannot be written to {path!r}: {error.strerror or error}'
        ) from None


def _aligned(traces: Sequence[RankTrace]) -> list[RankTrace]:
    shifts = [trace.header['offset_ns'] / 1e3 for trace in traces]
    first = min(
        (
            event['ts'] - shift
            for trace, shift in zip(traces, shifts, strict=True)
            for event in trace.events
            if 'ts' in event
        ),
        default=0.0,
    )
    return [
        RankTrace(
            trace.header,
            [
                event | {'ts': round(event['ts'] - shift - first, 3)} if 'ts' in event else event
                for event in trace.events
            ],
        )
        for trace, shift in zip(traces, shifts, strict=True)
    ]


def _read(path: Path, rank: int) -> RankTrace:
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == '.gz' else raw)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(
            f'{str(path)!r} cannot be read as JSON ({error}): is it cut off? Trace the run again',
            source=str(path),
        ) from None
    header = data.get('megatron_buffer') if isinstance(data, dict) else None
    if not isinstance(header, dict) or 'rank' not in header or 'traceEvents' not in data:
        raise ConfigError(
            f'{str(path)!r} is not a trace of --custom-buffer-trace', source=str(path)
        )
    if header.get('schema') != SCHEMA:
        raise ConfigError(
            f'{str(path)!r} has schema {header.get("schema")!r}, and this version of megatron-buffer '
            f'reads {SCHEMA}: trace the run again, or read it with the version that wrote it',
            source=str(path),
        )
    if header['rank'] != rank:
        raise ConfigError(
            f'{str(path)!r} is the trace of rank {header["rank"]}: was it renamed?',
            source=str(path),
        )
    return RankTrace(header, data['traceEvents'])


def _named(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {'name': what, 'ph': 'M', 'pid': rank, 'tid': track, 'args': {'name': name}}


def _write(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data).encode()
    partial = path.with_name(f'{path.name}.partial')
    partial.write_bytes(gzip.compress(text) if path.suffix == '.gz' else text)
    os.replace(partial, path)

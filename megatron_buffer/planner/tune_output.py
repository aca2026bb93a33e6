"""What ``megatron-buffer tune`` prints and writes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_buffer import __version__
from megatron_buffer.config import AXES, BufferConfig, load_config, to_dict
from megatron_buffer.planner.plan_render import sizes_of
from megatron_buffer.planner.scene import Scene
from megatron_buffer.planner.simulate_json import SCHEMA_VERSION, scene_as_dict, times_as_dict
from megatron_buffer.planner.simulate_render import say_scene
from megatron_buffer.planner.tune import Candidate, Found
from megatron_buffer.planner.units import amount, duration

_RUNNERS_UP = 4


def render_ranking(scene: Scene, found: Found, top: int, console: Console) -> None:
    """Prints the best candidates, and the config as it was given."""
    say_scene(scene, console)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column('')
    table.add_column('config', overflow='fold')
    for name in ('groups', 'exposed', 'reductions', 'gathers', 'iteration'):
        table.add_column(name, justify='right', no_wrap=True)
    for place, candidate in enumerate(_distinct(found)[:top], 1):
        table.add_row(*_row(str(place), candidate))
    table.add_row()
    table.add_row(*_row('', found.asked))
    console.print(table)
    total = len(found.ranking) + len(found.skipped)
    console.print(Text(f'{total} configs tried; {_gain(found)}'), soft_wrap=True)
    for text in found.skipped[:3]:
        console.print(Text(f'note: not possible: {text}'), soft_wrap=True)


def _distinct(found: Found) -> list[Candidate]:
    """Without those that come to the same time and number of groups as a better one."""
    seen: set[tuple[float, int]] = set()
    result: list[Candidate] = []
    for candidate in found.ranking:
        key = candidate.key()[:2]
        if key not in seen:
            seen.add(key)
            result.append(candidate)
    return result


def _row(place: str, candidate: Candidate) -> tuple[str, ...]:
    timeline = candidate.outcome.timeline
    times = (timeline.exposed_s, timeline.exposed_grad_s, timeline.exposed_param_s)
    return (
        place,
        candidate.what,
        str(candidate.num_groups),
        *map(duration, times),
        duration(timeline.iteration_s),
    )


def _gain(found: Found) -> str:
    best, asked = found.ranking[0].exposed_s, found.asked.exposed_s
    if best >= asked:
        return 'none exposes less than the config as given'
    return f'the best exposes {100 * best / asked:.0f} % of what the config as given does'


def ranking_as_dict(scene: Scene, found: Found) -> dict[str, Any]:
    """The search as JSON: ``ranking``, the best first, and ``asked``, the config as given."""
    return {
        'schema_version': SCHEMA_VERSION,
        'kind': 'tuning',
        'model': scene.model,
        **scene_as_dict(scene),
        'asked': _as_dict(found.asked),
        'ranking': [_as_dict(candidate) for candidate in found.ranking],
        'skipped': list(found.skipped),
    }


def _as_dict(candidate: Candidate) -> dict[str, Any]:
    return {
        'what': candidate.what,
        'bucket_size_elems': candidate.bucket_size_elems,
        'num_groups': candidate.num_groups,
        'config': {key: value for key, value in to_dict(candidate.config).items() if key in AXES},
        'times': times_as_dict(candidate.outcome.timeline),
    }


def write_config(path: str, scene: Scene, found: Found) -> None:
    """Writes the best config with what speaks for it, and reads it back.

    Raises:
        ConfigError: If what was written is no config.
    """
    best = found.ranking[0]
    text = '\n'.join(_comment(scene, found, best)) + '\n\n' + _yaml(best.config)
    with open(path, 'w', encoding='utf-8') as file:
        file.write(text)
    load_config(path)


def _comment(scene: Scene, found: Found, best: Candidate) -> Iterator[str]:
    timeline, asked = best.outcome.timeline, found.asked.outcome.timeline
    yield from _wrapped(f'Found by megatron-buffer {__version__} tune, by simulation:')
    yield from _wrapped(f'{scene.model}, {sizes_of(scene.job)}.')
    yield from _wrapped(f'Network {scene.network_name}; {scene.source_of_times}.')
    yield '#'
    yield from _wrapped(
        f'{best.what}: {best.num_groups} bucket groups. Exposed in an iteration of '
        f'{duration(timeline.iteration_s)}: {duration(timeline.exposed_grad_s)} of reductions and '
        f'{duration(timeline.exposed_param_s)} of gathers; {found.asked.config.source} exposes '
        f'{duration(asked.exposed_grad_s)} and {duration(asked.exposed_param_s)} with '
        f'{found.asked.num_groups} groups.'
    )
    last = _last_group(best)
    if last:
        yield from _wrapped(last)
    others = [c for c in _distinct(found)[1:] if c.what != best.what][:_RUNNERS_UP]
    if others:
        yield '#'
        yield from _wrapped(f'The next of {len(found.ranking)} that were tried:')
        for other in others:
            yield from _wrapped(f'{duration(other.exposed_s)}: {other.what}', '#   ')
    yield '#'
    yield from _wrapped(
        'This holds as far as the network and the times above do: measure it '
        '(megatron-buffer simulate shows the timeline).'
    )


def _last_group(best: Candidate) -> str:
    """Why the reductions end when they do."""
    reductions = [e for e in best.outcome.timeline.events if e.kind == 'reduce']
    if not reductions:
        return ''
    last = max(reductions, key=lambda event: event.end_s)
    group = best.outcome.iteration.chunks[last.chunk].groups[last.group]
    elems = sum(
        best.outcome.stage.chunks[last.chunk]
        .buffers[ref.buffer]
        .view.layout.buckets[ref.bucket]
        .numel_elems
        for ref in best.outcome.stage.chunks[last.chunk].view.groups[last.group].buckets
    )
    return (
        f'The last reduction is that of {group.name} ({amount(elems)} elements); it takes '
        f'{duration(last.duration_s)} and {last.why}.'
    )


def _wrapped(text: str, start: str = '# ') -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent=start, subsequent_indent=start, break_long_words=False
    )


def _yaml(config: BufferConfig) -> str:
    """What differs from upstream's choices, and the bucketing in any case."""
    said, plain = to_dict(config), to_dict(BufferConfig())
    kept = {
        key: value
        for key, value in said.items()
        if key in ('schema_version', 'bucketing') or value != plain[key]
    }
    dump: Any = yaml.safe_dump
    return dump(kept, sort_keys=False, default_flow_style=None, width=96)


def sweep_points(found: Found) -> list[tuple[int, float, float]]:
    """Bucket size in elements, exposed reductions and exposed gathers in seconds; nothing else differs."""
    asked = found.asked.config
    return [
        (
            candidate.bucket_size_elems,
            candidate.outcome.timeline.exposed_grad_s,
            candidate.outcome.timeline.exposed_param_s,
        )
        for candidate in found.sweep
        if candidate.bucket_size_elems is not None
        and candidate.config.bucket_groups == asked.bucket_groups
        and candidate.config.param_order == asked.param_order
    ]

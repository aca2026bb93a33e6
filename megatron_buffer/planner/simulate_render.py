"""A simulation for humans: what is exposed, when each bucket travels, and what the end waits for."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_buffer.planner.plan_render import sizes_of
from megatron_buffer.planner.plot import short_label
from megatron_buffer.planner.scene import Outcome, Scene
from megatron_buffer.planner.simulate_json import notes_of
from megatron_buffer.planner.timeline import Event, Timeline
from megatron_buffer.planner.units import duration, size

_MOST_ROWS = 24
_MOST_STEPS = 16


def render_simulation(scene: Scene, outcome: Outcome, console: Console) -> None:
    """Prints a simulation."""
    timeline = outcome.timeline
    say_scene(scene, console)
    _say(console, f'config {outcome.ask.runtime.config.source}')
    console.print()
    console.print(_sums(timeline, outcome.iteration.optimizer_s))
    console.print()
    if timeline.reduce_s or timeline.gather_s:
        console.print(_groups(outcome))
    else:
        _say(console, 'Nothing is sent: every group has one rank only (--dp, --world).')
    console.print()
    _say(console, 'What the end waits for:', 'bold')
    console.print(_path(timeline))
    for note in notes_of(scene, outcome):
        _say(console, f'note: {note}')


def say_scene(scene: Scene, console: Console) -> None:
    """Lines about job, network and where the times come from."""
    job = scene.job
    stage = f', stage {job.pp_rank}' if job.pp > 1 else ''
    _say(console, f'{scene.model}, {sizes_of(job)}{stage}')
    count = scene.schedule.microbatches
    batches = f'{count} micro-batch{"es" if count > 1 else ""}'
    _say(console, f'network {scene.network_name}')
    _say(console, f'{scene.source_of_times}; {batches}')


def _sums(timeline: Timeline, optimizer_s: float) -> Table:
    table = _table('', 'time', 'of the iteration', left=('',))
    total = timeline.iteration_s

    def row(name: str, seconds: float, style: str = '') -> None:
        share = f'{100 * seconds / total:.1f} %' if total else '-'
        table.add_row(Text(name, style), Text(duration(seconds), style), Text(share, style))

    row('computed', timeline.compute_s)
    idle = total - timeline.compute_s - timeline.exposed_s - optimizer_s
    if idle > 1e-9 * total:
        row('pipeline bubble', idle)
    row('optimizer', optimizer_s)
    row('exposed reductions', timeline.exposed_grad_s, 'bold')
    row('exposed gathers', timeline.exposed_param_s, 'bold')
    row('iteration', total)
    table.add_row()
    row('all reductions', timeline.reduce_s)
    row('all gathers', timeline.gather_s)
    table.add_row('hidden', '', f'{100 * timeline.hidden_share:.1f} % of both')
    return table


def _groups(outcome: Outcome) -> Table:
    """A row per group in the order of the reductions; times count from the end of backward."""
    timeline = outcome.timeline
    events = {(e.kind, e.chunk, e.group): e for e in timeline.events}
    table = _table('bucket group', 'params', 'gradients', 'ready', 'reduced', 'done', 'gathered')
    for name in ('there', 'last gradient'):
        table.add_column(name, justify='left' if name == 'last gradient' else 'right')
    rows = [
        (event.start_s, event.chunk, event.group)
        for event in timeline.events
        if event.kind == 'reduce'
    ]
    shown = sorted(rows)
    zero, begin = timeline.backward_end_s, timeline.optimizer_end_s
    hidden = len(shown) - _MOST_ROWS if len(shown) > _MOST_ROWS + 1 else 0
    for place, (start, chunk, index) in enumerate(shown):
        if hidden and _MOST_ROWS // 2 <= place < _MOST_ROWS // 2 + hidden:
            if place == _MOST_ROWS // 2:
                table.add_row(f'... {hidden} more')
            continue
        group = outcome.iteration.chunks[chunk].groups[index]
        gather = events.get(('gather', chunk, index))
        reduce = events['reduce', chunk, index]
        ready = reduce.start_s
        if reduce.cause is not None and reduce.why == 'the link is busy':
            ready = _ready_at(outcome, chunk, index)
        table.add_row(
            group.name,
            str(group.params),
            size(group.bytes),
            _relative(ready - zero),
            _relative(start - zero),
            _relative(reduce.end_s - zero),
            _relative(gather.start_s - begin) if gather else '-',
            _relative(gather.end_s - begin) if gather else '-',
            short_label(group.last_gradient),
        )
    table.caption = (
        'ready, reduced, done: from the end of backward; gathered, there: from the start of forward'
    )
    table.caption_justify = 'left'
    return table


def _ready_at(outcome: Outcome, chunk: int, index: int) -> float:
    """When a group's last gradient is there, in the time of the iteration."""
    it, timeline = outcome.iteration, outcome.timeline
    behind = sum(c.backward_s * it.waves for c in it.chunks[:chunk])
    of_chunk = it.chunks[chunk]
    return timeline.backward_end_s - behind - of_chunk.backward_s + of_chunk.groups[index].ready_s


def _path(timeline: Timeline) -> Table:
    """The critical path, with stretches of computation drawn together."""
    table = _table('from', 'takes', 'what', left=('what',))
    table.add_column('why not earlier', justify='left')
    steps = _joined(timeline.critical_path())
    hidden = len(steps) - _MOST_STEPS if len(steps) > _MOST_STEPS + 1 else 0
    for place, event in enumerate(steps):
        if hidden and _MOST_STEPS // 2 <= place < _MOST_STEPS // 2 + hidden:
            if place == _MOST_STEPS // 2:
                table.add_row('', '', f'... {hidden} more')
            continue
        kinds = ('backward', 'forward')
        name = f'{event.kind} {event.name}' if event.kind in kinds else event.name
        table.add_row(duration(event.start_s), duration(event.duration_s), name, event.why)
    return table


def _joined(path: Sequence[Event]) -> list[Event]:
    """One event for consecutive ones of computation of a kind."""
    result: list[Event] = []
    for event in path:
        if result and event.kind == result[-1].kind and event.kind in ('backward', 'forward'):
            result[-1] = result[-1]._replace(end_s=event.end_s, name=event.name)
        else:
            result.append(event)
    return result


def _relative(seconds: float) -> str:
    if abs(seconds) < 5e-10:  # nothing, but for the rounding of sums
        return '0'
    return f'{"-" if seconds < 0 else "+"}{duration(abs(seconds))}'


def _table(*names: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(names):
        is_left = index == 0 or name in left
        table.add_column(
            name,
            no_wrap=name != 'what',
            justify='left' if is_left else 'right',
            overflow='ellipsis' if name != 'what' else 'fold',
        )
    return table


def _say(console: Console, text: str, style: str = '') -> None:
    console.print(Text(text, style), soft_wrap=True)

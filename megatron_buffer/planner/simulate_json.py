"""A simulation as JSON, with keys that stay as they are (``docs/simulate.md`` lists them)."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_buffer.planner.scene import Outcome, Scene
from megatron_buffer.planner.timeline import Event, Timeline

SCHEMA_VERSION = 1


def simulation_as_dict(scene: Scene, outcome: Outcome) -> dict[str, Any]:
    """The whole simulation; times are seconds.

    Args:
        scene: What was simulated.
        outcome: What came of it.
    """
    config, timeline = outcome.ask.runtime.config, outcome.timeline
    return {
        'schema_version': SCHEMA_VERSION,
        'kind': 'simulation',
        'model': scene.model,
        'config': {
            'source': config.source,
            'hash': outcome.ask.runtime.hash,
            'short': config.short_str(),
        },
        **scene_as_dict(scene),
        'times': times_as_dict(timeline),
        'groups': _groups(outcome),
        'critical_path': [
            {
                'kind': event.kind,
                'name': event.name,
                'start_s': event.start_s,
                'end_s': event.end_s,
                'why': event.why,
            }
            for event in timeline.critical_path()
        ],
        'notes': notes_of(scene, outcome),
    }


def scene_as_dict(scene: Scene) -> dict[str, Any]:
    """Job, network and computation."""
    return {
        'job': scene.job.sizes(),
        'pp_rank': scene.job.pp_rank,
        'microbatches': scene.schedule.microbatches,
        'profile': scene.profile_path,
        'network': {'name': scene.network_name, **dataclasses.asdict(scene.network)},
    }


def times_as_dict(timeline: Timeline) -> dict[str, float]:
    """The sums of an iteration."""
    return {
        'iteration_s': timeline.iteration_s,
        'compute_s': timeline.compute_s,
        'backward_end_s': timeline.backward_end_s,
        'reduce_end_s': timeline.reduce_end_s,
        'optimizer_s': timeline.optimizer_end_s - timeline.reduce_end_s,
        'exposed_grad_s': timeline.exposed_grad_s,
        'exposed_param_s': timeline.exposed_param_s,
        'exposed_s': timeline.exposed_s,
        'reduce_s': timeline.reduce_s,
        'gather_s': timeline.gather_s,
        'hidden_share': timeline.hidden_share,
        'utilisation': timeline.utilisation,
    }


def notes_of(scene: Scene, outcome: Outcome) -> list[str]:
    """What else should be known."""
    seen = [note for chunk in outcome.stage.chunks for note in chunk.view.notes]
    return [*scene.notes, *dict.fromkeys(seen)]


def _groups(outcome: Outcome) -> list[dict[str, Any]]:
    found: dict[tuple[str, int, int], Event] = {
        (event.kind, event.chunk, event.group): event
        for event in outcome.timeline.events
        if event.kind in ('reduce', 'gather')
    }
    rows: list[dict[str, Any]] = []
    for number, chunk in enumerate(outcome.iteration.chunks):
        for index, group in enumerate(chunk.groups):
            row: dict[str, Any] = {
                'chunk': number,
                'index': index,
                'name': group.name,
                'is_expert_parallel': group.is_expert_parallel,
                'num_params': group.params,
                'grad_bytes': group.bytes,
                'last_gradient': group.last_gradient,
                'first_used': group.first_used,
            }
            for kind in ('reduce', 'gather'):
                event = found.get((kind, number, index))
                row[f'{kind}_start_s'] = event.start_s if event else None
                row[f'{kind}_end_s'] = event.end_s if event else None
                row[f'{kind}_why'] = event.why if event else None
            rows.append(row)
    return rows

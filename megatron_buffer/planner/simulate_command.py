"""``megatron-buffer simulate``: its options, and what it does with them.

Imports neither torch nor megatron before the command runs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_buffer.planner.files import check_file, say_written
from megatron_buffer.planner.flags import add_simulation
from megatron_buffer.planner.request import add_job_arguments
from megatron_buffer.printing import print_json

if TYPE_CHECKING:
    from rich.console import Console

"""What the command is for, in one line."""

OK = 0


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``megatron-buffer simulate``."""
    add_job_arguments(parser, required=False)
    add_simulation(parser)
    output = parser.add_argument_group('output')
    output.add_argument(
        '--trace', metavar='FILE', help='also write a trace for Perfetto or chrome://tracing'
    )
    output.add_argument(
        '--plot',
        metavar='FILE',
        help='also draw the timeline: .svg, .png or .pdf (needs matplotlib)',
    )


def simulate(options: argparse.Namespace, console: Console) -> int:
    """Runs ``megatron-buffer simulate``; returns the exit code.

    Raises:
        ConfigError: If something that was asked for is wrong.
        LayoutError: If a config makes a layout that Megatron-Core could not use.
    """
    if options.trace is not None:
        check_file('--trace', options.trace)
    if options.plot is not None:
        from megatron_buffer.planner.plot import check_target

        check_target(options.plot)
    from megatron_buffer.planner.scene import read_scene
    from megatron_buffer.planner.simulate_json import simulation_as_dict

    scene = read_scene(options)
    outcome = scene.run(scene.runtime(scene.request.config))
    if options.trace is not None:
        from megatron_buffer.planner.trace import write_trace

        write_trace(options.trace, outcome.timeline, f'{scene.model}, stage {scene.job.pp_rank}')
    if options.plot is not None:
        from megatron_buffer.planner.timeline_plot import plot_timeline

        plot_timeline(outcome, scene, options.plot)
    if options.json:
        print_json(simulation_as_dict(scene, outcome))
        return OK
    from megatron_buffer.planner.simulate_render import render_simulation

    render_simulation(scene, outcome, console)
    for path in (options.trace, options.plot):
        if path is not None:
            say_written(path, console)
    return OK

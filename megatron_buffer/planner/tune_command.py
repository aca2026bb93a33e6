"""``megatron-buffer tune``: its options, and what it does with them.

Imports neither torch nor megatron before the command runs.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.files import check_file, say_written
from megatron_buffer.planner.flags import add_simulation
from megatron_buffer.planner.request import add_job_arguments
from megatron_buffer.printing import print_json

if TYPE_CHECKING:
    from rich.console import Console

"""What the command is for, in one line."""

OK = 0


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``megatron-buffer tune``."""
    add_job_arguments(parser, required=False)
    add_simulation(parser)
    output = parser.add_argument_group('output')
    output.add_argument(
        '-o', '--output', metavar='FILE.yaml', help='write the best config there, with the reasons'
    )
    output.add_argument(
        '--top', type=int, default=10, metavar='N', help='how many to print (default 10)'
    )
    output.add_argument(
        '--plot',
        metavar='FILE',
        help='also draw exposed time over bucket size: .svg, .png or .pdf (needs matplotlib)',
    )


def tune(options: argparse.Namespace, console: Console) -> int:
    """Runs ``megatron-buffer tune``; returns the exit code.

    Raises:
        ConfigError: If something that was asked for is wrong.
        LayoutError: If the config that was given makes a layout that Megatron-Core could not use.
    """
    _check(options)
    from megatron_buffer.planner.scene import read_scene
    from megatron_buffer.planner.tune import search
    from megatron_buffer.planner.tune_output import ranking_as_dict, render_ranking, write_config

    scene = read_scene(options)
    with _Progress() as progress:
        found = search(scene, progress)
    if options.output is not None:
        write_config(options.output, scene, found)
    if options.plot is not None:
        from megatron_buffer.planner.sweep_plot import plot_sweep

        plot_sweep(scene, found, options.plot)
    if options.json:
        print_json(ranking_as_dict(scene, found))
        return OK
    render_ranking(scene, found, options.top, console)
    for path in (options.output, options.plot):
        if path is not None:
            say_written(path, console)
    return OK


def _check(options: argparse.Namespace) -> None:
    if options.top < 1:
        raise ConfigError(f'--top {options.top}: must be at least 1')
    if options.no_overlap:
        raise ConfigError('--no-overlap: without overlap there is one bucket, and nothing to tune')
    if options.rank_stage:
        raise ConfigError(
            f'--rank-stage {options.rank_stage}: only the first stage has several buckets; leave it out'
        )
    if options.output is not None:
        if not options.output.endswith(('.yaml', '.yml')):
            raise ConfigError(f'-o {options.output}: the name must end in .yaml')
        check_file('-o', options.output)
    if options.plot is not None:
        from megatron_buffer.planner.plot import check_target

        check_target(options.plot)


class _Progress:
    """A bar on a terminal's stderr, and nothing elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task('configs tried', total=None)
            self._bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=max(done, total))

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

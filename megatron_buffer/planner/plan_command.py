"""``megatron-buffer plan``: its options, and what it does with them.

Imports neither torch nor megatron before the command runs; with ``--params`` never.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.architecture import plain_name
from megatron_buffer.planner.files import check_file, say_written
from megatron_buffer.planner.request import (
    Request,
    add_job_arguments,
    read_fitting_model,
    read_request,
)
from megatron_buffer.printing import print_json

if TYPE_CHECKING:
    from rich.console import Console

"""What the command is for, in one line."""

OK = 0


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``megatron-buffer plan``."""
    # So that a negative --params is read, and refused in words: argparse knows no exponents before 3.14.
    vars(parser)['_negative_number_matcher'] = re.compile(r'-[\d.]+(?:[eE][+-]?\d+)?[A-Za-z]?$')
    add_job_arguments(parser, averages=True)
    output = parser.add_argument_group('output')
    output.add_argument('--html', metavar='FILE', help='also write a page that needs nothing else')
    output.add_argument(
        '--plot', metavar='FILE', help='also draw the ledger: .svg, .png or .pdf (needs matplotlib)'
    )


def plan(options: argparse.Namespace, console: Console) -> int:
    """Runs ``megatron-buffer plan``; returns the exit code.

    Raises:
        ConfigError: If something that was asked for is wrong.
        LayoutError: If a config makes a layout that Megatron-Core could not use.
    """
    request = read_request(options)
    if options.params is not None:
        return _averages(options, request, console)
    return _exact(options, request, console)


def _averages(options: argparse.Namespace, request: Request, console: Console) -> int:
    from megatron_buffer.planner.averages import averages, averages_as_dict, parse_params

    for option in ('html', 'plot'):
        if getattr(options, option) is not None:
            raise ConfigError(
                f'--{option} shows stages and buffers, which --params does not know: use --model or --hf'
            )
    params, config = parse_params(options.params), request.config
    configured: Any = getattr(config.bucketing, 'bucket_size_elems', None)
    if configured is None and config.bucketing.name != 'fixed_size':
        raise ConfigError(
            f'bucketing is {config.bucketing.name} in {config.source}, which needs the parameters: use '
            '--model or --hf instead of --params',
            yaml_path='bucketing',
            source=config.source,
        )
    found = averages(
        params,
        request.job,
        request.ddp,
        param_bytes=4 if request.dtype == 'fp32' else 2,
        recipe=request.recipe,
        optimizer=request.optimizer,
        bucket_size_elems=configured,
    )
    if options.json:
        print_json(averages_as_dict(found, params, request.job))
    else:
        from megatron_buffer.planner.plan_render import render_averages

        render_averages(found, params, request.job, console)
    return OK


def _exact(options: argparse.Namespace, request: Request, console: Console) -> int:
    _check_targets(options)
    architecture, notes = read_fitting_model(options, request)
    from megatron_buffer.planner.plan_json import classes, plan_as_dict
    from megatron_buffer.planner.stages import plan_stages

    ask = request.ask(plain_name(architecture.source))
    with _Progress(request.job.pp) as progress:
        stages = plan_stages(architecture, request.job, ask, progress=progress)
    seen = [n for s in stages for chunk in s.chunks for n in chunk.view.notes]
    # A pattern that matches nothing on one stage may match on another.
    notes += [n for n in dict.fromkeys(seen) if seen.count(n) == sum(len(s.chunks) for s in stages)]
    if options.html is not None:
        from megatron_buffer.planner.plan_html import write_page

        write_page(options.html, stages, ask, notes)
    if options.plot is not None:
        from megatron_buffer.planner.ledger_plot import plot_ledger

        plot_ledger(stages, ask, options.plot)
    if options.json:
        print_json(plan_as_dict(stages, ask, notes))
    else:
        from megatron_buffer.planner.plan_render import render_plan

        render_plan(stages, classes(stages), ask, notes, console)
        for path in (options.html, options.plot):
            if path is not None:
                say_written(path, console)
    return OK


def _check_targets(options: argparse.Namespace) -> None:
    if options.html is not None:
        check_file('--html', options.html)
    if options.plot is not None:
        from megatron_buffer.planner.plot import check_target

        check_target(options.plot)


class _Progress:
    """A bar on a terminal's stderr, and nothing elsewhere."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._bar: Any = None
        self._update: Callable[[int], None] = lambda stage: None

    def __enter__(self) -> Callable[[int], None]:
        if self._stages > 1 and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            bar = self._bar = Progress(console=Console(stderr=True), transient=True)
            task = bar.add_task('pipeline stages', total=self._stages)
            bar.start()
            self._update = lambda stage: bar.update(task, completed=stage)
        return self._update

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

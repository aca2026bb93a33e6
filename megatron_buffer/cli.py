"""The command ``megatron-buffer``: one subcommand, one function of a module that only it imports.

Exit codes: 0 all right, 1 something was found (``doctor``, ``layout --diff``), 2 bad input.
``validate``, ``schema`` and ``strategies`` import neither torch nor megatron. Upstream has no
counterpart.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, NoReturn

from megatron_buffer import __version__
from megatron_buffer.errors import ConfigError, LayoutError, RegistryError
from megatron_buffer.printing import BAD_INPUT, FOUND_SOMETHING, OK, plain_console, print_json


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        summary: For ``--help``.
        module: Of this package.
        function: Takes the options, and a console if it ``prints_tables``; returns the exit code.
        arguments: A function that adds what the command takes to its parser; none if empty.
        prints_tables: Whether it is given a console.
        has_json: Whether it can print JSON instead.
        is_brief: Whether it takes less than a second.
    """

    summary: str
    module: str
    function: str
    arguments: str = ''
    prints_tables: bool = True
    has_json: bool = True
    is_brief: bool = False


COMMANDS = {
    'validate': Command(
        'check configs, and show what each of them resolves to',
        'cli_config',
        'validate',
        'add_validate_arguments',
        prints_tables=False,
        is_brief=True,
    ),
    'schema': Command(
        'print the JSON schema of a config file, for editors',
        'cli_config',
        'schema',
        prints_tables=False,
        has_json=False,  # which it is anyway
        is_brief=True,
    ),
    'strategies': Command(
        'list every axis and the strategies that a config can name',
        'cli_config',
        'strategies',
        prints_tables=False,
        is_brief=True,
    ),
    'layout': Command(
        'show where every parameter of a model lies: buffers, buckets, padding, groups, orders',
        'planner.command',
        'layout',
        'add_layout_arguments',
    ),
    'plan': Command(
        'say what the buffers of every rank of a job weigh, and what goes over the wire',
        'planner.plan_command',
        'plan',
        'add_plan_arguments',
    ),
    'simulate': Command(
        'simulate an iteration: when buckets are reduced and gathered, and what of it is exposed',
        'planner.simulate_command',
        'simulate',
        'add_simulate_arguments',
    ),
    'tune': Command(
        'look for the config with the least exposed communication, by simulation',
        'planner.tune_command',
        'tune',
        'add_tune_arguments',
    ),
    'ablate': Command(
        'train the arms of a sweep file in turn, and record what each of them did',
        'ablation.command',
        'ablate',
        'add_ablate_arguments',
    ),
    'report': Command(
        'write what a sweep found as a page (HTML and Markdown)',
        'ablation.report_command',
        'report',
        'add_report_arguments',
    ),
    'trace': Command(
        'summarise traces: which bucket group was waited for, and whether each was communicated once',
        'observe.trace_command',
        'trace',
        'add_trace_arguments',
    ),
    'diff': Command(
        "show upstream's code beside ours, and what kind each difference is",
        'reference.command',
        'diff',
        'add_diff_arguments',
        prints_tables=False,
    ),
    'doctor': Command(
        'check whether the buffer can be installed into Megatron-Core here',
        'cli',
        'doctor',
        prints_tables=False,
    ),
}


def process() -> NoReturn:
    """The process of a command: :func:`main` with the process's arguments.

    One that lives for half a second does not collect garbage, and leaves its memory to the system, which takes
    it back at once; freeing object by object, Python takes a tenth of a second.
    """
    is_brief = any(name in COMMANDS and COMMANDS[name].is_brief for name in sys.argv[1:2])
    if is_brief:
        gc.disable()
    code = main()
    if is_brief:
        sys.stderr.flush()  # main() has flushed the other one
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    Args:
        argv: Arguments without the program's name; None for those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ['run']:
        # Not through argparse, which would take some of the script's own flags for its own.
        return run(arguments[1:])
    try:
        options = _parser(arguments).parse_args(arguments)
        command = COMMANDS[options.command]
        function = _of_module(command, command.function)
        console = [plain_console()] if command.prints_tables else []
        code: int = function(options, *console)
        sys.stdout.flush()
        return code
    except (ConfigError, RegistryError, LayoutError) as error:
        sys.stdout.flush()
        sys.stderr.write(f'megatron-buffer: error: {error}\n')
        return BAD_INPUT
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parser(arguments: Container[str]) -> argparse.ArgumentParser:
    """The parser of all commands; of those that ``arguments`` don't name, no module is imported."""
    parser = argparse.ArgumentParser(
        prog='megatron-buffer',
        description="Megatron-Core's data-parallel buffer with swappable strategies.",
        epilog='Exit codes: 0 all right, 1 something was found, 2 bad input.',
    )
    parser.add_argument('--version', action='version', version=f'%(prog)s {__version__}')
    commands = parser.add_subparsers(
        title='commands', metavar='COMMAND', required=True, dest='command'
    )
    for name, command in COMMANDS.items():
        text = command.summary
        sub = commands.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
        if name not in arguments:
            continue
        if command.has_json:
            sub.add_argument('--json', action='store_true', help='print JSON')
        if command.arguments:
            _of_module(command, command.arguments)(sub)
    # Only to be listed in --help: main() takes this command before argparse sees it.
    commands.add_parser('run', help='run an unmodified Megatron script with --use-custom-buffer')
    return parser


def _of_module(command: Command, name: str) -> Any:
    return getattr(importlib.import_module(f'megatron_buffer.{command.module}'), name)


def doctor(options: argparse.Namespace) -> int:
    """Says whether the buffer can be installed into the Megatron-Core found here."""
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet on stdout when imported
        from megatron_buffer.patching.doctor import doctor_report, render

        report = doctor_report()
    if options.json:
        print_json(report, default=str)
    else:
        render(report, plain_console())
    return OK if report['ok'] else FOUND_SOMETHING


def run(argv: list[str]) -> int:
    """Runs a training script that may use our flags; ``argv`` starts with the script."""
    from megatron_buffer import launch

    return launch.run(argv)

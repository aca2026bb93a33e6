"""The command ``megatron-buffer``: one subcommand, one function.

Exit codes: 0 all right, 1 something was found (``doctor``), 2 bad input. ``validate``, ``schema``
and ``strategies`` import neither torch nor megatron. Upstream has no counterpart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_buffer import __version__
from megatron_buffer.config import (
    AXES,
    Axis,
    config_hash,
    json_schema,
    load_config,
    shipped_configs,
    third_party_strategies,
    to_dict,
)
from megatron_buffer.config_catalog import one_line_meaning, origin, param_docs
from megatron_buffer.errors import ConfigError, RegistryError

if TYPE_CHECKING:
    from rich.console import Console

OK, FOUND_SOMETHING, BAD_INPUT = 0, 1, 2

_NOT_YET = (
    'checkpoint.layout_guard and checkpoint.repair_fully_reshardable are accepted, but take effect '
    'only in a later release; until then optimizer checkpoints are written and read as in stock '
    'Megatron'
)


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
        options = _parser().parse_args(arguments)
        code = options.command(options)
        sys.stdout.flush()
        return code
    except (ConfigError, RegistryError) as error:
        _say_error(error)
        return BAD_INPUT
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='megatron-buffer',
        description="Megatron-Core's data-parallel buffer with swappable strategies.",
        epilog='Exit codes: 0 all right, 1 something was found, 2 bad input.',
    )
    parser.add_argument('--version', action='version', version=f'%(prog)s {__version__}')
    commands = parser.add_subparsers(title='commands', metavar='COMMAND', required=True)

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
        sub.set_defaults(command=command)
        if command is not schema:  # which is JSON anyway
            sub.add_argument('--json', action='store_true', help='print JSON')
        return sub

    sub = add('validate', validate, 'check configs, and show what each of them resolves to')
    sub.add_argument(
        'configs',
        nargs='+',
        metavar='CONFIG',
        help=f'a YAML file, or the name of a shipped config: {", ".join(shipped_configs())}',
    )
    add('schema', schema, 'print the JSON schema of a config file, for editors')
    add('strategies', strategies, 'list every axis and the strategies that a config can name')
    add('doctor', doctor, 'check whether the buffer can be installed into Megatron-Core here')
    # Only to be listed in --help: main() takes this command before argparse sees it.
    commands.add_parser('run', help='run an unmodified Megatron script with --use-custom-buffer')
    return parser


def validate(options: argparse.Namespace) -> int:
    """Checks every config given, also after one that is wrong."""
    results = [_validate_one(source) for source in options.configs]
    ok = all(result['ok'] for result in results)
    if options.json:
        _print_json({'ok': ok, 'configs': results})
        return OK if ok else BAD_INPUT
    console = _console()
    for result in results:
        if result['ok']:
            text = f'{result["source"]}: OK, hash {result["hash"]}, {result["short"]}'
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stdout.flush()
            sys.stderr.write(f'{result["error"]}\n')
    for note in dict.fromkeys(note for result in results for note in result['notes']):
        console.print(f'note: {note}', markup=False, highlight=False, soft_wrap=True)
    return OK if ok else BAD_INPUT


def _validate_one(source: str) -> dict[str, Any]:
    try:
        config = load_config(source)
    except (ConfigError, RegistryError) as error:
        place = error.yaml_path if isinstance(error, ConfigError) else ''
        return {'source': source, 'ok': False, 'error': str(error), 'yaml_path': place, 'notes': []}
    return {
        'source': source,
        'ok': True,
        'hash': config_hash(config),
        'short': config.short_str(),
        'config': to_dict(config),
        'notes': [_NOT_YET],
    }


def schema(options: argparse.Namespace) -> int:
    """Prints the JSON schema of a config file."""
    del options
    _print_json(json_schema())
    return OK


def strategies(options: argparse.Namespace) -> int:
    """Lists the strategies of every axis: built-in, third-party and planned."""
    listing = [_describe_axis(axis) for axis in AXES.values()]
    if options.json:
        _print_json({'axes': listing})
        return OK
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column('axis and strategy', no_wrap=True)
    table.add_column('meaning, parameters and the upstream code it stands for', overflow='fold')
    table.add_column('from', min_width=len('not built yet'))
    for axis in listing:
        table.add_row(Text(axis['key'], 'bold'), Text(axis['meaning'], 'bold'))
        for item in axis['strategies']:
            default = ' (default)' if item['name'] == axis['default'] else ''
            about = Text(item['meaning'] or 'imported only when a config names it')
            for param in item['params'] or ():
                about.append(f'\n{_parameter_text(param)}')
            for symbol in (item['upstream_symbol'] or '').split('; '):
                about.append(f'\n{symbol}' if symbol else '', 'dim')
            table.add_row(Text(f'  {item["name"]}{default}'), about, Text(item['origin']))
        for item in axis['planned']:
            row = (f'  {item["name"]}', Text(item['meaning']), 'not built yet')
            table.add_row(*row, style='dim')
        table.add_row()
    _console().print(table)
    return OK


def _describe_axis(axis: Axis) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for name, cls in axis.strategies.items():
        found.append(
            {
                'name': name,
                'meaning': one_line_meaning(cls),
                'upstream_symbol': cls.upstream_symbol,
                'origin': 'built-in',
                'params': [
                    {
                        'name': doc.name,
                        'expected': doc.expected,
                        'required': doc.required,
                        'default': doc.default,
                        'description': doc.description,
                    }
                    for doc in param_docs(cls)
                ],
            }
        )
    for (key, name), entry_point in sorted(third_party_strategies().items()):
        if key == axis.key:
            found.append(
                {
                    'name': name,
                    'meaning': None,
                    'upstream_symbol': None,
                    'origin': origin(entry_point),
                    'params': None,
                }
            )
    return {
        'key': axis.key,
        'meaning': axis.meaning,
        'upstream_symbol': axis.upstream_symbol,
        'default': axis.default,
        'strategies': found,
        'planned': [{'name': k, 'meaning': v} for k, v in axis.planned.items()],
    }


def _parameter_text(param: dict[str, Any]) -> str:
    default = 'required' if param['required'] else f'= {json.dumps(param["default"])}'
    return f'  {param["name"]} {default} ({param["expected"]})'


def doctor(options: argparse.Namespace) -> int:
    """Says whether the buffer can be installed into the Megatron-Core found here."""
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet on stdout when imported
        from megatron_buffer.patching.doctor import doctor_report, render

        report = doctor_report()
    if options.json:
        _print_json(report)
    else:
        render(report, _console())
    return OK if report['ok'] else FOUND_SOMETHING


def run(argv: list[str]) -> int:
    """Runs a training script that may use our flags; ``argv`` starts with the script."""
    from megatron_buffer import launch

    return launch.run(argv)


def _console() -> Console:
    from rich.console import Console

    # Written to a file or a pipe, a table gets a width at which it can be read.
    return Console() if sys.stdout.isatty() else Console(width=120)


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, default=str) + '\n')


def _say_error(error: Exception) -> None:
    sys.stdout.flush()
    sys.stderr.write(f'megatron-buffer: error: {error}\n')

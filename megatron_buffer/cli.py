"""The command ``megatron-buffer``: one subcommand, one function.

Exit codes: 0 all right, 1 something was found (``doctor``, ``layout --diff``), 2 bad input.
``validate``, ``schema`` and ``strategies`` import neither torch nor megatron. Upstream has no
counterpart.
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
from megatron_buffer.ablation import command as ablation
from megatron_buffer.ablation import report_command
from megatron_buffer.config import (
    AXES,
    Axis,
    BufferConfig,
    config_hash,
    json_schema,
    load_config,
    shipped_names,
    third_party_strategies,
    to_dict,
)
from megatron_buffer.config_catalog import FINALIZE_STEP, one_line_meaning, origin, param_docs
from megatron_buffer.config_compat import INCOMPATIBLE, Incompatible
from megatron_buffer.config_steps import STEPS
from megatron_buffer.errors import ConfigError, LayoutError, RegistryError
from megatron_buffer.observe import trace_command
from megatron_buffer.planner import command as planner
from megatron_buffer.planner import plan_command, simulate_command, tune_command
from megatron_buffer.reference import command as reference

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

OK, FOUND_SOMETHING, BAD_INPUT = 0, 1, 2

_UNGUARDED = (
    'checkpoint.layout_guard is false: optimizer state that was saved under another layout is loaded '
    'into the wrong parameters, with a warning only'
)
_UNREPAIRED = (
    'checkpoint.repair_fully_reshardable is never: Megatron up to 0.19.2 saves wrong optimizer state in '
    'format fully_reshardable, with a warning only'
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
        help=f'a YAML file, or the name of a shipped config: {shipped_names()}',
    )
    add('schema', schema, 'print the JSON schema of a config file, for editors')
    add('strategies', strategies, 'list every axis and the strategies that a config can name')
    sub = add('layout', layout, planner.SUMMARY)
    planner.add_layout_arguments(sub)
    sub = add('plan', plan, plan_command.SUMMARY)
    plan_command.add_plan_arguments(sub)
    sub = add('simulate', simulate, simulate_command.SUMMARY)
    simulate_command.add_simulate_arguments(sub)
    sub = add('tune', tune, tune_command.SUMMARY)
    tune_command.add_tune_arguments(sub)
    sub = add('ablate', ablate, ablation.SUMMARY)
    ablation.add_ablate_arguments(sub)
    sub = add('report', report, report_command.SUMMARY)
    report_command.add_report_arguments(sub)
    sub = add('trace', trace, trace_command.SUMMARY)
    trace_command.add_trace_arguments(sub)
    sub = add('diff', reference.diff, reference.SUMMARY)
    reference.add_diff_arguments(sub)
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
        'notes': _notes(config),
    }


def _notes(config: BufferConfig) -> list[str]:
    """What is allowed, and takes away a protection."""
    unrepaired = config.checkpoint.repair_fully_reshardable == 'never'
    return [_UNGUARDED] * (not config.checkpoint.layout_guard) + [_UNREPAIRED] * unrepaired


def schema(options: argparse.Namespace) -> int:
    """Prints the JSON schema of a config file."""
    del options
    _print_json(json_schema())
    return OK


def strategies(options: argparse.Namespace) -> int:
    """Lists the strategies of every axis: built-in, third-party and planned."""
    listing = [_describe_axis(axis) for axis in AXES.values()]
    if options.json:
        _print_json({'axes': listing, 'incompatible': [_describe_pair(r) for r in INCOMPATIBLE]})
        return OK
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column('axis and strategy', no_wrap=True)
    table.add_column('meaning, parameters and the upstream code it stands for', overflow='fold')
    table.add_column('from', min_width=len('not built yet'))
    for axis in listing:
        about = Text.assemble((axis['meaning'], 'bold'), *_symbols(axis['upstream_symbol']))
        table.add_row(Text(axis['key'], 'bold'), about)
        for item in axis['strategies']:
            default = ' (default)' if item['name'] == axis['default'] else ''
            about = _about(item, above=axis['upstream_symbol'])
            table.add_row(Text(f'  {item["name"]}{default}'), about, Text(item['origin']))
        for item in axis['planned']:
            row = (f'  {item["name"]}', Text(item['meaning']), 'not built yet')
            table.add_row(*row, style='dim')
        for item in axis['steps']:
            name = f'    {item["name"]}'
            table.add_row(Text(name), _about(item), Text(item['origin']))
        table.add_row()
    table.add_row(Text('cannot be combined', 'bold'), Text('everything else can be', 'bold'))
    for rule in INCOMPATIBLE:
        table.add_row(Text(f'  {rule.names[0]}'), Text(f'with {rule.names[1]}'))
        table.add_row('', Text(f'{rule.reason}. {rule.way_out}', 'dim'))
    _console().print(table)
    return OK


def _about(item: dict[str, Any], above: str = '') -> Text:
    """Meaning and parameters of a strategy or a step; its upstream symbol if not the one ``above``."""
    from rich.text import Text

    about = Text(item['meaning'] or 'imported only when a config names it')
    for param in item['params'] or ():
        about.append(f'\n{_parameter_text(param)}')
    symbol = item['upstream_symbol']
    return about.append_text(Text.assemble(*_symbols('' if symbol == above else symbol)))


def _symbols(symbols: str | None) -> list[tuple[str, str]]:
    return [(f'\n{symbol}', 'dim') for symbol in (symbols or '').split('; ') if symbol]


def _describe_axis(axis: Axis) -> dict[str, Any]:
    ours = [
        _built_in(name, one_line_meaning(cls), cls.upstream_symbol, cls)
        for name, cls in axis.strategies.items()
    ]
    steps: list[dict[str, Any]] = []
    if axis.key == 'finalize':
        steps = [
            _built_in(name, step.meaning, step.upstream_symbol, step.options)
            for name, step in STEPS.items()
        ]
        steps += _third_party(FINALIZE_STEP)
    return {
        'key': axis.key,
        'meaning': axis.meaning,
        'upstream_symbol': axis.upstream_symbol,
        'default': axis.default,
        'strategies': ours + _third_party(axis.key),
        'planned': [{'name': k, 'meaning': v} for k, v in axis.planned.items()],
        'steps': steps,
    }


def _built_in(name: str, meaning: str, symbol: str, params: type[Any]) -> dict[str, Any]:
    return {
        'name': name,
        'meaning': meaning,
        'upstream_symbol': symbol,
        'origin': 'built-in',
        'params': [
            {
                'name': doc.name,
                'expected': doc.expected,
                'required': doc.required,
                'default': doc.default,
                'description': doc.description,
            }
            for doc in param_docs(params)
        ],
    }


def _third_party(axis: str) -> list[dict[str, Any]]:
    """What other distributions provide for an axis (or the finalize steps), none of it imported."""
    return [
        {
            'name': name,
            'meaning': None,
            'upstream_symbol': None,
            'origin': origin(entry_point),
            'params': None,
        }
        for (key, name), entry_point in sorted(third_party_strategies().items())
        if key == axis
    ]


def _describe_pair(rule: Incompatible) -> dict[str, Any]:
    return {
        'paths': rule.paths,
        'strategies': [choice.name for choice in rule.choices],
        'reason': rule.reason,
        'way_out': rule.way_out,
    }


def _parameter_text(param: dict[str, Any]) -> str:
    default = 'required' if param['required'] else f'= {json.dumps(param["default"])}'
    return f'  {param["name"]} {default} ({param["expected"]})'


def layout(options: argparse.Namespace) -> int:
    """Shows the layout of a config on a model, or what differs between two of them."""
    try:
        return planner.layout(options, _console())
    except LayoutError as error:
        _say_error(error)
        return BAD_INPUT


def plan(options: argparse.Namespace) -> int:
    """Says what the buffers of every rank of a job weigh, and what goes over the wire."""
    try:
        return plan_command.plan(options, _console())
    except LayoutError as error:
        _say_error(error)
        return BAD_INPUT


def simulate(options: argparse.Namespace) -> int:
    """Simulates an iteration of one rank."""
    try:
        return simulate_command.simulate(options, _console())
    except LayoutError as error:
        _say_error(error)
        return BAD_INPUT


def tune(options: argparse.Namespace) -> int:
    """Looks for the config with the least exposed communication, by simulation."""
    try:
        return tune_command.tune(options, _console())
    except LayoutError as error:
        _say_error(error)
        return BAD_INPUT


def ablate(options: argparse.Namespace) -> int:
    """Runs a sweep."""
    return ablation.ablate(options, _console())


def report(options: argparse.Namespace) -> int:
    """Writes what a sweep found as a page."""
    return report_command.report(options, _console())


def trace(options: argparse.Namespace) -> int:
    """Summarises the traces of a run; something is found where its ledger is violated."""
    return OK if trace_command.trace(options, _console()) else FOUND_SOMETHING


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

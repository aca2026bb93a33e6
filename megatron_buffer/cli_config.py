"""The commands ``validate``, ``schema`` and ``strategies``, which import neither torch nor megatron.

Upstream has no counterpart.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

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
from megatron_buffer.config_catalog import (
    FINALIZE_STEP,
    EntryPoints,
    one_line_meaning,
    origin,
    param_docs,
)
from megatron_buffer.config_compat import INCOMPATIBLE, Incompatible
from megatron_buffer.config_steps import STEPS
from megatron_buffer.errors import ConfigError, RegistryError
from megatron_buffer.printing import BAD_INPUT, OK, plain_console, print_json

if TYPE_CHECKING:
    from rich.text import Text

_UNGUARDED = (
    'checkpoint.layout_guard is false: optimizer state that was saved under another layout is loaded '
    'into the wrong parameters, with a warning only'
)
_UNREPAIRED = (
    'checkpoint.repair_fully_reshardable is never: Megatron up to 0.19.2 saves wrong optimizer state in '
    'format fully_reshardable, with a warning only'
)


def add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what ``validate`` takes."""
    parser.add_argument(
        'configs',
        nargs='+',
        metavar='CONFIG',
        help=f'a YAML file, or the name of a shipped config: {shipped_names()}',
    )


def validate(options: argparse.Namespace) -> int:
    """Checks every config given, also after one that is wrong."""
    results = [_validate_one(source) for source in options.configs]
    ok = all(result['ok'] for result in results)
    if options.json:
        print_json({'ok': ok, 'configs': results})
        return OK if ok else BAD_INPUT
    for result in results:
        if result['ok']:
            said = f'{result["source"]}: OK, hash {result["hash"]}, {result["short"]}'
            sys.stdout.write(f'{said}\n')
        else:
            sys.stdout.flush()
            sys.stderr.write(f'{result["error"]}\n')
    for note in dict.fromkeys(note for result in results for note in result['notes']):
        sys.stdout.write(f'note: {note}\n')
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
    print_json(json_schema())
    return OK


def strategies(options: argparse.Namespace) -> int:
    """Lists the strategies of every axis: built-in, third-party and planned."""
    others = third_party_strategies()
    listing = [_describe_axis(axis, others) for axis in AXES.values()]
    if options.json:
        print_json({'axes': listing, 'incompatible': [_describe_pair(r) for r in INCOMPATIBLE]})
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
    plain_console().print(table)
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


def _describe_axis(axis: Axis, others: EntryPoints) -> dict[str, Any]:
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
        steps += _third_party(FINALIZE_STEP, others)
    return {
        'key': axis.key,
        'meaning': axis.meaning,
        'upstream_symbol': axis.upstream_symbol,
        'default': axis.default,
        'strategies': ours + _third_party(axis.key, others),
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


def _third_party(axis: str, others: EntryPoints) -> list[dict[str, Any]]:
    """What other distributions provide for an axis (or the finalize steps), none of it imported."""
    return [
        {
            'name': name,
            'meaning': None,
            'upstream_symbol': None,
            'origin': origin(entry_point),
            'params': None,
        }
        for (key, name), entry_point in sorted(others.items())
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

"""The pages of the site that are made from the code when it is built: see :data:`PAGES`.

None of them is kept in the repository, so none can be out of date. Imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import megatron_buffer
from megatron_buffer import cli, launch_flags, testing

DOCS = Path(__file__).resolve().parent.parent / 'docs'
HELP_WIDTH = '100'


def config_page() -> str:
    """Every axis, strategy and parameter, from ``megatron-buffer strategies`` and the schema."""
    listing = json.loads(_output('strategies', '--json'))
    schema = json.loads(_output('schema'))['properties']
    text = [
        '# The config file',
        'A YAML file with `schema_version: 1` and any of the keys below; a key that is left out means its default, '
        '`upstream`. A strategy without parameters may be a bare name. `null` means what Megatron\'s flags say. '
        '`configs/upstream.yaml` and `configs/recommended.yaml` explain the choices; `megatron-buffer schema` '
        'prints a JSON schema for editors; strategies of your own are described in '
        '[Writing a strategy of your own](../third_party.md).',
    ]
    for axis in listing['axes']:
        text += [
            f'## `{axis["key"]}`',
            f'{_sentence(axis["meaning"])} Default: `{axis["default"]}`.',
        ]
        text += [_stands_for(axis['upstream_symbol'])]
        for item in axis['strategies']:
            text += _choice(item, above=axis['upstream_symbol'])
        for item in axis['planned']:
            text += [f'### `{item["name"]}` (not built yet)', item['meaning']]
        if axis['steps']:
            text += [
                '### The steps',
                'What `order` may name, in upstream\'s order; options stand beside the name.',
            ]
            for item in axis['steps']:
                text += [
                    f'#### `{item["name"]}`',
                    _sentence(item['meaning']),
                    _stands_for(item['upstream_symbol']),
                ]
                text += _parameters(item['params'])
    for key in ('checkpoint', 'checks'):
        text += [f'## `{key}`', schema[key]['description'], *_mapping(schema[key])]
    text += ['## What cannot be combined', 'Everything else can be.']
    for rule in listing['incompatible']:
        pair = [
            f'`{path}: {name}`'
            for path, name in zip(rule['paths'], rule['strategies'], strict=True)
        ]
        text += [f'- {" with ".join(pair)}: {rule["reason"]}. {rule["way_out"]}.']
    return '\n\n'.join(filter(None, text)) + '\n'


def _choice(item: dict[str, Any], above: str) -> list[str]:
    own = item['upstream_symbol'] if item['upstream_symbol'] != above else None
    meaning = item['meaning'] or f'From {item["origin"]}.'
    return [f'### `{item["name"]}`', meaning, _stands_for(own), *_parameters(item['params'])]


def _stands_for(symbols: str | None) -> str:
    names = [f'`{symbol}`' for symbol in (symbols or '').split('; ') if symbol]
    return f'Stands for {", ".join(names)}.' if names else ''


def _parameters(params: Iterable[dict[str, Any]] | None) -> list[str]:
    rows = [
        (
            f'`{p["name"]}`',
            p['expected'],
            'required' if p['required'] else f'`{json.dumps(p["default"])}`',
            p['description'],
        )
        for p in params or ()
    ]
    return [_table(('parameter', 'value', 'default', ''), rows)] if rows else []


def _mapping(schema: dict[str, Any]) -> list[str]:
    fields = next(choice for choice in schema['oneOf'] if 'properties' in choice)['properties']
    rows = [
        (
            f'`{name}`',
            ', '.join(f'`{v}`' for v in field.get('enum', ('true', 'false'))),
            f'`{json.dumps(field["default"])}`',
            field['description'],
        )
        for name, field in fields.items()
    ]
    return [_table(('key', 'value', 'default', ''), rows)]


def cli_page() -> str:
    """``--help`` of every command."""
    text = [
        '# Commands',
        'What `megatron-buffer COMMAND --help` prints. Exit codes: 0 all right, 1 something was found, 2 bad input.',
    ]
    for name, parser in _commands().items():
        if name == 'run':
            text += ['## run', 'See [Flags of a run](launcher.md).', _block(launch_flags.USAGE)]
        else:
            text += [f'## {name}', _block(_help(parser))]
    return '\n\n'.join(text) + '\n'


def launcher_page() -> str:
    """The flags of ``megatron-buffer run``, which a patched Megatron-LM takes too."""
    parser = argparse.ArgumentParser(add_help=False)
    launch_flags.add_flags(parser, launch_flags.Flags())
    rows = [
        (
            f'`{action.option_strings[0]}`',
            ', '.join(f'`{c}`' for c in action.choices or ())
            or (f'`{action.metavar}`' if action.metavar else ''),
            action.help or '',
        )
        for action in parser._actions
    ]
    return (
        '\n\n'.join(
            (
                '# Flags of a run',
                '`torchrun ... -m megatron_buffer run SCRIPT`, with the flags of the script and any of these, in any order. '
                'They are taken out before the script sees them, and stand in Megatron\'s `args`. A Megatron-LM that '
                '`scripts/apply_patches.sh` has patched takes them without the launcher.',
                _table(('flag', 'value', ''), rows),
                'In the environment, `MEGATRON_BUFFER_CPU=1` is `--custom-buffer-cpu`.',
            )
        )
        + '\n'
    )


def python_page() -> str:
    """The names of ``megatron_buffer``."""
    return _api(
        'Python',
        'What `import megatron_buffer` offers. Importing it imports neither torch nor megatron; a name imports what '
        'it needs when it is first used.',
        megatron_buffer,
    )


def testing_page() -> str:
    """The names of ``megatron_buffer.testing``."""
    intro = 'What `megatron_buffer.testing` offers; [Testing a strategy](../testing.md) shows how to use it.'
    return _api('Python, testing', intro, testing)


def _api(title: str, intro: str, module: Any) -> str:
    names = sorted(module.__all__, key=str.lower)
    return (
        '\n\n'.join([f'# {title}', intro, *(f'::: {module.__name__}.{name}' for name in names)])
        + '\n'
    )


def json_page() -> str:
    """Which commands print JSON, and where its keys are described."""
    text = [
        '# JSON keys',
        'Every command that prints data takes `--json`. Sizes carry their unit: `_elems` are elements, `_bytes` bytes.',
        '## Described on the pages of the commands',
    ]
    described = [
        f'- [{title}, {heading}](../{page}#{anchor})'
        for page, title, heading, anchor in _json_headings()
    ]
    text += ['\n'.join(described)]
    for title, arguments in (
        ('validate', ('validate', 'upstream', '--json')),
        ('strategies', ('strategies', '--json')),
    ):
        text += [f'## {title}', f'The keys of `megatron-buffer {" ".join(arguments)}`:']
        text += [_block('\n'.join(_keys(json.loads(_output(*arguments)))))]
    with_json = [
        f'`{name}`' for name, parser in _commands().items() if '--json' in parser.format_help()
    ]
    text += ['## All commands with `--json`', ', '.join(with_json) + '.']
    return '\n\n'.join(text) + '\n'


def _json_headings() -> Iterable[tuple[str, str, str, str]]:
    for path in sorted(DOCS.glob('*.md')):
        lines = path.read_text().splitlines()
        for line in lines:
            if line.startswith('#') and 'json' in line.lower():
                heading = line.lstrip('# ')
                yield path.name, lines[0].lstrip('# '), heading, _anchor(heading)


def _anchor(heading: str) -> str:
    return re.sub(r'[\s-]+', '-', re.sub(r'[^\w\s-]', '', heading.lower()).strip())


def _keys(data: Any, indent: str = '') -> list[str]:
    """The keys of nested JSON, one per line; of a list, those of its first item that has any."""
    if isinstance(data, list):
        data = next((item for item in data if isinstance(item, dict)), None)
    lines: list[str] = []
    for key, value in data.items() if isinstance(data, dict) else ():
        lines.append(f'{indent}{key}{"[]" if isinstance(value, list) else ""}')
        lines += _keys(value, indent + '  ') if key != 'config' else []
    return lines


def _commands() -> dict[str, argparse.ArgumentParser]:
    parser = cli._parser(cli.COMMANDS)
    (subcommands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(subcommands.choices)


def _help(parser: argparse.ArgumentParser) -> str:
    os.environ['COLUMNS'] = HELP_WIDTH
    return parser.format_help()


def _output(*arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(arguments)
    if code != cli.OK:
        raise RuntimeError(f'megatron-buffer {" ".join(arguments)} ended with exit code {code}')
    return out.getvalue()


def _block(text: str) -> str:
    return f'```text\n{text.rstrip()}\n```'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head]]
    lines.append(['---'] * len(lines[0]))
    lines += [[_cell(value) for value in row] for row in rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _cell(text: str) -> str:
    """Text on one line, with what Markdown would read as markup taken for what it is."""
    flat = re.sub(r'\s+', ' ', text).replace('|', r'\|')
    return flat if flat.startswith('`') else re.sub(r'([*_<])', r'\\\1', flat)


def _sentence(text: str) -> str:
    return f'{text[0].upper()}{text[1:].rstrip(".")}.'


PAGES: dict[str, Callable[[], str]] = {
    'ref/config.md': config_page,
    'ref/cli.md': cli_page,
    'ref/launcher.md': launcher_page,
    'ref/python.md': python_page,
    'ref/testing.md': testing_page,
    'ref/json.md': json_page,
}
"""Path below ``docs/`` and the function that makes the page's Markdown."""

"""``megatron-buffer diff``: its options, and what it does with them.

Imports neither torch nor megatron; sources are read, not run. Upstream has no counterpart.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_buffer.errors import ConfigError
from megatron_buffer.printing import print_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from megatron_buffer.patching.fingerprints import CoreInstall
    from megatron_buffer.reference.mapping import Entry

"""What the command is for, in one line."""

OK, DIFFERS = 0, 1
"""Exit codes; 1 is for ``--against`` with a difference."""


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``megatron-buffer diff``."""
    parser.epilog = (
        'For a pager: FORCE_COLOR=1 megatron-buffer diff ... | less -R. Two columns from 120 on '
        '(COLUMNS sets the width where the output is not a terminal).'
    )
    parser.add_argument(
        '--symbol',
        metavar='NAME',
        help='an upstream class, method or function, or the end of its name: '
        '_ParamAndGradBucketGroup.start_grad_sync, partition_buckets (default: a table of all)',
    )
    parser.add_argument(
        '--full', action='store_true', help="also print long stretches of upstream's own code"
    )
    parser.add_argument(
        '--list',
        action='store_true',
        help='list every symbol, also those that are used as they are; with --against only the table',
    )
    parser.add_argument('--html', metavar='FILE', help='write all (or --symbol) as one HTML file')
    other = parser.add_argument_group('another version of upstream')
    other.add_argument(
        '--against',
        metavar='VERSION',
        help='show how the upstream symbols themselves differ between the installed version and this '
        'one, and what of ours depends on them; exit code 1 if they do',
    )
    other.add_argument(
        '--source',
        metavar='PATH',
        help="that version's checkout, unpacked wheel or .whl file (default: pip downloads the wheel)",
    )


def diff(options: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        1 if ``--against`` found a difference, else 0.

    Raises:
        ConfigError: For a symbol, version, path or combination that cannot be.
    """
    from megatron_buffer.reference import catalog

    _check(options)
    core = catalog.require_core()
    entries = catalog.entries()
    if options.against is not None:
        return _against(options, core, entries)
    chosen = None if options.symbol is None else catalog.find(options.symbol, entries)
    if options.html:
        _write_html(options, core.version, entries, chosen)
        return OK
    if chosen is None:
        _show_all(options, core.version, entries)
        return OK
    comparisons = [catalog.compare_one(entries[symbol]) for symbol in chosen]
    if options.json:
        from megatron_buffer.reference.as_json import comparison_as_dict

        print_json(
            {
                'megatron_core': core.version,
                'symbols': [comparison_as_dict(comparison) for comparison in comparisons],
            }
        )
        return OK
    from megatron_buffer.reference.render import render

    console = _console()
    for comparison in comparisons:
        render(comparison, core.version, console, full=options.full)
    return OK


def _check(options: argparse.Namespace) -> None:
    if options.source is not None and options.against is None:
        raise ConfigError(
            f'--source {options.source} is where the version of --against comes from; give --against '
            'VERSION too'
        )
    if options.html and options.json:
        raise ConfigError('--html and --json cannot be combined; leave one of them out')
    if options.html and options.against is not None:
        raise ConfigError(
            '--html shows the installed version and ours, --against another version of upstream; leave '
            'one of them out'
        )
    if options.html and not Path(options.html).absolute().parent.is_dir():
        raise ConfigError(f'--html {options.html}: there is no folder {Path(options.html).parent}')
    if options.html and Path(options.html).is_dir():
        raise ConfigError(f'--html {options.html} is a folder; expected the name of a file')


def _show_all(options: argparse.Namespace, version: str, entries: Mapping[str, Entry]) -> None:
    if options.json:
        from megatron_buffer.reference.as_json import summary_as_dict

        print_json(summary_as_dict(entries, version))
        return
    from megatron_buffer.reference.render_tables import render_summary

    render_summary(entries, version, _console(), every_symbol=options.list)


def _write_html(
    options: argparse.Namespace,
    version: str,
    entries: Mapping[str, Entry],
    chosen: Sequence[str] | None,
) -> None:
    from megatron_buffer.reference.as_html import write_page
    from megatron_buffer.reference.catalog import compare_one

    symbols = list(entries) if chosen is None else chosen
    comparisons = [compare_one(entries[symbol]) for symbol in symbols]
    try:
        write_page(Path(options.html), comparisons, version)
    except OSError as error:
        raise ConfigError(f'--html {options.html} cannot be written: {error.strerror}') from error
    sys.stderr.write(f'wrote {options.html}\n')


def _against(options: argparse.Namespace, core: CoreInstall, entries: dict[str, Entry]) -> int:
    from megatron_buffer.reference import catalog, versions

    with versions.sources_of(options.against, options.source) as root:
        there = catalog.entries([str(root)])
        found = versions.compare_versions(core, root, options.against, entries, there)
        chosen = None
        if options.symbol is not None:
            chosen = catalog.find(options.symbol, {**there, **entries})
        changes = versions.touched(found, chosen)
        if options.json:
            from megatron_buffer.reference.as_json import versions_as_dict

            print_json(versions_as_dict(found, changes))
        else:
            from megatron_buffer.reference.render_tables import render_versions

            render_versions(found, changes, _console(), only_list=options.list)
    return OK if all(change.status == 'unchanged' for change in changes.values()) else DIFFERS


def _console() -> Console:
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    columns = os.environ.get('COLUMNS', '')
    width = int(columns) if columns.isdigit() and int(columns) >= 40 else 120
    return Console(width=width, highlight=False)

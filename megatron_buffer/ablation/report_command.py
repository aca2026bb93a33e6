"""``megatron-buffer report``: its options, and what it does with them.

Imports neither torch nor megatron. Upstream has no counterpart.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_buffer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

"""What the command is for, in one line."""

OK, FOUND_SOMETHING = 0, 1


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``megatron-buffer report``."""
    parser.epilog = (
        'Exit codes: 0 all right; 1 runs have failed or are missing, or an expectation did not come true; 2 bad '
        'input.'
    )
    parser.add_argument(
        'run_dir', metavar='RUN_DIR', help='folder that `megatron-buffer ablate` has filled'
    )
    parser.add_argument(
        '-o',
        '--output',
        metavar='FILE.html',
        help='the page (default: RUN_DIR/report.html); its Markdown twin lies beside it',
    )


def report(options: argparse.Namespace, console: Console) -> int:
    """Runs ``megatron-buffer report``; returns the exit code.

    Raises:
        ConfigError: If the folder holds no sweep, or the page cannot be written.
    """
    from megatron_buffer.ablation.report import load_report, report_as_dict
    from megatron_buffer.ablation.report_html import html_page
    from megatron_buffer.ablation.report_markdown import markdown_page

    folder = Path(options.run_dir)
    page = Path(options.output) if options.output else folder / 'report.html'
    if page.suffix not in ('.html', '.htm'):
        raise ConfigError(f'-o {page}: expected the name of a file that ends in .html')
    found = load_report(folder)
    twin = page.with_suffix('.md')
    try:
        page.write_text(html_page(found), encoding='utf-8')
        twin.write_text(markdown_page(found), encoding='utf-8')
    except OSError as error:
        raise ConfigError(f'{page} cannot be written: {error.strerror}') from None
    if options.json:
        json.dump(report_as_dict(found), sys.stdout, indent=2)
        sys.stdout.write('\n')
    else:
        for arm in found.arms:
            console.print(
                f'{arm.name}: {arm.sentence}', markup=False, highlight=False, soft_wrap=True
            )
            for verdict in arm.verdicts:
                console.print(
                    f'  expected: {verdict.text}: {verdict.outcome} ({verdict.why})',
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
        for note in found.notes:
            console.print(f'note: {note}', markup=False, highlight=False, soft_wrap=True)
        console.print(f'wrote {page} and {twin}', markup=False, highlight=False, soft_wrap=True)
    return OK if found.is_complete and not found.refuted else FOUND_SOMETHING

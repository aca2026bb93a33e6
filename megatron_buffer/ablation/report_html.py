"""A report as one HTML file that needs nothing else: no script, no font, no network; dark and light, print.

Styles are in ``report.css`` beside this file. Upstream has no counterpart.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_buffer import __version__
from megatron_buffer.ablation.report import ArmReport, Report
from megatron_buffer.ablation.report_figures import Figure, figures
from megatron_buffer.ablation.report_tables import Table, headline, tables, workload_text

_OUTCOMES = {'confirmed': 'yes', 'not confirmed': 'no', 'undecided': 'open'}
_SIGNS = {'confirmed': '✓', 'not confirmed': '✗', 'undecided': '?'}


def html_page(report: Report) -> str:
    """The whole page."""
    return '\n'.join(_page(report)) + '\n'


def _page(report: Report) -> Iterator[str]:
    name = _text(report.sweep['name'])
    style = (Path(__file__).parent / 'report.css').read_text(encoding='utf-8')
    drawings, made = figures(report), tables(report)
    yield '<!doctype html>'
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<title>Ablation: {name}</title>'
    yield f'<style>{style}</style></head><body><main>'
    yield f'<h1>Ablation: {name}</h1>'
    if report.sweep['question']:
        yield f'<p class="question">{_text(report.sweep["question"])}</p>'
    state = '' if report.is_complete else ' class="partial"'
    yield f'<p id="headline"{state}><b>{_text(headline(report))}</b></p>'
    yield f'<p>Every run: {_text(workload_text(report))}</p>'
    if report.notes:
        yield '<ul id="notes">'
        yield from (f'<li>{_text(note)}</li>' for note in report.notes)
        yield '</ul>'
    yield from _contents(drawings, made)
    yield '<section id="sentences"><h2>In a sentence each</h2><dl>'
    for arm in report.arms:
        yield from _sentence(arm)
    yield '</dl></section>'
    summary, *others = made
    yield from _table(summary)
    for figure in drawings:
        yield from _figure(figure)
    for table in others:
        yield from _table(table)
    yield f'<footer>Written by megatron-buffer {_text(__version__)}.</footer></main></body></html>'


def _contents(drawings: Sequence[Figure], made: Sequence[Table]) -> Iterator[str]:
    yield '<nav><a href="#sentences">In a sentence each</a>'
    for part in (made[0], *drawings, *made[1:]):
        yield f'<a href="#{part.key}">{_text(part.title)}</a>'
    yield '</nav>'


def _sentence(arm: ArmReport) -> Iterator[str]:
    yield f'<dt>{_text(arm.name)} <small>{_text(arm.short)}</small></dt><dd>'
    if arm.about:
        yield f'<span class="about">{_text(arm.about)}</span> '
    yield _text(arm.sentence)
    for verdict in arm.verdicts:
        outcome = verdict.outcome
        yield (
            f'<br><span class="verdict {_OUTCOMES[outcome]}"><b>{_SIGNS[outcome]} {outcome}</b>: '
            f'{_text(verdict.text)}</span> <small>{_text(verdict.why)}</small>'
        )
    yield '</dd>'


def _table(table: Table) -> Iterator[str]:
    yield f'<section><h2>{_text(table.title)}</h2>'
    if table.text:
        yield f'<p>{_text(table.text)}</p>'
    yield f'<div class="wide"><table id="{table.key}"><thead><tr>'
    yield from (
        f'<th scope="col"{_right(table, i)}>{_text(c)}</th>' for i, c in enumerate(table.columns)
    )
    yield '</tr></thead><tbody>'
    for row in table.rows:
        yield '<tr>' + ''.join(_cell(table, i, cell) for i, cell in enumerate(row)) + '</tr>'
    yield '</tbody></table></div></section>'


def _cell(table: Table, index: int, text: str) -> str:
    if '\n' in text:
        return f'<td><pre>{_text(text)}</pre></td>'
    if index == 0:
        return f'<th scope="row">{_text(text)}</th>'
    style = f' class="{_OUTCOMES[text]}"' if text in _OUTCOMES else _right(table, index)
    sign = f'{_SIGNS[text]} ' if text in _SIGNS else ''
    return f'<td{style}>{sign}{_text(text)}</td>'


def _right(table: Table, index: int) -> str:
    return ' class="number"' if index in table.numbers else ''


def _figure(figure: Figure) -> Iterator[str]:
    yield f'<section><figure id="{figure.key}"><h2>{_text(figure.title)}</h2>'
    yield figure.drawing
    yield f'<figcaption>{_text(figure.caption)}</figcaption></figure></section>'


def _text(text: str) -> str:
    return html.escape(text, quote=True)

"""A report as Markdown: the sentences and tables of the HTML page, without figures. Upstream has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_buffer.ablation.report import Report
from megatron_buffer.ablation.report_tables import Table, headline, tables, workload_text


def markdown_page(report: Report) -> str:
    """The whole page."""
    return '\n'.join(_page(report)) + '\n'


def _page(report: Report) -> Iterator[str]:
    yield f'# Ablation: {_cell(report.sweep["name"])}'
    yield ''
    if report.sweep['question']:
        yield _cell(report.sweep['question'])
        yield ''
    yield headline(report)
    yield ''
    yield f'Every run: {_cell(workload_text(report))}'
    yield ''
    for note in report.notes:
        yield f'- Note: {_cell(note)}'
    yield ''
    yield '## In a sentence each'
    yield ''
    for arm in report.arms:
        about = f' ({_cell(arm.about)})' if arm.about else ''
        yield f'- **{_cell(arm.name)}**{about}: {_cell(arm.sentence)}'
    yield ''
    for table in tables(report):
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    yield f'## {table.title}'
    yield ''
    if table.text:
        yield table.text
        yield ''
    yield f'| {" | ".join(map(_cell, table.columns))} |'
    rules = ('---:' if index in table.numbers else '---' for index in range(len(table.columns)))
    yield f'|{"|".join(rules)}|'
    for row in table.rows:
        yield f'| {" | ".join(map(_cell, row))} |'
    yield ''


def _cell(text: str) -> str:
    """Text that cannot break a table or be taken for Markdown or HTML."""
    for sign in '\\`*_[]<>|':
        text = text.replace(sign, f'\\{sign}')
    return text.replace('\n', '<br>')

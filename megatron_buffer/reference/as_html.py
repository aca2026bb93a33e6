"""All comparisons as one HTML file that needs nothing else: contents, filter by kind, dark and light, print.

Styles and script are in ``page.css`` and ``page.js`` beside this file, and are written into the page.
Upstream has no counterpart.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from pygments.lexers.python import PythonLexer
from pygments.token import Token

from megatron_buffer.reference.align import CHANGES, short_name
from megatron_buffer.reference.catalog import Comparison
from megatron_buffer.reference.hunks import (
    Hunk,
    Pair,
    fold,
    hunks_of,
    is_long,
    kind_of,
    pairs_of,
    title,
)
from megatron_buffer.reference.mapping import KINDS, RELATIONS, Entry, file_of
from megatron_buffer.reference.render_tables import is_plain

_HERE = Path(__file__).parent
_TOKENS = {
    Token.Keyword: 'k',
    Token.Operator.Word: 'k',
    Token.Literal.String: 's',
    Token.Literal.Number: 'm',
    Token.Comment: 'c',
    Token.Name.Function: 'f',
    Token.Name.Class: 'f',
    Token.Name.Decorator: 'd',
}


def write_page(path: Path, comparisons: Sequence[Comparison], version: str) -> None:
    """Writes the page.

    Args:
        path: The file.
        comparisons: In the order in which they are shown.
        version: Of the installed megatron-core.
    """
    path.write_text('\n'.join(_page(comparisons, version)) + '\n', encoding='utf-8')


def _page(comparisons: Sequence[Comparison], version: str) -> Iterator[str]:
    told = [c for c in comparisons if not is_plain(c.entry) or len(comparisons) == 1]
    plain = [c for c in comparisons if is_plain(c.entry) and len(comparisons) > 1]
    yield '<!doctype html>'
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<title>megatron-buffer beside megatron-core {_text(version)}</title>'
    yield f'<style>{(_HERE / "page.css").read_text(encoding="utf-8")}</style></head><body>'
    yield from _contents(told, plain)
    yield '<main>'
    yield f'<h1>megatron-buffer beside megatron-core {_text(version)}</h1>'
    yield '<p>Upstream on the left, as it is installed here; ours on the right. Every statement has a sign:</p>'
    yield from _legend()
    yield from _filter(told)
    file = ''
    for comparison in told:
        own = file_of(comparison.entry.symbol)
        if own != file:
            file = own
            yield f'<h2>{_text(file)}</h2>'
        yield from _section(comparison, is_open=len(comparisons) == 1)
    if plain:
        yield '<h2 id="as-they-are">Used as they are</h2>'
        yield '<p>Not replaced; their sources are fingerprinted, because ours relies upon them.</p><ul>'
        for comparison in plain:
            entry = comparison.entry
            yield (
                f'<li><code>{_text(entry.name)}</code> <small>{_text(comparison.upstream.where)}. '
                f'{_text(entry.summary)}</small></li>'
            )
        yield '</ul>'
    yield '</main>'
    yield f'<script>{(_HERE / "page.js").read_text(encoding="utf-8")}</script></body></html>'


def _contents(told: Sequence[Comparison], plain: Sequence[Comparison]) -> Iterator[str]:
    yield '<nav><div class="tools"><button id="theme" type="button">dark / light</button> '
    yield '<button id="open" type="button">open all</button> '
    yield '<button id="close" type="button">close all</button></div>'
    file = ''
    for comparison in told:
        entry = comparison.entry
        own = file_of(entry.symbol)
        if own != file:
            yield ('</ul>' if file else '') + f'<h3>{_text(own.rpartition("/")[2])}</h3><ul>'
            file = own
        inner = ' class="inner"' if '.' in entry.name else ''
        shown = f'.{entry.name.rpartition(".")[2]}' if inner else entry.name
        yield (
            f'<li{inner} data-for="{_id(entry)}"><a href="#{_id(entry)}">{_text(shown)}</a> '
            f'{_faults(entry)}</li>'
        )
    if file:
        yield '</ul>'
    if plain:
        yield f'<h3><a href="#as-they-are">{len(plain)} used as they are</a></h3>'
    yield '</nav>'


def _legend() -> Iterator[str]:
    yield '<p class="legend">'
    for change, (sign, meaning) in CHANGES.items():
        if sign.strip():
            yield f'<span class="{change}"><b>{_text(sign)}</b> {_text(meaning)}</span>'
    yield '</p>'


def _filter(told: Sequence[Comparison]) -> Iterator[str]:
    used = {d.kind for comparison in told for d in comparison.entry.differences}
    yield '<fieldset class="filter"><legend>Show differences of these kinds</legend>'
    for kind, meaning in KINDS.items():
        if kind in used:
            yield (
                f'<label title="{_text(meaning)}"><input type="checkbox" value="{kind}" checked> '
                f'<span class="tag {kind}">{kind}</span> {_text(meaning)}</label>'
            )
    yield '<label><input type="checkbox" id="quiet" checked> what does not differ</label></fieldset>'


def _section(comparison: Comparison, *, is_open: bool) -> Iterator[str]:
    entry = comparison.entry
    kinds = ' '.join(sorted({difference.kind for difference in entry.differences}))
    yield f'<section id="{_id(entry)}" data-kinds="{kinds}">'
    yield f'<h3><a href="#{_id(entry)}">{_text(entry.name)}</a> {_faults(entry)}</h3>'
    yield (
        f'<p><b title="{_text(RELATIONS[entry.relation])}">{entry.relation}</b>: '
        f'{_text(entry.summary)}</p>'
    )
    ours = ', '.join(
        f'<code title="{_text(piece.where)}">{_text(short_name(piece.symbol))}</code>'
        for piece in comparison.ours
    )
    yield f'<p class="where">{_text(comparison.upstream.where)}{" beside " + ours if ours else ""}</p>'
    if entry.differences:
        yield '<ol>'
        for difference in entry.differences:
            yield (
                f'<li data-kind="{difference.kind}"><span class="tag {difference.kind}">'
                f'{_text(difference.tag)}</span> {_text(difference.why)}</li>'
            )
        yield '</ol>'
    yield f'<details{" open" if is_open else ""}><summary>the code</summary><table>'
    yield '<colgroup><col class="code"><col class="sign"><col class="code"></colgroup>'
    told: set[int | None] = set()
    for hunk in hunks_of(comparison.rows):
        yield from _hunk(hunk, entry, in_short=hunk.label in told)
        told.add(hunk.label)
    yield '</table></details></section>'


def _hunk(hunk: Hunk, entry: Entry, *, in_short: bool) -> Iterator[str]:
    kind = kind_of(hunk, entry.differences)
    quiet = ' data-quiet' if not kind and hunk.is_quiet else ''
    yield f'<tbody data-kind="{kind}"{quiet}>'
    text = title(hunk, entry, in_short=in_short)
    if text:
        style = 'piece' if hunk.is_piece else f'why {kind}'
        yield f'<tr class="{style}"><th colspan="3">{_text(text)}</th></tr>'
    pairs = pairs_of(hunk)
    if not is_long(hunk):
        yield from _lines(pairs)
        yield '</tbody>'
        return
    above, away, below = fold(pairs)
    yield from _lines(above)
    yield f'<tr class="more"><td colspan="3"><button type="button">… {len(away)} more lines</button></td></tr>'
    yield from _lines(away, ' folded')
    yield from _lines(below)
    yield '</tbody>'


def _lines(pairs: Sequence[Pair], extra: str = '') -> Iterator[str]:
    left, right = (_highlighted(pairs, side) for side in (1, 2))
    for index, (change, a, b) in enumerate(pairs):
        yield (
            f'<tr class="{change}{extra}">{_cell(a, left[index])}<td class="sign">'
            f'{_text(CHANGES[change][0])}</td>{_cell(b, right[index])}</tr>'
        )


def _cell(line: tuple[int, str] | None, code: str) -> str:
    if line is None:
        return '<td></td>'
    number = line[0] or ''
    return f'<td data-n="{number}"><code>{code}</code></td>'


def _highlighted(pairs: Sequence[Pair], side: int) -> list[str]:
    """The lines of one side as HTML."""
    source = '\n'.join(line[1] if (line := pair[side]) else '' for pair in pairs)
    lines: list[str] = ['']
    for token, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        style = next((style for kind, style in _TOKENS.items() if token in kind), '')
        for number, part in enumerate(value.split('\n')):
            if number:
                lines.append('')
            if part:
                lines[-1] += f'<i class="{style}">{_text(part)}</i>' if style else _text(part)
    return lines + [''] * (len(pairs) - len(lines))


def _faults(entry: Entry) -> str:
    return ' '.join(f'<span class="fault">{fault}</span>' for fault in entry.faults)


def _id(entry: Entry) -> str:
    return _text(f'{entry.symbol.partition(":")[0].rpartition(".")[2]}-{entry.name}')


def _text(text: str) -> str:
    return html.escape(text, quote=True)

"""One upstream symbol beside ours, in a terminal: two columns where there is room, else one.

Every line says by a sign what it is, so nothing depends on colours. Upstream has no counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

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
from megatron_buffer.reference.mapping import RELATIONS, Entry, file_of
from megatron_buffer.reference.upstream_source import Piece

TWO_COLUMNS = 120
"""From this width on."""

STYLES = {
    'strategy': 'blue',
    'fix': 'bold magenta',
    'error': 'cyan',
    'check': 'cyan',
    'cpu': 'dim',
    'version': 'dim',
    'measure': 'dim',
    'speed': 'dim',
    'super': 'dim',
}
_SIGN_STYLES = {'gone': 'bold yellow', 'new': 'bold blue', 'moved': 'bold magenta', 'like': 'bold'}
_NUMBER = 5
_INDENT = 9
_CONTINUATION = 4


def render(comparison: Comparison, version: str, console: Console, *, full: bool = False) -> None:
    """Prints a comparison.

    Args:
        comparison: What to print.
        version: Of the installed megatron-core.
        console: Where to.
        full: Also print what is folded otherwise: long stretches of upstream's own code.
    """
    _head(comparison, version, console)
    entry = comparison.entry
    hunks = hunks_of(comparison.rows)
    wide = console.width >= TWO_COLUMNS and bool(comparison.ours)
    if comparison.rows:
        console.print()
        _print_hanging(console, _legend(comparison), 0)
        console.print()
    if wide:
        left = Text(f'upstream {version}', 'bold underline')
        left.pad_right(_code_width(console.width) - len(left) + _NUMBER + 4 + _NUMBER)
        _print(console, Text(' ' * _NUMBER) + left + Text('ours', 'bold underline'))
    told: set[int | None] = set()
    for hunk in hunks:
        wide = wide and not hunk.is_piece  # what follows has nothing on the left
        _print_title(title(hunk, entry, in_short=hunk.label in told), hunk, entry, console)
        told.add(hunk.label)
        _print_hunk(hunk, console, wide=wide, full=full)
    console.print()


def _head(comparison: Comparison, version: str, console: Console) -> None:
    entry = comparison.entry
    console.rule(style='dim')
    place = f'{file_of(entry.symbol)}:'
    gap = ' ' if len(place) + len(entry.name) < console.width else '\n  '
    console.print(Text.assemble(place, gap, (entry.name, 'bold')), soft_wrap=True)
    rows = [
        (entry.relation, f'{entry.summary}'),
        ('', f'({RELATIONS[entry.relation]})'),
        ('upstream', f'{comparison.upstream.where}, installed {version}'),
    ]
    for index, place in enumerate(_places(comparison.ours, console.width - _INDENT)):
        rows.append(('ours' if not index else '', place))
    for name, value in rows:
        text = Text(f'{name:<{_INDENT}}', 'bold')
        _print_hanging(console, text + Text(value, 'dim' if value.startswith('(') else ''), _INDENT)
    if entry.differences:
        console.print()
    for index, difference in enumerate(entry.differences, start=1):
        tag = Text(f'{index:>2} {difference.tag}: ', STYLES[difference.kind])
        _print_hanging(console, tag + Text(difference.why, ''), 3)


def _places(ours: Sequence[Piece], width: int) -> list[str]:
    """Where ours is, a line each: from the package's folder on where there is no room for all of it."""
    full = [f'{piece.where} {short_name(piece.symbol).partition(":")[2]}' for piece in ours]
    if max(map(len, full), default=0) <= width:
        return full
    return [place.partition('/')[2] for place in full]


def _print_hanging(console: Console, text: Text, indent: int) -> None:
    """Prints a text whose first ``indent`` characters are a head that further lines leave free."""
    first, *rest = text[indent:].wrap(console, max(console.width - indent, 20))
    _print(console, text[:indent] + first)
    for line in rest:
        _print(console, Text(' ' * indent) + line)


def _legend(comparison: Comparison) -> Text:
    used = {row.change for row in comparison.rows}
    parts = [
        f'{sign} {meaning}'
        for change, (sign, meaning) in CHANGES.items()
        if change in used and sign.strip()
    ]
    return Text('   '.join(parts), 'dim')


def _print_title(text: str, hunk: Hunk, entry: Entry, console: Console) -> None:
    if not text:
        return
    style = STYLES.get(kind_of(hunk, entry.differences), 'bold')
    dash = '═' if hunk.is_piece else '─'
    line = Text(f'{dash}{dash} {text} ', style)
    line.truncate(console.width, overflow='ellipsis')
    line.append(dash * max(console.width - line.cell_len, 0), 'dim')
    _print(console, line)


def _print_hunk(hunk: Hunk, console: Console, *, wide: bool, full: bool) -> None:
    pairs = pairs_of(hunk)
    if full or not is_long(hunk):
        _print_pairs(pairs, console, wide=wide)
        return
    above, away, below = fold(pairs)
    _print_pairs(above, console, wide=wide)
    what = 'docstring' if away[0][0] == 'doc' else "upstream's code"
    _print(
        console,
        Text(f'{"":>{_NUMBER}}… {len(away)} more lines of {what}; --full shows them', 'dim'),
    )
    _print_pairs(below, console, wide=wide)


def _print_pairs(pairs: Sequence[Pair], console: Console, *, wide: bool) -> None:
    left, right = (_highlighted(pairs, side) for side in (1, 2))
    if not wide:
        for line in _unified(pairs, left, right, console.width):
            _print(console, line)
        return
    width = _code_width(console.width)
    for index, (change, a, b) in enumerate(pairs):
        lefts = _wrapped(left[index], width)
        rights = _wrapped(right[index], width)
        for part in range(max(len(lefts), len(rights))):
            cell = lefts[part] if part < len(lefts) else Text('')
            cell.truncate(width, pad=True)
            line = _number(a, part) + cell
            line += _sign(change) if not part else Text('   ')
            line += _number(b, part)
            if part < len(rights):
                line += rights[part]
            _print(console, line)


def _unified(
    pairs: Sequence[Pair], left: Sequence[Text], right: Sequence[Text], width: int
) -> Iterator[Text]:
    """Upstream's lines of each stretch of one kind, then ours; what is the same only once."""
    start = 0
    for end in range(1, len(pairs) + 1):
        if end < len(pairs) and pairs[end][0] == pairs[start][0]:
            continue
        change = pairs[start][0]
        stretch = range(start, end)
        sides = [(1, left, '-'), (2, right, '+')]
        if change == 'same':
            sides = [(2, right, '=')]
        elif change == 'moved':
            sides = [(1, left, '-'), (2, right, '>')]
        elif change == 'runs':
            sides = [(2, right, '+'), (1, left, '|')]
        elif change == 'doc':
            sides = [(1, left, '-'), (2, right, '+')]
        for side, texts, sign in sides:
            for index in stretch:
                line = pairs[index][1] if side == 1 else pairs[index][2]
                if line is None:
                    continue
                for part, text in enumerate(_wrapped(texts[index], width - _NUMBER - 3)):
                    shown = sign if not part else ' '
                    style = {'-': 'bold yellow', '+': 'bold blue', '>': 'bold magenta'}.get(
                        sign, 'dim'
                    )
                    yield _number(line, part) + Text(f'{shown} ', style) + text
        start = end


def _highlighted(pairs: Sequence[Pair], side: int) -> list[Text]:
    """The lines of one side, coloured; docstrings are dim."""
    lines = [pair[side] for pair in pairs]
    source = '\n'.join(line[1] if line else '' for line in lines)
    syntax = Syntax('', 'python', theme='ansi_dark', background_color='default')
    texts = list(syntax.highlight(source).split('\n', allow_blank=True))
    for index, pair in enumerate(pairs):
        if pair[0] == 'doc':
            texts[index] = Text(texts[index].plain, 'dim')
    return texts[: len(pairs)]


def _wrapped(text: Text, width: int) -> list[Text]:
    """A line of code cut to a width, at spaces where there are any; what follows is indented further."""
    text = text.copy()
    text.rstrip()
    plain = text.plain
    indent = len(plain) - len(plain.lstrip())
    parts: list[Text] = []
    room = width
    while len(text) > room:
        at = text.plain.rfind(' ', 0, room)
        if at <= (indent if not parts else 0):
            at = room
        parts.append(text[:at])
        text = text[at:]
        text = text[len(text.plain) - len(text.plain.lstrip()) :]
        room = max(width - indent - _CONTINUATION, 10)
    parts.append(text)
    further = Text(' ' * min(indent + _CONTINUATION, width - 10))
    return [parts[0], *(further + part for part in parts[1:])]


def _code_width(width: int) -> int:
    return (width - 2 * _NUMBER - 3) // 2


def _number(line: tuple[int, str] | None, part: int) -> Text:
    number = line[0] if line and not part else 0
    return Text(f'{number or "":>{_NUMBER - 1}} ', 'dim')


def _sign(change: str) -> Text:
    return Text(f' {CHANGES[change][0]} ', _SIGN_STYLES.get(change, 'dim'))


def _print(console: Console, text: Text) -> None:
    text.rstrip()
    console.print(text, soft_wrap=True)

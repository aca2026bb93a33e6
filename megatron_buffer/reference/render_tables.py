"""The summary of all symbols, and what differs between two versions of upstream, in a terminal.

Upstream has no counterpart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_buffer.reference.mapping import KINDS, RELATIONS, Entry, file_of
from megatron_buffer.reference.render import STYLES
from megatron_buffer.reference.versions import HOW_TO_PROCEED, Change, Versions

_NARROW, _WIDE = 100, 140


def is_plain(entry: Entry) -> bool:
    """Whether upstream's symbol is used as it is, and there is nothing more to say of it."""
    return entry.relation == 'observed' and not entry.differences


def render_summary(
    entries: Mapping[str, Entry], version: str, console: Console, *, every_symbol: bool
) -> None:
    """Prints a row per symbol, by file, and counts at the end.

    Args:
        entries: The symbols.
        version: Of the installed megatron-core.
        console: Where to.
        every_symbol: Also those that are used as they are; otherwise they are counted.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    narrow = console.width < _NARROW
    names = 34 if narrow else min(console.width * 2 // 5, 56)
    table.add_column(f'upstream {version}', overflow='fold', width=names)
    table.add_column('relation', no_wrap=True, width=9)
    if narrow:
        table.add_column('differences and faults', width=console.width - names - 13)
    else:
        table.add_column('differences', width=24 if console.width < _WIDE else 32)
        table.add_column('faults', width=10 if console.width < _WIDE else 15)
    if not narrow:
        table.add_column('ours', overflow='fold')
    for file, group in _by_file(entries.values()).items():
        shown = file.rpartition('/')[2] if narrow else file.removeprefix('megatron/')
        table.add_row(Text(shown, 'bold'))
        owner = ''
        for entry in group:
            if not every_symbol and is_plain(entry):
                continue
            last, owner = owner, _owner(entry)
            if owner and owner not in (last, entry.name):
                table.add_row(Text(f'  {owner}'))
            own = entry.name.removeprefix(f'{owner}.')
            name = f'  {own}' if own == entry.name else f'    .{own}'
            cells = [Text(name), Text(entry.relation), kinds(entry)]
            faults = ', '.join(entry.faults)
            if narrow:
                cells[-1].append(f': {faults}' if faults else '')
            else:
                cells += [Text(faults), Text(_ours(entry), 'dim')]
            table.add_row(*cells)
        plain = sum(is_plain(entry) for entry in group)
        if plain and not every_symbol:
            table.add_row(Text(f'  {plain} used as they are', 'dim'))
    console.print(table)
    _print_counts(entries, console)
    console.print(
        "'megatron-buffer diff --symbol NAME' shows one of them, --list also those that are used as they "
        'are, --html FILE all of them. The faults are in docs/faults.md.',
        style='dim',
        highlight=False,
    )


def kinds(entry: Entry) -> Text:
    """How many differences of each kind, as one line."""
    counted = Counter(difference.kind for difference in entry.differences)
    text = Text()
    for kind in KINDS:
        if counted[kind]:
            text.append(', ' if text.plain else '')
            text.append(f'{counted[kind]} {kind}', STYLES[kind])
    return text


def _owner(entry: Entry) -> str:
    """The class that a method belongs to; a class is its own."""
    if entry.symbol.endswith('.<class>'):
        return entry.name
    return entry.name.rpartition('.')[0]


def _ours(entry: Entry) -> str:
    """The main counterpart: its module alone where it has the same name as upstream's."""
    if not entry.ours:
        return ''
    module, _, name = entry.ours[0].partition(':')
    same = name.rpartition('.')[2] == entry.name.rpartition('.')[2]
    return f'{module.replace(".", "/")}.py' + ('' if same else f': {name}')


def _by_file(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(file_of(entry.symbol), []).append(entry)
    return grouped


def counts(entries: Mapping[str, Entry]) -> dict[str, dict[str, int]]:
    """Symbols by relation, differences by kind and by fault."""
    differences = [d for entry in entries.values() for d in entry.differences]
    relations = Counter(entry.relation for entry in entries.values())
    by_kind = Counter(difference.kind for difference in differences)
    faults = Counter(difference.fault for difference in differences if difference.fault)
    return {
        'relations': {name: relations[name] for name in RELATIONS if relations[name]},
        'kinds': {name: by_kind[name] for name in KINDS if by_kind[name]},
        'faults': dict(sorted(faults.items(), key=lambda item: int(item[0][1:]))),
    }


def _print_counts(entries: Mapping[str, Entry], console: Console) -> None:
    counted = counts(entries)
    meanings: dict[str, Mapping[str, str]] = {'relations': RELATIONS, 'kinds': KINDS}
    total = sum(counted['kinds'].values())
    heads = {
        'relations': f'{len(entries)} symbols',
        'kinds': f'{total} differences',
        'faults': 'of them for a fault of upstream',
    }
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column(justify='right')
    grid.add_column(no_wrap=True)
    grid.add_column(overflow='fold')
    for key in ('relations', 'kinds'):
        grid.add_row('', Text(heads[key], 'bold'), '')
        for name, number in counted[key].items():
            grid.add_row(
                str(number), Text(name, STYLES.get(name, '')), Text(meanings[key][name], 'dim')
            )
    console.print(grid)
    faults = ', '.join(f'{name} x{number}' for name, number in counted['faults'].items())
    console.print(Text.assemble((f'{heads["faults"]}: ', 'bold'), faults))
    console.print()


def render_versions(
    versions: Versions, changes: Mapping[str, Change], console: Console, *, only_list: bool
) -> None:
    """Prints which symbols differ between two versions of upstream, and how.

    Args:
        versions: Both.
        changes: Those to print.
        console: Where to.
        only_list: The table without the text.
    """
    direction = f'{versions.older} to {versions.newer}'
    console.print(
        Text.assemble(
            ('megatron-core ', ''), (direction, 'bold'), f' (installed: {versions.installed})'
        ),
        soft_wrap=True,
    )
    for note in versions.notes:
        console.print(Text(f'note: {note}', 'dim'), soft_wrap=True)
    differing = [change for change in changes.values() if change.status != 'unchanged']
    if differing:
        console.print(_version_table(differing, console.width))
    if not only_list:
        for change in differing:
            _print_change(change, versions, console)
    statuses = Counter(change.status for change in changes.values())
    names = ('unchanged', 'changed', 'gone', 'new')
    console.print(
        Text.assemble(
            (f'{direction}: ', 'bold'),
            ', '.join(f'{statuses[name]} {name}' for name in names if statuses[name]) or 'nothing',
        ),
        soft_wrap=True,
    )
    if differing and only_list:
        console.print('Without --list the text of each change is shown too.', style='dim')


def _version_table(differing: Sequence[Change], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column('upstream', overflow='fold', min_width=34 if width < _NARROW else 52)
    table.add_column('', no_wrap=True)
    table.add_column('lines', no_wrap=True)
    table.add_column('relation', no_wrap=True)
    if width >= _NARROW:
        table.add_column('of ours depends on it', overflow='fold')
    grouped: dict[str, list[Change]] = {}
    for change in differing:
        grouped.setdefault(file_of(change.entry.symbol), []).append(change)
    for file, group in grouped.items():
        table.add_row(Text(file.rpartition('/')[2], 'bold'))
        for change in group:
            gone, came = change.counts
            cells = [
                Text(f'  {change.entry.name}'),
                Text(change.status, 'bold' if change.status != 'changed' else ''),
                Text(f'-{gone} +{came}'),
                Text(change.entry.relation),
                Text(_ours(change.entry), 'dim'),
            ]
            table.add_row(*cells[: len(table.columns)])
    return table


def _print_change(change: Change, versions: Versions, console: Console) -> None:
    entry = change.entry
    piece = change.newer or change.older
    console.rule(style='dim')
    console.print(
        Text.assemble(
            f'{file_of(entry.symbol)}: ',
            (entry.name, 'bold'),
            f' is {change.status} in {versions.newer}',
        ),
        soft_wrap=True,
    )
    if piece is not None:
        console.print(Text(piece.where, 'dim'), soft_wrap=True)
    depends = ', '.join(entry.ours) if entry.ours else entry.summary
    for name, text in (
        ('depends on it', depends),
        ('how to proceed', HOW_TO_PROCEED[entry.relation]),
    ):
        console.print(Text(f'{name}:', 'bold'))
        console.print(Padding(Text(text), (0, 0, 0, 2)))
    for line in change.diff():
        style = {'-': 'yellow', '+': 'blue', '@': 'dim'}.get(line[:1], '')
        console.print(Text(line, style), soft_wrap=True)

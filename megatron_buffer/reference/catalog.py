"""All upstream symbols that ours replaces or relies upon, and how to find the one that is meant.

Upstream has no counterpart.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_buffer.errors import ConfigError
from megatron_buffer.patching.fingerprints import CoreInstall, find_core
from megatron_buffer.patching.sources import collect
from megatron_buffer.patching.targets import RELIED_UPON
from megatron_buffer.reference.align import Row, align
from megatron_buffer.reference.mapping import PACKAGE, Entry, display_name, file_of, load_mapping
from megatron_buffer.reference.upstream_source import Piece, read_piece

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One upstream symbol with its source, ours, and the rows that put them side by side."""

    entry: Entry
    upstream: Piece
    ours: tuple[Piece, ...]
    rows: tuple[Row, ...]


def entries(path: Sequence[str] | None = None) -> dict[str, Entry]:
    """Every symbol of the mapping and of the fingerprints that is there, in the mapping's order.

    Args:
        path: Where megatron is looked for; None for the installed one.
    """
    mapped = load_mapping()
    found = {symbol: e for symbol, e in mapped.items() if read_piece(symbol, path) is not None}
    for reliance in RELIED_UPON:
        for symbol in collect([reliance], path):
            if symbol not in found:
                found[symbol] = Entry(
                    symbol=symbol, relation='observed', summary=f'Relied upon: {reliance.why}.'
                )
    return found


def require_core() -> CoreInstall:
    """The installed megatron-core.

    Raises:
        ConfigError: If there is none, as there is nothing to show then.
    """
    core = find_core()
    if core.path is None:
        raise ConfigError(
            'megatron-core is not installed in this Python, and its source is what is shown here; '
            "pip install 'megatron-core'"
        )
    return core


def compare_one(entry: Entry) -> Comparison:
    """Reads both sides of an entry and puts them side by side."""
    upstream = read_piece(entry.symbol)
    assert upstream is not None, entry.symbol
    part = (
        '.<class>' if entry.symbol.endswith('.<class>') else ''
    )  # its methods have entries of their own
    found = (read_piece(f'{PACKAGE}.{name}{part}') for name in entry.ours)
    ours = tuple(piece for piece in found if piece is not None)
    return Comparison(
        entry=entry, upstream=upstream, ours=ours, rows=tuple(align(entry, upstream, ours))
    )


def find(query: str, known: Mapping[str, Entry]) -> list[str]:
    """The symbols that a name means: one, or a class with those of its methods that ours touches.

    Args:
        query: A name or the end of one (``start_grad_sync``), with or without its module or file, or the
            name of our own counterpart.
        known: From :func:`entries`.

    Raises:
        ConfigError: If there is none, with near ones, or several.
    """
    name = _plain(query)
    if not name:
        raise ConfigError('--symbol is empty; expected the name of a class, method or function')
    found = [symbol for symbol in known if _ends_with(symbol, name)]
    if not found:
        found = [
            symbol
            for symbol, entry in known.items()
            if any(_ends_with(f'{PACKAGE}.{ours}', name) for ours in entry.ours[:1])
        ]
    if not found:
        raise ConfigError(f'--symbol {query!r}: no such symbol.{_near(name, known)}')
    if len(found) > 1:
        touched = [symbol for symbol in found if known[symbol].relation != 'observed']
        found = touched if len(touched) == 1 else found
    if len(found) > 1:
        raise ConfigError(
            f'--symbol {query!r} can mean {len(found)} symbols; give one of:\n'
            + '\n'.join(_lines(found, known))
        )
    symbol = found[0]
    if not symbol.endswith('.<class>'):
        return [symbol]
    inside = symbol.removesuffix('<class>')
    methods = [
        other
        for other, entry in known.items()
        if other.startswith(inside) and other != symbol and (entry.ours or entry.differences)
    ]
    return [symbol, *methods]


def _plain(query: str) -> str:
    """Accepts ``module:name`` and ``file.py: name`` as docstrings and messages spell them."""
    place, colon, name = query.strip().partition(':')
    if not colon:
        return place
    name = name.strip()
    module = place.strip().removesuffix('.py').replace('/', '.').rpartition('.')[2]
    return f'{module}:{name}' if name else ''


def _ends_with(symbol: str, name: str) -> bool:
    whole = symbol.removesuffix('.<class>')
    return whole == name or whole.endswith((f'.{name}', f':{name}'))


def _near(name: str, known: Iterable[str]) -> str:
    asked = name.rpartition(':')[2].lower()
    parts: dict[str, list[str]] = {}
    for symbol in known:
        shown = display_name(symbol)
        for part in {shown.lower(), shown.rpartition('.')[2].lower()}:
            parts.setdefault(part, []).append(shown)
    near = difflib.get_close_matches(asked, list(parts), n=6, cutoff=0.6)
    near += [part for part in parts if asked in part and part not in near and len(asked) > 3]
    names = list(dict.fromkeys(name for part in near for name in parts[part]))[:6]
    listed = f' Near: {", ".join(names)}.' if names else ''
    return f"{listed} 'megatron-buffer diff --list' lists all of them"


def _lines(symbols: Sequence[str], known: Mapping[str, Entry]) -> list[str]:
    ordered = sorted(symbols, key=lambda symbol: known[symbol].relation == 'observed')
    names = [display_name(symbol) for symbol in ordered]
    lines = [
        f'  {file_of(s).rpartition("/")[2]}:{n}' if names.count(n) > 1 else f'  {n}'
        for s, n in zip(ordered, names, strict=True)
    ]
    more = len(lines) - _SHOWN
    return lines[:_SHOWN] + ([f'  and {more} more'] if more > 0 else [])

"""The source of a symbol, upstream's or ours, as it stands in the installed file.

Nothing is imported for it: files are found and cut up by ``patching.sources``, as the fingerprints are.
Upstream has no counterpart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_buffer.patching.sources import locate, read_symbols

type Line = tuple[int, str]
"""Number in the file, and the dedented text."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The lines of one symbol.

    Attributes:
        symbol: ``module:qualname``.
        path: The file.
        lines: All lines of it, decorators included.
    """

    symbol: str
    path: Path
    lines: tuple[Line, ...]

    @property
    def text(self) -> str:
        """The dedented source."""
        return '\n'.join(text for _, text in self.lines)

    @property
    def where(self) -> str:
        """``file:line``, the file from its package on."""
        return f'{short_path(self.path)}:{self.lines[0][0]}'


def short_path(path: Path) -> str:
    """A path from the package on: ``megatron/core/…``."""
    parts = path.parts
    for package in ('megatron', 'megatron_buffer'):
        if package in parts:
            start = len(parts) - 1 - parts[::-1].index(package)
            return '/'.join(parts[start:])
    return str(path)


@cache
def _locate(module: str, path: tuple[str, ...] | None) -> Path | None:
    return locate(module, path)


def read_piece(symbol: str, path: Sequence[str] | None = None) -> Piece | None:
    """The source of a function, method, variable or class.

    Args:
        symbol: ``module:qualname``. A class that ends in ``.<class>`` comes without its methods, one that
            does not comes whole.
        path: Where to look for the package; None for where an import would.

    Returns:
        None if there is no such file or symbol.
    """
    module, _, qualname = symbol.partition(':')
    file = _locate(module, None if path is None else tuple(path))
    if file is None or file.suffix != '.py':
        return None
    if qualname.endswith('.<class>'):
        found = read_symbols(module, file, [qualname.removesuffix('.<class>')]).get(qualname)
        return None if found is None else Piece(symbol=symbol, path=file, lines=found.lines)
    parts = read_symbols(module, file, [qualname])
    if qualname in parts:
        return Piece(symbol=symbol, path=file, lines=parts[qualname].lines)
    if f'{qualname}.<class>' not in parts:
        return None
    numbers = [number for part in parts.values() for number, _ in part.lines]
    first, last = min(numbers), max(numbers)
    text = file.read_text(encoding='utf-8').split('\n')[first - 1 : last]
    dedented = textwrap.dedent('\n'.join(text)).split('\n')
    return Piece(symbol=symbol, path=file, lines=tuple(enumerate(dedented, start=first)))

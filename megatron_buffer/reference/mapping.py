"""Which of our symbols stands for which of upstream's, and what kind each difference is.

The data is in ``mapping/*.yaml``, one file per area; it holds names and reasons, no source. Upstream has
no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

FOLDER = Path(__file__).with_name('mapping')
PACKAGE = 'megatron_buffer'

type Relation = Literal['extends', 'replaces', 'strategy', 'wraps', 'calls', 'observed']
type Kind = Literal[
    'strategy', 'fix', 'error', 'check', 'cpu', 'version', 'measure', 'speed', 'super'
]

RELATIONS: Mapping[str, str] = {
    'extends': "ours calls upstream's through super()",
    'replaces': 'its body is written anew',
    'strategy': 'a strategy of the config stands for it',
    'wraps': "ours is put around upstream's function",
    'calls': "ours calls upstream's function, which stays in place",
    'observed': "upstream's own is used as it is; its source is fingerprinted because ours relies upon it",
}
KINDS: Mapping[str, str] = {
    'strategy': 'a strategy of the config decides',
    'fix': 'upstream goes wrong here',
    'error': 'a check of upstream that names what is wrong, and where',
    'check': 'a check that upstream does not have',
    'cpu': 'lets it run without a GPU',
    'version': 'bridges versions of megatron-core',
    'measure': 'looks on and changes nothing',
    'speed': 'does the same with less work',
    'super': "upstream's own code does it",
}
_STRICT = ConfigDict(extra='forbid')


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Difference:
    """One way in which ours differs from upstream's.

    Attributes:
        kind: A key of ``KINDS``.
        why: The reason, in a sentence.
        fault: F1 to F11 of ``docs/faults.md``, if it belongs to one.
        config: Key of the config that decides, like ``grad_reduce`` or ``checks.export``.
        upstream: Identifiers; a statement of upstream's that has one of them belongs to this difference.
        ours: Likewise for our statements.
    """

    kind: Kind
    why: str
    fault: str = ''
    config: str = ''
    upstream: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """The kind, with what decides and the fault: ``fix F4 (grad_reduce)``."""
        fault = f' {self.fault}' if self.fault else ''
        return f'{self.kind}{fault}' + (f' ({self.config})' if self.config else '')


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Entry:
    """What stands for one upstream symbol.

    Attributes:
        symbol: ``module:qualname``; a class ends in ``.<class>``, as in the fingerprints.
        relation: A key of ``RELATIONS``.
        ours: Our symbols, ``module:qualname`` below ``megatron_buffer``, the main one first.
        summary: What differs, in a sentence.
        differences: In detail.
        since: First version that has the upstream symbol, if not all supported ones do.
    """

    symbol: str
    relation: Relation
    summary: str
    ours: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    since: str = ''

    @property
    def module(self) -> str:
        """Upstream's module."""
        return self.symbol.partition(':')[0]

    @property
    def name(self) -> str:
        """Upstream's name in its module."""
        return display_name(self.symbol)

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults that its differences belong to, in order."""
        found = {difference.fault for difference in self.differences} - {''}
        return tuple(sorted(found, key=lambda fault: int(fault[1:])))


def display_name(symbol: str) -> str:
    """The name for people: without module, and without the mark of a class statement."""
    return symbol.partition(':')[2].removesuffix('.<class>')


def file_of(symbol: str) -> str:
    """The upstream file of a symbol, as docstrings spell it."""
    return symbol.partition(':')[0].replace('.', '/') + '.py'


@cache
def load_mapping() -> Mapping[str, Entry]:
    """All entries by upstream symbol, in the order of the files."""
    entries: dict[str, Entry] = {}
    adapter = TypeAdapter(Entry)
    for path in sorted(FOLDER.glob('*.yaml')):
        modules = cast(
            'dict[str, dict[str, dict[str, Any]]]', yaml.safe_load(path.read_text(encoding='utf-8'))
        )
        for module, symbols in modules.items():
            for name, fields in symbols.items():
                symbol = f'{module}:{name}'
                if symbol in entries:
                    raise ValueError(f'{path.name}: {symbol} is in the mapping twice')
                entries[symbol] = adapter.validate_python({'symbol': symbol, **fields})
    return entries

"""Sources of upstream's symbols: read from the files on disk, and compared with what is in memory.

Files are found as the import system would find them, but without importing anything: this works
before (and without) an import of megatron or torch.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
import textwrap
import tokenize
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_buffer.patching.holders import MISSING
from megatron_buffer.patching.targets import RELIED_UPON, Reliance

LINE_HASH_CHARS = 6


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of one symbol, as it stands in the file."""

    symbol: str
    """``module:qualname``."""
    path: Path
    lines: tuple[tuple[int, str], ...]
    """(line number in the file, dedented line)."""
    kind: str
    """``function`` (methods too), ``class`` (its statement without the methods) or ``variable``."""
    decorated: bool

    @property
    def first_line(self) -> int:
        return self.lines[0][0]

    @property
    def last_line(self) -> int:
        return self.lines[-1][0]

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256('\n'.join(text for _, text in self.lines).encode()).hexdigest()

    @property
    def line_hashes(self) -> list[str]:
        return [
            hashlib.sha256(text.encode()).hexdigest()[:LINE_HASH_CHARS] for _, text in self.lines
        ]


def locate(module: str, path: Sequence[str] | None = None) -> Path | None:
    """File of a module, found through the import system's finders without importing its parents.

    Args:
        module: Dotted name.
        path: Where to look for the top-level package; None for ``sys.meta_path`` as it is.
    """
    loaded = getattr(sys.modules.get(module), '__file__', None) if path is None else None
    if loaded is not None:
        return Path(loaded)
    parts = module.split('.')
    search, file = path, None
    for i in range(len(parts)):
        name = '.'.join(parts[: i + 1])
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, 'find_spec', None)
            spec = find(name, search, None) if find is not None else None
            if spec is not None:
                break
        if spec is None:
            return None
        locations = spec.submodule_search_locations
        search = list(locations) if locations is not None else []
        file = spec.origin if spec.has_location else None
    return Path(file) if file is not None and Path(file).is_file() else None


def read_symbols(module: str, path: Path, names: Iterable[str]) -> dict[str, Source]:
    """Sources of the named symbols of one file; names as in :class:`Reliance`. Absent ones are left out."""
    file_lines, definitions = _parse(path, path.stat().st_mtime_ns)
    wanted = {q for q in definitions for name in names if _selects(name, q, definitions)}
    sources: dict[str, Source] = {}
    for qualname in sorted(wanted):
        kind, decorated, numbers = definitions[qualname]
        body = textwrap.dedent('\n'.join(file_lines[n - 1] for n in numbers)).split('\n')
        sources[qualname] = Source(
            symbol=f'{module}:{qualname}',
            path=path,
            lines=tuple((n, line.rstrip()) for n, line in zip(numbers, body, strict=True)),
            kind=kind,
            decorated=decorated,
        )
    return sources


class _Definition(NamedTuple):
    """What is kept of a definition; the syntax trees of all of upstream's files weigh 20 MB."""

    kind: str
    decorated: bool
    line_numbers: list[int]


@functools.lru_cache(maxsize=32)
def _parse(path: Path, _modified: int) -> tuple[list[str], Mapping[str, _Definition]]:
    """Lines of a file, and its definitions; of one that is made several times, all lines and the last kind."""
    with tokenize.open(path) as file:
        text = file.read().replace('\r\n', '\n').replace('\r', '\n')
    definitions: dict[str, _Definition] = {}
    for qualname, node, span in _definitions(ast.parse(text)):
        before = definitions[qualname].line_numbers if qualname in definitions else []
        decorated = bool(getattr(node, 'decorator_list', ()))
        definitions[qualname] = _Definition(_kind(node), decorated, [*before, *span])
    return text.split('\n'), definitions


def _kind(node: ast.stmt) -> str:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return 'variable'
    return 'class' if isinstance(node, ast.ClassDef) else 'function'


def _selects(name: str, qualname: str, definitions: Mapping[str, _Definition]) -> bool:
    if name == '*':
        return definitions[qualname].kind != 'variable'
    if f'{name}.<class>' in definitions:
        return qualname.split('.')[0] == name
    return qualname == name


def _span(node: ast.stmt) -> list[int]:
    decorators = getattr(node, 'decorator_list', [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return list(range(first, (node.end_lineno or node.lineno) + 1))


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, list[int]]]:
    """Yields (qualname, node, line numbers) of functions, classes, methods and module variables."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for top in tree.body:
        pending: list[ast.stmt] = [top]
        while pending:
            node = pending.pop(0)
            if isinstance(node, functions):
                yield node.name, node, _span(node)
            elif isinstance(node, ast.ClassDef):
                inside: set[int] = set()
                for child in node.body:
                    if isinstance(child, functions):
                        inside.update(_span(child))
                        yield f'{node.name}.{child.name}', child, _span(child)
                yield f'{node.name}.<class>', node, [n for n in _span(node) if n not in inside]
            elif isinstance(node, ast.If | ast.Try | ast.With):
                nested = [*node.body, *getattr(node, 'orelse', ())]
                for handler in getattr(node, 'handlers', ()):
                    nested.extend(handler.body)
                pending.extend([*nested, *getattr(node, 'finalbody', ())])
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield target.id, node, _span(node)


def collect(
    reliances: Iterable[Reliance] = RELIED_UPON, path: Sequence[str] | None = None
) -> dict[str, Source]:
    """Sources of all symbols of the table that are there, by ``module:qualname``."""
    found: dict[str, Source] = {}
    for reliance in reliances:
        file = locate(reliance.module, path)
        if file is not None and file.suffix == '.py':
            for source in read_symbols(reliance.module, file, reliance.names).values():
                found[source.symbol] = source
    return found


def describe(value: Any) -> str:
    """What something is and where it comes from, for messages."""
    if value is MISSING:
        return 'nothing'
    plain = getattr(value, '__func__', value)
    name = getattr(plain, '__qualname__', None) or type(plain).__qualname__
    text = f'{getattr(plain, "__module__", "?")}.{name}'
    code = getattr(plain, '__code__', None)
    return f'{text} ({code.co_filename}:{code.co_firstlineno})' if code is not None else text


def live_state(value: Any, source: Source) -> str:
    """How an object in memory relates to the source it should come from.

    Returns:
        ``same``; ``wrapped``, when somebody put a wrapper around it that calls it; or ``replaced``.
    """
    if source.kind == 'variable':  # meant to be set
        return 'same'
    module_name, _, qualname = source.symbol.partition(':')
    qualname = qualname.removesuffix('.<class>')
    if isinstance(value, type):
        same = value.__module__ == module_name and value.__qualname__ == qualname
        return 'same' if same else 'replaced'
    functions = list(_functions_within(value))
    here = [f for f in functions if _comes_from(f.__code__, source, qualname)]
    if not here:
        return 'replaced'
    return 'same' if here[0] is functions[0] or source.decorated else 'wrapped'


def _comes_from(code: types.CodeType, source: Source, qualname: str) -> bool:
    return (
        code.co_qualname == qualname
        and source.first_line <= code.co_firstlineno <= source.last_line
        and _real_path(code.co_filename) == _real_path(str(source.path))
    )


@functools.cache
def _real_path(path: str) -> Path:
    return Path(path).resolve()


def _functions_within(value: Any) -> Iterator[types.FunctionType]:
    """A function and those that it wraps, as far as closures and ``__wrapped__`` tell."""
    pending, seen = [value], set[int]()
    while pending:
        item = pending.pop(0)
        if isinstance(item, property):
            pending.extend((item.fget, item.fset, item.fdel))
        item = getattr(item, '__func__', item)
        if not isinstance(item, types.FunctionType) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        pending.append(vars(item).get('__wrapped__'))
        for cell in item.__closure__ or ():
            try:
                pending.append(cell.cell_contents)
            except ValueError:
                continue

"""A source cut into statements, and how alike two of them are. Pure. Upstream has no counterpart."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_buffer.reference.upstream_source import Line, Piece

_NOISE = {'self', 'Any', 'torch', 'None', 'True', 'False'}


class Chunk(NamedTuple):
    """A statement, or the head of a compound one, with the comments above it."""

    lines: tuple[Line, ...]
    node: str
    normal: str
    tokens: Counter[str]
    parent: int | None
    calls: frozenset[str]


def chunks_of(piece: Piece) -> list[Chunk]:
    """Cuts a source into statements; together they hold all of its lines."""
    lines = piece.lines
    try:
        tree = ast.parse(piece.text)
    except SyntaxError:  # a variable that is set in two places
        return [Chunk(lines, 'Assign', piece.text, Counter(), None, frozenset())]
    made: list[Chunk] = []
    cursor = 0

    def add(node: ast.stmt, end: int, heads: Sequence[ast.AST], parent: int | None) -> int:
        nonlocal cursor
        end = max(end, cursor + 1)
        made.append(_chunk(node, lines[cursor:end], heads, parent))
        cursor = end
        return len(made) - 1

    def walk(body: Iterable[ast.stmt], parent: int | None) -> None:
        for node in body:
            inner = list(_bodies(node))
            if not inner or inner[0][0].lineno == node.lineno:
                add(node, node.end_lineno or node.lineno, [node], parent)
                continue
            end = _first_line(inner[0][0]) - 1
            while end > node.lineno and _is_filler(lines[end - 1][1]):
                end -= 1
            index = add(node, end, list(_heads(node)), parent)
            for part in inner:
                walk(part, index)

    walk(tree.body, None)
    if cursor < len(lines) and made:
        made[-1] = made[-1]._replace(lines=made[-1].lines + lines[cursor:])
    return made


def _chunk(
    node: ast.stmt, lines: tuple[Line, ...], heads: Sequence[ast.AST], parent: int | None
) -> Chunk:
    inside = [child for head in heads for child in ast.walk(head)]
    is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return Chunk(
        lines=lines,
        node='doc' if is_doc else type(node).__name__,
        normal=' '.join(ast.unparse(head) for head in heads),
        tokens=Counter(name for child in inside for name in _names(child) if name not in _NOISE),
        parent=parent,
        calls=frozenset(ast.unparse(child.func) for child in inside if isinstance(child, ast.Call)),
    )


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword) and node.arg:
        yield node.arg
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).split('.')[-1]
    elif isinstance(node, ast.Global):
        yield from node.names
    elif isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
        text = str(node.value)
        if ' ' not in text and len(text) < 50:
            yield text


def _heads(node: ast.stmt) -> Iterator[ast.AST]:
    """What stands before the colon of a compound statement."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from node.decorator_list
        yield ast.FunctionDef(
            name=node.name,
            args=node.args,
            body=[ast.Pass(lineno=0, col_offset=0)],
            decorator_list=[],
            returns=None,
            type_params=[],
            lineno=0,
            col_offset=0,
        )
    elif isinstance(node, ast.ClassDef):
        yield from [*node.bases, *node.decorator_list]
    elif isinstance(node, ast.If | ast.While):
        yield node.test
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield from (node.target, node.iter)
    elif isinstance(node, ast.With | ast.AsyncWith):
        yield from node.items


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement, in order."""
    parts: list[list[ast.stmt]] = [getattr(node, 'body', [])]
    parts += [handler.body for handler in getattr(node, 'handlers', [])]
    parts += [getattr(node, name, []) for name in ('orelse', 'finalbody')]
    yield from (part for part in parts if part)


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, 'decorator_list', []))])


def _is_filler(text: str) -> bool:
    return not text.strip() or text.lstrip().startswith('#')


def likeness(a: Chunk, b: Chunk) -> float:
    """How alike two statements are, from 0 to 1, by the names in them."""
    if a.node == 'doc' or b.node == 'doc':
        return float(a.node == b.node)
    if a.normal == b.normal:
        return 1.0
    if a.node == b.node == 'ClassDef':
        return 0.9
    total = a.tokens.total() + b.tokens.total()
    if total == 0:
        return 0.0
    value = 2 * (a.tokens & b.tokens).total() / total
    return value if a.node == b.node else 0.7 * value

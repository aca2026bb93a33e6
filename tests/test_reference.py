"""The mapping of upstream's symbols to ours: complete, true, and every difference has a reason."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_buffer.config import AXES, BufferConfig
from megatron_buffer.patching import fingerprints
from megatron_buffer.patching.targets import RELIED_UPON, TARGETS
from megatron_buffer.reference.align import align, match
from megatron_buffer.reference.catalog import entries
from megatron_buffer.reference.mapping import Difference, Entry, load_mapping
from megatron_buffer.reference.statements import chunks_of
from megatron_buffer.reference.upstream_source import Piece, read_piece
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parent.parent
MAPPING = load_mapping()
NEWEST = fingerprints.find_core().version_tuple >= (0, 19)
HERE = [e for e in MAPPING.values() if read_piece(e.symbol) is not None]
CASES = [pytest.param(entry, id=entry.name) for entry in HERE]


def ours_of(entry: Entry) -> list[Piece]:
    return [piece for name in entry.ours if (piece := read_piece(f'megatron_buffer.{name}'))]


def test_every_replaced_name_is_mapped() -> None:
    for target in TARGETS:
        symbols = {target.symbol, f'{target.symbol}.<class>'} & set(MAPPING)
        assert symbols, f'{target.symbol} is replaced, but is not in the mapping'
        entry = MAPPING[symbols.pop()]
        assert entry.relation != 'observed'
        assert (target.replacement or target.wrapper) == f'megatron_buffer.{entry.ours[0]}'


def test_every_mapped_symbol_is_upstream_s() -> None:
    missing = [e.symbol for e in MAPPING.values() if read_piece(e.symbol) is None]
    absent = {
        e.symbol
        for e in MAPPING.values()
        if e.since and fingerprints.find_core().version_tuple < tuple(map(int, e.since.split('.')))
    }
    if fingerprints.find_core().training_path is None:
        absent |= {symbol for symbol in MAPPING if symbol.startswith('megatron.training')}
    if not NEWEST:  # where it stands in the body of another function
        absent.add('megatron.training.training:resolve_ddp_bucket_size')
    assert set(missing) <= absent


@pytest.mark.parametrize('entry', [pytest.param(e, id=e.name) for e in MAPPING.values()])
def test_what_an_entry_says_exists(entry: Entry) -> None:
    assert len(ours_of(entry)) == len(entry.ours), f'of {entry.ours} some are not there'
    faults = (ROOT / 'docs' / 'faults.md').read_text()
    for difference in entry.differences:
        assert not difference.fault or re.search(rf'[(\s]{difference.fault}[,)]', faults)
        axis, _, key = difference.config.partition('.')
        assert not axis or axis in AXES or axis in ('checks', 'checkpoint'), difference.config
        if key:
            fields = {f.name for f in dataclasses.fields(getattr(BufferConfig(), axis))}
            assert key in fields, difference.config
        assert difference.why.endswith('.'), 'a sentence'
    assert (entry.relation == 'observed') == (not entry.ours)


@pytest.mark.parametrize('entry', CASES)
def test_the_relation_is_what_the_code_does(entry: Entry) -> None:
    if entry.symbol.endswith('.<class>') or not entry.ours:
        return
    main = ours_of(entry)[0]
    calls_super = 'super' in {call for chunk in chunks_of(main) for call in chunk.calls}
    if entry.relation == 'extends':
        assert calls_super
    elif entry.relation in ('replaces', 'strategy'):
        allowed = any(difference.kind == 'super' for difference in entry.differences)
        assert allowed or not calls_super, f'{main.symbol} calls super(), and no difference says so'
    if entry.relation in ('extends', 'wraps', 'calls'):
        upstream = read_piece(entry.symbol)
        assert upstream is not None
        rows = align(entry, upstream, ours_of(entry))
        assert any(row.change == 'runs' and row.right for row in rows), 'where it runs is not found'


@pytest.mark.parametrize('entry', CASES)
def test_every_marker_is_in_the_code(entry: Entry) -> None:
    """A stale marker would leave statements without their reason."""
    upstream = read_piece(entry.symbol)
    assert upstream is not None
    theirs = {name for chunk in chunks_of(upstream) for name in chunk.tokens}
    own = {name for piece in ours_of(entry) for chunk in chunks_of(piece) for name in chunk.tokens}
    for difference in entry.differences:
        if difference.upstream and NEWEST:
            assert theirs & set(difference.upstream), f'upstream has none of {difference.upstream}'
        if difference.ours:
            assert own & set(difference.ours), f'ours has none of {difference.ours}'


@pytest.mark.skipif(not NEWEST, reason='older sources have statements of their own')
@pytest.mark.parametrize('entry', CASES)
def test_every_statement_that_is_left_out_has_a_reason(entry: Entry) -> None:
    if entry.relation not in ('replaces', 'strategy') or entry.symbol.endswith('.<class>'):
        return
    upstream = read_piece(entry.symbol)
    assert upstream is not None
    for row in align(entry, upstream, ours_of(entry)):
        text = '\n'.join(line for _, line in row.left)
        bare = '\n'.join(x for x in text.split('\n') if x.strip() and not x.strip().startswith('#'))
        if row.change == 'gone' and not bare.strip().startswith(
            ('from ', 'import ', 'def ', 'else')
        ):
            assert (
                row.label is not None
            ), f'no difference of {entry.name} says why this is gone:\n{text}'


@pytest.mark.parametrize('entry', CASES)
def test_no_line_is_lost(entry: Entry) -> None:
    upstream = read_piece(entry.symbol)
    assert upstream is not None
    rows = align(entry, upstream, ours_of(entry)[:1])
    assert sorted(line for row in rows for line in row.left) == sorted(upstream.lines)
    shown = sorted(line for row in rows if row.change != 'moved' for line in row.right)
    assert shown == sorted(line for piece in ours_of(entry)[:1] for line in piece.lines)


def _overridden(rank: int, world_size: int) -> list[str]:
    """Every method of our classes that overrides one of upstream's, by upstream symbol."""
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup
    from megatron_buffer.buffer import ParamAndGradBuffer
    from megatron_buffer.ddp import DistributedDataParallel
    from megatron_buffer.optimizer import DistributedOptimizer

    found: set[str] = set()
    classes: list[Any] = [ParamAndGradBucketGroup, ParamAndGradBuffer]
    for cls in [*classes, DistributedDataParallel, DistributedOptimizer]:
        own = [c for c in cls.__mro__ if c.__module__.startswith('megatron_buffer.')]
        theirs = [c for c in cls.__mro__ if c.__module__.startswith('megatron.')]
        for name in {name for c in own for name in vars(c)}:
            if name.startswith('__') and name != '__init__':
                continue
            base = next((c for c in theirs if name in vars(c)), None)
            value = vars(base).get(name) if base is not None else None
            if base is not None and callable(getattr(value, '__func__', value)):
                found.add(f'{base.__module__}:{base.__qualname__}.{name}')
    return sorted(found)


def test_every_override_is_mapped() -> None:
    (found,) = run_ranks(_overridden, 1)
    assert len(found) > 25
    assert [s for s in found if s not in MAPPING or MAPPING[s].relation == 'observed'] == []


def test_everything_fingerprinted_is_listed() -> None:
    from megatron_buffer.patching.sources import collect

    assert set(collect(RELIED_UPON)) <= set(entries())


def test_nothing_of_upstream_is_in_the_mapping() -> None:
    """Names are; a marker that is more than a name would be source."""
    for entry in MAPPING.values():
        for difference in entry.differences:
            assert all(m.isidentifier() for m in (*difference.upstream, *difference.ours))


# ------------------------------------------------------------------------------ statements and rows


def piece(text: str) -> Piece:
    lines = tuple(enumerate(text.strip('\n').split('\n'), start=1))
    return Piece(symbol='m:f', path=Path('m.py'), lines=lines)


def test_statements_hold_every_line_and_the_comments_above_them() -> None:
    source = piece(
        'def f(a):\n    """Doc."""\n    # why\n    if a:\n        b = a\n\n    else:\n        # other\n'
        '        c = (\n            a\n        )\n    return b'
    )
    chunks = chunks_of(source)
    assert [chunk.node for chunk in chunks] == [
        *('FunctionDef', 'doc', 'If', 'Assign', 'Assign', 'Return')
    ]
    assert [line for chunk in chunks for line in chunk.lines] == list(source.lines)
    assert chunks[2].lines[0][1] == '    # why'
    assert chunks[4].parent == 2


def test_rows_of_a_body_written_anew() -> None:
    theirs = piece('def f(x):\n    alpha(x)\n    beta(gamma=x)\n    return delta(x)')
    own = piece('def f(x):\n    alpha(x)\n    extra(x, y)\n    return delta(x)')
    entry = Entry(
        symbol='m:f',
        relation='replaces',
        summary='s',
        differences=(
            Difference(kind='fix', why='w', upstream=('gamma',)),
            Difference(kind='error', why='w', ours=('extra',)),
        ),
    )
    rows = align(entry, theirs, [own])
    assert [(row.change, row.label) for row in rows] == [
        *(('same', None), ('same', None), ('gone', 0), ('new', 1), ('same', None))
    ]


@given(st.lists(st.sampled_from('abcd'), max_size=8), st.lists(st.sampled_from('abcd'), max_size=8))
def test_matching_keeps_the_order_of_both_sides(left: list[str], right: list[str]) -> None:
    def chunks(names: list[str]) -> Any:
        return chunks_of(piece('\n'.join(f'{name}()' for name in names))) if names else []

    pairs = match(chunks(left), chunks(right))
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(pairs))
    common = max(
        (n for n in range(min(len(left), len(right)) + 1) if _has_common(left, right, n)), default=0
    )
    assert len(pairs) == common


def _has_common(left: list[str], right: list[str], length: int) -> bool:
    """Whether a sequence of that length is in both, tried out one by one."""
    ours = set(itertools.combinations(right, length))
    return any(part in ours for part in itertools.combinations(left, length))


def test_the_sources_parse() -> None:
    for entry in HERE:
        for one in ours_of(entry):
            ast.parse(one.text)

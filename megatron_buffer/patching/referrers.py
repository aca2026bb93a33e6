"""Who else holds an original: what the sweep of ``holders.py`` can't exchange, in words.

The garbage collector lists everything that refers to an object, running frames list their local
variables. What remains once the sweep's holders, our own modules and the object's own machinery (its
mro, its methods' ``super()`` cells, annotations) are taken away keeps using stock Megatron-Core after
``install()``. That is reported: by ``doctor`` beforehand, by ``install()`` as a warning.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_buffer.patching.holders import Edit, Pairs, is_own, namespace, type_of

_MACHINERY = (
    *(types.FrameType, types.GenericAlias, types.UnionType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.WrapperDescriptorType),
    type(functools.cache(len)),  # typing keeps what it was given
)
_ANONYMOUS = (list, tuple, dict, set, frozenset, types.CellType)
_MAX_DEPTH = 4


class _Trail:
    """How a holder without a name is reached, followed outwards one level at a time."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.matters = True
        self.ends: dict[int, tuple[Any, str]] = {}

    def extend(self, holder: Any, held: Any, prefix: str) -> None:
        """Takes in somebody who refers to an end of the trail (at first, to the old object)."""
        text = _describe(holder, held)
        if text is None:
            self.ends[id(holder)] = holder, f'{prefix}a {type(holder).__name__} in '
        elif text == '':
            self.matters = False
        elif self.text is None:
            self.text = prefix + text


def find_unreachable(pairs: Pairs, edits: Iterable[Edit]) -> list[str]:
    """Describes holders of old objects that no edit covers.

    Args:
        pairs: As in :func:`~megatron_buffer.patching.holders.find_holders`.
        edits: What that function found (applied or not).
    """
    olds = [old for old, _ in pairs.values()]
    covered = _covered(pairs, edits) | {id(olds)}
    trails: list[_Trail] = []
    stock_objects: dict[type, int] = {}
    for holder in gc.get_referrers(*olds):
        kind = type_of(holder)
        if id(holder) in covered or issubclass(kind, type):
            continue
        if any(kind is old for old in olds):
            stock_objects[kind] = stock_objects.get(kind, 0) + 1
            continue
        referents = {id(r) for r in gc.get_referents(holder)}
        held = next((old for old in olds if id(old) in referents), None)
        trails.append(_Trail())
        trails[-1].extend(holder, held, '')
    for _ in range(_MAX_DEPTH):
        _follow(trails)
    found = dict.fromkeys(t.text for t in trails if t.matters and t.text is not None)
    for kind, count in stock_objects.items():
        found[f'{count} living object(s) of stock {kind.__module__}.{kind.__qualname__}'] = None
    found.update(dict.fromkeys(_local_variables({id(old) for old in olds})))
    return list(found)


def _follow(trails: list[_Trail]) -> None:
    """Extends all trails by one level, with one pass over the heap."""
    open_trails = [t for t in trails if t.matters and t.text is None and t.ends]
    ends = [(trail, trail.ends) for trail in open_trails]
    by_id: dict[int, list[tuple[_Trail, Any, str]]] = {}
    for trail, held in ends:
        for key, (holder, prefix) in held.items():
            by_id.setdefault(key, []).append((trail, holder, prefix))
        trail.ends = {}
    holders = [entries[0][1] for entries in by_id.values()]
    if not holders:
        return
    own = {id(holders), *(id(entry) for entries in by_id.values() for entry in entries)}
    own.update(id(pair) for _, held in ends for pair in held.values())
    for owner in gc.get_referrers(*holders):
        if id(owner) in own or isinstance(owner, types.FrameType):
            continue
        for referent in {id(r): r for r in gc.get_referents(owner)}.values():
            for trail, holder, prefix in by_id.get(id(referent), ()):
                trail.extend(owner, holder, prefix)


def _covered(pairs: Pairs, edits: Iterable[Edit]) -> set[int]:
    """Ids of what may refer to an old object: the sweep's holders, and the object's own machinery."""
    covered = {id(pairs), *(id(pair) for pair in pairs.values())}
    for edit in edits:
        covered.update((id(edit.slot.container), id(edit.old), id(edit.new)))
    for old, _ in pairs.values():
        if isinstance(old, type):
            for kind in (old, *_all_subclasses(old)):
                covered.update((id(kind.__mro__), id(kind.__bases__)))
            for member in vars(old).values():
                covered.update(_super_cells(member))
    return covered


def _all_subclasses(kind: type) -> Iterator[type]:
    for sub in type.__subclasses__(kind):
        yield sub
        yield from _all_subclasses(sub)


def _super_cells(member: Any) -> set[int]:
    """Ids of the ``__class__`` cells of a method, decorated or not."""
    pending, seen, cells = [getattr(member, '__func__', member)], set[int](), set[int]()
    if isinstance(member, property):
        pending = [member.fget, member.fset, member.fdel]
    while pending:
        function = pending.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if name == '__class__':
                cells.add(id(cell))
            else:
                try:
                    pending.append(cell.cell_contents)
                except ValueError:
                    continue
    return cells


def _describe(holder: Any, held: Any) -> str | None:
    """Names a holder; '' if it doesn't matter, None if only those who hold it can tell."""
    kind = type_of(holder)
    if issubclass(kind, _MACHINERY) or kind.__module__ == 'typing' or is_own(kind.__module__):
        return ''
    if kind is types.FunctionType:
        if is_own(holder.__globals__.get('__name__')) or _annotates(holder, held):
            return ''
        return f'{holder.__module__}:{holder.__qualname__}'
    if issubclass(kind, type):
        return '' if is_own(holder.__module__) else f'{holder.__module__}:{holder.__qualname__}'
    if issubclass(kind, types.ModuleType):
        name = (namespace(holder) or {}).get('__name__')
        return '' if is_own(name) else str(name)
    if kind is dict and isinstance(holder.get('__name__'), str) and '__builtins__' in holder:
        keys = [str(key) for key, value in list(holder.items()) if value is held]
        name = holder['__name__']
        return '' if is_own(name) or keys == ['__annotations__'] else f'{name}:{", ".join(keys)}'
    if issubclass(kind, _ANONYMOUS):
        return None
    return f'a {kind.__module__}.{kind.__qualname__} object'


def _annotates(function: types.FunctionType, held: Any) -> bool:
    if held is function.__defaults__ or held is function.__kwdefaults__:
        return False
    if isinstance(held, tuple):  # CPython keeps annotations as a tuple until somebody asks
        return held is not function.__closure__
    return isinstance(held, dict) and held is not vars(function)


def _local_variables(olds: set[int]) -> Iterator[str]:
    """Local variables of all running functions (frames are not visible to the collector)."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    for frame in frames.values():
        at: types.FrameType | None = frame
        while at is not None:
            if at.f_locals is not at.f_globals and not is_own(at.f_globals.get('__name__')):
                for name, value in list(at.f_locals.items()):
                    if id(value) in olds:
                        code = at.f_code
                        yield (
                            f'local variable {name!r} of {code.co_qualname} '
                            f'({code.co_filename}:{at.f_lineno})'
                        )
            at = at.f_back

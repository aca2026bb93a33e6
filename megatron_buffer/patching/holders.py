"""Finds everything that holds an object: by identity, under any name, wherever Python lets us write.

``find_holders`` walks ``sys.modules``: module variables, functions (defaults, keyword defaults,
closure cells), classes (attributes, and the bases of subclasses), partials, and lists, dicts, sets
and tuples two levels deep. It returns edits: where, what is there, what goes there instead. Nothing
is changed until an edit is applied. Who else holds the object is found by ``referrers.py`` and can
only be reported.

Our own modules are left alone: they keep the originals that they subclass and call. So are
annotations: they decide nothing, and a subclass passes any check made from them.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any

OWN_PACKAGE = 'megatron_buffer'
MISSING: Any = types.SimpleNamespace(nothing='there')

BASES_SUFFIX = ' (bases)'

_MAX_LEVEL = 2
_MAX_ITEMS = 10_000
_SHALLOW_ROOTS = frozenset(sys.stdlib_module_names) | {
    *('torch', 'torchgen', 'numpy', 'sympy', 'networkx', 'mpmath', 'triton', 'cuda', 'scipy'),
    *('pandas', 'matplotlib', 'setuptools', 'pkg_resources', 'pytest', '_pytest', 'pluggy'),
    *('hypothesis', 'pydantic', 'pydantic_core', 'rich', 'yaml', 'jinja2'),
}
"""Large general packages: their module variables are compared, but their functions, classes and
containers are not looked into. Anything deeper there shows up as unreachable."""

_SKIPPED_NAMES = frozenset({'__annotations__', '__builtins__', '__orig_bases__', '__dict__'}) | {
    *('__annotate__', '__annotate_func__', '__annotations_cache__')
}
_LEAVES = (str, int, float, bytes, types.NoneType, types.ModuleType, types.BuiltinFunctionType)
_CONSTANTS: Any = (tuple, frozenset)
_HOLDERS: Any = (
    types.FunctionType,
    type,
    list,
    dict,
    set,
    *_CONSTANTS,
    functools.partial,
    dataclasses.Field,
)
METHOD_WRAPPERS: Any = (staticmethod, classmethod)
_FUNCTIONS_IN: Mapping[type, tuple[str, ...]] = {
    staticmethod: ('__func__',),
    classmethod: ('__func__',),
    types.MethodType: ('__func__',),
    property: ('fget', 'fset', 'fdel'),
    functools.cached_property: ('func',),
}

type Pairs = Mapping[int, tuple[Any, Any]]
"""id(old) -> (old, new)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A place that can be read and written."""

    where: str
    """``module:name`` and how to get from there to the place."""
    container: Any
    """The object that refers to what is held, as the garbage collector sees it."""
    read: Callable[[], Any]
    write: Callable[[Any], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Edit:
    """An exchange of what a slot holds."""

    slot: Slot
    old: Any
    new: Any
    optional: bool = False
    """True where Python may refuse (the bases of a class): reported, not an error."""

    def holds(self, value: Any) -> bool:
        """Whether the slot now holds this very object, or a sequence of these very objects."""
        return _same(self.slot.read(), value)

    def apply(self) -> None:
        self.slot.write(self.new)

    def revert(self) -> bool:
        """Puts the old object back, unless somebody has put something else there since."""
        if not self.holds(self.new):
            return False
        self.slot.write(self.old)
        return True


type_of: Callable[[Any], Any] = type
"""``type()``, for values of which nothing is known."""


def _same(a: Any, b: Any) -> bool:
    kind = type_of(a)
    if a is b:
        return True
    if kind is not type(b) or not issubclass(kind, list | tuple | frozenset):
        return False
    if issubclass(kind, frozenset):
        return {id(x) for x in a} == {id(x) for x in b}
    return len(a) == len(b) and all(x is y or _same(x, y) for x, y in zip(a, b, strict=True))


def item_slot(container: Any, key: Any, where: str) -> Slot:
    """An item of a dict (a module's namespace among them) or a list."""

    def read() -> Any:
        try:
            return container[key]
        except (KeyError, IndexError):
            return MISSING

    return Slot(where, container, read, functools.partial(container.__setitem__, key))


def class_slot(owner: type, name: str, where: str) -> Slot:
    """An attribute in a class's own ``__dict__``: static and class methods stay what they are."""
    return Slot(
        where,
        owner,
        lambda: vars(owner).get(name, MISSING),
        functools.partial(type.__setattr__, owner, name),
    )


def attribute_slot(owner: Any, name: str, where: str) -> Slot:
    """A plain attribute: defaults of a function, contents of a cell, a dataclass field's default."""
    return Slot(where, owner, lambda: getattr(owner, name), functools.partial(setattr, owner, name))


def _bases_slot(owner: type, where: str) -> Slot:
    def write(bases: Any) -> None:
        owner.__bases__ = bases
        for base in owner.__mro__:
            if isinstance(base, ABCMeta):  # negative isinstance answers are cached there
                getattr(base, '_abc_caches_clear', lambda: None)()

    return Slot(where, owner, lambda: owner.__bases__, write)


def _partial_slot(owner: functools.partial[Any], where: str) -> Slot:
    def write(state: Any) -> None:
        function, args, names, values = state
        keywords = dict(zip(names, values, strict=True))
        owner.__setstate__((function, args, keywords, vars(owner) or None))  # type: ignore[attr-defined]

    return Slot(where, owner, lambda: _partial_state(owner), write)


def _partial_state(owner: functools.partial[Any]) -> tuple[Any, ...]:
    return owner.func, owner.args, tuple(owner.keywords), tuple(owner.keywords.values())


def _contents_slot(container: Any, where: str) -> Slot:
    """The members of a set, or the items of a dict one of whose keys is exchanged."""

    def read() -> Any:
        is_dict = issubclass(type_of(container), dict)
        return tuple(container.items()) if is_dict else frozenset(container)

    def write(contents: Any) -> None:
        container.clear()
        container.update(contents)

    return Slot(where, container, read, write)


def namespace(module: object) -> dict[str, Any] | None:
    """A module's variables, without triggering a lazy module's import or ``__getattr__``."""
    try:
        found: Any = object.__getattribute__(module, '__dict__')
    except Exception:
        return None
    return found if issubclass(type_of(found), dict) else None


def is_own(module_name: object) -> bool:
    """Whether this is the name of one of our modules."""
    return isinstance(module_name, str) and _root(module_name) == OWN_PACKAGE


def _is_shallow(module_name: object) -> bool:
    return not isinstance(module_name, str) or _root(module_name) in _SHALLOW_ROOTS


@functools.cache
def _root(module_name: str) -> str:
    return module_name.partition('.')[0]


class _Inspected(dict[type, bool]):
    """By type: whether its values are looked at; those of others could only be an old object themselves."""

    def __missing__(self, kind: type) -> bool:
        # issubclass() of type(), not isinstance(), which asks value.__class__: lazy proxies act on that
        holds = issubclass(kind, _HOLDERS) or kind in _FUNCTIONS_IN
        self[kind] = holds and not issubclass(kind, _LEAVES)
        return self[kind]


_class_dict: Callable[[type], Mapping[str, Any]] = type.__dict__['__dict__'].__get__


class _Sweep:
    """One walk through everything that is loaded."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.edits: list[Edit] = []
        self.entered = {id(new) for _, new in pairs.values()}
        self.rebuilt: dict[int, tuple[Any, Any]] = {}
        self.inspected = _Inspected()

    def run(self) -> list[Edit]:
        namespaces: set[int] = set()
        for module_name, module in list(sys.modules.items()):
            names = namespace(module)
            if names is None or id(names) in namespaces:
                continue
            if is_own(module_name) or is_own(names.get('__name__')):
                continue
            namespaces.add(id(names))
            if _is_shallow(module_name):
                self.variables(module_name, names)
                continue
            for name, value in self.worth_a_visit(names):
                if name not in _SKIPPED_NAMES:
                    self.visit(value, item_slot, names, name, (module_name, ':', name), 0)
        self.subclasses()
        return self.edits

    def variables(self, module_name: str, names: dict[str, Any]) -> None:
        """Exchanges a module's variables, and doesn't look inside them."""
        if self.pairs.keys().isdisjoint(map(id, names.values())):
            return
        for name, value in list(names.items()):
            if id(value) in self.pairs:
                self.place(value, item_slot, names, name, (module_name, ':', name))

    def worth_a_visit(self, names: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        """The items that are to be exchanged, or can hold something that is; most can not."""
        items = list(names.items())  # at once: another thread may be importing
        return [(key, value) for key, value in items if self.may_hold(value)]

    def may_hold(self, value: Any) -> bool:
        """Whether a value is to be exchanged, or is of a type that can hold what is."""
        return self.inspected[type_of(value)] or id(value) in self.pairs

    def visit(
        self, value: Any, slot: Callable[..., Slot], owner: Any, key: Any, where: Any, level: int
    ) -> None:
        """Exchanges a value where it is held, and looks inside it."""
        if self.may_hold(value):
            self.place(value, slot, owner, key, where)
            self.enter(value, where, level)

    def place(
        self, value: Any, slot: Callable[..., Slot], owner: Any, key: Any, where: Any
    ) -> None:
        new = self.exchange(value, 0)
        if new is not value:
            self.edits.append(Edit(slot(owner, key, _join(where)), value, new))

    def exchange(self, value: Any, level: int) -> Any:
        """What takes a value's place: itself, unless it is an old object or a constant made of one."""
        pair = self.pairs.get(id(value))
        if pair is not None:
            return pair[1]
        if id(value) in self.rebuilt:
            return self.rebuilt[id(value)][1]
        kind = type_of(value)
        new = value
        if kind is types.FunctionType or kind is type:  # most of what is asked about
            return value
        if issubclass(kind, _CONSTANTS):
            if level < _MAX_LEVEL and len(value) <= _MAX_ITEMS:
                items = [self.exchange(item, level + 1) for item in value]
                if any(a is not b for a, b in zip(items, value, strict=True)):
                    new = getattr(kind, '_make', kind)(items)
        elif kind in METHOD_WRAPPERS:
            function = self.exchange(value.__func__, level)
            new = value if function is value.__func__ else kind(function)
        elif kind is types.MethodType:
            bound = [self.exchange(value.__func__, level), self.exchange(value.__self__, level)]
            if not _same(bound, [value.__func__, value.__self__]):
                new = types.MethodType(*bound)
        elif kind is property:
            functions = [value.fget, value.fset, value.fdel]
            exchanged = [self.exchange(f, level) for f in functions]
            if not _same(functions, exchanged):
                new = property(*exchanged, doc=value.__doc__)
        if new is not value:
            self.rebuilt[id(value)] = value, new
        return new

    def enter(self, value: Any, where: Any, level: int) -> None:
        """Visits what a value holds."""
        kind = type_of(value)
        if kind is types.FunctionType:
            self.function(value, where)
        elif issubclass(kind, type):
            self.class_(value)
        elif issubclass(kind, list | dict | set | tuple | frozenset):
            if level < _MAX_LEVEL and 0 < len(value) <= _MAX_ITEMS and self.is_new(value):
                self.container(value, where, level)
        elif issubclass(kind, functools.partial):
            if self.is_new(value):
                self.partial(value, where, level)
        elif kind in _FUNCTIONS_IN:
            for name in _FUNCTIONS_IN[kind]:
                self.enter(getattr(value, name), where, level)
        elif kind is dataclasses.Field:
            for name in ('default', 'default_factory'):
                held = getattr(value, name)
                self.visit(held, attribute_slot, value, name, (*where, '.', name), level + 1)

    def is_new(self, value: Any) -> bool:
        if id(value) in self.entered:
            return False
        self.entered.add(id(value))
        return True

    def container(self, value: Any, where: Any, level: int) -> None:
        kind = type_of(value)
        if issubclass(kind, tuple | frozenset):
            for item in value:
                if self.inspected[type_of(item)]:
                    self.enter(item, where, level + 1)
        elif kind.__module__ not in ('builtins', 'collections'):
            return  # a subclass may do anything when it is written to
        elif issubclass(kind, dict):
            if any(id(key) in self.pairs for key in value):
                old = tuple(value.items())
                new = tuple((self.exchange(k, 0), self.exchange(v, 0)) for k, v in old)
                self.edits.append(Edit(_contents_slot(value, _join(where)), old, new))
                return
            for key, item in self.worth_a_visit(value):
                self.visit(item, item_slot, value, key, (*where, '[', key, ']'), level + 1)
        elif issubclass(kind, set):
            old, new = frozenset(value), frozenset(self.exchange(item, 0) for item in value)
            if not _same(old, new):
                self.edits.append(Edit(_contents_slot(value, _join(where)), old, new))
        else:
            for i, item in enumerate(list(value)):
                self.visit(item, item_slot, value, i, (*where, '[', i, ']'), level + 1)

    def function(self, function: types.FunctionType, where: Any) -> None:
        defaults, keywords = function.__defaults__, function.__kwdefaults__
        cells = function.__closure__ or ()
        if not (defaults or keywords or cells) or not self.is_new(function):
            return
        made_in = function.__globals__.get('__name__')
        if is_own(made_in) or (_is_shallow(made_in) and _is_shallow(function.__module__)):
            return
        if defaults and any(map(self.may_hold, defaults)):
            label = (*where, ' (defaults)')
            self.visit(defaults, attribute_slot, function, '__defaults__', label, 0)
        for name, value in self.worth_a_visit(keywords) if keywords else ():
            self.visit(value, item_slot, keywords, name, (*where, ' (', name, '=)'), 0)
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if name == '__class__':  # super() in the original's own methods stands on it
                continue
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            label = (*where, ' (closure ', name, ')')
            self.visit(value, attribute_slot, cell, 'cell_contents', label, 0)

    def class_(self, owner: type) -> None:
        if not self.is_new(owner):
            return
        attributes = _class_dict(owner)
        module_name = attributes.get('__module__')
        if is_own(module_name) or _is_shallow(module_name):
            return
        for name, value in self.worth_a_visit(attributes):
            if name not in _SKIPPED_NAMES:
                label = (module_name, ':', owner.__qualname__, '.', name)
                self.visit(value, class_slot, owner, name, label, 0)

    def partial(self, value: functools.partial[Any], where: Any, level: int) -> None:
        old = _partial_state(value)
        function, args, names, values = old
        values_now = tuple(self.exchange(v, 0) for v in values)
        new = (self.exchange(function, 0), self.exchange(args, 0), names, values_now)
        if not _same(old, new):
            self.edits.append(Edit(_partial_slot(value, _join(where)), old, new))
        for held in (function, args, *values):
            self.enter(held, where, level + 1)

    def subclasses(self) -> None:
        done: set[type] = set()
        for old, new in self.pairs.values():
            if not isinstance(old, type):
                continue
            for sub in type.__subclasses__(old):
                has_it = issubclass(sub, new) and not issubclass(old, new)
                if sub is new or sub in done or has_it or is_own(sub.__module__):
                    continue
                done.add(sub)
                bases = tuple(self.exchange(base, 0) for base in sub.__bases__)
                where = f'{sub.__module__}:{sub.__qualname__}{BASES_SUFFIX}'
                slot = _bases_slot(sub, where)
                self.edits.append(Edit(slot, sub.__bases__, bases, optional=True))


def _join(where: Any) -> str:
    return ''.join(map(str, where))


def find_holders(pairs: Pairs) -> list[Edit]:
    """Edits that put the new object wherever an old one is held.

    Args:
        pairs: id(old) -> (old, new); compared by identity, names don't matter.
    """
    return _Sweep(pairs).run()

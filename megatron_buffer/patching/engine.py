"""Replaces and restores, as one transaction: all of it happens, or nothing does.

resolve -> check conflicts -> list holders -> mutate -> verify; any failure restores what was already
changed, last first. :class:`Transaction` works on any targets table and knows nothing of Megatron.
The gate in front of it, and the config that it installs, are in ``lifecycle.py``.

Modules imported after ``commit()`` take the replacement from the defining modules, without our doing;
``revert()`` therefore sweeps for the *replacements* too, instead of trusting its own list.
"""

from __future__ import annotations

import ast
import gc
import importlib
import logging
import sys
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_buffer.errors import PatchError
from megatron_buffer.patching.holders import (
    BASES_SUFFIX,
    METHOD_WRAPPERS,
    MISSING,
    OWN_PACKAGE,
    Edit,
    Slot,
    class_slot,
    find_holders,
    is_own,
    item_slot,
    namespace,
    type_of,
)
from megatron_buffer.patching.referrers import find_unreachable
from megatron_buffer.patching.sources import describe, live_state, read_symbols
from megatron_buffer.patching.targets import Target

logger = logging.getLogger(__name__)

_MAX_SWEEPS = 3


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A target whose defining module is imported."""

    target: Target
    slot: Slot
    """The name in the defining module or class; reads the raw value, static methods included."""
    original: Any
    replacement: Any


def _import(module_name: str, for_what: str) -> types.ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        raise PatchError(
            f'{for_what}: importing {module_name} failed with {type(error).__name__}: {error}. '
            "'megatron-buffer doctor' says more"
        ) from error


def _attribute(path: str, for_what: str) -> Any:
    module_name, _, name = path.partition(':')
    found = vars(_import(module_name, for_what)).get(name, MISSING)
    if found is MISSING:
        raise PatchError(f'{for_what}: {module_name} has no {name}')
    return found


def defining_slot(target: Target) -> Slot:
    """The place where a target's name is defined.

    The module comes from ``import_module``, never from attributes along a dotted path (a function may
    shadow its own submodule), and values come from ``vars``: ``getattr`` would unwrap static methods.

    Raises:
        PatchError: If the module can't be imported or a class on the way isn't there.
    """
    owner: Any = _import(target.module, target.symbol)
    *classes, name = target.qualname.split('.')
    for class_name in classes:
        owner = vars(owner).get(class_name)
        if not isinstance(owner, type):
            raise PatchError(f'{target.symbol}: {target.module} has no class {class_name}')
    if isinstance(owner, type):
        return class_slot(owner, name, target.symbol)
    return item_slot(namespace(owner), name, target.symbol)


class Transaction:
    """Everything that one ``install()`` changes.

    Args:
        targets: What is replaced.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = tuple(targets)
        self.resolved: list[Resolved] = []
        self.edits: list[Edit] = []
        """What was changed, in order."""
        self.unreachable: list[str] = []
        self.sweep_seconds = 0.0
        self._deliberate: set[tuple[str, int]] = set()
        self._replacements_were_loaded = False

    def prepare(self) -> None:
        """Resolves the targets and checks for conflicts; changes nothing.

        Raises:
            PatchError: If a target isn't there, or isn't upstream's any more.
        """
        slots = [(target, defining_slot(target)) for target in self.targets]
        for target, slot in slots:
            _check_conflict(target, slot.read())
        self._replacements_were_loaded = any(
            t.replacement.partition(':')[0] in sys.modules for t in self.targets
        )
        # only now: our classes subclass whatever is in memory when their modules are imported
        self.resolved = [
            Resolved(
                target=target,
                slot=slot,
                original=slot.read(),
                replacement=_replacement(target, slot.read()),
            )
            for target, slot in slots
        ]
        for one in self.resolved:
            _check_lineage(one)

    def holders(self) -> list[Edit]:
        """Everybody who holds an original now, other than the defining names."""
        defining = {_place(one.slot) for one in self.resolved}
        return [e for e in self._sweep(self._pairs()) if _place(e.slot) not in defining]

    def find_unreachable(self, edits: Iterable[Edit]) -> list[str]:
        """Holders that can only be reported, given the edits that cover the others."""
        return find_unreachable(self._pairs(), [*self._defining_edits(), *edits])

    def commit(self) -> None:
        """Puts the replacements everywhere.

        Raises:
            PatchError: If that can't be done; nothing is changed then.
        """
        if self._replacements_were_loaded:  # somebody may hold them on purpose
            self._deliberate = {_place(e.slot) for e in self._sweep(self._reverse_pairs())}
        holders = self.holders()
        try:
            for edit in self._defining_edits():
                self._apply(edit)
            for _ in range(_MAX_SWEEPS):  # another thread may be importing meanwhile
                for edit in holders:
                    self._apply(edit)
                holders = [e for e in self.holders() if not e.optional]
                if not holders:
                    break
            self._verify(holders)
            self._report_others()
        except BaseException as error:
            _roll_back(self.edits)
            self.edits = []
            if isinstance(error, PatchError) or not isinstance(error, Exception):
                raise
            raise PatchError(f'nothing was changed: {type(error).__name__}: {error}') from error

    def check_revertible(self) -> None:
        """Makes sure that the defining names are still as ``commit()`` left them.

        Raises:
            PatchError: Naming the place and what is there now.
        """
        for one in self.resolved:
            now = one.slot.read()
            if now is not one.replacement:
                raise PatchError(
                    f'cannot uninstall: {one.target.symbol} is {describe(now)} now, set by somebody '
                    f'else after install(), which put {describe(one.replacement)} there; undo that '
                    'change first'
                )

    def revert(self) -> None:
        """Restores every holder, those that were imported since included.

        Raises:
            PatchError: If somebody else changed a defining name since; nothing is changed then.
        """
        self.check_revertible()
        kept = {_place(e.slot) for e in self.edits if e.holds(e.new)} | self._deliberate
        later = [
            edit
            for edit in self._sweep(self._reverse_pairs())
            if _place(edit.slot) not in kept and not _taken_from_us(edit)
        ]
        done: list[Edit] = []
        try:
            for edit in later:
                _apply_where_possible(edit, done, self.unreachable)
            for edit in reversed(self.edits):
                if edit.revert():
                    done.append(Edit(edit.slot, edit.new, edit.old))
        except BaseException as error:
            _roll_back(done)
            if not isinstance(error, Exception):
                raise
            raise PatchError(f'cannot uninstall: {type(error).__name__}: {error}') from error
        logger.debug('restored %d holders, %d of them made after install()', len(done), len(later))
        self.edits = []

    def _pairs(self) -> dict[int, tuple[Any, Any]]:
        pairs: dict[int, tuple[Any, Any]] = {}
        for one in self.resolved:
            for old, new in _faces(one.original, one.replacement):
                pairs[id(old)] = (old, new)
        return pairs

    def _reverse_pairs(self) -> dict[int, tuple[Any, Any]]:
        return {id(new): (new, old) for old, new in self._pairs().values()}

    def _sweep(self, pairs: dict[int, tuple[Any, Any]]) -> list[Edit]:
        start = time.perf_counter()
        edits = find_holders(pairs)
        self.sweep_seconds = time.perf_counter() - start
        return edits

    def _defining_edits(self) -> list[Edit]:
        return [Edit(one.slot, one.original, one.replacement) for one in self.resolved]

    def _apply(self, edit: Edit) -> None:
        _apply_where_possible(edit, self.edits, self.unreachable)

    def _report_others(self) -> None:
        try:
            self.unreachable += self.find_unreachable(self.edits)
        except Exception:  # a report must not undo what works
            logger.debug('could not list other holders', exc_info=True)

    def _verify(self, remaining: list[Edit]) -> None:
        if remaining:
            where = ', '.join(edit.slot.where for edit in remaining)
            raise PatchError(f'these do not keep what was put there: {where}')
        for edit in self.edits:
            if not edit.holds(edit.new):
                raise PatchError(f'{edit.slot.where} does not keep what was put there')


def _place(slot: Slot) -> tuple[str, int]:
    return slot.where, id(slot.container)


def _roll_back(edits: list[Edit]) -> None:
    for edit in reversed(edits):
        try:
            edit.revert()
        except Exception:  # go on: one holder must not keep the others from being restored
            logger.exception('could not restore %s', edit.slot.where)


def _apply_where_possible(edit: Edit, done: list[Edit], unreachable: list[str]) -> None:
    """Applies an edit and records it; an optional one that Python refuses is recorded as unreachable."""
    if edit.optional:
        living = _instances_of(edit.slot.container)
        if living:
            unreachable.append(f'{edit.slot.where}: {living} living object(s) keep it as it is')
            return
    try:
        edit.apply()
    except TypeError as error:
        if not edit.optional:
            raise
        unreachable.append(f'{edit.slot.where}: {error}')
        return
    done.append(edit)


def _instances_of(kind: type) -> int:
    kinds, pending = {kind}, [kind]
    while pending:
        subs = [s for s in type.__subclasses__(pending.pop()) if s not in kinds]
        kinds.update(subs)
        pending.extend(subs)
    return sum(type(item) in kinds for item in gc.get_objects())


def _faces(original: Any, replacement: Any) -> Iterator[tuple[Any, Any]]:
    """The raw object and, for a static or class method, the function inside it."""
    yield original, replacement
    if type_of(original) in METHOD_WRAPPERS:
        yield original.__func__, replacement.__func__


def _check_conflict(target: Target, value: Any) -> None:
    """Refuses a name that isn't upstream's any more; a wrapper may be wrapped once more."""
    if value is MISSING:
        raise PatchError(
            f'{target.symbol} is not there: this version of the package has no such name'
        )
    origin = getattr(getattr(value, '__func__', value), '__module__', None)
    scope = getattr(value, '__globals__', {}).get('__name__')
    if is_own(origin) or is_own(scope):
        raise PatchError(
            f'{target.symbol} is already ours ({describe(value)}), but not by this install(): another '
            f'thread is inside a constructor of ours, or {OWN_PACKAGE} was loaded twice'
        )
    file = getattr(sys.modules[target.module], '__file__', None)
    name = f'{target.qualname}.<class>' if isinstance(value, type) else target.qualname
    found = read_symbols(target.module, Path(file), [target.qualname]) if file else {}
    if name not in found:
        raise PatchError(f'{target.symbol}: no definition of it in {file}')
    state = live_state(value, found[name])
    if state == 'same' or (state == 'wrapped' and target.wrapper):
        return
    raise PatchError(
        f'{target.symbol} is {describe(value)}, not what {file} defines: somebody else has replaced '
        'it. Call install() before them, or undo their change'
    )


def _replacement(target: Target, original: Any) -> Any:
    if target.wrapper:
        new = _attribute(target.wrapper, target.symbol)(getattr(original, '__func__', original))
    else:
        new = _attribute(target.replacement, target.symbol)
    kind = type_of(original)
    if kind in METHOD_WRAPPERS and type_of(new) is not kind:
        return kind(new)
    return new


def _check_lineage(one: Resolved) -> None:
    if isinstance(one.original, type) and not (
        isinstance(one.replacement, type) and issubclass(one.replacement, one.original)
    ):
        raise PatchError(
            f'{one.target.symbol}: {describe(one.replacement)} does not subclass the class that is '
            f'loaded; was {one.target.module} reloaded?'
        )


def _taken_from_us(edit: Edit) -> bool:
    """Whether a holder names our class on purpose, and so is meant to keep it.

    That is a variable imported from our package, or a class whose statement derives from one.
    """
    module_name, _, name = edit.slot.where.removesuffix(BASES_SUFFIX).partition(':')
    file = getattr(sys.modules.get(module_name), '__file__', None)
    if file is None or not name.isidentifier():
        return False
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    ours: set[str] = set()
    wanted = {name}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and is_own(node.module):
            ours.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (a.asname or a.name.partition('.')[0] for a in node.names if is_own(a.name))
            ours.update(names)
        elif isinstance(node, ast.ClassDef) and edit.optional and node.name == name:
            wanted = {ast.unparse(base).partition('.')[0] for base in node.bases}
    return bool(ours & wanted)

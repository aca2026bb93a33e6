"""The one list of everything that CPU mode replaces, so that it can be undone exactly.

No other module of the package writes into ``torch`` or ``megatron``: they all go through
:meth:`Ledger.replace`. Upstream has no counterpart.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

logger = logging.getLogger('megatron_buffer.cpu')

_ABSENT = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacement:
    """One attribute that CPU mode has replaced."""

    owner: Any
    """Module, class or object whose attribute was replaced."""

    name: str
    """Name of the attribute."""

    original: Any
    """What the owner's own namespace held (a staticmethod object stays one)."""

    was_present: bool
    """False when the attribute was inherited: undoing then deletes it from the owner."""

    value: Any
    """What is there now."""

    reason: str
    """Which Megatron (or torch) symbol needs it."""

    @property
    def target(self) -> str:
        """Dotted name of the attribute, for messages."""
        owner = self.owner
        if isinstance(owner, types.ModuleType):
            return f'{owner.__name__}.{self.name}'
        if isinstance(owner, type):
            return f'{owner.__module__}.{owner.__qualname__}.{self.name}'
        return f'{type(owner).__qualname__} object.{self.name}'


class Ledger:
    """Replaces attributes and puts every one of them back, last in, first out."""

    def __init__(self) -> None:
        self.replacements: list[Replacement] = []
        self._undo_steps: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, value: Any, reason: str) -> None:
        """Sets ``owner.name`` to ``value``; a name that this version lacks is left alone."""
        if not hasattr(owner, name):
            return
        namespace = vars(owner)
        was_present = name in namespace
        original = namespace[name] if was_present else getattr(owner, name)
        replacement = Replacement(
            owner=owner,
            name=name,
            original=original,
            was_present=was_present,
            value=value,
            reason=reason,
        )
        setattr(owner, name, value)
        self.replacements.append(replacement)
        self._undo_steps.append(lambda: _put_back(replacement))

    def on_undo(self, step: Callable[[], None]) -> None:
        """Remembers something other than an attribute that has to be undone."""
        self._undo_steps.append(step)

    def redirect_holders(self) -> None:
        """Gives loaded modules that hold an original by value the replacement.

        For modules imported before: ``from torch.distributed import _coalescing_manager`` binds the
        object, not the name. torch's own modules keep what they have.
        """
        pairs = {id(r.original): r.value for r in self.replacements if _can_be_held(r.original)}
        for module, name, value in _module_values(skip='torch'):
            if id(value) in pairs and pairs[id(value)] is not value:
                self.replace(module, name, pairs[id(value)], 'holds the original by value')

    def undo(self) -> None:
        """Restores everything, also in modules that were imported meanwhile."""
        values = {id(r.value): r.original for r in self.replacements if _can_be_held(r.value)}
        keep_alive = [r.value for r in self.replacements]
        while self._undo_steps:
            self._undo_steps.pop()()
        self.replacements.clear()
        # Modules imported while the mode was on may hold a replacement by value.
        for module, name, value in _module_values():
            if id(value) in values:
                setattr(module, name, values[id(value)])
        del keep_alive


def _put_back(replacement: Replacement) -> None:
    owner, name = replacement.owner, replacement.name
    current = vars(owner).get(name, _ABSENT)
    if current is not replacement.value:
        logger.warning(
            '%s was changed by somebody else while CPU mode was on; the original is put back',
            replacement.target,
        )
    if replacement.was_present:
        setattr(owner, name, replacement.original)
    elif current is not _ABSENT:
        delattr(owner, name)


def _can_be_held(value: Any) -> bool:
    """Functions and classes are recognised by identity; shared constants such as () are not."""
    return callable(value) and not isinstance(value, types.ModuleType)


def _module_values(skip: str = '') -> list[tuple[types.ModuleType, str, Any]]:
    """Every (module, name, callable value) that is loaded, without triggering lazy attributes."""
    found: list[tuple[types.ModuleType, str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType):
            continue
        if skip and (module_name == skip or module_name.startswith(skip + '.')):
            continue
        if module_name.startswith(__name__.rpartition('.')[0]):
            continue  # our own wrappers keep the originals that they call
        found += [
            (module, key, value) for key, value in list(vars(module).items()) if callable(value)
        ]
    return found

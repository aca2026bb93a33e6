"""What a parameter without a gradient means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from megatron_buffer.errors import ReadinessError

if TYPE_CHECKING:
    from megatron_buffer.strategies.unused import Window


@dataclass(frozen=True, kw_only=True)
class TolerateParams:
    """Some parameters may be without a gradient, all others may not."""

    name: Literal['tolerate'] = 'tolerate'
    may_be_unused: tuple[str, ...]


class Tolerate:
    """Zeros are reduced for parameters that match; any other one stops the run."""

    Params = TolerateParams
    on_late = 'reduce'
    tracks_forward = 'never'

    def __init__(self, params: TolerateParams) -> None:
        self.params = params

    def patterns(self) -> list[tuple[str, str]]:
        return [(f'may_be_unused[{i}]', p) for i, p in enumerate(self.params.may_be_unused)]

    def check(self, windows: Sequence[Window]) -> None:
        unused = [name for window in windows for name in window.unused()]
        wrong = [name for name in unused if not self._tolerated(name)]
        if wrong:
            raise ReadinessError(f'these parameters must get a gradient: {", ".join(wrong)}')

    def _tolerated(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.params.may_be_unused)

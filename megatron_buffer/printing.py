"""What commands print with, and the exit codes they end with. Upstream has no counterpart."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

OK, FOUND_SOMETHING, BAD_INPUT = 0, 1, 2


def plain_console() -> Console:
    """A console of the terminal's width; a table in a file or a pipe gets one at which it can be read."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=120)


def print_json(data: Any, default: Callable[[Any], Any] | None = None) -> None:
    """What ``--json`` prints; ``default`` is json's, for what it has no form for."""
    json.dump(data, sys.stdout, indent=2, default=default)
    sys.stdout.write('\n')

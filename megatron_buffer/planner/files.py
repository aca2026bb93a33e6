"""The files that a command writes: beforehand is said what would prevent them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_buffer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def check_file(option: str, path: str) -> None:
    """Says beforehand what would keep a file from being written.

    Raises:
        ConfigError: If its folder does not exist, or it is a folder itself.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigError(f'{option} {path}: there is no folder {folder}')
    if os.path.isdir(path):
        raise ConfigError(f'{option} {path}: this is a folder; give the name of a file')
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f'{option} {path}: may not be written')


def say_written(path: str, console: Console) -> None:
    """One line about a file that is there now."""
    console.print(f'wrote {path}', markup=False, highlight=False, soft_wrap=True)

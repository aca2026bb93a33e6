"""Takes values of the kinds that a sweep file needs out of YAML; what is wrong is noted, with its path.

Used by :mod:`megatron_buffer.ablation.read_sweep`. Upstream has no counterpart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_buffer.config_problems import Problems, found, what_to_write
from megatron_buffer.config_yaml import YamlPath, did_you_mean
from megatron_buffer.errors import ConfigError

_OURS = ('custom-buffer', 'use-custom-buffer')
_NESTED_PROBLEM = re.compile(r'  (?:line (\d+): )?(?:([a-z_]+(?:\.\w+|\[\d+\])*): )?(.+)')


class Values(Problems):
    """The problems of a sweep file, and readers that note them."""

    def __init__(self, source: str, lines: Mapping[YamlPath, int]) -> None:
        super().__init__(source, lines)
        self.source = source
        self.lines = lines

    def raise_if_any(self) -> None:
        """Raises one error with all problems so far, in the order of the file."""
        try:
            super().raise_if_any()
        except ConfigError as error:
            text = str(error).replace('in this config\n', 'in this sweep\n', 1)
            raise ConfigError(text, yaml_path=error.yaml_path, source=error.source) from None

    def add_nested(self, path: YamlPath, error: ConfigError) -> None:
        """Notes the problems of a config that the sweep contains, under the path of the config."""
        first, *rest = str(error).split('\n')
        for line in rest or [first]:
            match = _NESTED_PROBLEM.fullmatch(line)
            number, inner, text = match.groups() if match else (None, '', line.strip())
            keys = [int(k) if k.isdigit() else k for k in re.findall(r'\w+', inner or '')]
            self.add((*path, *keys), text, int(number) if number else None)

    def mapping(
        self, path: YamlPath, value: Any, known: Iterable[str] | None = None, what: str = 'key'
    ) -> dict[str, Any]:
        """A mapping with text keys, of which those not ``known`` are problems; {} after null."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.add(path, f'found {found(value)}, expected a mapping')
            return {}
        good: dict[str, Any] = {}
        names = None if known is None else tuple(known)
        for key, item in value.items():
            if not isinstance(key, str):
                self.add_bad_key((*path, key))
            elif names is not None and key not in names:
                hint = did_you_mean(key, names)
                self.add((*path, key), f'unknown {what}.{hint} Valid: {", ".join(names)}')
            else:
                good[key] = item
        return good

    def integer(self, path: YamlPath, value: Any, default: int, least: int = 1) -> int:
        """An integer of at least ``least``."""
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            expected = f'an integer >= {least}'
            advice = what_to_write(value, expected)
            self.add(
                path, f'found {found(value)}, expected {expected}{"; " * bool(advice)}{advice}'
            )
            return default
        return value

    def number(self, path: YamlPath, value: Any) -> float | None:
        """A number that is not negative; YAML takes 1e-3 for text, which is meant as one too."""
        try:
            number = math.nan if isinstance(value, bool | None) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            self.add(path, f'found {found(value)}, expected a number >= 0')
            return None
        return number

    def text(self, path: YamlPath, value: Any, default: str = '') -> str:
        """Text."""
        if value is None:
            return default
        if not isinstance(value, str):
            self.add(path, f'found {found(value)}, expected text; put it in quotes')
            return default
        return value.strip()

    def one_of(self, path: YamlPath, value: Any, names: tuple[str, ...]) -> str:
        """One of ``names``, the first by default."""
        if value is None:
            return names[0]
        if value not in names:
            hint = did_you_mean(value, names) if isinstance(value, str) else ''
            self.add(path, f'found {found(value)}, expected {" or ".join(map(repr, names))}.{hint}')
            return names[0]
        return value

    def flags(self, path: YamlPath, value: Any) -> dict[str, Any]:
        """Flags of a script by name, without ``--``."""
        good: dict[str, Any] = {}
        for key, item in self.mapping(path, value).items():
            name = key.removeprefix('--')
            items = item if isinstance(item, list) else [item]
            if name.replace('_', '-').startswith(_OURS):
                self.add((*path, key), 'this flag is set by the sweep itself: arms say the config')
            elif not name or name.startswith('-') or ' ' in name:
                self.add((*path, key), 'expected the name of one flag, such as hidden-size')
            elif any(not isinstance(part, str | int | float | None) for part in items):
                self.add(
                    (*path, key),
                    f'found {found(item)}, expected text, a number, a list of these, true for a flag '
                    'without a value, or false to leave the flag out',
                )
            else:
                good[name] = item
        return good

    def env(self, path: YamlPath, value: Any) -> dict[str, str]:
        """Environment variables; numbers become text."""
        good: dict[str, str] = {}
        for key, item in self.mapping(path, value).items():
            if not key or '=' in key or '\0' in key:
                self.add((*path, key), 'expected the name of an environment variable')
            elif isinstance(item, bool) or not isinstance(item, str | int | float):
                self.add((*path, key), f'found {found(item)}, expected text or a number')
            else:
                good[key] = str(item)
        return good

"""The arms of a sweep file: named ones, and those of a grid.

Used by :mod:`megatron_buffer.ablation.read_sweep`. Upstream has no counterpart.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_buffer.ablation.read_values import Values
from megatron_buffer.ablation.sweep import Arm
from megatron_buffer.config import AXES, BufferConfig, load_config, to_dict
from megatron_buffer.config_check import read_config
from megatron_buffer.config_problems import found
from megatron_buffer.config_yaml import Document, YamlPath, did_you_mean
from megatron_buffer.errors import ConfigError, RegistryError

STOCK = 'stock'
"""What a sweep file calls Megatron-Core without our buffer."""
ARM_KEYS = ('config', 'flags', 'env', 'about', 'against')
_CONFIG_KEYS = (*AXES, 'checkpoint', 'checks')
_MAX_ARMS = 1000


class _Value(NamedTuple):
    """One value of a grid's axis: what an arm with it is called, and what it changes."""

    name: str
    overlay: Mapping[str, Any]
    flags: Mapping[str, Any]
    env: Mapping[str, str]


class ArmReader:
    """Reads ``arms`` and ``grid``.

    Args:
        values: The sweep file's problems.
        base: The config that arms are laid over.
        folder: Of the sweep file.
    """

    def __init__(self, values: Values, base: BufferConfig, folder: Path) -> None:
        self._values, self._base, self._folder = values, base, folder

    def read(self, arms: Any, grid: Any) -> dict[str, Arm]:
        """The arms, named ones first."""
        so_far = len(self._values)
        read: dict[str, Arm] = {}
        for name, said in self._values.mapping(('arms',), arms).items():
            if self._is_good_name(('arms', name), name):
                read[name] = self._arm(name, said)
        for arm in self._grid(grid):
            if arm.name in read:
                self._values.add(('grid',), f'there is an arm {arm.name!r} already')
            read[arm.name] = arm
        if not read and len(self._values) == so_far:
            self._values.add(
                (),
                'there is nothing to run: give arms, or a grid such as {bucketing.bucket_size_elems: [1000, 2000]}',
            )
        return read

    def _is_good_name(self, path: YamlPath, name: str) -> bool:
        good = bool(name.strip()) and len(name) <= 100 and name.isprintable()
        if not good:
            self._values.add(path, 'expected a printable name of at most 100 characters')
        return good

    def _arm(self, name: str, said: Any) -> Arm:
        values = self._values
        path: YamlPath = ('arms', name)
        if isinstance(said, str):
            return Arm(name=name, config=self._config(path, said), flags={}, env={})
        said = values.mapping(path, said, (*ARM_KEYS, *_CONFIG_KEYS), 'key of an arm')
        overlay = {key: value for key, value in said.items() if key in _CONFIG_KEYS}
        config: BufferConfig | None = self._base
        if said.get('config') is not None:
            source = values.text((*path, 'config'), said['config'])
            config = self._config((*path, 'config'), source) if source else config
        if overlay and config is None:
            key = next(iter(overlay))
            values.add(
                (*path, key),
                'stock Megatron-Core has no such choice; leave it or config: stock out',
            )
        elif overlay:
            config = self._overlaid(path, config or self._base, overlay)
        return Arm(
            name=name,
            config=config,
            flags=values.flags((*path, 'flags'), said.get('flags')),
            env=values.env((*path, 'env'), said.get('env')),
            about=' '.join(values.text((*path, 'about'), said.get('about')).split()),
            against=values.text((*path, 'against'), said.get('against')),
        )

    def _config(self, path: YamlPath, source: str) -> BufferConfig | None:
        """A config by name or path; None for stock."""
        if source == STOCK:
            return None
        name = os.path.expanduser(source)
        inside = self._folder / name
        is_path = '/' in name or name.endswith(('.yaml', '.yml'))
        try:
            return load_config(str(inside) if is_path and inside.is_file() else name)
        except (ConfigError, RegistryError) as error:
            self._values.add(path, str(error))
            return self._base

    def _overlaid(
        self, path: YamlPath, base: BufferConfig, overlay: Mapping[str, Any]
    ) -> BufferConfig:
        """``base`` with the overlay's values; the problems of the result are noted under ``path``."""
        lines = {
            where[len(path) :]: line
            for where, line in self._values.lines.items()
            if where[: len(path)] == path
        }
        try:
            return overlaid(base, overlay, lines, self._values.source)
        except ConfigError as error:
            self._values.add_nested(path, error)
        except RegistryError as error:
            self._values.add(path, str(error))
        return self._base

    # ------------------------------------------------------------------ grid

    def _grid(self, grid: Any) -> list[Arm]:
        so_far = len(self._values)
        axes = [
            self._axis(key, said) for key, said in self._values.mapping(('grid',), grid).items()
        ]
        if not axes or len(self._values) > so_far:
            return []
        arms: list[Arm] = []
        for combination in itertools.product(*axes):
            name = ', '.join(value.name for value in combination)
            if len(arms) == _MAX_ARMS:
                self._values.add(('grid',), f'more than {_MAX_ARMS} arms; leave values out')
                return []
            overlay: dict[str, Any] = {}
            flags: dict[str, Any] = {}
            env: dict[str, str] = {}
            for value in combination:
                overlay = laid_over(overlay, value.overlay)
                flags.update(value.flags)
                env.update(value.env)
            try:
                config = overlaid(self._base, overlay, {}, self._values.source)
            except ConfigError as error:
                text = str(error).split('\n', 1)[-1].strip()
                self._values.add(('grid',), f'arm {name!r}: {text}')
                continue
            if self._is_good_name(('grid',), name):
                arms.append(Arm(name=name, config=config, flags=flags, env=env))
        return arms

    def _axis(self, key: str, said: Any) -> list[_Value]:
        path: YamlPath = ('grid', key)
        head, _, rest = key.partition('.')
        if head not in (*_CONFIG_KEYS, 'flags', 'env') or (head in ('flags', 'env') and not rest):
            hint = did_you_mean(head, (*_CONFIG_KEYS, 'flags', 'env'))
            self._values.add(
                path,
                f'unknown axis.{hint} Valid: an axis of the config ({", ".join(_CONFIG_KEYS)}), with or '
                'without .parameter, flags.NAME or env.NAME',
            )
            return []
        if isinstance(said, Mapping):
            items = [(str(name), (*path, name), value) for name, value in said.items()]
        elif isinstance(said, list):
            items = [(_value_name(key, value), (*path, i), value) for i, value in enumerate(said)]
        else:
            items = []
        if not items:
            self._values.add(
                path, f'found {found(said)}, expected a list of values, or a mapping of named ones'
            )
        names = [name for name, _, _ in items]
        for name, where, _ in items:
            if names.count(name) > 1:
                self._values.add(where, f'the value {name!r} is there twice')
                break
        return [self._value(name, where, key, value) for name, where, value in items]

    def _value(self, name: str, path: YamlPath, key: str, value: Any) -> _Value:
        head, _, rest = key.partition('.')
        if head == 'flags':
            return _Value(name, {}, self._values.flags(path, {rest: value}), {})
        if head == 'env':
            return _Value(name, {}, {}, self._values.env(path, {rest: value}))
        for part in reversed(rest.split('.') if rest else []):
            value = {part: value}
        # Alone first, so that a wrong value is said at its own place.
        lines: dict[YamlPath, int] = {(): self._values.lines.get(path, 0)}
        for where, line in self._values.lines.items():
            if where[: len(path)] == path:
                lines[(head, *(rest.split('.') if rest else ()), *where[len(path) :])] = line
        try:
            overlaid(self._base, {head: value}, lines, self._values.source)
        except ConfigError as error:
            text = str(error).split('\n', 1)[-1].strip()
            self._values.add(path, re.sub(r'^line \d+: ', '', text))
        except RegistryError as error:
            self._values.add(path, str(error))
        return _Value(name, {head: value}, {}, {})


def overlaid(
    base: BufferConfig, overlay: Mapping[str, Any], lines: Mapping[YamlPath, int], source: str
) -> BufferConfig:
    """A config with some of its values changed.

    Args:
        base: The config.
        overlay: Values in the shape of the YAML. A mapping with a ``name`` takes the place of the base's
            strategy; one without changes parameters of it.
        lines: Lines of the overlay's values.
        source: What to call it in messages.

    Raises:
        ConfigError: If the result is wrong.
    """
    data = to_dict(base)
    data.pop('schema_version')
    return read_config(Document(laid_over(data, overlay), lines, []), source, needs_version=False)


def laid_over(data: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with the overlay's values; a mapping without a name changes keys of the one that is there."""
    result = dict(data)
    for key, value in overlay.items():
        old = result.get(key)
        if isinstance(value, Mapping) and 'name' not in value and isinstance(old, Mapping):
            value = {**old, **value}
        result[key] = value
    return result


def _value_name(key: str, value: Any) -> str:
    last = key.rpartition('.')[2]
    if isinstance(value, Mapping) and 'name' in value:
        rest = ','.join(f'{k}={_short(v)}' for k, v in value.items() if k != 'name')
        return f'{value["name"]}({rest})' if rest else str(value['name'])
    if isinstance(value, str):
        return value if key in _CONFIG_KEYS else f'{last}={value}'
    return f'{last}={_short(value)}'


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    return str(value).replace(' ', '')

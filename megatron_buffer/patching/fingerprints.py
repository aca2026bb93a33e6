"""The gate: is the megatron-core that is installed here one whose sources we know?

A version string is only used in messages, since checkouts of the same sources report different ones
and forks report upstream's. What decides is the sha256 of the dedented source of every symbol in
``targets.RELIED_UPON``, against ``manifest.json``. The manifest holds no upstream text: per symbol one
digest, and per line a short hash, enough to show which lines of the *installed* source are new.

Nothing is imported for this: the gate works before (and without) an import of megatron or torch.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_buffer.errors import FingerprintError, UnsupportedVersionError
from megatron_buffer.patching.sources import LINE_HASH_CHARS, Source, locate
from megatron_buffer.patching.targets import CORE, RELIED_UPON, TRAINING, Reliance

MANIFEST_PATH = Path(__file__).with_name('manifest.json')
OLDEST = '0.18.2'
SUPPORTED = '>=0.18.2,<0.20,!=0.19.1'
COMPAT_HINT = "--custom-buffer-compat warn (Python: install(..., compat='warn'))"
_SHOWN_LINES = 12
_SHOWN_SYMBOLS = 12


class Manifest:
    """``manifest.json``: which source each symbol has in each version that we know."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.sources: Mapping[str, str] = data['sources']
        self.versions: dict[str, dict[str, str]] = {}
        for version, modules in data['versions'].items():
            if isinstance(modules, str):
                self.versions[version] = self.versions[modules]
            else:
                self.versions[version] = {
                    f'{module}:{qualname}': digest
                    for module, symbols in modules.items()
                    for qualname, digest in symbols.items()
                }

    @classmethod
    def load(cls, path: Path = MANIFEST_PATH) -> Manifest:
        return cls(json.loads(path.read_text(encoding='utf-8')))

    def line_hashes(self, digest: str) -> list[str]:
        joined = self.sources[digest]
        return [joined[i : i + LINE_HASH_CHARS] for i in range(0, len(joined), LINE_HASH_CHARS)]


def make_manifest(versions: Mapping[str, Mapping[str, Source]]) -> dict[str, Any]:
    """The data of ``manifest.json`` for the sources of each version."""
    data: dict[str, Any] = {'versions': {}, 'sources': {}}
    for version, sources in versions.items():
        modules: dict[str, dict[str, str]] = {}
        for symbol, source in sorted(sources.items()):
            module, qualname = symbol.split(':')
            modules.setdefault(module, {})[qualname] = source.sha256
            data['sources'][source.sha256] = ''.join(source.line_hashes)
        same = [v for v, known in data['versions'].items() if known == modules]
        data['versions'][version] = same[0] if same else modules
    data['sources'] = dict(sorted(data['sources'].items()))
    return data


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One symbol whose installed source is not the manifest's."""

    symbol: str
    kind: str
    """``changed``, ``new`` or ``missing``."""
    where: str = ''
    """``file:line`` of the installed source."""
    new_lines: tuple[tuple[int, str], ...] = ()
    """Lines of the installed source that the manifest's version doesn't have."""
    lost_lines: int = 0
    """How many of the manifest's lines are gone."""

    def __str__(self) -> str:
        what = {'changed': 'is changed', 'new': 'is new', 'missing': 'is missing'}[self.kind]
        text = [f'  {self.symbol} {what}' + (f' ({self.where})' if self.where else '')]
        text += [f'    {number:>5} | {line}' for number, line in self.new_lines[:_SHOWN_LINES]]
        if len(self.new_lines) > _SHOWN_LINES:
            text.append(f'          and {len(self.new_lines) - _SHOWN_LINES} more lines')
        if self.lost_lines:
            text.append(f'          known lines that are gone or replaced: {self.lost_lines}')
        return '\n'.join(text)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the comparison with the manifest found."""

    matching: tuple[str, ...]
    """Versions in the manifest whose sources are all the same as the installed ones."""
    nearest: str
    """The version of the manifest that most symbols agree with."""
    differences: tuple[Difference, ...]
    """Against ``nearest``; empty when ``matching`` is not."""

    def report(self) -> str:
        shown = [str(d) for d in self.differences[:_SHOWN_SYMBOLS]]
        if len(self.differences) > _SHOWN_SYMBOLS:
            shown.append(f'  and {len(self.differences) - _SHOWN_SYMBOLS} more symbols')
        return '\n'.join(shown)


def compare(
    sources: Mapping[str, Source],
    manifest: Manifest,
    reliances: Iterable[Reliance] = RELIED_UPON,
    version: str = '',
) -> Verdict:
    """Compares installed sources with every version of the manifest.

    Args:
        sources: From :func:`collect`.
        manifest: What we know.
        reliances: Only their modules are compared.
        version: Preferred as the nearest when several agree equally well.
    """
    modules = {r.module for r in reliances}
    installed = {s: x.sha256 for s, x in sources.items() if s.split(':')[0] in modules}
    scores: dict[str, tuple[int, bool]] = {}
    matching: list[str] = []
    known: dict[str, dict[str, str]] = {}
    for name, symbols in manifest.versions.items():
        known[name] = {s: d for s, d in symbols.items() if s.split(':')[0] in modules}
        scores[name] = (sum(installed.get(s) == d for s, d in known[name].items()), name == version)
        if known[name] == installed:
            matching.append(name)
    nearest = max(reversed(list(scores)), key=lambda name: scores[name])
    if matching:
        nearest = nearest if nearest in matching else matching[-1]
        return Verdict(matching=tuple(matching), nearest=nearest, differences=())
    differences = tuple(
        _difference(symbol, sources.get(symbol), known[nearest].get(symbol), manifest)
        for symbol in sorted({*installed, *known[nearest]})
        if installed.get(symbol) != known[nearest].get(symbol)
    )
    return Verdict(matching=(), nearest=nearest, differences=differences)


def _difference(
    symbol: str, source: Source | None, digest: str | None, manifest: Manifest
) -> Difference:
    if source is None:
        return Difference(symbol=symbol, kind='missing')
    where = f'{source.path}:{source.first_line}'
    if digest is None:
        return Difference(symbol=symbol, kind='new', where=where)
    before, after = manifest.line_hashes(digest), source.line_hashes
    new_lines: list[tuple[int, str]] = []
    lost_lines = 0
    for tag, i0, i1, j0, j1 in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        if tag != 'equal':
            new_lines.extend(source.lines[j0:j1])
            lost_lines += i1 - i0
    if new_lines:
        where = f'{source.path}:{new_lines[0][0]}'
    return Difference(
        symbol=symbol,
        kind='changed',
        where=where,
        new_lines=tuple(new_lines),
        lost_lines=lost_lines,
    )


@dataclass(frozen=True, kw_only=True)
class CoreInstall:
    """The megatron-core that an import would load."""

    path: Path | None
    """Folder ``megatron/core``; None when there is none."""
    version: str = ''
    """What ``package_info.py`` says."""
    kind: str = ''
    """``wheel`` (pip knows these files) or ``checkout``."""
    training_path: Path | None = None
    """Folder ``megatron/training``, if any."""

    @property
    def version_tuple(self) -> tuple[int, ...]:
        return tuple(int(p) for p in self.version.split('+')[0].split('.')[:3] if p.isdigit())


def find_core(path: Sequence[str] | None = None) -> CoreInstall:
    """Finds megatron-core without importing it."""
    init = locate('megatron.core', path)
    if init is None:
        return CoreInstall(path=None)
    folder = init.parent
    numbers: dict[str, Any] = {}
    info = folder / 'package_info.py'
    if info.is_file():
        for node in ast.parse(info.read_text(encoding='utf-8')).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    numbers[ast.unparse(target)] = node.value.value
    version = '.'.join(str(numbers.get(k, '?')) for k in ('MAJOR', 'MINOR', 'PATCH'))
    version += str(numbers.get('PRE_RELEASE', ''))
    kind = 'checkout'
    for distribution in importlib.metadata.distributions(name='megatron-core'):
        known = Path(cast('Any', distribution.locate_file('megatron/core/__init__.py')))
        if known.is_file() and known.resolve() == init.resolve():
            kind = 'wheel'
    training = locate('megatron.training', path)
    return CoreInstall(
        path=folder,
        version=version,
        kind=kind,
        training_path=training.parent if training is not None else None,
    )


def reliances_for(core: CoreInstall, training: bool) -> tuple[Reliance, ...]:
    """The part of the table that has to match here."""
    groups = [CORE, TRAINING] if training and core.training_path is not None else [CORE]
    return tuple(r for r in RELIED_UPON if r.group in groups)


def unsupported_reason(core: CoreInstall) -> str:
    """Why a version whose sources don't match can't be supported either; '' when it may be."""
    if core.path is None:
        return f"megatron-core is not installed in this Python ({sys.executable}); pip install 'megatron-core{SUPPORTED}'"
    version = core.version_tuple
    where = f'megatron-core {core.version} at {core.path} is not supported'
    advice = f"pip install 'megatron-core{SUPPORTED}'"
    if lacks_seams(core):
        return (
            f'{where}: layout and grouping are closures inside the constructor of '
            f'_ParamAndGradBuffer there, with nothing to take hold of, so nothing can override this; '
            f"{advice}. What has changed since: 'megatron-buffer diff --against {OLDEST} --list'"
        )
    if version < (0, 18, 2) or version >= (0, 20) or version == (0, 19, 1):
        return f'{where} (supported: {SUPPORTED}) and its sources are not those of a version that is; {advice}'
    return ''


def lacks_seams(core: CoreInstall) -> bool:
    """Whether no override can help: there is nothing there, or nothing to take hold of."""
    return core.path is None or core.version_tuple < (0, 18)


def check_gate(core: CoreInstall, verdict: Verdict) -> None:
    """Raises unless the sources match a version of the manifest.

    Raises:
        UnsupportedVersionError: Not installed, or a version without the seams we need.
        FingerprintError: A version in range whose sources we don't know.
    """
    if verdict.matching and core.path is not None:
        return
    reason = unsupported_reason(core)
    if reason and lacks_seams(core):
        raise UnsupportedVersionError(reason)
    if reason:
        raise UnsupportedVersionError(
            f'{reason}\nUnlike {verdict.nearest}:\n{verdict.report()}\n'
            f'To go on all the same: {COMPAT_HINT}.\n{how_to_proceed(core, verdict)}'
        )
    raise FingerprintError(fingerprint_message(core, verdict))


def fingerprint_message(core: CoreInstall, verdict: Verdict) -> str:
    """Names the symbols that differ, shows the installed lines, and says what can be done."""
    return (
        f'megatron-core {core.version} at {core.path}: the source of {len(verdict.differences)} '
        f'symbol(s) that we replace or rely upon is not one we know (nearest: {verdict.nearest}).\n'
        f'{verdict.report()}\n'
        f"Install a known version (pip install 'megatron-core{SUPPORTED}'), or read the lines above "
        f'and, if they do no harm, go on with {COMPAT_HINT}.\n{how_to_proceed(core, verdict)}'
    )


def how_to_proceed(core: CoreInstall, verdict: Verdict) -> str:
    """All symbols that differ, by module, and the command that says what of ours depends on each.

    The command does not have the script's folder on its path, which is how a checkout is mostly found.
    """
    command = f'megatron-buffer diff --against {verdict.nearest}'
    shown = f"'{command}'"
    if core.kind == 'checkout' and core.path is not None:
        shown = f'PYTHONPATH={shlex.quote(str(core.path.parents[1]))} {command}'
    modules: dict[str, list[str]] = {}
    for difference in verdict.differences:
        module, _, qualname = difference.symbol.partition(':')
        name = qualname.removesuffix('.<class>')
        kind = '' if difference.kind == 'changed' else f' ({difference.kind})'
        modules.setdefault(module.rpartition('.')[2], []).append(f'{name}{kind}')
    lines = [f'  {module}.py: {", ".join(names)}' for module, names in modules.items()]
    return '\n'.join(
        (
            f'Symbols that differ from {verdict.nearest}:',
            *lines,
            f'What of ours depends on each of them, and how to proceed: {shown}',
        )
    )

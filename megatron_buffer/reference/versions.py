"""How upstream's own symbols differ between the installed megatron-core and another version.

The other version's files come from a checkout, an unpacked wheel, a wheel, or the wheel that pip
downloads into a temporary folder. Upstream has no counterpart.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_buffer.errors import ConfigError
from megatron_buffer.patching.fingerprints import CoreInstall, find_core
from megatron_buffer.reference.mapping import Entry
from megatron_buffer.reference.upstream_source import Piece, read_piece

type Status = Literal['unchanged', 'changed', 'gone', 'new']

_DOWNLOAD_LIMIT_S = 300
_VERSION = re.compile(r'\d+(\.\d+)*((a|b|rc|\.dev|\.post)\d*)?(\+\w+)?')

HOW_TO_PROCEED: Mapping[str, str] = {
    'extends': 'Ours calls it through super(): read whether what ours does before and behind the call '
    'still belongs there, and whether arguments or attributes that it sets have changed.',
    'replaces': 'Its body is written anew here: bring the change over, or write down why not.',
    'strategy': "A strategy stands for it: bring the change over into the one that is upstream's choice, "
    'and compare layouts or traces with stock.',
    'wraps': 'Ours only wraps it: check the arguments that are passed on and what is returned.',
    'calls': 'Ours calls it: check the arguments, and what it reads from the model chunk.',
    'observed': 'It is used as it is: check that what ours relies upon still holds.',
}
"""Per relation, what a change of the upstream symbol asks for."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One symbol in both versions; ``older`` or ``newer`` is None where it is not there."""

    entry: Entry
    older: Piece | None
    newer: Piece | None

    @property
    def status(self) -> Status:
        """What became of it from the older version to the newer one."""
        if self.older is None:
            return 'new'
        if self.newer is None:
            return 'gone'
        same = _stripped(self.older) == _stripped(self.newer)
        return 'unchanged' if same else 'changed'

    def diff(self) -> list[str]:
        """Unified diff with three lines of context; without file headers."""
        lines = difflib.unified_diff(_stripped(self.older), _stripped(self.newer), lineterm='', n=3)
        return list(lines)[2:]

    @property
    def counts(self) -> tuple[int, int]:
        """Lines that went and that came."""
        diff = self.diff()
        return sum(x.startswith('-') for x in diff), sum(x.startswith('+') for x in diff)


def _stripped(piece: Piece | None) -> list[str]:
    return [] if piece is None else [text.rstrip() for _, text in piece.lines]


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Two versions of megatron-core and all symbols of either, older to newer.

    Attributes:
        older: Version of the older one, as its files say.
        newer: Version of the newer one.
        installed: Which of the two is installed.
        changes: By symbol.
        notes: What is worth knowing about the sources.
    """

    older: str
    newer: str
    installed: str
    changes: dict[str, Change]
    notes: tuple[str, ...] = ()


def compare_versions(
    installed: CoreInstall,
    other_root: Path,
    wanted: str,
    here: Mapping[str, Entry],
    there: Mapping[str, Entry],
) -> Versions:
    """Compares the installed sources with those below ``other_root``.

    Args:
        installed: The installed megatron-core.
        other_root: Folder that contains ``megatron/core``.
        wanted: The version that was asked for.
        here: Entries of the installed version.
        there: Entries of the other one.
    """
    root = [str(other_root)]
    other = find_core(root)
    notes: list[str] = []
    if other.version.split('+')[0] != wanted:
        notes.append(f'the files of {wanted} call themselves {other.version}')
    training = any(symbol.startswith('megatron.training') for symbol in there)
    if installed.training_path is not None and not training:
        notes.append(f'{wanted} has no megatron.training; its symbols are left out')
    installed_is_older = _sort_key(installed.version) <= _sort_key(other.version)
    changes: dict[str, Change] = {}
    for symbol in dict.fromkeys([*here, *there]):
        if symbol.startswith('megatron.training') and not training:
            continue
        ours = read_piece(symbol) if symbol in here else None
        theirs = read_piece(symbol, root) if symbol in there else None
        older, newer = (ours, theirs) if installed_is_older else (theirs, ours)
        entry = here.get(symbol) or there[symbol]
        changes[symbol] = Change(entry=entry, older=older, newer=newer)
    names = (installed.version, f'{wanted}')
    return Versions(
        older=names[0] if installed_is_older else names[1],
        newer=names[1] if installed_is_older else names[0],
        installed=installed.version,
        changes=changes,
        notes=tuple(notes),
    )


def _sort_key(version: str) -> tuple[tuple[int, ...], bool]:
    numbers = tuple(int(n) for n in re.findall(r'\d+', version.split('+')[0])[:3])
    return numbers, not re.search(r'[a-z]', version)


@contextlib.contextmanager
def sources_of(version: str, source: str | None) -> Iterator[Path]:
    """A folder with ``megatron/core`` of that version; what was unpacked is removed behind the block.

    Args:
        version: As pip knows it; with ``source`` only a label.
        source: A checkout, a folder with an unpacked wheel, or a wheel; None downloads the wheel.

    Raises:
        ConfigError: If there is no such thing.
    """
    with tempfile.TemporaryDirectory(prefix='megatron-buffer-diff-') as name:
        folder = Path(name)
        if source is None:
            yield _unpack(_download(version, folder), folder / 'unpacked')
            return
        path = Path(source).expanduser()
        if path.is_file() and path.suffix == '.whl':
            yield _unpack(path, folder / 'unpacked')
            return
        if not path.is_dir():
            raise ConfigError(
                f'--source {source}: no such folder or wheel; expected a Megatron-LM checkout, an '
                'unpacked wheel of megatron-core, or a .whl file'
            )
        if not (path / 'megatron' / 'core' / '__init__.py').is_file():
            raise ConfigError(
                f'--source {source}: there is no megatron/core in this folder; expected the top of a '
                'Megatron-LM checkout or of an unpacked wheel'
            )
        yield path.resolve()


def _unpack(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                n for n in archive.namelist() if n.startswith('megatron/') and n.endswith('.py')
            ]
            archive.extractall(folder, members)
    except zipfile.BadZipFile as error:
        raise ConfigError(f'{wheel} is not a wheel: {error}') from error
    if not (folder / 'megatron' / 'core' / '__init__.py').is_file():
        raise ConfigError(f'{wheel} has no megatron/core; expected a wheel of megatron-core')
    return folder


def _download(version: str, folder: Path) -> Path:
    if not _VERSION.fullmatch(version):
        raise ConfigError(
            f'--against {version!r} is no version number such as 0.19.2; for a branch or a commit give '
            '--source PATH too, a checkout of it'
        )
    wanted = f'megatron-core=={version}'
    command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--disable-pip-version-check']
    command += ['--no-deps', '--only-binary', ':all:', '--dest', str(folder), wanted]
    sys.stderr.write(f'downloading the wheel of {wanted} (pip download, a few MB)\n')
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_LIMIT_S
        )
        said = done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        said = [f'no answer within {_DOWNLOAD_LIMIT_S} s']
    wheels = sorted(folder.glob('*.whl'))
    if wheels:
        return wheels[0]
    raise ConfigError(
        f'the wheel of {wanted} cannot be had from pip: {_reason(said)}. Offline, or for a version that pip does not have, give --source PATH: a checkout of '
        'Megatron-LM, an unpacked wheel, or a .whl file'
    )


def _reason(said: Sequence[str]) -> str:
    """The last error of pip's, and which releases there are where it knows."""
    known = re.search(r'from versions: ([^)]*)', ' '.join(said))
    releases = [v for v in known[1].split(', ') if re.fullmatch(r'[\d.]+', v)] if known else []
    if releases:
        return f'it knows {", ".join(releases[-8:])}'
    errors = [line for line in said if line.startswith('ERROR')] or list(said)
    return errors[-1].removeprefix('ERROR: ') if errors else 'it said nothing'


def touched(versions: Versions, symbols: Sequence[str] | None) -> dict[str, Change]:
    """The changes that were asked for."""
    if symbols is None:
        return versions.changes
    return {symbol: versions.changes[symbol] for symbol in symbols if symbol in versions.changes}

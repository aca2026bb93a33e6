"""A checkout of Megatron-LM for its unit tests: is it the installed megatron-core, and which tests are in it.

Upstream has no counterpart.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_buffer.errors import ConfigError
from megatron_buffer.patching.fingerprints import CoreInstall, find_core
from megatron_buffer.patching.targets import RELIED_UPON, TARGETS

UNIT_TESTS = 'tests/unit_tests'

_FOLDERS = (f'{UNIT_TESTS}/distributed', f'{UNIT_TESTS}/optimizer')
_FILES = (
    f'{UNIT_TESTS}/test_optimizer.py',
    f'{UNIT_TESTS}/test_optimizer_cpu_offloading.py',
    f'{UNIT_TESTS}/test_lion_optimizer.py',
    f'{UNIT_TESTS}/test_wrap_model_chunks_with_ddp.py',
    f'{UNIT_TESTS}/test_layer_wise_optimizer.py',
    f'{UNIT_TESTS}/dist_checkpointing/test_optimizer.py',
)
# What only tests of buffers, their layouts and their groups write.
_LAYOUT_WORDS = ('param_layout', 'ParamLayout', 'ParamAndGradBuffer', 'partition_buckets')


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A checkout that may be tested against."""

    path: Path
    version: str
    """What its ``package_info.py`` says."""
    installed: CoreInstall
    other_files: tuple[str, ...]
    """Files that are unlike the installed ones and that we neither replace nor rely upon."""


def check_checkout(path: Path) -> Checkout:
    """Accepts a checkout whose sources are those of the installed megatron-core.

    Tags and wheels of the same sources report different patch levels, so major and minor version have to
    agree, and then the bytes of every module that we replace or rely upon.

    Raises:
        ConfigError: It is no checkout, or not the one for the installed megatron-core.
    """
    path = path.resolve()
    for needed in ('megatron/core/package_info.py', UNIT_TESTS):
        if not (path / needed).exists():
            raise ConfigError(
                f'{path} is not a checkout of Megatron-LM with its tests: {needed} is missing. Clone '
                'https://github.com/NVIDIA/Megatron-LM at the tag of the installed megatron-core'
            )
    installed, theirs = find_core(), find_core([str(path)])
    if installed.path is None:
        raise ConfigError(
            f'megatron-core is not installed in this Python ({sys.executable}); run scripts/setup.sh, or '
            'choose another one with --python'
        )
    if installed.path.is_relative_to(path):
        raise ConfigError(
            f'{path} shadows the installed megatron-core that it is to be compared with: run this from '
            'another folder and without it in PYTHONPATH'
        )
    which = (
        f'the checkout {path} is megatron-core {theirs.version}, and the one installed in '
        f'{sys.executable} is {installed.version}'
    )
    advice = (
        f'check out the tag of {installed.version}, or choose a Python that has {theirs.version}'
    )
    if theirs.version_tuple[:2] != installed.version_tuple[:2]:
        raise ConfigError(f'{which}: {advice}')
    differing = _differing_files(path, installed.path.parent.parent)
    ours = {t.module for t in TARGETS} | {r.module for r in RELIED_UPON}
    changed = [file for file in differing if _module_of(file) in ours]
    if changed:
        raise ConfigError(
            f'{which}, but {", ".join(changed)} {"is" if len(changed) == 1 else "are"} not the same: '
            f'{advice}; a patched or edited tree has to be reverted first'
        )
    return Checkout(
        path=path, version=theirs.version, installed=installed, other_files=tuple(differing)
    )


def find_tests(path: Path, pattern: str | None = None) -> list[str]:
    """Paths of the test files to run, relative to the checkout.

    Args:
        path: The checkout.
        pattern: Keeps those whose path contains this text, or matches it as a glob.

    Raises:
        ConfigError: Nothing is left.
    """
    files = {file for folder in _FOLDERS for file in (path / folder).rglob('test_*.py')}
    files |= {path / file for file in _FILES if (path / file).is_file()}
    for file in (path / UNIT_TESTS).rglob('test_*.py'):
        text = file.read_text(encoding='utf-8')
        if any(word in text for word in _LAYOUT_WORDS):
            files.add(file)
    found = sorted(str(file.relative_to(path)) for file in files)
    if pattern is None:
        return found
    kept = [f for f in found if pattern in f or fnmatch.fnmatchcase(f, pattern)]
    if not kept:
        names = ', '.join(f.removeprefix(f'{UNIT_TESTS}/') for f in found)
        raise ConfigError(f'--only {pattern} selects none of the test files: {names}')
    return kept


def missing_packages() -> list[str]:
    """Packages without which pytest, or nearly all of the tests, cannot run."""
    return [
        name for name in ('pytest', 'einops', 'psutil') if importlib.util.find_spec(name) is None
    ]


def _differing_files(checkout: Path, installed: Path) -> list[str]:
    """Python files of the installed ``megatron`` whose counterpart is missing or unlike."""
    differing: list[str] = []
    for package in ('core', 'training'):
        for file in sorted((installed / 'megatron' / package).rglob('*.py')):
            name = file.relative_to(installed)
            twin = checkout / name
            if not twin.is_file() or twin.read_bytes() != file.read_bytes():
                differing.append(str(name))
    return differing


def _module_of(file: str) -> str:
    return file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')

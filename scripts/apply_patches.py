"""Adds --use-custom-buffer to a checkout of Megatron-LM by the diffs in patches/, or takes it out again.

Needs Python's standard library only, neither git nor patch: the diffs have no context and only add lines.
Every file is known by its sha256 before and after (patches/manifest.json); a tree with any other file is
left as it is.

Exit codes: 0 done, or nothing to do; 2 this tree cannot be changed, or bad input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATCHES = Path(__file__).resolve().parent.parent / 'patches'
PATCH_NAME = 'custom-buffer.patch'
PROGRAM = 'apply_patches.sh'
OK, BAD_INPUT = 0, 2

BEFORE, AFTER, OTHER, MISSING = 'before', 'after', 'other', 'missing'
_HUNK = re.compile(r'@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@\n')
_VERSION = re.compile(r'^(MAJOR|MINOR|PATCH) = (\d+)', re.MULTILINE)


class PatchingError(Exception):
    """What is wrong and what to do, for the user."""


@dataclass(frozen=True)
class Hunk:
    """Lines to add."""

    after_line: int
    """The line of the original file behind which they go, counted from 1."""
    new_line: int
    """The line of the changed file that the first of them becomes."""
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class Tag:
    """One supported state of upstream's tree."""

    name: str
    commit: str
    version: str
    files: Mapping[str, Mapping[str, str]]
    """By path, the sha256 ``before`` and ``after``."""


def read_manifest(folder: Path = PATCHES) -> list[Tag]:
    """All tags of ``manifest.json``."""
    data = json.loads((folder / 'manifest.json').read_text(encoding='utf-8'))
    return [Tag(name, **fields) for name, fields in data.items()]


def parse_patch(text: str) -> dict[str, list[Hunk]]:
    """The hunks of a diff by path.

    Raises:
        ValueError: It has context, removes a line, or is otherwise not a diff that only adds.
    """
    files: dict[str, list[Hunk]] = {}
    lines = text.splitlines(keepends=True)
    i, path = 0, ''
    while i < len(lines):
        hunk = _HUNK.fullmatch(lines[i])
        if lines[i].startswith('--- a/') and lines[i + 1] == lines[i].replace(
            '--- a/', '+++ b/', 1
        ):
            path = lines[i].removeprefix('--- a/').rstrip('\n')
            files[path] = []
            i += 2
        elif hunk and path:
            count = int(hunk[3] or 1)
            added = lines[i + 1 : i + 1 + count]
            if len(added) < count or not all(line[0] == '+' and line[-1] == '\n' for line in added):
                raise ValueError(f'line {i + 1}: the hunk does not only add {count} lines')
            files[path].append(
                Hunk(int(hunk[1]), int(hunk[2]), tuple(line[1:].encode() for line in added))
            )
            i += 1 + count
        else:
            raise ValueError(f'line {i + 1} is neither a header nor part of a hunk: {lines[i]!r}')
    return files


def add_lines(content: bytes, hunks: Sequence[Hunk]) -> bytes:
    """The file with the hunks' lines added."""
    lines = content.splitlines(keepends=True)
    for hunk in reversed(hunks):
        lines[hunk.after_line : hunk.after_line] = hunk.lines
    return b''.join(lines)


def take_lines(content: bytes, hunks: Sequence[Hunk]) -> bytes:
    """The reverse of :func:`add_lines`."""
    lines = content.splitlines(keepends=True)
    for hunk in reversed(hunks):
        del lines[hunk.new_line - 1 : hunk.new_line - 1 + len(hunk.lines)]
    return b''.join(lines)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def states_of(tree: Path, tag: Tag) -> dict[str, str]:
    """For each file of a tag: is it as before, as after, another one, or missing."""
    states: dict[str, str] = {}
    for path, hashes in tag.files.items():
        file = tree / path
        found = sha256(file.read_bytes()) if file.is_file() else None
        known = {hashes['before']: BEFORE, hashes['after']: AFTER, None: MISSING}
        states[path] = known.get(found, OTHER)
    return states


def detect(tree: Path, tags: Sequence[Tag]) -> Tag:
    """The tag whose files these are.

    Raises:
        PatchingError: None, naming the files that are unlike the nearest one's.
    """
    if not tree.is_dir():
        raise PatchingError(f'{tree} is not a folder')
    if not (tree / 'megatron' / 'training').is_dir():
        raise PatchingError(
            f'{tree} is not a checkout of Megatron-LM: it has no folder megatron/training'
        )
    version = version_of(tree)
    states = {tag.name: states_of(tree, tag) for tag in tags}

    def likeness(tag: Tag) -> tuple[int, bool]:
        known = sum(state in (BEFORE, AFTER) for state in states[tag.name].values())
        return known, tag.version == version

    nearest = max(tags, key=likeness)
    unlike = {p: s for p, s in states[nearest.name].items() if s in (OTHER, MISSING)}
    if not unlike:
        return nearest
    text = [
        f'{tree} (version {version or "unknown"}) is none of {", ".join(t.name for t in tags)}.'
    ]
    text.append(f'Nearest: {nearest.name}, commit {nearest.commit}; unlike it:')
    for path, state in unlike.items():
        text.append(f'  {path}')
        text.append(f'    expected sha256 {nearest.files[path]["before"]}')
        text.append(f'              (or {nearest.files[path]["after"]} with the patch applied)')
        found = 'no such file' if state == MISSING else sha256((tree / path).read_bytes())
        text.append(f'    found           {found}')
    text.append('Nothing was changed. What you can do:')
    checkout = f'git -C {shlex.quote(str(tree))} checkout {nearest.commit[:12]}'
    if version in ('', nearest.version):
        text.append(f'  - if these files were edited by mistake: {checkout} -- {" ".join(unlike)}')
    else:
        text.append(f'  - for a tree of {nearest.name} as a whole: {checkout}')
    text.append(
        '  - if the changes are wanted, or it is another version: leave the tree as it is and use the '
        'launcher, which needs no patch: torchrun ... -m megatron_buffer run pretrain_gpt.py ...'
    )
    raise PatchingError('\n'.join(text))


def version_of(tree: Path) -> str:
    """``MAJOR.MINOR.PATCH`` of the tree's package_info.py; '' if it does not say."""
    file = tree / 'megatron' / 'core' / 'package_info.py'
    numbers = dict(_VERSION.findall(file.read_text(encoding='utf-8'))) if file.is_file() else {}
    parts = [numbers.get(key) for key in ('MAJOR', 'MINOR', 'PATCH')]
    return '.'.join(parts) if all(parts) else ''  # type: ignore[arg-type]


def change(tree: Path, tag: Tag, hunks: Mapping[str, Sequence[Hunk]], target: str) -> list[str]:
    """Brings all files of the tree to the target state, or leaves all of them as they are.

    Args:
        tree: Whose files are those of ``tag``, each before or after.
        tag: What is expected.
        hunks: Of its patch.
        target: ``before`` or ``after``.

    Returns:
        The files that were written.

    Raises:
        PatchingError: A file could not be written, or would not have the expected hash.
    """
    edit = add_lines if target == AFTER else take_lines
    contents: dict[str, tuple[Path, bytes, bytes]] = {}
    for path, state in states_of(tree, tag).items():
        if state != target:
            file = (tree / path).resolve()
            old = file.read_bytes()
            new = edit(old, hunks[path])
            if sha256(new) != tag.files[path][target]:
                raise PatchingError(
                    f'{path}: the patch does not give the file that manifest.json expects; nothing was '
                    'changed. This copy of megatron-buffer is damaged: install it anew'
                )
            contents[path] = (file, old, new)
    written: list[str] = []
    try:
        for path, (file, _, new) in contents.items():
            _replace(file, new)
            written.append(path)
    except OSError as error:
        for done in written:
            _replace(*contents[done][:2])
        raise PatchingError(
            f'{tree / path} cannot be written: {error.strerror}; the tree is as it was'
        ) from error
    return written


def _replace(file: Path, content: bytes) -> None:
    """Writes a file in one step, with the mode it had."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f'.{file.name}.')
    try:
        with os.fdopen(descriptor, 'wb') as stream:
            stream.write(content)
        shutil.copymode(file, temporary)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def main(argv: Sequence[str] | None = None, folder: Path = PATCHES) -> int:
    """Runs the command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        print(_run(options, folder))
        return OK
    except PatchingError as error:
        print(f'{PROGRAM}: error: {error}', file=sys.stderr)
    except OSError as error:
        print(f'{PROGRAM}: error: {error.filename}: {error.strerror}', file=sys.stderr)
    return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--megatron-lm', metavar='PATH', type=Path, required=True, help='the checkout'
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        '--check', action='store_true', help='say what would be done, and change nothing'
    )
    what.add_argument('--revert', action='store_true', help='restore the exact bytes of upstream')
    return parser


def _run(options: Any, folder: Path) -> str:
    tree: Path = options.megatron_lm
    tag = detect(tree, read_manifest(folder))
    hunks = parse_patch((folder / tag.name / PATCH_NAME).read_text(encoding='utf-8'))
    states = states_of(tree, tag)
    todo = [path for path, state in states.items() if state == BEFORE]
    if options.check:
        if not todo:
            return f'{tree}: {tag.name}, the patch is applied'
        half = '' if len(todo) == len(states) else 'half applied; '
        return f'{tree}: {tag.name}, {half}the patch can be applied; it changes {", ".join(todo)}'
    if options.revert:
        written = change(tree, tag, hunks, BEFORE)
        if not written:
            return f'{tree}: {tag.name}, the patch is not applied; nothing to do'
        return f'{tree}: {tag.name}, reverted: {", ".join(written)}'
    if not todo:
        return f'{tree}: {tag.name}, the patch is applied already; nothing to do'
    written = change(tree, tag, hunks, AFTER)
    return (
        f'{tree}: {tag.name}, patched: {", ".join(written)}\n'
        'Now its scripts take --use-custom-buffer and --custom-buffer-config, given that megatron_buffer can '
        'be imported.'
    )


if __name__ == '__main__':
    sys.exit(main())

#!/usr/bin/env python3
"""Regenerates megatron_buffer/patching/manifest.json from installed or unpacked megatron-core versions.

usage: scripts/make_manifest.py [VERSION=]PATH ...

PATH is a Python interpreter, a virtual environment, a folder that contains `megatron/core` (an
unpacked wheel, a checkout, site-packages) or a .whl file. VERSION overrides what the sources say of
themselves, for a checkout of a tag that reports another version. The manifest holds digests and
short per-line hashes, no upstream text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from megatron_buffer.patching import fingerprints, sources  # noqa: E402

_FIND = (
    'import importlib.util, pathlib;'
    'roots = importlib.util.find_spec("megatron").submodule_search_locations;'
    'print(next(pathlib.Path(r).parent for r in roots if (pathlib.Path(r) / "core").is_dir()))'
)


def find_root(path: Path, scratch: Path) -> Path:
    """Folder that contains `megatron/core` for any of the accepted kinds of path."""
    if path.suffix == '.whl':
        root = scratch / path.stem
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(root, [n for n in wheel.namelist() if n.endswith('.py')])
        return root
    if (path / 'megatron' / 'core').is_dir():
        return path
    interpreter = path / 'bin' / 'python' if path.is_dir() else path
    if not interpreter.exists():
        raise SystemExit(f'{path}: neither a wheel, an interpreter nor a folder with megatron/core')
    answer = subprocess.run([interpreter, '-c', _FIND], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f'{path}: no megatron-core there:\n{answer.stderr}')
    return Path(answer.stdout.strip())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('paths', nargs='+', metavar='[VERSION=]PATH')
    parser.add_argument('--output', type=Path, default=fingerprints.MANIFEST_PATH)
    parser.add_argument('--check', action='store_true', help='compare only; exit 1 if it differs')
    options = parser.parse_args()
    versions: dict[str, dict[str, sources.Source]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for given in options.paths:
            version, _, path = given.rpartition('=')
            root = find_root(Path(path), Path(scratch))
            core = fingerprints.find_core([str(root)])
            if core.path is None:
                raise SystemExit(f'{path}: no megatron/core in {root}')
            found = sources.collect(path=[str(root)])
            versions[version or core.version] = found
            print(f'{version or core.version}: {len(found)} symbols from {core.path}')
    text = json.dumps(fingerprints.make_manifest(versions), indent=1) + '\n'
    if options.check:
        same = options.output.read_text(encoding='utf-8') == text
        print(f'{options.output}: {"up to date" if same else "differs"}')
        return 0 if same else 1
    options.output.write_text(text, encoding='utf-8')
    print(f'wrote {options.output}: {len(text)} bytes')
    return 0


if __name__ == '__main__':
    sys.exit(main())

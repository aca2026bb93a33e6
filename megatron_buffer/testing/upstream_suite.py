"""``scripts/run_upstream_tests.sh``: upstream's own unit tests, first on stock Megatron-Core, then on ours.

Needs a checkout of Megatron-LM at the tag of the installed megatron-core; nothing of it is changed or kept.
Upstream has no counterpart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_buffer.config import config_hash, load_config
from megatron_buffer.errors import ConfigError, MegatronBufferError
from megatron_buffer.testing.upstream_checkout import (
    Checkout,
    check_checkout,
    find_tests,
    missing_packages,
)
from megatron_buffer.testing.upstream_results import ARMS, OURS, STOCK, FileResult, compare, show
from megatron_buffer.testing.upstream_run import Setting, run_file

PROGRAM = 'run_upstream_tests.sh'
ALL_WELL, REGRESSION, BAD_INPUT, STOPPED = 0, 1, 2, 130

_PACKAGE = Path(__file__).resolve().parent.parent
_STOCK_SOURCES = ('cpu/*.py', 'testing/upstream_*.py')
_OUR_SOURCES = ('**/*.py', '**/*.json')

type Results = dict[str, dict[str, FileResult]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code.

    Args:
        argv: Arguments without the program's name; None for those of the process.
    """
    options = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(options)
    except KeyboardInterrupt:
        sys.stderr.write(f'{PROGRAM}: stopped\n')
        return STOPPED
    except MegatronBufferError as error:
        sys.stderr.write(f'{PROGRAM}: error: {error}\n')
        return BAD_INPUT
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    """So that a polite kill ends the ranks too."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Runs upstream's own unit tests of the data-parallel buffer, unmodified, on stock "
        'Megatron-Core and through our buffer, and compares. Without a GPU they run on the CPU with gloo.',
        epilog='Exit codes: 0 no test that passes on stock fails on ours, 1 one does, 2 bad input. '
        'scripts/run_upstream_tests.sh also takes --python PATH: the interpreter to use (default: .venv).',
        allow_abbrev=False,
    )
    parser.add_argument(
        '--megatron-lm',
        metavar='PATH',
        type=Path,
        required=True,
        help='a checkout of Megatron-LM at the tag of the installed megatron-core',
    )
    parser.add_argument(
        '--config',
        metavar='CONFIG',
        default='upstream',
        help='YAML file, or the name of a shipped config, for our arm (default: upstream)',
    )
    parser.add_argument(
        '--nproc', metavar='N', type=int, default=2, help='ranks for each test (default: 2)'
    )
    parser.add_argument(
        '--only',
        metavar='PATTERN',
        help='only files whose path contains this text or matches it as a glob',
    )
    parser.add_argument(
        '--timeout',
        metavar='S',
        type=float,
        default=900,
        help='seconds for one file in one arm (default: 900)',
    )
    parser.add_argument(
        '--out',
        metavar='DIR',
        type=Path,
        help='keep logs and results there; files whose results are there already are not run again',
    )
    parser.add_argument(
        '--json', metavar='FILE', type=Path, help='write every outcome to this file'
    )
    parser.add_argument('--list', action='store_true', help='print the test files and stop')
    return parser


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    _check_options(options)
    config = load_config(options.config)
    checkout = check_checkout(options.megatron_lm)
    files = find_tests(checkout.path, options.only)
    if options.list:
        sys.stdout.write('\n'.join(files) + '\n')
        return ALL_WELL
    console = Console(width=None if sys.stdout.isatty() else 140)
    for line in _describe(checkout, options, len(files)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    path = str(Path(options.config).resolve()) if Path(options.config).is_file() else options.config
    with tempfile.TemporaryDirectory(prefix='megatron-buffer-upstream-') as temporary:
        root = (options.out or Path(temporary)).resolve()
        setting = Setting(checkout=checkout.path, nproc=options.nproc, timeout_s=options.timeout)
        hashes = {STOCK: 'stock', OURS: f'ours-{config_hash(config)[:12]}'}
        results: Results = {}
        for i, file in enumerate(files):
            results[file] = {}
            for arm in ARMS:
                what = f'{checkout.version}-{options.nproc}-{hashes[arm]}'
                folder = root / what / file.replace('/', '+')
                result = _run_or_reuse(setting, file, path if arm == OURS else None, folder)
                results[file][arm] = result
                console.print(
                    f'[{i + 1}/{len(files)}] {_one_line(file, arm, result)}', markup=False
                )
    show(console, results)
    if options.json is not None:
        _write_json(options, checkout, results)
    return _exit_code(results)


def _check_options(options: argparse.Namespace) -> None:
    missing = missing_packages()
    if missing:
        raise ConfigError(
            f'{sys.executable} lacks {", ".join(missing)}: pip install {" ".join(missing)}, or run '
            'scripts/setup.sh, which installs what the tests need'
        )
    if options.nproc < 1:
        raise ConfigError(f'--nproc is {options.nproc}; it must be at least 1')
    if options.timeout <= 0:
        raise ConfigError(
            f'--timeout is {options.timeout:g}; it must be a number of seconds above 0'
        )
    for flag, path in (('--json', options.json), ('--out', options.out)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f'{flag} {path}: the folder {path.resolve().parent} does not exist')
    if options.json is not None and options.json.is_dir():
        raise ConfigError(f'--json {options.json} is a folder; name a file in it')


def _describe(checkout: Checkout, options: argparse.Namespace, count: int) -> list[str]:
    lines = [
        f'checkout {checkout.path}: megatron-core {checkout.version}, every module that we replace or rely '
        f'upon is byte for byte the installed {checkout.installed.version}',
        "megatron.core and megatron.training come from the checkout, as upstream's tests expect",
        f'{count} files, {options.nproc} ranks each; without a GPU on the CPU with gloo; ours: config '
        f'{options.config}',
    ]
    if checkout.other_files:
        lines.append(f'other files unlike the installed ones: {", ".join(checkout.other_files)}')
    return lines


def _run_or_reuse(setting: Setting, file: str, config: str | None, folder: Path) -> FileResult:
    """Takes the result of an earlier run if neither the tests nor our sources have changed, or runs them."""
    saved = folder / 'result.json'
    ours = _STOCK_SOURCES if config is None else _OUR_SOURCES
    digest = _digest([setting.checkout / file, *(p for glob in ours for p in _PACKAGE.glob(glob))])
    if saved.is_file():
        data = json.loads(saved.read_text(encoding='utf-8'))
        if data.get('sources_sha256') == digest:
            return FileResult.from_json(data)
    folder.mkdir(parents=True, exist_ok=True)
    attempt = folder / time.strftime('%Y%m%d-%H%M%S')
    result = run_file(setting, file, config, attempt)
    data = {'sources_sha256': digest} | result.as_json()
    saved.write_text(json.dumps(data, indent=1), encoding='utf-8')
    return result


def _digest(files: list[Path]) -> str:
    parts = [hashlib.sha256(file.read_bytes()).digest() for file in sorted(files)]
    return hashlib.sha256(b''.join(parts)).hexdigest()


def _one_line(file: str, arm: str, result: FileResult) -> str:
    counts = {
        name: result.count(name) for name in dict.fromkeys(t.outcome for t in result.tests.values())
    }
    text = ', '.join(f'{n} {name}' for name, n in counts.items()) or 'no tests'
    return f'{file.removeprefix("tests/unit_tests/")} {arm}: {text} ({result.seconds:.0f} s)'


def _write_json(options: argparse.Namespace, checkout: Checkout, results: Results) -> None:
    differences = [
        {
            'id': d.nodeid,
            'is_regression': d.is_regression,
            'stock': d.stock.outcome,
            'ours': d.ours.outcome,
        }
        for arms in results.values()
        for d in compare(arms[STOCK], arms[OURS])
    ]
    data: dict[str, Any] = {
        'megatron_core': {'checkout': checkout.version, 'installed': checkout.installed.version},
        'config': options.config,
        'nproc': options.nproc,
        'differences': differences,
        'files': {
            file: {a: r.as_json() for a, r in arms.items()} for file, arms in results.items()
        },
    }
    options.json.write_text(json.dumps(data, indent=1) + '\n', encoding='utf-8')


def _exit_code(results: Results) -> int:
    """0, 1 or 2; when nothing at all passes on stock, nothing was tested."""
    if not any(arms[STOCK].count('passed') for arms in results.values()):
        first = next(iter(results.values()))[STOCK]
        message = next((t.message for t in first.tests.values() if t.message), 'no tests')
        raise ConfigError(
            f'no test passes on stock, so nothing was compared; the first error is: {message}'
        )
    differences = [d for arms in results.values() for d in compare(arms[STOCK], arms[OURS])]
    return REGRESSION if any(d.is_regression for d in differences) else ALL_WELL


if __name__ == '__main__':
    sys.exit(main())

"""``megatron-buffer doctor``: can the buffer be installed here, and if not, what to do.

:func:`doctor_report` looks and never raises: it also has to work where torch or megatron-core is
missing, too old, or dies while it is imported. Nothing is replaced; megatron is imported (quietly),
because holders exist only in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import platform
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_buffer.patching import fingerprints, lifecycle
from megatron_buffer.patching.engine import Resolved, Transaction
from megatron_buffer.patching.holders import Edit, type_of
from megatron_buffer.patching.sources import Source, collect
from megatron_buffer.patching.targets import CORE, TARGETS, TRAINING, Target

if TYPE_CHECKING:
    from rich.console import Console

_MIN_PYTHON = (3, 12)
_TRANSFORMER_ENGINE = ('transformer-engine', 'transformer-engine-torch', 'transformer-engine-cu12')


def doctor_report() -> dict[str, Any]:
    """Everything that decides whether ``install()`` works here.

    Returns:
        Plain data for ``--json``. ``ok`` is False when ``install()`` or the launcher would refuse;
        ``problems`` then says why and what to do; ``notes`` are worth knowing, no more.
    """
    report: dict[str, Any] = {'ok': True, 'problems': [], 'notes': []}
    report['interpreter'] = _interpreter(report)
    report['platform'] = platform.platform()
    report['torch'] = _torch(report)
    report['transformer_engine'] = _transformer_engine(report)
    report['apex'] = _apex(report)
    _megatron_core(report)
    report['ok'] = not report['problems']
    return report


def _interpreter(report: dict[str, Any]) -> dict[str, Any]:
    if sys.version_info < _MIN_PYTHON:
        report['problems'].append(
            f'Python {platform.python_version()} is too old: use 3.12 or newer (megatron-core 0.17 '
            'and later need it too)'
        )
    return {'executable': sys.executable, 'version': platform.python_version()}


def _version(names: Iterable[str]) -> str | None:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return module in sys.modules


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keeps warnings, log records and prints of other people's imports away from our output."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter('ignore')
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


def _torch(report: dict[str, Any]) -> dict[str, Any]:
    if not _is_there('torch'):
        report['problems'].append(
            f"torch is not installed in {sys.executable}: pip install 'megatron-buffer'"
        )
        return {'version': None, 'cuda': None, 'gpus': 0, 'error': None}
    found: dict[str, Any] = {'version': _version(['torch']), 'cuda': None, 'gpus': 0, 'error': None}
    try:
        with _quiet():
            torch = importlib.import_module('torch')
            found.update(
                version=str(torch.__version__),
                cuda=torch.version.cuda,
                gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            )
    except Exception as error:
        found['error'] = f'{type(error).__name__}: {error}'
        report['problems'].append(f'importing torch fails ({found["error"]}): reinstall torch')
    if not found['gpus'] and not found['error']:
        report['notes'].append('no GPU is visible: training here needs --custom-buffer-cpu')
    return found


def _has_driver() -> bool:
    try:
        ctypes.CDLL('libcuda.so.1')
    except OSError:
        return False
    return True


def _transformer_engine(report: dict[str, Any]) -> dict[str, Any]:
    there = _is_there('transformer_engine')
    found = {
        'present': there,
        'version': _version(_TRANSFORMER_ENGINE) if there else None,
        'importable': _has_driver() if there else None,
    }
    if there and not found['importable'] and 'transformer_engine' not in sys.modules:
        report['problems'].append(
            'Transformer Engine is installed but there is no GPU driver (libcuda.so.1): importing '
            'megatron.core dies with an OSError. Uninstall transformer_engine in this environment, or '
            'use a machine with a driver'
        )
    return found


def _apex(report: dict[str, Any]) -> dict[str, Any]:
    """NVIDIA's apex, or the Pyramid toolkit that has the same name on PyPI; never imported."""
    if not _is_there('apex'):
        return {'present': False, 'kind': None, 'path': None}
    spec = importlib.util.find_spec('apex')
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    folders = [Path(location) for location in locations]
    kind = 'unknown'
    if any((f / 'multi_tensor_apply').is_dir() or (f / 'normalization').is_dir() for f in folders):
        kind = 'nvidia'
    else:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution('apex')
            text = f'{distribution.metadata["Summary"]} {distribution.requires}'.lower()
            if 'pyramid' in text:
                kind = 'impostor'
    if kind != 'nvidia':
        what = 'the Pyramid toolkit from PyPI' if kind == 'impostor' else "not NVIDIA's"
        report['problems'].append(
            f'the installed apex is {what}, and Megatron-Core believes that it has fused kernels '
            f"because of it: '{sys.executable} -m pip uninstall apex'. NVIDIA's is built from source "
            '(github.com/NVIDIA/apex); it is not needed'
        )
    return {'present': True, 'kind': kind, 'path': str(folders[0]) if folders else None}


def _megatron_core(report: dict[str, Any]) -> None:
    """Fills in everything about megatron-core, our targets and who holds them."""
    core = fingerprints.find_core()
    reliances = fingerprints.reliances_for(core, training=True)
    sources = collect(reliances)
    manifest = fingerprints.Manifest.load()
    verdicts: dict[str, fingerprints.Verdict] = {}
    for group in (CORE, TRAINING):
        chosen = [r for r in reliances if r.group == group]
        if chosen:
            verdicts[group] = fingerprints.compare(sources, manifest, chosen, core.version)
    report['megatron_core'] = {
        'version': core.version or None,
        'path': str(core.path) if core.path else None,
        'kind': core.kind or None,
        'training_path': str(core.training_path) if core.training_path else None,
        'supported_versions': fingerprints.SUPPORTED,
        'matching_versions': list(verdicts[CORE].matching),
        'nearest_version': verdicts[CORE].nearest if core.path else None,
        'fingerprinted_symbols': len(sources),
        'differences': (
            [str(d).strip() for v in verdicts.values() for d in v.differences] if core.path else []
        ),
        'error': None,
    }
    _judge_sources(report, core, verdicts)
    config = lifecycle.installed_config()
    report['installed'] = None
    if config is not None:
        from megatron_buffer.config import config_hash

        report['installed'] = {'config': config.source, 'hash': config_hash(config)}
    transactions = _transactions(report, core)
    holders = _holders(transactions)
    report['targets'] = [
        _target(target, sources, verdicts[target.group], holders.get(target.symbol))
        for target in TARGETS
        if target.group == CORE or core.training_path is not None
    ]
    report['unreachable'] = sorted({text for t in transactions for text in t.unreachable})


def _judge_sources(
    report: dict[str, Any],
    core: fingerprints.CoreInstall,
    verdicts: dict[str, fingerprints.Verdict],
) -> None:
    if core.path and core.training_path and core.path.parent != core.training_path.parent:
        report['notes'].append(
            f'megatron.core comes from {core.path} but megatron.training from {core.training_path}: '
            'two trees are mixed on sys.path'
        )
    try:
        fingerprints.check_gate(core, verdicts[CORE])
    except Exception as error:
        report['problems'].append(str(error))
        return
    if core.training_path is None:
        report['notes'].append(
            'megatron.training is not there: use megatron_buffer.install() in your own script; '
            "'megatron-buffer run' needs it"
        )
    elif not verdicts[TRAINING].matching:
        report['problems'].append(
            "'megatron-buffer run' refuses (install() in Python doesn't): "
            + fingerprints.fingerprint_message(core, verdicts[TRAINING])
        )


def _transactions(report: dict[str, Any], core: fingerprints.CoreInstall) -> list[Transaction]:
    """What is installed, or what an install would start from; imports megatron for it."""
    installed = lifecycle.installed_transactions()
    if installed:
        return installed
    if fingerprints.lacks_seams(core):
        return []
    entry = report['megatron_core']
    if report['torch']['version'] is None or report['torch']['error']:
        entry['error'] = 'not imported, because torch is missing or broken'
        return []
    if report['transformer_engine']['importable'] is False:
        entry['error'] = 'not imported, because Transformer Engine needs a GPU driver'
        return []
    found: list[Transaction] = []
    groups = {CORE: 'megatron.core.optimizer', TRAINING: 'megatron.training.training'}
    for group, module in groups.items():
        if group == TRAINING and core.training_path is None:
            continue
        transaction = Transaction([t for t in TARGETS if t.group == group])
        try:
            with _quiet():
                importlib.import_module(module)
                transaction.prepare()
        except Exception as error:
            entry['error'] = f'{type(error).__name__}: {error}'
            report['problems'].append(
                f'{module} or what replaces parts of it cannot be used ({entry["error"]})'
            )
            return found
        found.append(transaction)
    for transaction in found:
        transaction.unreachable = transaction.find_unreachable(transaction.holders())
    return found


def _holders(transactions: list[Transaction]) -> dict[str, list[str]]:
    """Who holds each target that could be resolved, its defining name included."""
    found: dict[str, list[str]] = {}
    for transaction in transactions:
        edits = transaction.edits or transaction.holders()
        for one in transaction.resolved:
            where = {edit.slot.where for edit in edits if _concerns(edit, one)}
            found[one.target.symbol] = sorted(where | {one.target.symbol})
    return found


def _target(
    target: Target,
    sources: dict[str, Source],
    verdict: fingerprints.Verdict,
    holders: list[str] | None,
) -> dict[str, Any]:
    def is_part(symbol: str) -> bool:
        return symbol == target.symbol or symbol.startswith(target.symbol + '.')

    changed = [d.symbol for d in verdict.differences if is_part(d.symbol)]
    state = 'changed' if changed else 'known'
    return {
        'symbol': target.symbol,
        'group': target.group,
        'replaced_by': target.replacement or f'{target.wrapper}(original)',
        'fingerprint': state if any(is_part(symbol) for symbol in sources) else 'missing',
        'changed': changed,
        'resolved': holders is not None,
        'holders': holders or [],
    }


def _concerns(edit: Edit, one: Resolved) -> bool:
    pending: list[tuple[Any, int]] = [(edit.old, 0)]
    while pending:
        item, level = pending.pop()
        if item is one.original:
            return True
        if type_of(item) in (tuple, frozenset) and level < 3:
            pending.extend((inner, level + 1) for inner in item)
    return False


def render(report: dict[str, Any], console: Console) -> None:
    """Prints a report as tables, readable at 80 columns."""
    from rich.table import Table
    from rich.text import Text

    core, torch = report['megatron_core'], report['torch']
    engine, apex = report['transformer_engine'], report['apex']
    rows: list[tuple[str, str]] = [
        ('Python', f'{report["interpreter"]["version"]} ({report["interpreter"]["executable"]})'),
        ('platform', report['platform']),
        ('torch', f'{torch["version"]}, CUDA {torch["cuda"]}, GPUs: {torch["gpus"]}'),
        ('megatron-core', _core_line(core)),
        ('megatron.training', core['training_path'] or 'not there'),
        ('Transformer Engine', _presence(engine, lambda e: f'{e["version"]}')),
        ('apex', _presence(apex, lambda a: f'{a["kind"]} ({a["path"]})')),
        ('installed now', _installed_line(report['installed'])),
    ]
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True, style='bold')
    table.add_column(overflow='fold')
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table, '')
    targets = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    targets.add_column('replaced name', overflow='fold', width=27)
    targets.add_column('source', no_wrap=True)
    targets.add_column('held by', overflow='fold')
    for entry in report['targets']:
        name = entry['symbol'].partition(':')[2]
        holders = [_short_holder(holder, name) for holder in entry['holders']]
        targets.add_row(
            Text(name), entry['fingerprint'], Text('\n'.join(holders) or 'not looked up')
        )
    console.print(targets, '')
    console.print(
        Text('Holders: modules of megatron, and the name there if it differs.', style='dim')
    )
    for title, key in (
        ('Cannot be changed', 'unreachable'),
        ('Note', 'notes'),
        ('Problem', 'problems'),
    ):
        for text in report[key]:
            console.print(
                Text(f'{title}: ', style='bold red' if key == 'problems' else 'bold') + Text(text)
            )
    if report['ok']:
        console.print(Text('The buffer can be installed here.', style='bold green'))
    else:
        console.print(Text('The buffer cannot be installed here as it is.', style='bold red'))


def _short_holder(holder: str, name: str) -> str:
    """The module, and under which name if that is another."""
    module, _, place = holder.removeprefix('megatron.').partition(':')
    return module if place == name else f'{module}: {place}'


def _core_line(core: dict[str, Any]) -> str:
    if core['path'] is None:
        return 'not installed'
    known = ', '.join(core['matching_versions'])
    sources = (
        f'sources are those of {known}' if known else f'sources unlike {core["nearest_version"]}'
    )
    return f'{core["version"]} ({core["kind"]}), {sources}; {core["path"]}'


def _presence(entry: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> str:
    return text(entry) if entry['present'] else 'not installed'


def _installed_line(installed: dict[str, Any] | None) -> str:
    return 'nothing' if installed is None else f'{installed["config"]} ({installed["hash"]})'

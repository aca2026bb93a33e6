"""``install()``, ``uninstall()`` and ``activated()``: one config per process, put in place or taken out.

The gate (``fingerprints.py``) comes before any import of megatron, the transaction (``engine.py``)
after. One lock guards both directions.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from megatron_buffer import errors
from megatron_buffer.errors import (
    ConfigError,
    FingerprintError,
    LiveModelsError,
    PatchError,
    UnsupportedVersionError,
)
from megatron_buffer.patching import fingerprints
from megatron_buffer.patching.engine import Transaction
from megatron_buffer.patching.holders import MISSING, is_own
from megatron_buffer.patching.sources import Source, collect, describe, live_state
from megatron_buffer.patching.targets import CORE, TARGETS, TRAINING

if TYPE_CHECKING:
    from megatron_buffer.config import BufferConfig

logger = logging.getLogger(__name__)

type Compat = Literal['strict', 'warn']

_MAX_LIVE_NAMES = 5
_MAX_UNREACHABLE = 10


@dataclass(kw_only=True)
class _Installed:
    config: BufferConfig
    hash: str
    groups: set[str] = field(default_factory=set[str])
    transactions: list[Transaction] = field(default_factory=list[Transaction])
    """In the order in which they were committed."""


_lock = threading.RLock()
_state: _Installed | None = None
_warned: set[str] = set()


def install(
    config: Any = None, *, compat: Compat = 'strict', training: bool = False
) -> BufferConfig:
    """Makes Megatron-Core build its data-parallel buffers through ours, from now on.

    Call it before the model is built; modules that have imported Megatron's classes already are
    found and changed too. Installing the same config again does nothing. With MEGATRON_BUFFER_CPU=1 in
    the environment the CPU mode is turned on first.

    Args:
        config: Anything that ``load_config`` takes; None means the shipped ``upstream``.
        compat: What to do when the installed sources of megatron-core aren't ones we know: refuse,
            or warn once and go on.
        training: Also wrap the argument parser of ``megatron.training``; for the launcher.

    Returns:
        The config that is in force.

    Raises:
        ConfigError: The config is wrong, or the CPU mode was asked for where it cannot be had.
        UnsupportedVersionError, FingerprintError: This megatron-core isn't one that we know.
        PatchError: Another config is installed, or somebody else has replaced the same names.
    """
    from megatron_buffer.config import config_hash, load_config

    if compat not in ('strict', 'warn'):
        raise ConfigError(f"compat is {compat!r}; it must be 'strict' or 'warn'")
    loaded = load_config(config)
    digest = config_hash(loaded)
    groups = (CORE, TRAINING) if training else (CORE,)
    with _lock:
        if _state is not None and _state.hash != digest:
            raise PatchError(
                f'config {_state.config.source} ({_state.hash}) is installed, and {loaded.source} '
                f'({digest}) differs from it; call uninstall() first'
            )
        missing = [g for g in groups if _state is None or g not in _state.groups]
        if missing:
            _install(loaded, digest, missing, compat)
            if config is None:
                _log_once_per_job('no config was given: using the shipped config "upstream"')
        return loaded if _state is None else _state.config


def _install(config: BufferConfig, digest: str, groups: list[str], compat: Compat) -> None:
    global _state
    from megatron_buffer import cpu

    if cpu.requested():
        cpu.enable()
    sources = _pass_gate(groups, compat)
    transaction = Transaction([t for t in TARGETS if t.group in groups])
    transaction.prepare()
    _check_memory(sources, compat)

    from megatron_buffer import runtime

    made = runtime.Runtime(config) if _state is None else None
    transaction.commit()
    if _state is None:
        runtime.set_installed(made)
        _state = _Installed(config=config, hash=digest)
    _state.groups.update(groups)
    _state.transactions.append(transaction)
    _log_once_per_job(
        f'installed buffer config {config.source} ({digest}): {len(transaction.edits)} names of '
        'megatron-core replaced'
    )
    unreachable = transaction.unreachable
    if unreachable:
        shown = '; '.join(unreachable[:_MAX_UNREACHABLE])
        more = len(unreachable) - _MAX_UNREACHABLE
        _log_once_per_job(
            f'these hold stock classes of megatron-core and cannot be changed: {shown}'
            + (f'; and {more} more' if more > 0 else '')
            + '. What they build stays stock: call install() before they are made',
            logging.WARNING,
        )


def _pass_gate(groups: list[str], compat: Compat) -> Mapping[str, Source]:
    """Raises unless the sources on disk are known, or ``compat`` lets it pass."""
    core = fingerprints.find_core()
    if TRAINING in groups and core.path is not None and core.training_path is None:
        raise PatchError(
            f'megatron.training is not there beside {core.path}: the launcher needs it; use '
            'megatron_buffer.install() in your own script, or a megatron-core that contains it'
        )
    reliances = [
        r for r in fingerprints.reliances_for(core, TRAINING in groups) if r.group in groups
    ]
    sources = collect(reliances)
    manifest = fingerprints.Manifest.load()
    verdict = fingerprints.compare(sources, manifest, reliances, core.version)
    try:
        fingerprints.check_gate(core, verdict)
    except (UnsupportedVersionError, FingerprintError) as error:
        if compat != 'warn' or fingerprints.lacks_seams(core):
            raise
        _warn_once(f'going on as --custom-buffer-compat warn asks, in spite of: {error}')
    return sources


def _check_memory(sources: Mapping[str, Source], compat: Compat) -> None:
    """Refuses symbols that somebody has replaced in memory, so that the file says nothing of them."""
    replaced: list[str] = []
    for symbol, source in sources.items():
        module_name, _, qualname = symbol.partition(':')
        if module_name not in sys.modules:
            continue  # it will come from the file
        value = _look_up(sys.modules[module_name], qualname.removesuffix('.<class>'))
        scope = getattr(getattr(value, '__func__', value), '__globals__', {}).get('__name__')
        gone = value is MISSING or live_state(value, source) == 'replaced'
        if gone and not is_own(scope):
            replaced.append(f'  {symbol} is {describe(value)}')
    if not replaced:
        return
    text = 'somebody else has replaced these in memory, and we rely upon them:\n' + '\n'.join(
        replaced
    )
    if compat != 'warn':
        raise FingerprintError(
            f'{text}\nCall install() before they do, undo their change, or go on with '
            f'{fingerprints.COMPAT_HINT}.'
        )
    _warn_once(text)


def _look_up(owner: Any, qualname: str) -> Any:
    for name in qualname.split('.'):
        owner = (
            MISSING if owner is MISSING else cast('dict[str, Any]', vars(owner)).get(name, MISSING)
        )
    return owner


def uninstall() -> None:
    """Restores every name as it was; does nothing when nothing is installed.

    Raises:
        LiveModelsError: Models that were wrapped since ``install()`` still live; they are named.
        PatchError: Somebody else has changed a name since; nothing is restored then.
    """
    with _lock:
        _uninstall(force=False)


def _uninstall(*, force: bool) -> None:
    global _state
    if _state is None:
        return
    from megatron_buffer import runtime

    gc.collect()
    living = runtime.live_models()
    if living and not force:
        names = ', '.join(living[:_MAX_LIVE_NAMES]) + (
            ' ...' if len(living) > _MAX_LIVE_NAMES else ''
        )
        raise LiveModelsError(
            f'cannot uninstall: {len(living)} model(s) wrapped under {_state.config.source} still '
            f'live: {names}. Drop every reference to them (optimizers hold them too) first'
        )
    for transaction in _state.transactions:
        transaction.check_revertible()
    while _state.transactions:
        _state.transactions[-1].revert()
        _state.transactions.pop()
    runtime.set_installed(None)
    if not force:
        # After an exception the watch stays: the reason has not reached the other ranks yet.
        errors.stop_watch()
    _state = None


@contextlib.contextmanager
def activated(
    config: Any = None, *, compat: Compat = 'strict', training: bool = False
) -> Generator[BufferConfig]:
    """Installs a config for the duration of a block.

    Inside a block with the same config it does nothing; with another one it is an error. Models that
    are wrapped in the block must be dropped before it ends, unless it ends by an exception.
    """
    with _lock:
        outermost = _state is None
        loaded = install(config, compat=compat, training=training)
    try:
        yield loaded
    except BaseException:
        if outermost:
            with _lock:
                _uninstall(
                    force=True
                )  # the traceback keeps models alive, and its cause matters more
        raise
    if outermost:
        uninstall()


def installed_config() -> BufferConfig | None:
    """The config that ``install()`` put in force, if any."""
    state = _state
    return None if state is None else state.config


def installed_transactions() -> list[Transaction]:
    """What is installed; for ``doctor``."""
    state = _state
    return [] if state is None else list(state.transactions)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log_once_per_job(text, logging.WARNING)


def _log_once_per_job(text: str, level: int = logging.INFO) -> None:
    """Logs on rank 0: by Megatron's own filter, and by torchrun's variable while there is no group."""
    if os.environ.get('RANK', '0') != '0':
        return
    utils = sys.modules.get('megatron.core.utils')
    if utils is None:
        logger.log(level, text)
    else:
        utils.log_single_rank(logger, level, text)

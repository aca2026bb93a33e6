"""CPU mode: makes the CUDA surface that Megatron touches mean "the CPU", for gloo runs without a GPU.

Megatron-Core calls ``torch.cuda`` on every path: streams, the device of the buffers, RNG states,
``param.type() == 'torch.cuda.BFloat16Tensor'``. With CPU mode on, all of that is answered for the
CPU, NCCL groups become gloo groups, and what gloo lacks or gets wrong is put right, so that stock
Megatron-Core and ours train on any machine and can be compared.

It is never on by itself: importing this module changes nothing. Turn it on with :func:`enable`
*before* Megatron is imported, with the launcher's ``--custom-buffer-cpu``, or with the environment
variable ``MEGATRON_BUFFER_CPU=1``. :func:`disable` restores every attribute.

Modules: ``ledger`` (the list of replacements), ``cuda_surface`` (torch.cuda, tensors), ``gloo``
(torch.distributed), ``megatron_fixes`` (megatron.core itself). Upstream has no counterpart.
"""

from __future__ import annotations

import os
import sys

from megatron_buffer.cpu.ledger import Ledger, Replacement
from megatron_buffer.errors import ConfigError

__all__ = [
    'ENVIRONMENT_VARIABLE',
    'after_import',
    'disable',
    'enable',
    'forced',
    'is_enabled',
    'replacements',
    'requested',
]

ENVIRONMENT_VARIABLE = 'MEGATRON_BUFFER_CPU'
_OFF = ('', '0', 'false')
_ON = ('1', 'true')
_FORCE = 'force'

_ledger: Ledger | None = None
_megatron_is_fixed = False
_megatron_was_imported_by_us = False


def requested() -> bool:
    """Whether the environment asks for CPU mode.

    Raises:
        ConfigError: The variable holds something else than 1, true, force, 0, false or nothing.
    """
    return _environment() not in _OFF


def forced() -> bool:
    """Whether the environment asks for CPU mode even where a GPU is."""
    return _environment() == _FORCE


def is_enabled() -> bool:
    """Whether CPU mode is on in this process."""
    return _ledger is not None


def enable(*, force: bool = False) -> None:
    """Turns CPU mode on for this process (and the processes it forks). Nothing to do when it is on.

    It also imports the parts of megatron.core that need a change of their own, see
    :func:`after_import`; ``sys.path`` must therefore already be what the run will use.

    Args:
        force: Turn it on even though a GPU is there (``MEGATRON_BUFFER_CPU=force`` does the same).

    Raises:
        ConfigError: A GPU is there and ``force`` is not given, or Megatron was imported before:
            its modules have then already bound and compiled against the real ``torch.cuda``.
    """
    global _ledger
    if is_enabled():
        return
    if 'megatron.core' in sys.modules and not _megatron_was_imported_by_us:
        raise ConfigError(
            'CPU mode must be turned on before Megatron is imported, but megatron.core is already '
            'imported. Call megatron_buffer.cpu.enable() first, or start the script with '
            f'--custom-buffer-cpu or {ENVIRONMENT_VARIABLE}=1.'
        )
    import torch

    from megatron_buffer.cpu import cuda_surface, gloo

    if torch.cuda.is_available() and not (force or forced()):
        raise ConfigError(
            'CPU mode was asked for, but this machine has a GPU. Leave CPU mode out, hide the GPU '
            f'(CUDA_VISIBLE_DEVICES=), or insist with {ENVIRONMENT_VARIABLE}={_FORCE}.'
        )
    _ledger = Ledger()
    try:
        cuda_surface.apply(_ledger)
        gloo.apply(_ledger)
        _ledger.redirect_holders()
        after_import()
    except BaseException:
        disable()
        raise


def after_import() -> None:
    """Changes what CPU mode needs inside megatron.core, importing it if that is still to be done.

    :func:`enable` calls it; calling it again does nothing.
    """
    global _megatron_is_fixed, _megatron_was_imported_by_us
    if _ledger is None or _megatron_is_fixed:
        return
    from megatron_buffer.cpu import megatron_fixes

    _megatron_was_imported_by_us = True
    megatron_fixes.apply(_ledger)
    _megatron_is_fixed = True


def disable() -> None:
    """Turns CPU mode off and restores every attribute. Nothing to do when it is off.

    Models, optimizers and process groups that were made while it was on are not usable afterwards.
    """
    global _ledger, _megatron_is_fixed
    if _ledger is None:
        return
    ledger, _ledger = _ledger, None
    _megatron_is_fixed = False
    ledger.undo()


def replacements() -> tuple[Replacement, ...]:
    """What is replaced at this moment, each with its reason."""
    return () if _ledger is None else tuple(_ledger.replacements)


def _environment() -> str:
    value = os.environ.get(ENVIRONMENT_VARIABLE, '').strip().lower()
    if value not in (*_OFF, *_ON, _FORCE):
        raise ConfigError(
            f'{ENVIRONMENT_VARIABLE}={value!r} is not understood: expected 1 or true (CPU mode on), '
            f'{_FORCE} (on even where a GPU is), 0 or false or nothing (off).'
        )
    return value

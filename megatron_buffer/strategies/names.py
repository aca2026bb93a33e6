"""Shell-style patterns against the dotted names of parameters and modules.

Upstream's counterpart is the ``fnmatch`` call for ``param_name_patterns_for_fp32_local_accumulation`` in
``_ParamAndGradBuffer.__init__`` (``megatron/core/distributed/param_and_grad_buffer.py``). A model in 16 bits
is wrapped in ``Float16Module``, which puts ``module.`` in front of every name: a pattern may have it or not,
so that one config serves both.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

_WRAPPER = 'module.'


def bare_name(name: str) -> str:
    """The name without the prefixes of wrappers around the model."""
    while name.startswith(_WRAPPER):
        name = name.removeprefix(_WRAPPER)
    return name


def matches(name: str, pattern: str) -> bool:
    """True when the known ``name`` matches; ``*`` crosses dots, and an unknown name ('') never does."""
    return bool(name) and (fnmatchcase(name, pattern) or fnmatchcase(bare_name(name), pattern))


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """True when the known ``name`` matches one of ``patterns``."""
    return any(matches(name, pattern) for pattern in patterns)


def outermost_module(name: str, pattern: str) -> str:
    """The outermost module around a parameter whose own name matches, or ''.

    Args:
        name: Full name of the parameter, such as ``decoder.layers.3.mlp.fc1.weight``.
        pattern: Pattern of module names, such as ``*layers.*``.

    Returns:
        The module's full name; never that of a wrapper around the model.
    """
    end = name.find('.', len(name) - len(bare_name(name)))
    while end != -1:
        if matches(name[:end], pattern):
            return name[:end]
        end = name.find('.', end + 1)
    return ''

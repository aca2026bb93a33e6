"""What the planner knows of a parameter, and how a list of parameters is read from a file.

Stands for the attributes of ``torch.nn.Parameter`` that ``group_params_for_buffers``
(``megatron/core/distributed/param_and_grad_buffer.py``) looks at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_buffer.config_yaml import did_you_mean, parse, read_file
from megatron_buffer.errors import ConfigError
from megatron_buffer.strategies.grouping import ParamTraits

DTYPES: Mapping[str, torch.dtype] = {
    'fp32': torch.float32,
    'bf16': torch.bfloat16,
    'fp16': torch.float16,
}
"""Short names of the dtypes that parameters can have."""

_QUANTIZED = 'quantized'
_FLAGS = ('shared_embedding', 'pipeline_synced', 'expert', _QUANTIZED)
_KEYS = ('name', 'numel', 'dtype', *_FLAGS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedParam:
    """A trainable parameter of one rank."""

    name: str
    numel_elems: int
    dtype: torch.dtype
    """Logical dtype; the high-precision one of a quantized parameter."""
    shape: tuple[int, ...] | None = None
    """None where only the size is known."""
    is_expert_parallel: bool = False
    shared_embedding: bool = False
    pipeline_synced: bool = False
    """Another mark of parameters whose gradients finalize sums over pipeline stages."""
    has_quantized_storage: bool = False

    @property
    def traits(self) -> ParamTraits:
        """What buffer grouping looks at."""
        return ParamTraits(
            name=self.name,
            dtype=self.dtype,
            has_quantized_storage=self.has_quantized_storage,
            is_expert_parallel=self.is_expert_parallel,
            is_managed_by_layer_wise_optimizer=False,
            shared_embedding=self.shared_embedding,
        )


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16`` for ``torch.bfloat16``."""
    short = {value: name for name, value in DTYPES.items()}
    return short.get(dtype, str(dtype).removeprefix('torch.'))


def load_params(source: str, default_dtype: torch.dtype) -> list[PlannedParam]:
    """Reads a parameter list, in registration (forward) order.

    The file is text with a line ``NAME NUMEL [DTYPE] [FLAG ...]`` for each
    parameter (``#`` starts a comment; the flags are ``shared_embedding``, ``pipeline_synced``, ``expert`` and
    ``quantized``), or YAML or JSON: a list of mappings with the keys ``name``,
    ``numel`` and optionally ``dtype`` and the flags, or a mapping of names to sizes.

    Args:
        source: Path of the file.
        default_dtype: Dtype of parameters without one.

    Raises:
        ConfigError: If a line or entry is wrong.
    """
    text = read_file(source, source)
    first = next((line.strip() for line in text.splitlines() if _content(line)), '')
    if source.endswith(('.json', '.yaml', '.yml')) or first[:1] in ('[', '{', '-'):
        params = _from_document(parse(text, source).data, source, default_dtype)
    else:
        params = [
            _from_words(_content(line).split(), f'{source}:{number}', default_dtype)
            for number, line in enumerate(text.splitlines(), 1)
            if _content(line)
        ]
    if not params:
        raise ConfigError(f'{source}: holds no parameters', source=source)
    seen: set[str] = set()
    for param in params:
        if param.name in seen:
            raise ConfigError(f'{source}: parameter {param.name} is there twice', source=source)
        seen.add(param.name)
    return params


def _content(line: str) -> str:
    return line.partition('#')[0].strip()


def _from_words(words: Sequence[str], where: str, default_dtype: torch.dtype) -> PlannedParam:
    if len(words) < 2 or not words[1].replace('_', '').isdecimal():
        raise ConfigError(
            f'{where}: found {" ".join(words)!r}, expected NAME NUMEL [DTYPE] [FLAG ...], such as '
            f"'output_layer.weight 525336576 bf16'"
        )
    entry: dict[str, Any] = {'name': words[0], 'numel': int(words[1])}
    for word in words[2:]:
        if word in DTYPES and 'dtype' not in entry:
            entry['dtype'] = word
        elif word in _FLAGS:
            entry[word] = True
        else:
            known = (*DTYPES, *_FLAGS)
            raise ConfigError(
                f'{where}: {word!r} is neither a dtype ({", ".join(DTYPES)}) nor a flag '
                f'({", ".join(_FLAGS)}).{did_you_mean(word, known)}'
            )
    return _from_entry(entry, where, default_dtype)


def _from_document(data: Any, source: str, default_dtype: torch.dtype) -> list[PlannedParam]:
    if isinstance(data, dict):
        if isinstance(data.get('params'), list):
            data = data['params']
        else:
            data = [{'name': name, 'numel': numel} for name, numel in data.items()]
    if not isinstance(data, list):
        raise ConfigError(
            f'{source}: expected a list of {{name: ..., numel: ...}} or a mapping of names to sizes'
        )
    return [
        _from_entry(entry, f'{source}: entry {number}', default_dtype)
        for number, entry in enumerate(data, 1)
    ]


def _from_entry(entry: Any, where: str, default_dtype: torch.dtype) -> PlannedParam:
    if not isinstance(entry, dict):
        raise ConfigError(f'{where}: found {entry!r}, expected a mapping with name and numel')
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(
                f'{where}: unknown key {key!r}; there are: {", ".join(_KEYS)}.'
                f'{did_you_mean(str(key), _KEYS)}'
            )
    name, numel, dtype = entry.get('name'), entry.get('numel'), entry.get('dtype')
    if not isinstance(name, str) or not name:
        raise ConfigError(f'{where}: name: found {name!r}, expected a word')
    if not isinstance(numel, int) or isinstance(numel, bool) or numel < 0:
        raise ConfigError(
            f'{where}: numel of {name}: found {numel!r}, expected a number of elements'
        )
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            f'{where}: dtype of {name}: found {dtype!r}, expected one of {", ".join(DTYPES)}'
        )
    flags = {flag: entry.get(flag, False) for flag in _FLAGS}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f'{where}: {flag} of {name}: found {value!r}, expected true or false')
    return PlannedParam(
        name=name,
        numel_elems=numel,
        dtype=default_dtype if dtype is None else DTYPES[dtype],
        is_expert_parallel=flags['expert'],
        shared_embedding=flags['shared_embedding'],
        pipeline_synced=flags['pipeline_synced'],
        has_quantized_storage=flags[_QUANTIZED],
    )

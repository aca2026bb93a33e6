"""The profile file: in which order gradients arrive and parameters are read, as a run measured it.

``--custom-buffer-record`` writes one (:mod:`megatron_buffer.recording`), and ``param_order: recorded``
lays buffers out by it. The file is JSON with a version; a model chunk is found by its pipeline stage and
chunk number, a parameter by its name in the wrapped module. Imports neither torch nor megatron. Upstream
has no counterpart.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError

from megatron_buffer.config_base import adapter, params_dataclass
from megatron_buffer.errors import ConfigError

SCHEMA_VERSION = 1

_YAML_PATH = 'param_order.profile'
_Position = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(allow_inf_nan=False)]


@params_dataclass
class ParamProfile:
    """One trainable parameter."""

    name: str
    """Name in the wrapped module."""
    numel_elems: int
    dtype: str
    """As torch prints it, without ``torch.``."""
    grad_arrival: _Position | None
    """Place in the order in which gradients are complete in the backward of the last micro-batch; null: it
    got none there."""
    grad_time_s: _Seconds | None
    """Seconds from the first gradient of that backward."""
    forward_use: _Position | None
    """Place in the order in which modules that own parameters are called in forward; null: never."""
    forward_time_s: _Seconds | None
    """Seconds from the first such call."""
    gradients_per_backward: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """How often one backward of one micro-batch accumulates into it; a fraction: not in each of them."""


@params_dataclass
class ChunkProfile:
    """One model chunk of one pipeline stage; medians over the steps, means over the ranks."""

    params: tuple[ParamProfile, ...]
    """In registration order."""
    steps: Annotated[int, Field(ge=1)]
    """Recorded iterations."""
    ranks: Annotated[int, Field(ge=1)]
    """Ranks of the data-parallel group."""
    clock: Literal['host', 'cuda']
    """host: when Python heard of it; cuda: when the stream reached it."""
    agreed: bool
    """Whether all ranks found the same orders."""
    differing_grad_arrivals: _Position
    """Parameters whose place in backward is not the same on all ranks."""
    differing_forward_uses: _Position
    """Parameters whose place in forward is not the same on all ranks."""


@params_dataclass
class World:
    """Parallel sizes of the job that was recorded."""

    tp: int
    pp: int
    vpp: int
    """Model chunks per stage."""
    dp: int
    """Data-parallel ranks, context-parallel ones included."""
    ep: int


@params_dataclass
class Profile:
    """A whole file."""

    schema_version: int
    megatron_buffer: str
    """Version that wrote the file."""
    megatron_core: str
    created: str
    """UTC, ISO 8601."""
    world: World
    chunks: dict[str, ChunkProfile]
    """By :func:`chunk_key`."""


def chunk_key(pp_rank: int, vp_stage: int) -> str:
    """Key of a model chunk in a profile: ``pp1.vp0``."""
    return f'pp{pp_rank}.vp{vp_stage}'


def dump_profile(profile: Profile) -> str:
    """The profile as JSON, a line per parameter; equal profiles give equal text."""
    plain: dict[str, Any] = adapter(Profile).dump_python(profile, mode='json')
    chunks: dict[str, dict[str, Any]] = plain.pop('chunks')
    lines = [f'{json.dumps(key)}: {json.dumps(value)}' for key, value in plain.items()]
    texts: list[str] = []
    for key, chunk in chunks.items():
        params: list[Any] = chunk.pop('params')
        rows = ',\n   '.join(json.dumps(param) for param in params)
        texts.append(f'  {json.dumps(key)}: {json.dumps(chunk)[:-1]}, "params": [\n   {rows}]}}')
    return '{\n ' + ',\n '.join(lines) + ',\n "chunks": {\n' + ',\n'.join(texts) + '}}\n'


def dump_chunks(chunks: Mapping[str, ChunkProfile]) -> bytes:
    """Some chunks as JSON, for the way from one rank to another."""
    return _chunks_adapter().dump_json(dict(chunks))


def load_chunks(data: bytes) -> dict[str, ChunkProfile]:
    """What :func:`dump_chunks` made."""
    return _chunks_adapter().validate_json(data)


def write_profile(path: str, profile: Profile) -> None:
    """Writes the file in one step: a reader finds the old one or the new one.

    Raises:
        OSError: If it cannot be written; what was there stays.
    """
    handle, temporary = tempfile.mkstemp(
        dir=os.path.dirname(_absolute(path)), prefix='.profile-', suffix='.json'
    )
    try:
        with os.fdopen(handle, 'w') as file:
            file.write(dump_profile(profile))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def load_profile(path: str, asked_by: str = _YAML_PATH) -> Profile:
    """Reads and checks a profile.

    Args:
        path: Its path; ``~`` is the home folder.
        asked_by: The YAML path or the option that named it, for messages.

    Raises:
        ConfigError: If there is no such file, or it is not a profile of this version.
    """
    try:
        with open(os.path.expanduser(path), encoding='utf-8') as file:
            text = file.read()
        plain: object = json.loads(text)
    except FileNotFoundError:
        raise _error(
            asked_by,
            path,
            f'no such file (looked for {_absolute(path)}); record one with --custom-buffer-record',
        ) from None
    except OSError as error:
        raise _error(asked_by, path, f'cannot be read: {error.strerror}') from None
    except ValueError as error:
        raise _error(asked_by, path, f'is not JSON: {error}') from None
    if not isinstance(plain, dict) or 'schema_version' not in plain:
        raise _error(asked_by, path, 'has no schema_version, so it is not a profile')
    version: object = cast(dict[str, object], plain)['schema_version']
    if version != SCHEMA_VERSION:
        raise _error(
            asked_by,
            path,
            f'has schema_version {version!r}, and this megatron-buffer reads {SCHEMA_VERSION}; record '
            'it again',
        )
    try:
        profile = adapter(Profile).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = '.'.join(str(part) for part in first['loc'])
        raise _error(asked_by, path, f'{where}: {first["msg"]}') from None
    for key, chunk in profile.chunks.items():
        _check_chunk(asked_by, path, key, chunk.params)
    return profile


def dense_positions(scores: Sequence[float | None], names: Sequence[str]) -> list[int | None]:
    """Places 0, 1, 2, ... by score, equal scores by name; None has no place."""
    scored = [(score, names[i], i) for i, score in enumerate(scores) if score is not None]
    places: list[int | None] = [None] * len(scores)
    for place, (_, _, index) in enumerate(sorted(scored)):
        places[index] = place
    return places


def _check_chunk(asked_by: str, path: str, key: str, params: Sequence[ParamProfile]) -> None:
    names = [param.name for param in params]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _error(asked_by, path, f'chunks.{key} holds the parameter {twice} twice')
    for field in ('grad_arrival', 'forward_use'):
        places: list[int | None] = [getattr(param, field) for param in params]
        found = sorted(place for place in places if place is not None)
        if found != list(range(len(found))):
            raise _error(
                asked_by,
                path,
                f'chunks.{key}: {field} must number the parameters that have one from 0 on',
            )


def _error(asked_by: str, path: str, problem: str) -> ConfigError:
    return ConfigError(f'{asked_by}: {path} {problem}', yaml_path=asked_by, source=path)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


@functools.cache
def _chunks_adapter() -> TypeAdapter[dict[str, ChunkProfile]]:
    return TypeAdapter(dict[str, ChunkProfile])

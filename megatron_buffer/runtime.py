"""The config in force, with its strategies resolved: one :class:`Runtime` per config.

``install()`` makes one runtime the default of the process; a ``DistributedDataParallel`` of ours
brings its own for the duration of its constructor, and everything built in there (buffers, buckets,
groups) keeps it. Upstream has no counterpart: its choices are written into the bodies.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_buffer.config import AXES, BufferConfig, config_hash, load_config
from megatron_buffer.errors import PatchError
from megatron_buffer.layout import LayoutStrategies
from megatron_buffer.strategies.accumulation import Accumulation
from megatron_buffer.strategies.bucket_groups import BucketGrouping
from megatron_buffer.strategies.dispatch import DispatchOrder, Peers
from megatron_buffer.strategies.finalize import Finalize
from megatron_buffer.strategies.gather import ParamGather
from megatron_buffer.strategies.grouping import BufferGrouping
from megatron_buffer.strategies.readiness import OnLate, Readiness
from megatron_buffer.strategies.reduce import GradReduce
from megatron_buffer.strategies.registry import make_strategy
from megatron_buffer.strategies.scaling import Scaling
from megatron_buffer.strategies.unused import UnusedParams


class Runtime:
    """A config and the strategy object of each of its axes.

    Args:
        config: A loaded config.

    Raises:
        RegistryError: If a strategy that the config names cannot be made.
    """

    buffer_grouping: BufferGrouping
    bucket_groups: BucketGrouping
    readiness: Readiness
    dispatch_order: DispatchOrder
    unused_params: UnusedParams
    scaling: Scaling
    accumulation: Accumulation
    grad_reduce: GradReduce
    param_gather: ParamGather
    finalize: Finalize
    layout: LayoutStrategies

    def __init__(self, config: BufferConfig) -> None:
        self.config = config
        self.hash = config_hash(config)
        made: dict[str, Any] = {axis: make_strategy(axis, getattr(config, axis)) for axis in AXES}
        shaping = {field.name for field in fields(LayoutStrategies)}
        self.layout = LayoutStrategies(**{axis: made.pop(axis) for axis in shaping})
        vars(self).update(made)
        self._peers: dict[int, Peers] = {}

    def peers(self, process_group: Any) -> Peers:
        """What the model chunks over one data-parallel group share to take turns."""
        return self._peers.setdefault(id(process_group), Peers())

    @property
    def on_late(self) -> OnLate:
        """What a gradient means that comes after its bucket group was dispatched."""
        of_readiness = self.readiness.on_late
        return (
            of_readiness
            if of_readiness != 'warn'
            else getattr(self.unused_params, 'on_late', 'warn')
        )

    @property
    def needs_names(self) -> bool:
        """True if a layout of this config depends on the names of parameters."""
        shaping = [getattr(self.layout, field.name) for field in fields(LayoutStrategies)]
        return any(
            getattr(strategy, 'needs_names', False) for strategy in (self.buffer_grouping, *shaping)
        )

    def __repr__(self) -> str:
        return f'Runtime({self.config.source}, {self.hash})'


class ModelChunk(NamedTuple):
    """The model chunk that is being wrapped, for strategies that go by names.

    Attributes:
        names: Parameter to name in the chunk; empty where upstream hands over bare parameters.
        pp_rank: Pipeline stage.
        vp_stage: Which of the stage's chunks it is; 0 without an interleaved schedule.
        grouped: Into which buffers its parameters go, once that is known: upstream asks twice.
    """

    names: Mapping[Any, str] = MappingProxyType({})
    pp_rank: int = 0
    vp_stage: int = 0
    grouped: dict[Any, Any] | None = None


_installed: Runtime | None = None
_generation = 0
_scope = threading.local()
_wrapped: weakref.WeakKeyDictionary[Any, tuple[Runtime, str]] = weakref.WeakKeyDictionary()


def installed() -> Runtime | None:
    """The runtime that ``install()`` made the default, if any."""
    return _installed


def set_installed(runtime: Runtime | None) -> None:
    """For ``install()`` and ``uninstall()``."""
    global _installed, _generation
    _installed = runtime
    _generation += runtime is not None


@contextlib.contextmanager
def scope(runtime: Runtime, chunk: ModelChunk | None = None) -> Iterator[Runtime]:
    """Makes ``runtime`` (and ``chunk``) the current one in this thread for the duration of the block."""
    previous = getattr(_scope, 'runtime', None), getattr(_scope, 'chunk', None)
    _scope.runtime, _scope.chunk = runtime, chunk
    try:
        yield runtime
    finally:
        _scope.runtime, _scope.chunk = previous


def current_chunk() -> ModelChunk:
    """The model chunk being wrapped here; without names outside of a constructor of ours."""
    return getattr(_scope, 'chunk', None) or ModelChunk()


def _in_force() -> Runtime | None:
    return getattr(_scope, 'runtime', None) or _installed


def current() -> Runtime:
    """The runtime in force here: the innermost scope's, else the installed one.

    Raises:
        PatchError: If there is none.
    """
    runtime = _in_force()
    if runtime is None:
        raise PatchError(
            'no megatron_buffer config is in force: call megatron_buffer.install(config) first, or '
            'build the model with megatron_buffer.DistributedDataParallel'
        )
    return runtime


def resolve(config: Any = None) -> Runtime:
    """The runtime for ``config`` (anything ``load_config`` takes), or the one in force for None.

    Without a config and without an installed one it is ``upstream``.
    """
    if config is None:
        return _in_force() or Runtime(load_config(None))
    return Runtime(load_config(config))


def generation(runtime: Runtime) -> int | None:
    """Which of the process's installed runtimes this is; None for one that belongs to one model only.

    Every rank of a job installs alike, so the number names a comparison between ranks.
    """
    return _generation if runtime is _installed else None


def track(model: Any, runtime: Runtime, description: str) -> None:
    """Remembers a wrapped model for as long as it lives."""
    _wrapped[model] = (runtime, description)


def live_models() -> list[str]:
    """Descriptions of the models that were wrapped under the installed runtime and still live."""
    return [text for runtime, text in _wrapped.values() if runtime is _installed]

"""What is to be checked: a config, or a config in which objects take the place of some strategies.

Upstream has no counterpart.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_buffer.config import AXES, BufferConfig, load_config
from megatron_buffer.config_yaml import did_you_mean
from megatron_buffer.errors import ConfigError
from megatron_buffer.layout import LayoutStrategies
from megatron_buffer.strategies.registry import make_strategy

if TYPE_CHECKING:
    from megatron_buffer.runtime import Runtime

LAYOUT_AXES = (
    'buffer_grouping',
    'param_order',
    'bucketing',
    'bucket_isolation',
    'padding',
    'bucket_groups',
)
"""The axes that decide where things lie and what travels together."""


@dataclass(frozen=True)
class Choice:
    """A config, and objects that act instead of the strategies it names; travels to other processes.

    Attributes:
        config: A loaded config.
        objects: Strategy objects by axis.
    """

    config: BufferConfig
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Any, implementation: Any, config: Any) -> Choice:
        """From what a user hands over: a config, or an axis and the object that acts for it.

        Raises:
            ConfigError: If there is no such axis, or the config is wrong.
        """
        if implementation is None:
            if isinstance(strategy, str) and strategy in AXES:
                raise ConfigError(
                    f'{strategy} is an axis: give the strategy object as second argument, or a config '
                    f'such as {{{strategy!r}: ...}}'
                )
            return cls(load_config(strategy))
        if not isinstance(strategy, str) or strategy not in AXES:
            hint = did_you_mean(str(strategy), AXES)
            raise ConfigError(
                f'{strategy!r} is no axis; a strategy object needs one of {", ".join(AXES)}.{hint}'
            )
        return cls(load_config(config), {strategy: implementation})

    def __str__(self) -> str:
        """What differs from upstream, in one line."""
        told = [f'{axis}={type(found).__name__}' for axis, found in self.objects.items()]
        words = self.config.short_str()
        return ' '.join([*([] if told and words == 'upstream' else [words]), *told])

    def strategy(self, axis: str) -> Any:
        """The object that acts for an axis."""
        if axis in self.objects:
            return self.objects[axis]
        return make_strategy(axis, getattr(self.config, axis))

    def layout_strategies(self) -> LayoutStrategies:
        """The four strategies that shape a buffer."""
        names = [field.name for field in dataclasses.fields(LayoutStrategies)]
        return LayoutStrategies(**{axis: self.strategy(axis) for axis in names})

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the choice, as a config is installed, for the duration of the block."""
        import megatron_buffer
        from megatron_buffer import runtime as runtime_module

        with megatron_buffer.activated(self.config):
            if self.objects:
                runtime_module.set_installed(self.runtime())
            yield

    def runtime(self) -> Runtime:
        """A runtime of this choice, for :func:`megatron_buffer.runtime.scope`."""
        from megatron_buffer.runtime import Runtime

        runtime = Runtime(self.config)
        runtime.layout = self.layout_strategies()
        vars(runtime).update(
            {
                axis: found
                for axis, found in self.objects.items()
                if not hasattr(runtime.layout, axis)
            }
        )
        return runtime

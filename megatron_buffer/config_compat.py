"""Which choices of a config cannot work together, whatever the model and Megatron's own flags are.

What is not in this table works together. What depends on ``ddp_config`` or on the backend is
checked when a model is wrapped. Imports neither torch nor megatron; upstream has no counterpart (it
asserts while it trains).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_buffer.config_layout import SingleGroup
from megatron_buffer.config_runtime import AllToAllFp32Sum, PremulSum
from megatron_buffer.errors import ConfigError

if TYPE_CHECKING:
    from megatron_buffer.config_types import BufferConfig


def _always(first: Any, second: Any) -> bool:
    del first, second
    return True


class Incompatible(NamedTuple):
    """Two choices that cannot work together.

    Attributes:
        paths: YAML paths of the two choices: their axes.
        choices: The strategies that clash, as parameter classes.
        reason: Why they clash.
        way_out: What to choose instead.
        clash: Says of the two strategies' parameters whether they clash; always, unless told.
    """

    paths: tuple[str, str]
    choices: tuple[type[Any], type[Any]]
    reason: str
    way_out: str
    clash: Callable[[Any, Any], bool] = _always

    @property
    def path(self) -> tuple[str]:
        """Where a message about it points."""
        return (self.paths[0],)

    @property
    def names(self) -> tuple[str, str]:
        """The two choices as YAML writes them, ``scaling: premul_sum``."""
        (first, second), (one, other) = self.paths, self.choices
        return f'{first}: {one.name}', f'{second}: {other.name}'

    @property
    def text(self) -> str:
        """The whole rule in words, without the first path."""
        return (
            f'{self.choices[0].name!r} cannot be combined with {self.names[1]}: {self.reason}. '
            f'{self.way_out}'
        )


INCOMPATIBLE: tuple[Incompatible, ...] = (
    Incompatible(
        paths=('grad_reduce', 'bucket_groups'),
        choices=(AllToAllFp32Sum, SingleGroup),
        reason='it works on one bucket per group, and one group of all buckets would need '
        'temporaries as large as all gradients at once',
        way_out='Choose bucket_groups: separate or merge_into_last_fp8, or another grad_reduce',
    ),
    Incompatible(
        paths=('scaling', 'grad_reduce'),
        choices=(PremulSum, AllToAllFp32Sum),
        reason='NCCL multiplies while it reduces, and an all-to-all only sends; the sum is made '
        'afterwards, without a reduce op',
        way_out='Choose scaling: prescale or shard_postscale, or another grad_reduce',
    ),
)
"""Every impossible pair of choices."""


def incompatibilities(strategies: Mapping[str, Any]) -> list[Incompatible]:
    """The rules that these choices break.

    Args:
        strategies: The parameters of the strategy chosen for each axis, by YAML key; None, or no
            entry, for an axis whose choice is not known.
    """
    broken: list[Incompatible] = []
    for rule in INCOMPATIBLE:
        chosen = [strategies.get(axis) for axis in rule.paths]
        right = all(isinstance(one, cls) for one, cls in zip(chosen, rule.choices, strict=True))
        if right and rule.clash(*chosen):
            broken.append(rule)
    return broken


def check_compatible(config: BufferConfig) -> None:
    """Checks that a config's choices can work together; every config checks itself when it is made.

    Raises:
        ConfigError: If some cannot; it names both YAML paths of each such pair, and the way out.
    """
    broken = incompatibilities(vars(config))
    if broken:
        raise ConfigError(
            '\n'.join(f'{rule.paths[0]}: {rule.text}' for rule in broken),
            yaml_path=broken[0].paths[0],
            source=config.source,
        )

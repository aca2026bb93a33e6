"""``bucketing: time_optimal``: the cuts that expose the least of reductions and gathers.

Stands for the same places as :mod:`megatron_buffer.strategies.bucketing`. The times at which gradients
arrive and forward reads parameters come from a profile file (``--custom-buffer-record``), the times of the
collectives from a network model; the running rank measures nothing, so all ranks cut alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from megatron_buffer.config_layout import FixedSizeBucketing as FixedSizeParams
from megatron_buffer.config_layout import TimeOptimalBucketing as TimeOptimalParams
from megatron_buffer.config_network import Line, Network, Placement, load_network
from megatron_buffer.errors import LayoutError
from megatron_buffer.profile import ChunkProfile, Profile, World, chunk_key, load_profile
from megatron_buffer.strategies.best_cuts import best_cuts
from megatron_buffer.strategies.bucketing import Cutter, FixedSize
from megatron_buffer.strategies.padding import Alignment, round_up
from megatron_buffer.strategies.registry import strategy
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec
from megatron_buffer.strategies.timed_cuts import Row

_ADVICE = 'Record a profile of this model with --custom-buffer-record, or choose another bucketing.'


@strategy('bucketing', TimeOptimalParams)
class TimeOptimal:
    """Cuts each buffer by itself, as if the network were there for it alone.

    Args:
        params: The config's.
        profile: What to use in place of the file ``params.profile``.
        network: What to use in place of ``params.network``.

    Raises:
        ConfigError: If the file or the network cannot be read.
    """

    needs_names = True

    def __init__(
        self,
        params: TimeOptimalParams,
        profile: Profile | None = None,
        network: Network | None = None,
    ) -> None:
        self.params = params
        self.profile = profile or load_profile(params.profile, 'bucketing.profile')
        self.network = network or load_network(params.network, 'bucketing.network')

    def for_buffer(self, buffer: BufferTraits, alignment: Alignment, sharded: bool) -> _OfBuffer:
        """The strategy for one buffer, of which it needs to know more than the others do.

        Args:
            buffer: The buffer.
            alignment: Where its parameters and buckets may start.
            sharded: Whether the distributed optimizer is used.
        """
        return _OfBuffer(self, buffer, alignment, sharded)

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """Of a buffer that nothing is known of: unsharded, without padding."""
        return self.for_buffer(BufferTraits(), Alignment(1, 1), False).cutter(
            params, alone, bucket_size_elems
        )


class _OfBuffer:
    """Cuts one buffer."""

    def __init__(
        self, strategy: TimeOptimal, buffer: BufferTraits, alignment: Alignment, sharded: bool
    ) -> None:
        self._strategy = strategy
        self._buffer = buffer
        self._alignment = alignment
        self._sharded = sharded

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Cutter:
        """Where names are not known it is the resolved size that cuts.

        Raises:
            LayoutError: If the profile lacks the model chunk or a parameter.
        """
        if bucket_size_elems is None or not all(spec.name for spec in params):
            return FixedSize(FixedSizeParams()).cutter(params, alone, bucket_size_elems)
        planned = frozenset(best_cuts(self._row(params, alone)))
        return lambda bucket: bucket.position in planned

    def _row(self, params: Sequence[ParamSpec], alone: Sequence[bool]) -> Row:
        strategy, buffer = self._strategy, self._buffer
        starts: list[int] = []
        ends: list[int] = []
        cursor = 0
        for spec in params:
            starts.append(round_up(cursor, self._alignment.param_start_elems))
            cursor = starts[-1] + spec.numel_elems
            ends.append(cursor)
        is_expert = all('.experts.' in spec.name for spec in params)
        group = group_of(
            strategy.network,
            strategy.profile.world,
            # Without the distributed optimizer nobody tells how many ranks there are.
            buffer.dp_size if self._sharded else strategy.profile.world.dp,
            is_expert,
        )
        network, chunk = strategy.network, self._chunk()
        grad_bytes = buffer.grad_bytes if self._sharded else 4
        row = Row(
            ready_s=ready_times(chunk, params, _source(strategy.params.profile, buffer)),
            starts_elems=starts,
            ends_elems=ends,
            alone=alone,
            divisor_elems=math.lcm(*self._alignment),
            lines=_per_elem(
                network.lines('reduce_scatter' if self._sharded else 'all_reduce', group),
                grad_bytes,
            ),
            backward_end_s=_latest(param.grad_time_s for param in chunk.params),
        )
        used = {param.name: param.forward_time_s for param in chunk.params}
        if strategy.profile.world.vpp > 1:
            # The interleaved schedule starts all collectives of a chunk at once, after its backward and before
            # its forward (align_grad_reduce, align_param_gather).
            row = dataclasses.replace(row, ready_s=[row.backward_end_s] * len(params))
            used = dict.fromkeys(used, 0.0)
        if not self._sharded:
            return row
        return dataclasses.replace(
            row,
            gather_lines=_per_elem(
                network.lines('all_gather', group), buffer.param_bytes / buffer.values_per_byte
            ),
            first_use_s=[_or_never(used[spec.name]) for spec in params],
            forward_s=_latest(used.values()),
        )

    def _chunk(self) -> ChunkProfile:
        buffer, profile = self._buffer, self._strategy.profile
        chunk = profile.chunks.get(chunk_key(buffer.pp_rank, buffer.vp_stage))
        if chunk is None:
            raise LayoutError(
                f'{_source(self._strategy.params.profile, buffer)} is missing; the profile holds '
                f'{", ".join(profile.chunks) or "none"}. {_ADVICE}'
            )
        return chunk


def group_of(network: Network, world: World, ranks: int, is_expert: bool) -> Placement:
    """Where the ranks are that a buffer is reduced over: tensor and expert parallelism lie inside."""
    return network.placement(ranks, world.tp * (world.ep if is_expert else 1))


def ready_times(chunk: ChunkProfile, params: Sequence[ParamSpec], source: str) -> list[float]:
    """When the gradient of each parameter was there, in seconds from the chunk's first one.

    One that got none in the recorded backward counts as the last: its bucket waits for the end.

    Args:
        chunk: The recorded chunk.
        params: The parameters.
        source: What the recorded chunk is called in messages.

    Raises:
        LayoutError: If the chunk lacks one of them.
    """
    times = {param.name: param.grad_time_s for param in chunk.params}
    last = max((time for time in times.values() if time is not None), default=0.0)
    result: list[float] = []
    for spec in params:
        if spec.name not in times:
            raise LayoutError(
                f'{source} has no parameter {spec.name} among its {len(times)}: it was recorded with '
                f'another model, dtype or sizes. {_ADVICE}'
            )
        time = times[spec.name]
        result.append(last if time is None else time)
    return result


def _latest(times: Iterable[float | None]) -> float:
    return max((time for time in times if time is not None), default=0.0)


def _or_never(time: float | None) -> float:
    return math.inf if time is None else max(0.0, time)


def _per_elem(lines: Iterable[Line], elem_bytes: float) -> list[tuple[float, float]]:
    return [(line.alpha_s, line.beta_s_per_byte * elem_bytes) for line in lines]


def _source(path: str, buffer: BufferTraits) -> str:
    key = chunk_key(buffer.pp_rank, buffer.vp_stage)
    return f'bucketing.profile: model chunk {key} of {path}'

"""``param_order: recorded``: the order that a profile file holds, for the layout and for the gathers.

Stands for the same places as :mod:`megatron_buffer.strategies.order`, and for the chain of
``next_param_gather_bucket_group`` that ``DistributedDataParallel.__init__``
(``megatron/core/distributed/distributed_data_parallel.py``) makes of the list of groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_buffer.config_layout import RecordedOrder as RecordedOrderParams
from megatron_buffer.errors import LayoutError
from megatron_buffer.profile import ParamProfile, chunk_key, load_profile
from megatron_buffer.strategies.registry import strategy
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec

_ADVICE = (
    'Record a profile of this model with --custom-buffer-record, or choose another param_order.'
)


@strategy('param_order', RecordedOrderParams)
class RecordedOrder:
    """Lays parameters out as a recorded run saw them; the file is read when the strategy is made.

    Raises:
        ConfigError: If the file cannot be read, or is no profile.
    """

    needs_names = True

    def __init__(self, params: RecordedOrderParams) -> None:
        self.params = params
        self.profile = load_profile(params.profile)

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        """The recorded order; parameters that were not seen come last, last registered first.

        Where names are not known it is the ``reverse`` order.

        Raises:
            LayoutError: If the profile lacks the model chunk or a parameter.
        """
        backwards = range(len(params) - 1, -1, -1)
        if not all(param.name for param in params):
            return backwards
        by_name = self._chunk(buffer.pp_rank, buffer.vp_stage)
        places: dict[int, int] = {}
        for index, param in enumerate(params):
            found = by_name.get(param.name)
            if found is None:
                raise LayoutError(self._no_parameter(param.name, buffer, len(by_name)))
            if self.params.layout_by == 'grad_arrival':
                place = found.grad_arrival
            else:
                place = None if found.forward_use is None else -found.forward_use
            if place is not None:
                places[index] = place
        unseen = [index for index in backwards if index not in places]
        return [*sorted(places, key=places.__getitem__), *unseen]

    def gather_order(
        self, groups: Sequence[Sequence[str]], pp_rank: int, vp_stage: int
    ) -> list[int] | None:
        """In which order forward first needs the bucket groups.

        Args:
            groups: Names of each group's parameters, in Megatron's order of the groups: from the end of
                the model to its start.
            pp_rank: Pipeline stage.
            vp_stage: Which of the stage's chunks it is.

        Returns:
            Indices of the groups. Those that forward never read come last, as Megatron would take them.
            None where the config leaves the order of the gathers to Megatron.
        """
        if not self.params.chain_gathers:
            return None
        by_name = self._chunk(pp_rank, vp_stage)

        def first_use(index: int) -> float:
            uses = [by_name[name].forward_use for name in groups[index] if name in by_name]
            return min((use for use in uses if use is not None), default=float('inf'))

        return sorted(range(len(groups) - 1, -1, -1), key=first_use)

    def _chunk(self, pp_rank: int, vp_stage: int) -> dict[str, ParamProfile]:
        key = chunk_key(pp_rank, vp_stage)
        chunk = self.profile.chunks.get(key)
        if chunk is None:
            raise LayoutError(
                f'param_order.profile: {self.params.profile} has no model chunk {key} (pipeline stage '
                f'{pp_rank}, chunk {vp_stage}); it holds {", ".join(self.profile.chunks) or "none"}. '
                f'{_ADVICE}'
            )
        return {param.name: param for param in chunk.params}

    def _no_parameter(self, name: str, buffer: BufferTraits, num_known: int) -> str:
        world = self.profile.world
        return (
            f'param_order.profile: {self.params.profile} has no parameter {name} among the {num_known} '
            f'of model chunk {chunk_key(buffer.pp_rank, buffer.vp_stage)}: it was recorded with another '
            f'model, dtype or sizes (it says tp {world.tp}, pp {world.pp}, vpp {world.vpp}, dp '
            f'{world.dp}, ep {world.ep}). {_ADVICE}'
        )

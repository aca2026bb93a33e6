"""``param_order``: in which order the parameters of a buffer are laid out.

Upstream has no function for it: ``params[::-1]`` is written into every loop over a buffer
(``DistributedOptimizer._compute_per_buffer_param_layout``, ``_compute_default_per_buffer_param_layout``
and the mounting loop of ``_ParamAndGradBuffer.__init__``). An order is therefore realised by permuting
the parameter list inside ``group_params_for_buffers``, so that upstream's own reversal yields it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from megatron_buffer.config_layout import ForwardOrder as ForwardOrderParams
from megatron_buffer.config_layout import RandomOrder as RandomOrderParams
from megatron_buffer.config_layout import ReverseOrder as ReverseOrderParams
from megatron_buffer.strategies.registry import strategy
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec


class ParamOrder(Protocol):
    """Chooses the order in the buffer."""

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        """Returns a permutation of ``range(len(params))``: first in the buffer first.

        It must come out equal on all ranks that share the buffer: data- and tensor-parallel ones.

        Args:
            params: The buffer's parameters in registration (forward) order.
            buffer: The buffer; its sizes are not final here, its pipeline stage and chunk are.
        """
        ...


@strategy('param_order', ReverseOrderParams)
class ReverseOrder:
    """Last registered first: about the order in which backward produces gradients."""

    def __init__(self, params: ReverseOrderParams) -> None:
        self.params = params

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        """Registration order, backwards."""
        return range(len(params) - 1, -1, -1)


@strategy('param_order', ForwardOrderParams)
class ForwardOrder:
    """First registered first: gradients arrive from the far end of the buffer."""

    def __init__(self, params: ForwardOrderParams) -> None:
        self.params = params

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        """Registration order."""
        return range(len(params))


@strategy('param_order', RandomOrderParams)
class RandomOrder:
    """A shuffle that depends on the seed and the number of parameters alone."""

    def __init__(self, params: RandomOrderParams) -> None:
        self.params = params

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        """Python's own generator, seeded with a number: every rank shuffles alike."""
        order = list(range(len(params)))
        random.Random(self.params.seed).shuffle(order)
        return order

"""``param_order``: in which order the parameters of a buffer are laid out.

Upstream has no function for it: ``params[::-1]`` is written into every loop over a buffer
(``DistributedOptimizer._compute_per_buffer_param_layout``, ``_compute_default_per_buffer_param_layout``
and the mounting loop of ``_ParamAndGradBuffer.__init__``). An order is therefore realised by permuting
the parameter list inside ``group_params_for_buffers``, so that upstream's own reversal yields it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_buffer.config_layout import ReverseOrder as ReverseOrderParams
from megatron_buffer.strategies.registry import strategy


class ParamOrder(Protocol):
    """Chooses the order in the buffer."""

    def layout_order(self, names: Sequence[str]) -> Sequence[int]:
        """Returns a permutation of ``range(len(names))``: first in the buffer first.

        Args:
            names: Parameter names in registration (forward) order; '' where unknown.
        """
        ...


@strategy('param_order', ReverseOrderParams)
class ReverseOrder:
    """Last registered first: about the order in which backward produces gradients."""

    def __init__(self, params: ReverseOrderParams) -> None:
        self.params = params

    def layout_order(self, names: Sequence[str]) -> Sequence[int]:
        """Registration order, backwards."""
        return range(len(names) - 1, -1, -1)

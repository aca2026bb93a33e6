"""``unused_params``: what a parameter without a gradient means.

Stands for the assertions in ``_ParamAndGradBucketGroup.finish_grad_sync`` and ``reset``
(``megatron/core/distributed/param_and_grad_buffer.py``), which fire bare, and in the first iteration
only at the next ``zero_grad_buffer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megatron_buffer.config_types import UpstreamUnused as UpstreamUnusedParams
from megatron_buffer.errors import ReadinessError
from megatron_buffer.strategies.registry import strategy


class WindowState(NamedTuple):
    """A bucket group when its window is being finished, with overlap_grad_reduce on.

    Attributes:
        missing: Names of parameters that got no gradient, or fewer than in the learned window.
        surplus: Names of parameters that got more than in the learned window.
        num_registered: Parameters that got at least one.
        num_params: Parameters of the group.
        is_first_batch: True while the golden counts are not known.
        dispatched: True when the reduction was started in this window.
    """

    missing: Sequence[str]
    surplus: Sequence[str]
    num_registered: int
    num_params: int
    is_first_batch: bool
    dispatched: bool


class UnusedParams(Protocol):
    """Judges a window before its reductions are waited for."""

    def check(self, window: WindowState) -> None:
        """Raises, warns or accepts.

        Raises:
            ReadinessError: If the group cannot be reduced as it is.
        """
        ...


@strategy('unused_params', UpstreamUnusedParams)
class UpstreamUnused:
    """An error only where stock would assert, but at once and by name.

    Stock asserts when some but not all parameters of a group got a gradient in the first iteration,
    or when a later one does not repeat the first one's counts exactly; with several optimizer instances
    it goes on in the latter case with gradients that were never reduced, which is an error here. A group that never gets any
    gradient is reduced as zeros for ever, without an error; DDP names its parameters in one warning.
    """

    def __init__(self, params: UpstreamUnusedParams) -> None:
        self.params = params

    def check(self, window: WindowState) -> None:
        """See the class."""
        if window.is_first_batch:
            if 0 < window.num_registered < window.num_params:
                raise ReadinessError(
                    f'{len(window.missing)} of {window.num_params} parameters of a bucket group got '
                    f'no gradient in this iteration: {_listed(window.missing)}. With '
                    'overlap_grad_reduce every parameter of a bucket must take part in the loss. '
                    'Freeze the unused ones (requires_grad=False) before wrapping the model, or turn '
                    'overlap_grad_reduce off.'
                )
        elif not window.dispatched:
            if window.num_registered == 0:
                found = 'no gradient arrived'
            else:
                parts: list[str] = []
                if window.missing:
                    parts.append(f'too few gradients for {_listed(window.missing)}')
                if window.surplus:
                    parts.append(f'too many for {_listed(window.surplus)}')
                found = '; '.join(parts)
            raise ReadinessError(
                'a bucket group was not reduced, because its gradients did not arrive as often as in '
                f'the first iteration ({window.num_registered} of {window.num_params} parameters got '
                f'any): {found}. The number of backward passes without no_sync(), and the parameters '
                'that take part in each, must be the same in every iteration.'
            )


def _listed(names: Sequence[str], limit: int = 8) -> str:
    shown = ', '.join(names[:limit])
    return shown if len(names) <= limit else f'{shown} and {len(names) - limit} more'

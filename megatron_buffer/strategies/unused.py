"""``unused_params``: what a parameter without a gradient means.

Stands for the assertions in ``_ParamAndGradBucketGroup.finish_grad_sync`` and ``reset``
(``megatron/core/distributed/param_and_grad_buffer.py``), which fire bare, and in the first iteration
only at the next ``zero_grad_buffer``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from megatron_buffer.config_runtime import UnusedIsError as UnusedIsErrorParams
from megatron_buffer.config_runtime import UpstreamUnused as UpstreamUnusedParams
from megatron_buffer.config_runtime import ZeroFillUnused as ZeroFillUnusedParams
from megatron_buffer.errors import ReadinessError
from megatron_buffer.strategies.readiness import OnLate
from megatron_buffer.strategies.registry import strategy

logger = logging.getLogger(__name__)


TracksForward = Literal['never', 'first_window', 'always']


class Window(Protocol):
    """A bucket group when its window is being finished, with overlap_grad_reduce on.

    Names are those of the wrapped module and are looked up only when asked for.

    Attributes:
        num_params: Parameters of the group.
        num_registered: Those that got at least one gradient in the last micro-batch.
        is_first_batch: True while no counts are expected.
        adapts: True if what is expected follows the window before, so that other counts are no fault.
        dispatched: True when the reduction was started in this window.
        level: At which level this rank says what every rank sees alike: a warning on the first one.
        has_handle: False with several optimizer instances, whose reductions are ordered by streams, so
            that stock has no handle to miss.
    """

    num_params: int
    num_registered: int
    is_first_batch: bool
    adapts: bool
    dispatched: bool
    level: int
    has_handle: bool

    def unused(self) -> list[str]:
        """Parameters without any gradient on this rank in this window."""
        ...

    def missing(self) -> list[str]:
        """Parameters with no gradient, or fewer than expected."""
        ...

    def surplus(self) -> list[str]:
        """Parameters with more gradients than expected."""
        ...

    def late(self) -> list[str]:
        """Parameters whose gradient came after the reduction was started, and was added all the same."""
        ...

    def describe(self, name: str) -> str:
        """The parameter's name with what is known of it: its module, and whether that ran in forward."""
        ...


class UnusedParams(Protocol):
    """Judges a chunk's windows before their reductions are waited for.

    The attributes may be left out, and are then ``warn``, ``never`` and False.

    Attributes:
        on_late: What a gradient means that comes after its group was dispatched, where the readiness
            axis leaves it at ``warn``.
        tracks_forward: In which windows :meth:`Window.describe` should know which modules ran; it costs a
            forward pre-hook for each module.
        thawed_is_error: True if a parameter that was frozen when the model was wrapped, and is not any
            more, stops the run; otherwise one warning names it.
    """

    on_late: OnLate
    tracks_forward: TracksForward
    thawed_is_error: bool

    def check(self, windows: Sequence[Window]) -> None:
        """Raises, warns or accepts.

        Args:
            windows: The groups of the chunk where anything is not as it should be: a parameter without
                a gradient, other counts than expected, or a late gradient.

        Raises:
            ReadinessError: If the groups cannot be reduced as they are.
        """
        ...


@strategy('unused_params', UpstreamUnusedParams)
class UpstreamUnused:
    """An error only where stock would assert, but at once and by name; a warning where it is silent.

    Stock asserts when some but not all parameters of a group got a gradient in the first iteration, or
    when a later one falls short of the first one's counts. It says nothing, and trains on with wrong
    gradients, when some arrive after the reduction was started. A group that never gets any gradient is
    reduced as zeros for ever, which is right, and is named once.
    """

    on_late: OnLate = 'warn'
    tracks_forward: TracksForward = 'never'
    thawed_is_error = False

    def __init__(self, params: UpstreamUnusedParams) -> None:
        self.params = params
        self._warned = _Once()

    def check(self, windows: Sequence[Window]) -> None:
        """See the class."""
        silent: list[str] = []
        for window in windows:
            late = window.late()
            if late:
                self._warned.say(
                    'late',
                    'gradients arrived after their bucket group was reduced, and are lost or counted '
                    f'wrongly: {_listed(late)}. {_found(window)} Gradients are wrong from this '
                    'iteration on. readiness: golden_checked reduces such gradients too.',
                )
            if window.num_registered == 0 and (window.is_first_batch or window.adapts):
                silent += window.unused()
            elif window.is_first_batch or window.adapts:
                self._check_partly_used(window)
            elif not window.dispatched and window.has_handle:
                raise ReadinessError(f'a bucket group was not reduced: {_found(window)}')
            elif not window.dispatched:
                self._warned.say(
                    'lacking', f'a bucket group is reduced at finish: {_found(window)}'
                )
        if silent:
            self._warned.say(
                'silent',
                f'{len(silent)} parameters got no gradient in this iteration and are reduced as zeros: '
                f'{_listed(silent)}. Freeze them before wrapping the model if they are unused on '
                'purpose.',
                max(window.level for window in windows),
            )

    def _check_partly_used(self, window: Window) -> None:
        unused = window.unused()
        if unused:
            raise ReadinessError(
                f'{len(unused)} of {window.num_params} parameters of a bucket group got no gradient in '
                f'this iteration: {_listed(unused)}. With overlap_grad_reduce every parameter of a '
                'bucket must take part in the loss. Freeze the unused ones (requires_grad=False) before '
                'wrapping the model, set unused_params: zero_fill, or turn overlap_grad_reduce off.'
            )


@strategy('unused_params', UnusedIsErrorParams)
class UnusedIsError:
    """Any parameter without a gradient is an error that names it."""

    on_late: OnLate = 'warn'
    tracks_forward: TracksForward = 'always'
    thawed_is_error = True

    def __init__(self, params: UnusedIsErrorParams) -> None:
        self.params = params
        self._lacking = UpstreamUnused(UpstreamUnusedParams())

    def check(self, windows: Sequence[Window]) -> None:
        """See the class; what is not about unused parameters is judged as upstream's strategy does."""
        unused = [window.describe(name) for window in windows for name in window.unused()]
        if unused:
            raise ReadinessError(
                f'{len(unused)} parameters got no gradient in this iteration: {_listed(unused)}. Freeze '
                'them (requires_grad=False) before wrapping the model, or set unused_params: zero_fill.'
            )
        self._lacking.check(windows)


@strategy('unused_params', ZeroFillUnusedParams)
class ZeroFillUnused:
    """Zeros are reduced in its place; each parameter is named once.

    What is expected follows the window before, so a parameter that is unused in one window is not waited
    for in the next; if it comes back, its gradient may be late, and is reduced at finish.
    """

    on_late: OnLate = 'reduce'
    tracks_forward: TracksForward = 'first_window'
    thawed_is_error = True

    def __init__(self, params: ZeroFillUnusedParams) -> None:
        self.params = params
        self._named: set[str] = set()

    def check(self, windows: Sequence[Window]) -> None:
        """Warns of the parameters that were not named before."""
        new: list[str] = []
        for window in windows:
            new += [window.describe(n) for n in window.unused() if n not in self._named]
            self._named.update(window.unused())
        if new:
            logger.log(
                max(window.level for window in windows),
                '%d parameters got no gradient in this iteration and are reduced as zeros: %s. This is '
                'said once for each parameter.',
                len(new),
                _listed(new),
            )


class _Once:
    """Says each kind of thing once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, kind: str, message: str, level: int = logging.WARNING) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.log(level, '%s', message)


def _found(window: Window) -> str:
    parts: list[str] = []
    missing, surplus = window.missing(), window.surplus()
    if window.num_registered == 0:
        parts.append('no gradient arrived')
    elif missing:
        parts.append(f'too few for {_listed(missing)}')
    if surplus:
        parts.append(f'too many for {_listed(surplus)}')
    if not parts:
        return f'{window.num_registered} of {window.num_params} parameters got a gradient.'
    return (
        f'gradients did not come as often as in the first iteration ({window.num_registered} of '
        f'{window.num_params} parameters got any): {"; ".join(parts)}. The number of backward passes '
        'without no_sync(), and the parameters that take part in each, must be the same in every '
        'iteration.'
    )


def _listed(names: Sequence[str], limit: int = 8) -> str:
    shown = ', '.join(names[:limit])
    return shown if len(names) <= limit else f'{shown} and {len(names) - limit} more'

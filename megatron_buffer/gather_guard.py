"""Parameters that are read before their gather has brought this step's values.

With ``overlap_param_gather`` a rank holds last step's values of what other ranks own until the gather of
the bucket group has finished; upstream waits for it in a module's forward pre-hook, and for that module's
own parameters only (``DistributedDataParallel._make_forward_pre_hook``,
``megatron/core/distributed/distributed_data_parallel.py``). A weight that is read by another module, or by
``state_dict()``, is read as it is.
"""

from __future__ import annotations

import logging
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._dynamo import OptimizedModule
from torch.overrides import TorchFunctionMode

from megatron_buffer.errors import StaleReadError
from megatron_buffer.hook_identity import as_upstreams

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup
    from megatron_buffer.ddp import DistributedDataParallel

logger = logging.getLogger(__name__)

_LEARNING_PASSES = 3

# Functions that take a parameter and do not read its values.
_HARMLESS = frozenset(
    {
        '__hash__',
        '__len__',
        '__repr__',
        'data_ptr',
        'dim',
        'element_size',
        'get_device',
        'is_complex',
        'is_contiguous',
        'is_floating_point',
        'is_set_to',
        'nelement',
        'ndimension',
        'numel',
        'register_hook',
        'register_post_accumulate_grad_hook',
        'requires_grad_',
        'size',
        'storage_offset',
        'stride',
        'type',
        'untyped_storage',
    }
)
# Attributes that hand the values on.
_READING_ATTRIBUTES = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ('data', 'T', 'mT', 'H', 'mH', 'real', 'imag')
)


class StaleReads(TorchFunctionMode):
    """While a forward pass runs: every torch function that is handed a parameter must find it gathered.

    Args:
        ddp: The wrapped chunk.
        policy: ``error`` names the parameter and the place; ``wait`` waits for the gather first; ``learn``
            does so in the first passes that could find something, and from then on the module that read
            it waits by a forward pre-hook of its own; ``warn`` names it in these first passes, once per
            bucket group, and leaves the values as they are.
    """

    def __init__(
        self, ddp: DistributedDataParallel, policy: Literal['warn', 'error', 'wait', 'learn']
    ) -> None:
        super().__init__()
        self._ddp = weakref.ref(ddp)
        self._policy = policy
        self._groups: Mapping[Any, ParamAndGradBucketGroup] = ddp.param_to_bucket_group
        self._all_groups = ddp._all_groups()
        self._modules = weakref.WeakSet(ddp.module.modules())
        self._learned: set[tuple[int, int]] = set()
        self._warned: set[int] = set()
        # Compiled code would be compiled again for the passes that are watched, and again after them.
        compiled = policy in ('warn', 'learn') and any(map(_is_compiled, self._modules))
        self._passes_left = 0 if compiled else _LEARNING_PASSES
        self._entered = False
        self._depth = 0

    def begin_forward(self, *unused: Any) -> None:
        """Watches this pass, if it can find anything; a pass inside it belongs to it."""
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth > 1:
            return
        if self._passes_left and any(group.awaits_gather for group in self._all_groups):
            self.__enter__()
            self._entered = True

    def end_forward(self, *unused: Any) -> None:
        """Ends the watch, also when the pass has failed."""
        if torch.compiler.is_compiling():
            return
        self._depth = max(0, self._depth - 1)
        if self._entered and self._depth == 0:
            self._entered = False
            self.__exit__(None, None, None)
            self._passes_left -= self._policy in ('warn', 'learn')

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Checks the arguments, then calls the function."""
        kwargs = kwargs or {}
        if (
            torch.compiler.is_compiling()
        ):  # while tracing: what is true now says nothing of later calls
            return func(*args, **kwargs)
        for param in _parameters(args, kwargs):
            group = self._groups.get(param)
            if group is not None and group.awaits_gather and _reads(func):
                self._found(param, group, func)
        return func(*args, **kwargs)

    def _found(self, param: Any, group: ParamAndGradBucketGroup, func: Any) -> None:
        if self._policy == 'warn' and id(group) in self._warned:
            return
        if self._policy in ('warn', 'error'):
            message = (
                f'{group.names([param])[0]} is read by {getattr(func, "__name__", func)} at {_place()} '
                "before the gather of its bucket group has finished, so it still holds last step's values "
                "on other ranks' shards. Read it in the forward of the module that owns it, set "
                'checks.stale_read: learn (or wait), or turn overlap_param_gather off'
            )
            if self._policy == 'error':
                raise StaleReadError(message)
            self._warned.add(id(group))
            logger.warning('%s', message)
            return
        self._wait(group)
        reader = self._reader() if self._policy == 'learn' else None
        if reader is not None and (id(reader), id(group)) not in self._learned:
            self._learned.add((id(reader), id(group)))
            this, waited_for = weakref.ref(self), weakref.ref(group)

            def hook(*unused: Any) -> None:
                mode, group = this(), waited_for()
                if mode is not None and group is not None and group.awaits_gather:
                    mode._wait(group)

            reader.register_forward_pre_hook(as_upstreams(hook))
            logger.info(
                '%s is read by another module (%s), which waits for its gather from now on',
                group.names([param])[0],
                type(reader).__name__,
            )

    def _wait(self, group: ParamAndGradBucketGroup) -> None:
        ddp = self._ddp()
        if ddp is not None:
            wait_for_gather(ddp, group)

    def _reader(self) -> torch.nn.Module | None:
        """The module of ours whose code is running, from the stack."""
        frame = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get('self')
            if isinstance(owner, torch.nn.Module) and owner in self._modules:
                return owner
            frame = frame.f_back
        return None


def wait_for_gather(ddp: DistributedDataParallel, group: ParamAndGradBucketGroup) -> None:
    """Waits for a group's gather as upstream's forward pre-hook does."""
    with torch.no_grad():
        group.finish_param_sync(skip_next_bucket_dispatch=ddp.skips_next_gather)


def watch_reads(ddp: DistributedDataParallel) -> None:
    """Installs what ``checks.stale_read`` and ``checks.export`` ask for; nothing without the overlap."""
    if not (ddp.ddp_config.overlap_param_gather and ddp.ddp_config.use_distributed_optimizer):
        return
    checks = ddp.runtime.config.checks
    if checks.stale_read != 'ignore':
        mode = StaleReads(ddp, checks.stale_read)

        ddp.register_forward_pre_hook(mode.begin_forward)
        ddp.register_forward_hook(mode.end_forward, always_call=True)
    this = weakref.ref(ddp)

    def before_export(module: torch.nn.Module, *unused: Any) -> None:
        wrapped = this()
        if wrapped is not None:
            _settle_for_export(wrapped, module)

    for module in ddp.module.modules():
        if any(param is not None and param.requires_grad for param in module._parameters.values()):
            module.register_state_dict_pre_hook(before_export)


def _settle_for_export(ddp: DistributedDataParallel, module: torch.nn.Module) -> None:
    policy = ddp.runtime.config.checks.export
    for param in module.parameters(recurse=False):
        group = ddp.param_to_bucket_group.get(param)
        if group is None or not group.awaits_gather:
            continue
        if group.param_gather_handle is not None or policy == 'gather':
            with torch.no_grad():
                group.start_param_sync(force_sync=True)
            continue
        message = (
            f'state_dict() between an optimizer step and the next forward pass: {group.names([param])[0]} '
            "and the others of its bucket group were not gathered yet and hold last step's values on other "
            "ranks' shards. Call start_param_sync(force_sync=True) on every rank first, or set "
            'checks.export: gather, which does so and is then a collective call'
        )
        if policy == 'error':
            raise StaleReadError(message)
        if not group.warned_of_export:
            group.warned_of_export = True
            logger.warning('%s', message)


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None or isinstance(module, OptimizedModule)


def _reads(func: Any) -> bool:
    name = getattr(func, '__name__', '')
    if name == '__get__':
        return func in _READING_ATTRIBUTES
    return name != '__set__' and name not in _HARMLESS


def _parameters(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.nn.Parameter]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.nn.Parameter))


def _place() -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()[:-3]):
        if '/torch/' not in frame.filename and '/megatron_buffer/' not in frame.filename:
            return f'{frame.filename}:{frame.lineno} ({frame.name})'
    return 'an unknown place'

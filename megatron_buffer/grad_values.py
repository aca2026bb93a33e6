"""NaN, Inf and unexpectedly large values in gradients, with the names of the parameters that have them.

Stands for ``_ParamAndGradBucketGroup.check_grads``
(``megatron/core/distributed/param_and_grad_buffer.py``), which names the bucket's number in its group.
Values go through Megatron's rerun state machine as upstream's do, so that what it does about a value that
does not come again is unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_buffer.errors import GradientValueError

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup

logger = logging.getLogger(__name__)

_LARGE = 10  # times what was the largest so far; upstream's threshold
_TOLERANCE = 0.001  # by how much a rerun may differ, with a backward pass that is not deterministic


def check_local_grads(group: ParamAndGradBucketGroup, *, nan_or_inf: bool, large: bool) -> None:
    """Checks each bucket's gradients of this rank before they are reduced.

    Args:
        group: The group, not dispatched yet.
        nan_or_inf: ``ddp_config.check_for_nan_in_grad``.
        large: ``ddp_config.check_for_large_grads``; such values are reported and do not stop the run.

    Raises:
        GradientValueError: On NaN or Inf, naming parameters, bucket and rank.
    """
    machine = get_rerun_state_machine()
    too_large = partial(machine.is_unexpectedly_large, threshold=_LARGE, context='grads')
    checks: list[tuple[str, Callable[[Any], Any], bool]] = []
    if nan_or_inf:
        checks += [('NaN', torch.isnan, True), ('Inf', torch.isinf, True)]
    if large:
        checks.append(('unexpectedly large', too_large, False))
    for index, bucket in enumerate(group.buckets):
        norm = bucket.grad_data.norm(p=2)
        for what, rejects, fatal in checks:
            found: list[str] = []

            def named(
                value: Any, index: int = index, rejects: Any = rejects, found: Any = found
            ) -> Any:
                rejected = rejects(value)
                if rejected:
                    found.append(describe_values(group, index, 'before it was reduced'))
                return rejected

            try:
                machine.validate_result(
                    result=norm,
                    rejection_func=named,
                    message=f'{what} in the local gradient norm of bucket {index} of its group, before '
                    'the data-parallel reduction',
                    tolerance=_TOLERANCE,
                    fatal=fatal,
                )
            except RuntimeError as error:
                if found and fatal:
                    raise GradientValueError(found[-1]) from error
                raise
            if found:
                logger.error('%s', found[-1])


def check_reduced_grads(group: ParamAndGradBucketGroup) -> None:
    """Checks the reduced gradients that this rank owns; the host waits for them.

    Raises:
        GradientValueError: On NaN or Inf, naming parameters, bucket and rank.
    """
    for index, bucket in enumerate(group.buckets):
        sharded = group.ddp_config.use_distributed_optimizer
        owned = group.owned_grad_shard(index) if sharded else bucket.grad_data
        if not bool(torch.isfinite(owned).all()):
            raise GradientValueError(describe_values(group, index, 'after it was reduced', owned))


def describe_values(
    group: ParamAndGradBucketGroup, index: int, when: str, owned: torch.Tensor | None = None
) -> str:
    """Which parameters of a bucket have values that are not finite, or else the largest ones.

    Args:
        group: The bucket group.
        index: Which of its buckets.
        when: For the message.
        owned: The part of the bucket to look at; None looks at all of it.
    """
    bucket = group.buckets[index]
    data = bucket.grad_data.view(-1)
    first, last = 0, data.numel()
    if owned is not None:
        first = owned.storage_offset() - data.storage_offset()
        last = first + owned.numel()
    bad: list[str] = []
    largest: list[tuple[float, str]] = []
    for param in bucket.params_list:
        start, end = (min(max(edge, first), last) for edge in bucket.param_to_index[param])
        if start >= end:
            continue
        values = data[start:end]
        name = group.names([param])[0]
        nans, infs = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
        if nans or infs:
            bad.append(f'{name} ({nans} NaN, {infs} Inf of {end - start})')
        else:
            largest.append((float(values.abs().max()), name))
    what = ', '.join(bad[:8]) + (f' and {len(bad) - 8} more' if len(bad) > 8 else '')
    if not bad:
        largest.sort(reverse=True)
        what = 'the largest are ' + ', '.join(
            f'{name} ({value:.3g})' for value, name in largest[:3]
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f'rank {rank}: gradients of bucket {bucket.bucket_id} of its buffer {when}: {what}'

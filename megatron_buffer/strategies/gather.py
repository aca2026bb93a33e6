"""``param_gather``: how updated parameters come back from the ranks that own their shards.

Stands for ``_ParamAndGradBucketGroup.start_param_sync``
(``megatron/core/distributed/param_and_grad_buffer.py``) under the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from megatron_buffer.config_runtime import EagerGather as EagerGatherParams
from megatron_buffer.config_runtime import PerDtypeGather as PerDtypeGatherParams
from megatron_buffer.config_runtime import UpstreamGather as UpstreamGatherParams
from megatron_buffer.strategies.registry import strategy


class ParamGather(Protocol):
    """Splits a group's all-gathers into launches.

    Attributes:
        eager: The optimizer starts the first gathers itself, right after its step.
    """

    eager: bool

    def launches(self, dtypes: Sequence[Hashable], backend: str) -> list[list[int]]:
        """Returns which buckets are gathered in one coalesced launch.

        Args:
            dtypes: Storage dtype of each bucket of the group.
            backend: Backend of the process group, such as 'nccl' or 'gloo'.
        """
        ...


@strategy('param_gather', UpstreamGatherParams)
class UpstreamGather:
    """All buckets of a group in one coalesced launch.

    Not on gloo when their dtypes differ: it takes one dtype for the whole launch and silently writes
    wrong bytes for the others. There it is a launch per dtype.
    """

    eager = False

    def __init__(self, params: UpstreamGatherParams) -> None:
        self.params = params

    def launches(self, dtypes: Sequence[Hashable], backend: str) -> list[list[int]]:
        """See the class."""
        if backend != 'gloo':
            return [list(range(len(dtypes)))]
        return by_dtype(dtypes)


@strategy('param_gather', EagerGatherParams)
class EagerGather(UpstreamGather):
    """As upstream's, but the gather that forward needs first is under way before forward begins.

    The optimizer starts it (:meth:`megatron_buffer.optimizer.DistributedOptimizer.step_with_ready_grads`).
    """

    eager = True

    def __init__(self, params: EagerGatherParams) -> None:
        self.params = params


@strategy('param_gather', PerDtypeGatherParams)
class PerDtypeGather:
    """A launch per dtype, on every backend."""

    eager = False

    def __init__(self, params: PerDtypeGatherParams) -> None:
        self.params = params

    def launches(self, dtypes: Sequence[Hashable], backend: str) -> list[list[int]]:
        """See the class."""
        return by_dtype(dtypes)


def by_dtype(dtypes: Sequence[Hashable]) -> list[list[int]]:
    """Groups indices by dtype, in order of first appearance."""
    launches: dict[Hashable, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        launches.setdefault(dtype, []).append(index)
    return list(launches.values())


def chain_heads(groups: Sequence[Any]) -> list[Any]:
    """The bucket groups that are gathered first: those that no other group's gather starts.

    Args:
        groups: Bucket groups of one model chunk, chained by ``next_param_gather_bucket_group``.
    """
    followers = {id(group.next_param_gather_bucket_group) for group in groups}
    return [group for group in groups if id(group) not in followers]

"""``param_gather``: how updated parameters come back from the ranks that own their shards.

Stands for ``_ParamAndGradBucketGroup.start_param_sync``
(``megatron/core/distributed/param_and_grad_buffer.py``) under the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from megatron_buffer.config_runtime import UpstreamGather as UpstreamGatherParams
from megatron_buffer.strategies.registry import strategy


class ParamGather(Protocol):
    """Splits a group's all-gathers into launches."""

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

    def __init__(self, params: UpstreamGatherParams) -> None:
        self.params = params

    def launches(self, dtypes: Sequence[Hashable], backend: str) -> list[list[int]]:
        """See the class."""
        if backend != 'gloo':
            return [list(range(len(dtypes)))]
        return by_dtype(dtypes)


def by_dtype(dtypes: Sequence[Hashable]) -> list[list[int]]:
    """Groups indices by dtype, in order of first appearance."""
    launches: dict[Hashable, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        launches.setdefault(dtype, []).append(index)
    return list(launches.values())

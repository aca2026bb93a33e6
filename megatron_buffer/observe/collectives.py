"""Which collectives a bucket group really starts: seen below ``torch.distributed``, nothing replaced.

Upstream has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal['reduce_scatter', 'all_reduce', 'all_gather', 'all_to_all']

# Operator of c10d: what it is, and which argument holds what all ranks of the group have together.
_OPERATORS: dict[str, tuple[Kind, int]] = {
    'allreduce_': ('all_reduce', 0),
    'allreduce_coalesced_': ('all_reduce', 0),
    '_reduce_scatter_base_': ('reduce_scatter', 1),
    'reduce_scatter_': ('reduce_scatter', 1),
    'reduce_scatter_tensor_coalesced_': ('reduce_scatter', 1),
    '_allgather_base_': ('all_gather', 0),
    'allgather_': ('all_gather', 0),
    'allgather_coalesced_': ('all_gather', 0),
    'allgather_into_tensor_coalesced_': ('all_gather', 0),
    'alltoall_base_': ('all_to_all', 1),
    'alltoall_': ('all_to_all', 1),
}


class Collective(NamedTuple):
    """One launch.

    Attributes:
        kind: Which collective.
        payload_bytes: What is reduced, gathered or exchanged: the whole buckets.
        num_ranks: Size of the process group.
        num_tensors: Buckets that it takes at once.
    """

    kind: Kind
    payload_bytes: int
    num_ranks: int
    num_tensors: int

    @property
    def wire_bytes(self) -> int:
        """What each rank sends in a ring; an all-reduce goes round twice."""
        rounds = 2 if self.kind == 'all_reduce' else 1
        return -(-rounds * (self.num_ranks - 1) * self.payload_bytes // self.num_ranks)


class SeenCollectives(TorchDispatchMode):
    """Notes every collective that this thread starts while it is active.

    Args:
        mark: Makes a mark.

    Attributes:
        calls: The collectives, in order.
        first: When the first one was started.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self.first: Any = None
        self._mark = mark

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes and passes on."""
        if func.namespace == 'c10d' and (known := _OPERATORS.get(func._opname)):
            if not self.calls:
                self.first = self._mark()
            kind, place = known
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            whole = [leaf for leaf in tree_leaves(args[place]) if isinstance(leaf, torch.Tensor)]
            # One of the two lists has an entry per rank in the operators that take lists of lists.
            given = [a for a in args[:2] if not isinstance(a, torch.ScriptObject)]
            self.calls.append(
                Collective(
                    kind,
                    sum(tensor.nbytes for tensor in whole),
                    dist.ProcessGroup.unbox(group).size(),
                    min(len(tree_leaves(arg)) for arg in given),
                )
            )
        return func(*args, **(kwargs or {}))

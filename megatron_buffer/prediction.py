"""Which parameters a backward pass will reach, read from the autograd graph of the forward pass.

Upstream has no counterpart: it counts the first backward pass instead
(``_ParamAndGradBucketGroup.register_grad_ready``, ``reset``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves


class Reach(NamedTuple):
    """What is known about a coming backward pass.

    Attributes:
        params: Parameters that the graph leads to; each gets one gradient, however often it was used,
            because autograd adds up before it hands over.
        hides_some: True if the graph has a node that runs a backward pass of its own (a re-entrant
            checkpoint), which may reach any parameter.
    """

    params: set[Any]
    hides_some: bool


def reach_of(output: Any) -> Reach:
    """Walks the graph behind ``output``.

    Args:
        output: What a forward pass returned: a tensor, or any nesting of tensors.

    Returns:
        The parameters that its backward pass will reach.
    """
    waiting = [
        leaf.grad_fn
        for leaf in tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    seen: set[Any] = set(waiting)
    params: set[Any] = set()
    hides_some = False
    while waiting:
        node = waiting.pop()
        variable = getattr(node, 'variable', None)
        if variable is not None:
            params.add(variable)
        # torch's, Megatron's and Transformer Engine's checkpoints all have it in their name.
        elif 'Checkpoint' in type(node).__name__:
            hides_some = True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return Reach(params, hides_some)


def predicted_counts(reach: Reach, params: Iterable[Any]) -> dict[Any, int]:
    """Gradients to expect of each parameter in a synchronised backward pass."""
    return {param: int(param in reach.params or reach.hides_some) for param in params}

"""What a training run left behind, from the package: `megatron_buffer.testing.tiny_results`."""

from megatron_buffer.testing.tiny_results import (
    compare,
    copied,
    flat_tensors,
    layout,
    named_params,
    optimizer_state,
    owned_grads,
    same_bits,
)

__all__ = [
    'compare',
    'copied',
    'flat_tensors',
    'layout',
    'named_params',
    'optimizer_state',
    'owned_grads',
    'same_bits',
]

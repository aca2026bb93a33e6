"""The three-layer model and its oracle, from the package: `megatron_buffer.testing.small_model`."""

from megatron_buffer.testing.small_model import (
    Net,
    batch,
    covered,
    ddp_class,
    differences,
    init_parallel,
    make_net,
    names_of,
    oracle_grads,
    owned_main_grads,
    run_window,
    transformer_config,
    wrap,
)

__all__ = [
    'Net',
    'batch',
    'covered',
    'ddp_class',
    'differences',
    'init_parallel',
    'make_net',
    'names_of',
    'oracle_grads',
    'owned_main_grads',
    'run_window',
    'transformer_config',
    'wrap',
]

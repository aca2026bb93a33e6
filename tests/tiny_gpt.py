"""Training the tiny GPT, from the package: `megatron_buffer.testing.tiny_gpt`."""

from megatron_buffer.testing.tiny_gpt import (
    OracleResult,
    TrainCase,
    compare,
    flat_tensors,
    init_parallel,
    oracle,
    run_backward,
    same_bits,
    seed_everything,
    train,
    train_in_scope,
    wrap,
)

__all__ = [
    'OracleResult',
    'TrainCase',
    'compare',
    'flat_tensors',
    'init_parallel',
    'oracle',
    'run_backward',
    'same_bits',
    'seed_everything',
    'train',
    'train_in_scope',
    'wrap',
]

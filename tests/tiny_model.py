"""The tiny GPT itself, from the package: `megatron_buffer.testing.tiny_model`."""

from megatron_buffer.testing.tiny_model import (
    BETAS,
    DTYPES,
    EPS,
    LR,
    MOMENTUM,
    SAMPLES,
    SEQUENCE,
    VOCAB,
    WEIGHT_DECAY,
    TrainCase,
    batch,
    build_model,
    call_model,
    init_parallel,
)

__all__ = [
    'BETAS',
    'DTYPES',
    'EPS',
    'LR',
    'MOMENTUM',
    'SAMPLES',
    'SEQUENCE',
    'VOCAB',
    'WEIGHT_DECAY',
    'TrainCase',
    'batch',
    'build_model',
    'call_model',
    'init_parallel',
]

"""The default workload of a sweep: the small GPT of ``scripts/quickstart.sh``, as Megatron's flags.

About 250,000 parameters in several buckets; on the CPU a step takes some 100 ms. Upstream has no counterpart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MICRO_BATCH_SIZE, _MICRO_BATCHES = 2, 3


def script() -> Path | None:
    """``scripts/pretrain_gpt.py`` of a checkout, or the wheel's copy; None where both are missing."""
    package = Path(__file__).resolve().parents[1]
    places = (
        package / 'scripts' / 'pretrain_gpt.py',
        package.parent / 'scripts' / 'pretrain_gpt.py',
    )
    return next((path for path in places if path.is_file()), None)


def flags(ranks: int) -> dict[str, Any]:
    """Megatron's flags for it.

    Args:
        ranks: Data-parallel ranks.
    """
    switches = (
        *('mock-data', 'bf16', 'accumulate-allreduce-grads-in-fp32', 'use-distributed-optimizer'),
        *('overlap-grad-reduce', 'overlap-param-gather', 'no-masked-softmax-fusion'),
        *('no-bias-gelu-fusion', 'no-bias-dropout-fusion', 'no-gradient-accumulation-fusion'),
        *('no-persist-layer-norm', 'no-rope-fusion'),
    )
    return {
        'num-layers': 4,
        'hidden-size': 64,
        'ffn-hidden-size': 256,
        'num-attention-heads': 4,
        'seq-length': 64,
        'max-position-embeddings': 64,
        'vocab-size': 511,
        'make-vocab-size-divisible-by': 8,
        'tokenizer-type': 'NullTokenizer',
        'micro-batch-size': _MICRO_BATCH_SIZE,
        'global-batch-size': _MICRO_BATCH_SIZE * _MICRO_BATCHES * ranks,
        'lr': 3e-3,
        'lr-decay-style': 'constant',
        'weight-decay': 0.01,
        'clip-grad': 1.0,
        'ddp-bucket-size': 40_000,
        'eval-iters': 0,
        'eval-interval': 1000,
        'log-interval': 1,
        'num-workers': 0,
        'transformer-impl': 'local',
        'attention-backend': 'unfused',
        'distributed-backend': '{backend}',
        **dict.fromkeys(switches, True),
    }

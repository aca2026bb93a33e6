"""Options that ``megatron-buffer layout`` and ``megatron-buffer plan`` share. Upstream has no counterpart."""

from __future__ import annotations

import argparse
from typing import Any

_SIZES = {
    'tp': 'tensor-parallel size',
    'pp': 'pipeline-parallel size',
    'vpp': 'model chunks per pipeline stage',
    'dp': 'data-parallel size',
    'cp': 'context-parallel size',
    'ep': 'expert-parallel size',
    'etp': 'tensor-parallel size of experts (default: that of --tp)',
    'instances': 'num_distributed_optimizer_instances',
}


def add_sizes(group: Any, leave_out: str = '') -> None:
    """The sizes of a job; all but ``leave_out``, which a command asks for in its own way."""
    for option, text in _SIZES.items():
        if option != leave_out:
            default = None if option == 'etp' else 1
            group.add_argument(f'--{option}', type=int, metavar='N', default=default, help=text)


def add_dtypes(group: Any) -> None:
    """The dtype of the parameters; ``group`` is mutually exclusive."""
    for dtype in ('bf16', 'fp16', 'fp32'):
        group.add_argument(
            f'--{dtype}',
            dest='dtype',
            action='store_const',
            const=dtype,
            help=f'parameters are {dtype}{" (default)" if dtype == "bf16" else ""}',
        )


def add_ddp(group: argparse._ArgumentGroup) -> None:
    """What ddp_config says of buckets and overlap."""
    group.add_argument(
        '--no-dist-opt', action='store_true', help='without the distributed optimizer'
    )
    group.add_argument(
        '--no-overlap', action='store_true', help='without overlap_grad_reduce and _param_gather'
    )
    group.add_argument(
        '--bucket-size', type=int, metavar='N', help='ddp_config.bucket_size, elements'
    )
    group.add_argument('--num-buckets', type=int, metavar='N', help='ddp_config.num_buckets')
    group.add_argument(
        '--high-busbw', action='store_true', help='ddp_config.pad_buckets_for_high_nccl_busbw'
    )

"""Options that several of the planner's commands share. Upstream has no counterpart."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_buffer.planner.architecture import shipped_models

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


def add_model(source: Any) -> None:
    """Adds ``--model``."""
    source.add_argument(
        '--model',
        metavar='MODEL',
        help='a YAML file with the fields of TransformerConfig and GPTModel, or the name of a shipped '
        f'one: {", ".join(shipped_models())}',
    )


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


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """What an iteration is made of, and over which network it runs."""
    group = parser.add_argument_group('iteration')
    group.add_argument(
        '--profile',
        metavar='FILE',
        help='times that a run with --custom-buffer-record measured; without a model its parameters too',
    )
    group.add_argument(
        '--rank-stage', type=int, default=0, metavar='N', help='pipeline stage (default 0)'
    )
    group.add_argument(
        '--microbatches', type=int, metavar='N', help='micro-batches of an iteration (default: pp)'
    )
    group.add_argument(
        '--microbatch-group-size',
        type=int,
        metavar='N',
        help='with --vpp: micro-batches that run through a chunk before the next one (default: pp)',
    )
    group.add_argument(
        '--no-align-grad-reduce',
        action='store_true',
        help="with --vpp: gradients start reductions, not the schedule at the end of a chunk's backward",
    )
    group.add_argument(
        '--no-align-param-gather',
        action='store_true',
        help='with --vpp: forward starts gathers, not the schedule',
    )
    group.add_argument(
        '--no-overlap-param-gather',
        action='store_true',
        help='all gathers follow the optimizer; reductions overlap all the same',
    )
    group.add_argument(
        '--micro-batch-size', type=int, default=1, metavar='N', help='sequences of one (default 1)'
    )
    group.add_argument(
        '--seq-length',
        type=int,
        metavar='N',
        help="tokens of a sequence (default: the model's, 8192 at most)",
    )
    group.add_argument(
        '--recompute', action='store_true', help='backward runs forward once more, all of it'
    )
    network = parser.add_argument_group('network')
    network.add_argument(
        '--network', default='h100', metavar='NETWORK', help='h100 (default), h200, or a YAML file'
    )
    network.add_argument(
        '--net',
        action='append',
        default=[],
        metavar='KEY=VALUE',
        help='another value of the network, such as inter_gbit_per_s=200 or tflops=500; repeatable',
    )

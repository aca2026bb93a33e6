"""``megatron-buffer layout``: its options, and what it does with them.

Imports neither torch nor megatron before the command runs; with ``--params-file`` never megatron.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from megatron_buffer.config import load_config, shipped_names
from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.architecture import load_architecture, plain_name
from megatron_buffer.planner.flags import add_ddp, add_dtypes, add_model, add_sizes
from megatron_buffer.planner.job import DdpOptions, Job
from megatron_buffer.printing import print_json

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from megatron_buffer.planner.params import PlannedParam
    from megatron_buffer.planner.view import LayoutView

"""What the command is for, in one line."""

OK, MOVED = 0, 1
"""Exit codes; 1 is for ``--diff`` with a difference."""

_Params = dict[int, list['PlannedParam']]


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``megatron-buffer layout``."""
    parser.add_argument(
        'config',
        nargs='?',
        metavar='CONFIG',
        help=f'a YAML file, or the name of a shipped config: {shipped_names()} (default: upstream)',
    )
    parser.add_argument(
        '--diff',
        nargs=2,
        metavar=('A', 'B'),
        help='compare two configs; exit code 1 if they differ',
    )
    what = parser.add_argument_group('model')
    source = what.add_mutually_exclusive_group(required=True)
    add_model(source)
    source.add_argument(
        '--params-file',
        metavar='FILE',
        help='the parameters of another model: lines NAME NUMEL [DTYPE] [shared_embedding|'
        'pipeline_synced|expert|quantized] in the order of forward, or the same as YAML or JSON',
    )
    dtypes = what.add_mutually_exclusive_group()
    add_dtypes(dtypes)
    job = parser.add_argument_group('parallelism')
    add_sizes(job)
    job.add_argument(
        '--rank-stage', type=int, default=0, metavar='S', help='the pipeline stage to show, from 0'
    )
    job.add_argument(
        '--chunk', type=int, default=0, metavar='C', help="the stage's model chunk to show, from 0"
    )
    ddp = parser.add_argument_group('DDP')
    grads = ddp.add_mutually_exclusive_group()
    grads.add_argument(
        '--grad-dtype',
        choices=('fp32', 'bf16', 'fp16'),
        help='dtype of the gradients in the buffer: fp32 (default), or that of the parameters',
    )
    grads.add_argument(
        '--grad-reduce-in-fp32',
        dest='grad_dtype',
        action='store_const',
        const='fp32',
        help='the same as --grad-dtype fp32',
    )
    add_ddp(ddp)
    out = parser.add_argument_group('output')
    detail = out.add_mutually_exclusive_group()
    detail.add_argument(
        '--buckets-only',
        action='store_true',
        help='a row for every bucket, nothing folded; with --json no parameters',
    )
    detail.add_argument('--all-params', action='store_true', help='a row for every parameter')
    out.add_argument('--plot', metavar='FILE.svg', help='draw the buffers (needs matplotlib)')


def layout(options: argparse.Namespace, console: Console) -> int:
    """Runs ``megatron-buffer layout``; returns the exit code.

    Raises:
        ConfigError: If something that was asked for is wrong.
        LayoutError: If a config makes a layout that Megatron-Core could not use.
    """
    if options.diff and options.config:
        raise ConfigError(f'{options.config}: --diff takes its two configs itself')
    if options.diff and (options.plot or options.all_params or options.buckets_only):
        raise ConfigError('--diff cannot be combined with --plot, --all-params or --buckets-only')
    job = Job(
        **{key: getattr(options, key) for key in ('tp', 'pp', 'vpp', 'dp', 'cp', 'ep', 'etp')},
        instances=options.instances,
        pp_rank=options.rank_stage,
        chunk=options.chunk,
    )
    dtype = options.dtype or 'bf16'
    grad_dtype = options.grad_dtype or 'fp32'
    if grad_dtype not in ('fp32', dtype):
        raise ConfigError(
            f'--grad-dtype {grad_dtype}: gradients are fp32, or have the dtype of the parameters, '
            f'{dtype}'
        )
    ddp = DdpOptions(
        use_distributed_optimizer=not options.no_dist_opt,
        overlap=not options.no_overlap,
        grad_reduce_in_fp32=grad_dtype == 'fp32',
        bucket_size=options.bucket_size,
        num_buckets=options.num_buckets,
        pad_buckets_for_high_nccl_busbw=options.high_busbw,
    )
    if options.plot:
        from megatron_buffer.planner.plot import check_target

        check_target(options.plot)
    # Before the model is built: a wrong config should not take seconds to be found.
    configs = [load_config(source) for source in options.diff or [options.config]]

    from megatron_buffer.planner.collect import collect
    from megatron_buffer.planner.params import DTYPES
    from megatron_buffer.runtime import Runtime

    runtimes = [Runtime(config) for config in configs]
    chunks, notes = _params(options, job, DTYPES[dtype])
    views = [
        collect(
            chunks[job.chunk],
            model=plain_name(options.model or options.params_file),
            runtime=runtime,
            job=job,
            ddp=ddp,
            param_dtype=DTYPES[dtype],
            num_params_elems_of_rank=sum(p.numel_elems for ps in chunks.values() for p in ps),
            notes=notes,
        )
        for runtime in runtimes
    ]
    if options.diff:
        return _show_diff(views[0], views[1], options.json, console)
    _show(views[0], options, console)
    return OK


def _params(options: argparse.Namespace, job: Job, dtype: torch.dtype) -> tuple[_Params, list[str]]:
    """The parameters of each chunk of the rank, and what should be said about them."""
    if options.params_file:
        from megatron_buffer.planner.params import load_params

        return {job.chunk: load_params(options.params_file, dtype)}, []
    architecture = load_architecture(options.model)
    from megatron_buffer.planner.model import build_params, padded_vocab_size

    chunks = build_params(architecture, job, dtype)
    vocab, padded = architecture.positive('vocab_size'), padded_vocab_size(architecture, job.tp)
    notes: list[str] = []
    if vocab != padded:
        notes.append(
            f'vocab_size {vocab:,} is padded to {padded:,} (make_vocab_size_divisible_by x tp)'
        )
    return chunks, notes


def _show(view: LayoutView, options: argparse.Namespace, console: Console) -> None:
    if options.json:
        from megatron_buffer.planner.as_json import layout_as_dict

        print_json(layout_as_dict(view, with_params=not options.buckets_only))
    else:
        from megatron_buffer.planner.render import render, render_params

        if options.all_params:
            render_params(view, console)
        else:
            render(view, console, every_bucket=options.buckets_only)
    if options.plot:
        from megatron_buffer.planner.plot import plot

        plot(view, options.plot)
        sys.stderr.write(f'wrote {options.plot}\n')


def _show_diff(a: LayoutView, b: LayoutView, as_json: bool, console: Console) -> int:
    from megatron_buffer.planner.diff import compare, diff_as_dict, render_diff

    diff = compare(a, b)
    if as_json:
        print_json(diff_as_dict(diff))
    else:
        render_diff(diff, console)
    return OK if diff.same else MOVED

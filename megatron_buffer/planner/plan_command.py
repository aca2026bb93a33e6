"""``megatron-buffer plan``: its options, and what it does with them.

Imports neither torch nor megatron before the command runs; with ``--params`` never.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_buffer.config import BufferConfig, load_config
from megatron_buffer.errors import ConfigError
from megatron_buffer.planner import ledger
from megatron_buffer.planner.architecture import (
    Architecture,
    load_architecture,
    plain_name,
    shipped_models,
)
from megatron_buffer.planner.flags import add_ddp, add_dtypes, add_sizes
from megatron_buffer.planner.hf import FAMILIES, load_hf
from megatron_buffer.planner.job import DdpOptions, Job
from megatron_buffer.planner.megatron_args import Flags, apply_flags, read_flags

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = 'say what the buffers of every rank of a job weigh, and what goes over the wire'
"""What the command is for, in one line."""

OK = 0
_SIZES = ('tp', 'pp', 'vpp', 'cp', 'ep', 'etp', 'instances')


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``megatron-buffer plan``."""
    what = parser.add_argument_group('model')
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument(
        '--model',
        metavar='MODEL',
        help='a YAML file with the fields of TransformerConfig and GPTModel, or the name of a shipped '
        f'one: {", ".join(shipped_models())}',
    )
    source.add_argument(
        '--hf',
        metavar='CONFIG.json',
        help=f"a Hugging Face model's config.json; families: {', '.join(FAMILIES)}",
    )
    source.add_argument(
        '--megatron-args',
        metavar='FLAGS',
        help='the flags of a pretrain script, in quotes; --vocab-size among them, and --dp or --world '
        'beside them',
    )
    source.add_argument(
        '--params', metavar='N', help='only a number of parameters, such as 7.5e9: averages'
    )
    job = parser.add_argument_group('parallelism')
    ranks = job.add_mutually_exclusive_group()
    ranks.add_argument('--dp', type=int, metavar='N', help='data-parallel size (default: 1)')
    ranks.add_argument(
        '--world',
        type=int,
        metavar='N',
        help='ranks of the job, instead of --dp: tp x pp x cp x dp',
    )
    add_sizes(job, leave_out='dp')
    _add_dtypes(parser)
    ddp = parser.add_argument_group('DDP')
    ddp.add_argument(
        '--config', metavar='CONFIG', help='a YAML file or shipped config (default: upstream)'
    )
    add_ddp(ddp)


def _add_dtypes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('dtypes')
    dtypes = group.add_mutually_exclusive_group()
    add_dtypes(dtypes)
    group.add_argument(
        '--grads',
        choices=('fp32', 'bf16', 'fp16'),
        help='dtype of the gradients in the buffer: fp32 (default), or that of the parameters',
    )
    recipes = group.add_mutually_exclusive_group()
    for recipe, text in (
        ('fp8', 'weights stored as fp8 (fp8_param_gather, one scale per weight)'),
        ('mxfp8', 'weights stored as MXFP8, gathered in the gradient buffer'),
        ('nvfp4', 'weights stored as NVFP4'),
    ):
        recipes.add_argument(
            f'--{recipe}', dest='recipe', action='store_const', const=recipe, help=text
        )
    group.add_argument(
        '--precision-aware', action='store_true', help='use_precision_aware_optimizer'
    )
    group.add_argument(
        '--main-params-dtype', choices=('fp32', 'fp16'), help='its main parameters (default: fp32)'
    )
    for moment in ('exp-avg', 'exp-avg-sq'):
        group.add_argument(
            f'--{moment}-dtype',
            choices=('fp32', 'fp16', 'bf16', 'fp8'),
            help='its moments (default: fp32)',
        )


def plan(options: argparse.Namespace, console: Console) -> int:
    """Runs ``megatron-buffer plan``; returns the exit code.

    Raises:
        ConfigError: If something that was asked for is wrong.
        LayoutError: If a config makes a layout that Megatron-Core could not use.
    """
    flags = read_flags(options.megatron_args) if options.megatron_args is not None else None
    if flags is not None:
        apply_flags(options, flags)
    job = Job(dp=_dp(options), **{key: getattr(options, key) for key in _SIZES})
    dtype, grads = options.dtype or 'bf16', options.grads or 'fp32'
    if grads not in ('fp32', dtype):
        raise ConfigError(
            f'--grads {grads}: gradients are fp32, or have the dtype of the parameters, {dtype}'
        )
    recipe = ledger.RECIPES[options.recipe] if options.recipe else None
    if recipe and dtype != 'bf16':
        raise ConfigError(f'--{recipe.name}: quantized weights need --bf16, not --{dtype}')
    if recipe and recipe.shares_grad_buffer and options.no_dist_opt:
        raise ConfigError(
            '--mxfp8: gathering in the gradient buffer needs the distributed optimizer; leave out '
            '--no-dist-opt'
        )
    optimizer = ledger.optimizer_dtypes(
        precision_aware=options.precision_aware,
        dist_opt=not options.no_dist_opt,
        recipe=recipe,
        bf16=dtype == 'bf16',
        names=(options.main_params_dtype, options.exp_avg_dtype, options.exp_avg_sq_dtype),
    )
    ddp = DdpOptions(
        use_distributed_optimizer=not options.no_dist_opt,
        overlap=not options.no_overlap,
        grad_reduce_in_fp32=grads == 'fp32',
        bucket_size=options.bucket_size,
        num_buckets=options.num_buckets,
        pad_buckets_for_high_nccl_busbw=options.high_busbw,
        values_per_byte=2 if recipe and recipe.stored_bits == 4 else 1,
    )
    config = load_config(options.config)
    if options.params is not None:
        return _averages(options, job, ddp, config, recipe, optimizer, console)
    architecture, notes = _architecture(options, flags)
    return _exact(options, architecture, notes, job, ddp, config, recipe, optimizer, console)


def _dp(options: argparse.Namespace) -> int:
    """The data-parallel size, from ``--dp`` or from ``--world``."""
    if options.world is None:
        return 1 if options.dp is None else options.dp
    if options.world < 1:
        raise ConfigError(f'--world {options.world}: must be at least 1')
    others = options.tp * options.pp * options.cp
    if min(options.tp, options.pp, options.cp) < 1:
        return 1  # Job says which of them is wrong
    if options.world % others:
        raise ConfigError(
            f'--world {options.world}: is not a multiple of tp x pp x cp = {options.tp} x {options.pp} x '
            f'{options.cp} = {others}; data parallelism takes what they leave'
        )
    return options.world // others


def _averages(
    options: argparse.Namespace,
    job: Job,
    ddp: DdpOptions,
    config: BufferConfig,
    recipe: ledger.Recipe | None,
    optimizer: ledger.OptimizerDtypes,
    console: Console,
) -> int:
    from megatron_buffer.planner.averages import averages, averages_as_dict, parse_params

    params = parse_params(options.params)
    configured: Any = getattr(config.bucketing, 'bucket_size_elems', None)
    if configured is None and config.bucketing.name != 'fixed_size':
        raise ConfigError(
            f'bucketing is {config.bucketing.name} in {config.source}, which needs the parameters: use '
            '--model or --hf instead of --params',
            yaml_path='bucketing',
            source=config.source,
        )
    found = averages(
        params,
        job,
        ddp,
        param_bytes=4 if options.dtype == 'fp32' else 2,
        recipe=recipe,
        optimizer=optimizer,
        bucket_size_elems=configured,
    )
    if options.json:
        _print_json(averages_as_dict(found, params, job))
    else:
        from megatron_buffer.planner.plan_render import render_averages

        render_averages(found, params, job, console)
    return OK


def _architecture(
    options: argparse.Namespace, flags: Flags | None
) -> tuple[Architecture, list[str]]:
    if flags is not None:
        ignored = ', '.join(flags.ignored)
        return flags.architecture, (
            [f'flags that change no buffer here: {ignored}'] if ignored else []
        )
    if options.hf is not None:
        return load_hf(options.hf)
    return load_architecture(options.model), []


def _exact(
    options: argparse.Namespace,
    architecture: Architecture,
    notes: list[str],
    job: Job,
    ddp: DdpOptions,
    config: BufferConfig,
    recipe: ledger.Recipe | None,
    optimizer: ledger.OptimizerDtypes,
    console: Console,
) -> int:
    from megatron_buffer.planner.model import check_divisions, padded_vocab_size

    check_divisions(architecture, job)  # before Megatron takes its seconds
    vocab, padded = architecture.positive('vocab_size'), padded_vocab_size(architecture, job.tp)
    if vocab != padded:
        notes.append(
            f'vocab_size {vocab:,} is padded to {padded:,} (make_vocab_size_divisible_by x tp)'
        )
    from megatron_buffer.planner.params import DTYPES
    from megatron_buffer.planner.plan_json import classes, plan_as_dict
    from megatron_buffer.planner.stages import Ask, plan_stages
    from megatron_buffer.runtime import Runtime

    ask = Ask(
        model=plain_name(architecture.source),
        runtime=Runtime(config),
        ddp=ddp,
        dtype=DTYPES[options.dtype or 'bf16'],
        recipe=recipe,
        optimizer=optimizer,
    )
    with _Progress(job.pp) as progress:
        stages = plan_stages(architecture, job, ask, progress=progress)
    seen = [n for s in stages for chunk in s.chunks for n in chunk.view.notes]
    # A pattern that matches nothing on one stage may match on another.
    notes += [n for n in dict.fromkeys(seen) if seen.count(n) == sum(len(s.chunks) for s in stages)]
    if options.json:
        _print_json(plan_as_dict(stages, ask, notes))
    else:
        from megatron_buffer.planner.plan_render import render_plan

        render_plan(stages, classes(stages), ask, notes, console)
    return OK


class _Progress:
    """A bar on a terminal's stderr, and nothing elsewhere."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._bar: Any = None
        self._update: Callable[[int], None] = lambda stage: None

    def __enter__(self) -> Callable[[int], None]:
        if self._stages > 1 and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            bar = self._bar = Progress(console=Console(stderr=True), transient=True)
            task = bar.add_task('pipeline stages', total=self._stages)
            bar.start()
            self._update = lambda stage: bar.update(task, completed=stage)
        return self._update

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write('\n')

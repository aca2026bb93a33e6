"""What the planner's commands are asked: the options of a job, and what they say when read.

Shared by ``megatron-buffer plan``, ``simulate`` and ``tune``. Imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from megatron_buffer.config import BufferConfig, load_config
from megatron_buffer.errors import ConfigError
from megatron_buffer.planner import ledger
from megatron_buffer.planner.architecture import Architecture, load_architecture
from megatron_buffer.planner.flags import add_ddp, add_dtypes, add_model, add_sizes
from megatron_buffer.planner.hf import FAMILIES, load_hf
from megatron_buffer.planner.job import DdpOptions, Job
from megatron_buffer.planner.megatron_args import Flags, apply_options, read_flags

if TYPE_CHECKING:
    from megatron_buffer.planner.stages import Ask
    from megatron_buffer.runtime import Runtime

_SIZES = ('tp', 'pp', 'vpp', 'cp', 'ep', 'etp', 'instances')


class Request(NamedTuple):
    """What was asked for.

    Attributes:
        flags: Those of a pretrain script, if it was they that were given.
        job: Its parallelism.
        ddp: What ``ddp_config`` says.
        dtype: Dtype of the parameters, in short.
        recipe: How weights are quantized; None: not at all.
        optimizer: How the optimizer stores its state.
        config: The config.
    """

    flags: Flags | None
    job: Job
    ddp: DdpOptions
    dtype: str
    recipe: ledger.Recipe | None
    optimizer: ledger.OptimizerDtypes
    config: BufferConfig

    def ask(self, model: str, runtime: Runtime | None = None) -> Ask:
        """The same for ``plan_stages``, under the name of a model, or with other strategies; imports torch."""
        from megatron_buffer.planner.params import DTYPES
        from megatron_buffer.planner.stages import Ask
        from megatron_buffer.runtime import Runtime

        return Ask(
            model=model,
            runtime=runtime or Runtime(self.config),
            ddp=self.ddp,
            dtype=DTYPES[self.dtype],
            recipe=self.recipe,
            optimizer=self.optimizer,
        )


def add_job_arguments(
    parser: argparse.ArgumentParser, *, averages: bool = False, required: bool = True
) -> None:
    """Adds the options that say what job it is.

    Args:
        parser: Of the command.
        averages: Whether a mere number of parameters will do.
        required: Whether one of the options for the model must be given.
    """
    what = parser.add_argument_group('model')
    source = what.add_mutually_exclusive_group(required=required)
    add_model(source)
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
    if averages:
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


def read_request(options: argparse.Namespace) -> Request:
    """What the options say.

    Raises:
        ConfigError: If something that was asked for is wrong.
    """
    flags = read_flags(options.megatron_args) if options.megatron_args is not None else None
    if flags is not None:
        apply_options(options, flags.options)
    job = Job(dp=data_parallel_size(options), **{key: getattr(options, key) for key in _SIZES})
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
    return Request(flags, job, ddp, dtype, recipe, optimizer, load_config(options.config))


def data_parallel_size(options: argparse.Namespace) -> int:
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


def read_model(options: argparse.Namespace, flags: Flags | None) -> tuple[Architecture, list[str]]:
    """The model that the options name, and notes about it.

    Raises:
        ConfigError: If it cannot be read.
    """
    if flags is not None:
        ignored = ', '.join(flags.ignored)
        return flags.architecture, (
            [f'flags that change no buffer here: {ignored}'] if ignored else []
        )
    if options.hf is not None:
        return load_hf(options.hf)
    return load_architecture(options.model), []


def read_fitting_model(
    options: argparse.Namespace, request: Request
) -> tuple[Architecture, list[str]]:
    """The model that the options name, checked against the job's sizes, and notes about it; imports torch.

    Raises:
        ConfigError: If it cannot be read, or does not fit the job.
    """
    architecture, notes = read_model(options, request.flags)
    from megatron_buffer.planner.model import check_divisions, padded_vocab_size

    check_divisions(architecture, request.job)  # before Megatron takes its seconds
    vocab = architecture.positive('vocab_size')
    padded = padded_vocab_size(architecture, request.job.tp)
    if vocab != padded:
        notes.append(
            f'vocab_size {vocab:,} is padded to {padded:,} (make_vocab_size_divisible_by x tp)'
        )
    return architecture, notes

"""What ``simulate`` and ``tune`` have in common: the stage's parameters, their times, the network.

Any number of configs can then be tried on them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_buffer.config import BufferConfig
from megatron_buffer.config_network import Network, changed, load_network
from megatron_buffer.errors import ConfigError
from megatron_buffer.planner.architecture import plain_name
from megatron_buffer.planner.iteration import Schedule, iteration_of
from megatron_buffer.planner.job import DdpOptions, Job
from megatron_buffer.planner.megatron_args import Flags, apply_options
from megatron_buffer.planner.params import PlannedParam
from megatron_buffer.planner.request import (
    Request,
    data_parallel_size,
    read_fitting_model,
    read_request,
)
from megatron_buffer.planner.simulation import simulate
from megatron_buffer.planner.stages import Ask, StageLedger, quantized, stage_ledger
from megatron_buffer.planner.timeline import Iteration, Timeline
from megatron_buffer.planner.work import (
    ChunkTimes,
    estimated_profile,
    load_of,
    times_from_flops,
    times_from_profile,
)
from megatron_buffer.profile import Profile, chunk_key, load_profile
from megatron_buffer.runtime import Runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """One stage of a job, ready to be simulated under any config."""

    model: str
    request: Request
    job: Job
    """With the stage as its ``pp_rank``."""
    chunks: Mapping[int, Sequence[PlannedParam]]
    times: Mapping[int, ChunkTimes]
    network: Network
    network_name: str
    """With the values that were changed."""
    request_network: str | None
    """What a config can call the network; None where single values were changed."""
    schedule: Schedule
    profile: Profile
    """The recorded one, or the estimated times in its form."""
    profile_path: str | None
    """Of the recorded one."""
    notes: tuple[str, ...]

    def runtime(self, config: BufferConfig) -> Runtime:
        """The strategies of a config."""
        return Runtime(config)

    def run(self, runtime: Runtime, ddp: DdpOptions | None = None) -> Outcome:
        """Simulates one iteration.

        Args:
            runtime: The config's strategies.
            ddp: What ``ddp_config`` says, if not what was asked for.

        Raises:
            ConfigError: If the config contradicts ``ddp``.
            LayoutError: If it makes a layout that Megatron-Core could not use.
        """
        ask = self.request.ask(self.model, runtime)
        if ddp is not None:
            ask = dataclasses.replace(ask, ddp=ddp)
        chunks = {number: list(params) for number, params in self.chunks.items()}
        stage = stage_ledger(chunks, self.job, ask)
        iteration = iteration_of(stage, ask, self.network, self.times, self.schedule)
        return Outcome(ask, stage, iteration, simulate(iteration))

    @property
    def source_of_times(self) -> str:
        """Where the times of computation come from, in words."""
        if self.profile_path is not None:
            return f'times from {self.profile_path}'
        return f'times from FLOPs at {self.network.tflops:g} TFLOP/s'


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A config on a scene."""

    ask: Ask
    stage: StageLedger
    iteration: Iteration
    timeline: Timeline


def read_scene(options: argparse.Namespace) -> Scene:
    """What the options of ``simulate`` and ``tune`` say.

    Raises:
        ConfigError: If something that was asked for is wrong.
    """
    network = _network(options)
    _check_iteration(options)
    profile = load_profile(options.profile, '--profile') if options.profile else None
    has_model = any(
        value is not None for value in (options.model, options.hf, options.megatron_args)
    )
    if not has_model:
        if profile is None:
            raise ConfigError(
                'what is to be simulated? Give --model, --hf or --megatron-args, or a --profile'
            )
        _take_sizes(options, profile)
    request = read_request(options)
    if request.flags is not None:
        request = request._replace(flags=_take_flags(options, request.flags))
    _check_iteration(options)
    job = dataclasses.replace(request.job, pp_rank=options.rank_stage)
    schedule = _schedule(options, job)  # before the model is built: that takes seconds
    notes: list[str] = []
    if has_model:
        from megatron_buffer.planner.model import build_params
        from megatron_buffer.planner.params import DTYPES

        architecture, notes = read_fitting_model(options, request)
        chunks = build_params(architecture, job, DTYPES[request.dtype])
        model = plain_name(architecture.source)
        load = load_of(
            architecture,
            job,
            seq_length=options.seq_length,
            micro_batch_size=options.micro_batch_size,
            flops_per_s=network.tflops * 1e12,
            recompute=options.recompute,
        )
        if profile is None:
            times = {n: times_from_flops(params, load, job) for n, params in chunks.items()}
    else:
        assert profile is not None
        chunks = _params_of(profile, job, options.profile)
        model = options.profile
    if profile is not None:
        times = {
            number: _recorded(profile, job, number, params, options.profile)
            for number, params in chunks.items()
        }
    return Scene(
        model=model,
        request=request,
        job=job,
        chunks={n: quantized(params, request.recipe) for n, params in chunks.items()},
        times=times,
        network=network,
        network_name=options.network + (f' with {", ".join(options.net)}' if options.net else ''),
        request_network=None if options.net else options.network,
        schedule=schedule,
        profile=profile or estimated_profile(chunks, times, job),
        profile_path=options.profile,
        notes=tuple(notes),
    )


def _check_iteration(options: argparse.Namespace) -> None:
    for option in ('microbatches', 'micro_batch_size', 'seq_length', 'microbatch_group_size'):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise ConfigError(f'--{option.replace("_", "-")} {value}: must be at least 1')


def _take_flags(options: argparse.Namespace, flags: Flags) -> Flags:
    """Sets what the flags say about an iteration; returns the flags, those that it takes not ignored.

    Raises:
        ConfigError: If one of them changes when gradients arrive in a way that no estimate knows.
    """
    if flags.timing and options.profile is None:
        raise ConfigError(
            f'--megatron-args: {flags.timing[0]} changes when gradients arrive or collectives start, which '
            'the estimate does not know; leave it out, or give a --profile that was recorded with it'
        )
    iteration = dict(flags.iteration)
    total = iteration.pop('global_batch_size', None)
    apply_options(options, iteration)
    if total is not None and options.microbatches is None:
        dp = data_parallel_size(options)
        each = options.micro_batch_size * dp
        if total % each:
            raise ConfigError(
                f'--megatron-args: --global-batch-size {total}: is not a multiple of --micro-batch-size x dp '
                f'= {options.micro_batch_size} x {dp} = {each}'
            )
        options.microbatches = total // each
    return flags._replace(ignored=[f for f in flags.ignored if f not in flags.of_iteration])


def _schedule(options: argparse.Namespace, job: Job) -> Schedule:
    """Of the interleaved schedule Megatron's own limits hold."""
    microbatches = options.microbatches or job.pp
    size = options.microbatch_group_size
    if job.vpp == 1:
        for option in ('microbatch_group_size', 'no_align_grad_reduce', 'no_align_param_gather'):
            if getattr(options, option):
                raise ConfigError(
                    f'--{option.replace("_", "-")}: only the interleaved schedule knows it; set --vpp as well'
                )
        return Schedule(microbatches, overlap_param_gather=not options.no_overlap_param_gather)
    size = size or job.pp
    if not job.pp <= size <= microbatches:
        raise ConfigError(
            f'--microbatch-group-size {size}: with --vpp {job.vpp} Megatron wants at least --pp {job.pp} and '
            f'at most --microbatches {microbatches}'
        )
    if 0 < microbatches % size < job.pp:
        raise ConfigError(
            f'--microbatches {microbatches}: with --vpp {job.vpp} what groups of {size} leave must be 0 or at '
            f'least --pp {job.pp}; it is {microbatches % size}'
        )
    return Schedule(
        microbatches,
        size,
        align_grad_reduce=not options.no_align_grad_reduce,
        align_param_gather=not options.no_align_param_gather,
        overlap_param_gather=not options.no_overlap_param_gather,
    )


def _network(options: argparse.Namespace) -> Network:
    network = load_network(options.network)
    values: dict[str, Any] = {}
    for text in options.net:
        key, equals, value = text.partition('=')
        if not equals:
            raise ConfigError(f'--net {text}: expected KEY=VALUE, such as inter_gbit_per_s=200')
        try:
            number = float(value)
        except ValueError:
            number = None
        whole = number is not None and key == 'gpus_per_node' and number.is_integer()
        values[key] = int(value) if whole else value if number is None else number
    return changed(network, values, '--net') if values else network


def _take_sizes(options: argparse.Namespace, profile: Profile) -> None:
    """Sizes that were not given are those of the run that was recorded."""
    world = profile.world
    sizes = ('tp', 'pp', 'vpp', 'ep')
    vars(options).update({key: getattr(world, key) for key in sizes if vars(options)[key] == 1})
    if options.dp is None and options.world is None:
        options.dp = max(1, world.dp // max(1, options.cp))


def _params_of(profile: Profile, job: Job, path: str) -> dict[int, list[PlannedParam]]:
    """The parameters that a profile knows, without the marks that it does not."""
    result: dict[int, list[PlannedParam]] = {}
    for number in range(job.vpp):
        chunk = profile.chunks.get(chunk_key(job.pp_rank, number))
        if chunk is None:
            raise _no_chunk(profile, job, number, path)
        result[number] = [
            PlannedParam(
                name=param.name,
                numel_elems=param.numel_elems,
                dtype=getattr(torch, param.dtype, torch.bfloat16),
                is_expert_parallel='.experts.' in param.name,
            )
            for param in chunk.params
        ]
    return result


def _recorded(
    profile: Profile, job: Job, number: int, params: Sequence[PlannedParam], path: str
) -> ChunkTimes:
    chunk = profile.chunks.get(chunk_key(job.pp_rank, number))
    if chunk is None:
        raise _no_chunk(profile, job, number, path)
    return times_from_profile(chunk, [param.name for param in params], path)


def _no_chunk(profile: Profile, job: Job, number: int, path: str) -> ConfigError:
    return ConfigError(
        f'--profile {path}: has no model chunk {chunk_key(job.pp_rank, number)} (pipeline stage '
        f'{job.pp_rank}, chunk {number}); it holds {", ".join(profile.chunks) or "none"}'
    )

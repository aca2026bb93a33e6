"""``DistributedDataParallel``: upstream's wiring around our buffers and bucket groups.

Stands for ``DistributedDataParallel`` (``megatron/core/distributed/distributed_data_parallel.py``).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import log_on_each_pipeline_stage, log_single_rank

from megatron_buffer import __version__, errors
from megatron_buffer import runtime as runtime_module
from megatron_buffer.agreement import check_against_first, check_agreement
from megatron_buffer.bucket_groups import Gathers, ParamAndGradBucketGroup, partition_buckets
from megatron_buffer.bucket_size import default_bucket_size, resolve_bucket_size
from megatron_buffer.buffer import ParamAndGradBuffer
from megatron_buffer.chunk_window import ChunkWindow
from megatron_buffer.collector import paused_collector
from megatron_buffer.config import AXES, BufferConfig
from megatron_buffer.config_catalog import third_party_origins
from megatron_buffer.config_yaml import did_you_mean
from megatron_buffer.embedding_agreement import check_tied_embeddings
from megatron_buffer.errors import ConflictError, LayoutError, RankMismatchError, ReadinessError
from megatron_buffer.gather_chain import maybe_chain_gathers
from megatron_buffer.gather_guard import watch_reads
from megatron_buffer.grad_writes import watch_writes
from megatron_buffer.hooks import RareCases, backward_hook, forward_pre_hook
from megatron_buffer.observe.session import observe_if_wanted
from megatron_buffer.optimizer import DistributedOptimizer
from megatron_buffer.param_checks import ParamData, settle_shared_storage
from megatron_buffer.param_layout import (
    compute_default_per_buffer_param_layout,
    compute_per_buffer_param_layout,
    group_params_for_buffers,
)
from megatron_buffer.recording import attach_if_wanted
from megatron_buffer.runtime import ModelChunk, Runtime
from megatron_buffer.strategies.names import matches, outermost_module
from megatron_buffer.strategies.scaling import ScalingContext
from megatron_buffer.wrap_checks import check_collectives

_ddp = importlib.import_module('megatron.core.distributed.distributed_data_parallel')
_do = importlib.import_module('megatron.core.optimizer.distrib_optimizer')
_pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')

logger = logging.getLogger(__name__)
_constructor_lock = threading.RLock()
_LAYOUT_AXES = ('param_order', 'bucketing', 'bucket_isolation', 'padding')


class DistributedDataParallel(_ddp.DistributedDataParallel):
    """``DistributedDataParallel`` whose buffers and bucket groups follow a config.

    Used directly, upstream's constructor sees our classes for its own duration and nothing stays
    patched; what belongs to the optimizer (checkpoints) needs ``megatron_buffer.install()``.

    Args:
        config: Transformer config.
        ddp_config: DDP config; a copy is kept, the caller's is not changed.
        module: The model chunk to wrap.
        disable_bucketing: One bucket per buffer, one bucket group.
        pg_collection: Process groups; None takes ``parallel_state``'s.
        full_param_layout: Layout computed beforehand, under the same config.
        buffer_config: Config, shipped name or path; None takes the installed one, or ``upstream``.

    Raises:
        ConflictError: If ``ddp_config`` contradicts the config.
        LayoutError: If ``full_param_layout`` was made by another config, or a bucket group cannot work.
        RankMismatchError: If ranks that must agree do not.

    Attributes:
        runtime: The config in force for this model.
        gathers: How many bucket groups are not gathered.
        fused_params: Parameters whose gradients fused kernels have written into the buffer.
        grad_writes: What was written in this window, per buffer that is overwritten and not zeroed.
    """

    @paused_collector()
    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        full_param_layout: Any = None,
        *,
        buffer_config: Any = None,
    ) -> None:
        runtime = runtime_module.resolve(buffer_config)
        errors.start_watch()
        # Before upstream's constructor, which asks for the hooks; nn.Module's __setattr__ is not ready.
        object.__setattr__(self, '_rare_cases', [])
        object.__setattr__(self, 'fused_params', [])
        object.__setattr__(self, 'gathers', Gathers())
        overwrites = getattr(runtime.accumulation, 'overwrites', False)
        object.__setattr__(self, '_overwrites', overwrites)
        requested_elems = ddp_config.bucket_size
        ddp_config = copy.copy(ddp_config)
        _merge_config(runtime, ddp_config)
        if ddp_config.use_distributed_optimizer:
            policy = runtime.config.checks.aliased_params
            settle_shared_storage(module, policy, runtime.config.source)
        chunk = _named_chunk(module)
        if runtime.needs_names and chunk.names and ddp_config.use_distributed_optimizer:
            # Computed before DDP, it knows no names; upstream's constructor makes another one below.
            full_param_layout = None
        with _constructor_lock, runtime_module.scope(runtime, chunk), _constructor_names():
            super().__init__(
                config=config,
                ddp_config=ddp_config,
                module=module,
                disable_bucketing=disable_bucketing,
                pg_collection=pg_collection,
                full_param_layout=full_param_layout,
            )
        self.runtime = runtime
        self._check_bucket_size(requested_elems)
        self._check_layouts(full_param_layout)
        self._apply_scaling(config)
        self.gathers.take_over(self._all_groups())
        self.grad_writes = watch_writes(self) if self._overwrites else []
        self._window = ChunkWindow(self, config, self._names())
        self._param_data = ParamData(runtime.config.checks.replaced_param_data, self._all_buffers())
        check_collectives(self)
        self._warn_of_idle_patterns()
        self._log_summary(requested_elems, disable_bucketing)
        self._check_rank_agreement()
        maybe_chain_gathers(self, chunk)
        attach_if_wanted(self, chunk)
        watch_reads(self)
        observe_if_wanted(self)
        runtime_module.track(
            self, runtime, f'{type(module).__name__} ({len(self._names())} parameters)'
        )

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Waits for all reductions; upstream: ``DistributedDataParallel.finish_grad_sync``.

        Raises:
            ReadinessError: If parameters have no gradient, or late ones, and the config does not allow it.
        """
        self._window.finish(
            partial(super().finish_grad_sync, force_all_reduce=force_all_reduce),
            bool(force_all_reduce),
        )

    def zero_grad_buffer(self) -> None:
        """Starts a window; upstream: ``DistributedDataParallel.zero_grad_buffer``."""
        self._window.begin()
        self._param_data.check()
        # Upstream takes a mark back from every parameter; only a fused kernel's hook has seen it set.
        own = self.__dict__  # nn.Module's __setattr__ looks for more than a plain attribute
        every_param, own['params_with_grad'] = self.params_with_grad, self.fused_params
        try:
            super().zero_grad_buffer()
        finally:
            own['params_with_grad'] = every_param
        self._window.reset()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """No gradient is counted meanwhile; upstream: ``DistributedDataParallel.no_sync``."""
        intakes = [group.intake for group in self._all_groups()]
        for intake in intakes:
            intake.is_last_microbatch = False
        try:
            yield
        finally:
            for intake in intakes:
                intake.is_last_microbatch = True

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiplies all gradients; upstream: ``DistributedDataParallel.scale_gradients``.

        Raises:
            ReadinessError: If they are being reduced meanwhile.
        """
        if any(group.grad_reduce_handle is not None for group in self._all_groups()):
            raise ReadinessError(
                'scale_gradients() was called while gradients are being reduced; call '
                'finish_grad_sync() first'
            )
        super().scale_gradients(scaling_factor)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Frees the gradients' storage between iterations; ``restore_grad_buffers`` brings back zeros.

        Upstream: ``DistributedDataParallel.offload_grad_buffers``.

        Raises:
            ReadinessError: In the middle of an accumulation window, whose gradients would be lost.
            ParamStorageError: If the storage is not the gradients' alone.
        """
        open_groups = [group for group in self._all_groups() if group.holds_gradients()]
        if open_groups:
            names = open_groups[0].names(open_groups[0].param_to_bucket)
            raise ReadinessError(
                'offload_grad_buffers() was called in the middle of an accumulation window: the '
                f'gradients of {len(open_groups)} bucket groups are not reduced yet, the first holds '
                f'{", ".join(names[:4])}. Call it after finish_grad_sync() and the optimizer step, or '
                'after zero_grad_buffer()'
            )
        super().offload_grad_buffers(synchronize=synchronize, empty_cache=empty_cache)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Loads once no gather is in flight; upstream: ``DistributedDataParallel.load_state_dict``."""
        for group in self._all_groups():
            if group.param_gather_handle is not None:
                with torch.no_grad():
                    group.start_param_sync(force_sync=True)
        super().load_state_dict(state_dict, strict=strict)

    def enable_forward_pre_hook(self) -> None:
        """Waits for gathers in forward from now on; nothing where that is so already.

        Upstream: ``DistributedDataParallel.enable_forward_pre_hook``.
        """
        if not self.remove_forward_pre_hook_handles:
            super().enable_forward_pre_hook()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Gathers now and no longer in forward; only gathers where that is so already.

        Upstream: ``DistributedDataParallel.disable_forward_pre_hook``.
        """
        if self.remove_forward_pre_hook_handles:
            super().disable_forward_pre_hook(param_sync=param_sync)
        elif param_sync:
            with torch.no_grad():
                self.start_param_sync(force_sync=True)

    @property
    def skips_next_gather(self) -> bool:
        """True where a wait for one group's gather must not start the next one's: others start them."""
        return bool(
            self.ddp_config.align_param_gather or self.overlap_param_gather_with_optimizer_step
        )

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        """A hook that looks nothing up and holds no model; upstream: ``_make_backward_post_hook``."""
        self._rare_cases.append(RareCases(self, param, super()._make_backward_post_hook(param)))
        return backward_hook(self._rare_cases[-1], self._overwrites)

    def _make_forward_pre_hook(self) -> Callable[..., None]:
        """A hook that looks nothing up and holds no model; upstream: ``_make_forward_pre_hook``."""
        return forward_pre_hook(self)

    def _all_groups(self) -> list[ParamAndGradBucketGroup]:
        return [*self.bucket_groups, *self.expert_parallel_bucket_groups]

    def _all_buffers(self) -> list[ParamAndGradBuffer]:
        return [*self.buffers, *self.expert_parallel_buffers]

    def _names(self) -> dict[torch.nn.Parameter, str]:
        buffers = self._all_buffers()
        return buffers[0].param_to_name if buffers else {}

    def _pp_rank(self) -> int:
        return (self.pp_group[0] if isinstance(self.pp_group, list) else self.pp_group).rank()

    def _pp_size(self) -> int:
        return (self.pp_group[0] if isinstance(self.pp_group, list) else self.pp_group).size()

    def _check_bucket_size(self, requested_elems: int | None) -> None:
        """A size in the config and another one in ddp_config cannot both hold."""
        bucketing: Any = self.runtime.config.bucketing
        configured = getattr(bucketing, 'bucket_size_elems', None)
        if configured is None:
            return
        defaults = {default_bucket_size(g.size()) for g in (self.dp_group, self.dp_cp_group)}
        if requested_elems is not None and requested_elems not in defaults | {configured}:
            origin = 'bucket_size' if self.ddp_config.num_buckets is None else 'num_buckets'
            raise ConflictError(
                f'bucketing.bucket_size_elems is {configured} in {self.runtime.config.source}, and '
                f'ddp_config.{origin} asks for {requested_elems} elements; set one of them, or both to '
                'the same value',
                yaml_path='bucketing.bucket_size_elems',
                source=self.runtime.config.source,
            )

    def _check_layouts(self, given: Any) -> None:
        """A layout that was handed in must be what this config makes; stock's axes take any."""
        config, stock = self.runtime.config, BufferConfig()
        changed = [axis for axis in _LAYOUT_AXES if getattr(config, axis) != getattr(stock, axis)]
        if given is None or not changed:
            return
        for buffer in self._all_buffers():
            if getattr(buffer.params[0], 'is_managed_by_layer_wise_optimizer', False):
                log_single_rank(
                    logger,
                    logging.WARNING,
                    f'{", ".join(changed)} of {config.source} do not apply to the parameters that '
                    'LayerWiseDistributedOptimizer manages: it lays their buffers out itself',
                )
            elif not self._follows_config(buffer):
                raise LayoutError(
                    f'full_param_layout is not what {config.source} ({self.runtime.hash}) makes, which '
                    f'differs from stock in {", ".join(changed)}. Compute it with '
                    'DistributedOptimizer.compute_full_param_layout after megatron_buffer.install() of '
                    'the same config, or leave it out.'
                )

    def _follows_config(self, buffer: ParamAndGradBuffer) -> bool:
        """Whether the buffer's layout is the config's, by whichever group upstream sizes it."""
        with runtime_module.scope(self.runtime):
            if not self.ddp_config.use_distributed_optimizer:
                made = [compute_default_per_buffer_param_layout(buffer.params, self.bucket_size)]
            else:  # 0.18 sizes layouts by the whole group, also with several optimizer instances
                whole = self.expt_dp_group if self._is_expert(buffer) else self.dp_cp_group
                made = [
                    compute_per_buffer_param_layout(
                        buffer.params, self.bucket_size, size, self.ddp_config
                    )
                    for size in {buffer.data_parallel_world_size, whole.size()}
                ]
        return any(
            layout.param_index_map == buffer.param_index_map
            and layout.bucket_indices == buffer.bucket_indices
            for layout in made
        )

    def _is_expert(self, buffer: ParamAndGradBuffer) -> bool:
        return any(buffer is expert for expert in self.expert_parallel_buffers)

    def _apply_scaling(self, config: Any) -> None:
        """Sets how each bucket's gradients become averages."""
        parts = (
            (self.buffers, self.bucket_groups, False),
            (self.expert_parallel_buffers, self.expert_parallel_bucket_groups, True),
        )
        for buffers, groups, is_expert_parallel in parts:
            plan = self.runtime.scaling.plan(
                ScalingContext(
                    dp_size=self.dp_cp_group.size(),
                    expert_dp_size=self.expt_dp_group.size(),
                    is_expert_parallel=is_expert_parallel,
                    average_in_collective=self.ddp_config.average_in_collective,
                    per_token_loss=config.calculate_per_token_loss,
                )
            )
            for buffer in buffers:
                buffer.gradient_scaling_factor = plan.bucket_factor
                for bucket in buffer.buckets:
                    bucket.gradient_scaling_factor = plan.bucket_factor
            for group in groups:
                group.scaling_plan = plan

    def _warn_of_idle_patterns(self) -> None:
        """A pattern that no parameter matches is likely a typing error, or another model's."""
        for axis in AXES:
            strategy = getattr(self.runtime, axis, None) or getattr(self.runtime.layout, axis, None)
            for place, pattern in getattr(strategy, 'patterns', list)():
                names = list(self._names().values())
                if not any(matches(n, pattern) or outermost_module(n, pattern) for n in names):
                    log_on_each_pipeline_stage(
                        logger,
                        logging.WARNING,
                        f'{axis}.{place} of {self.runtime.config.source}: {pattern!r} matches no '
                        f'parameter of this model chunk.{did_you_mean(pattern, names)}',
                        tp_group=self.tp_group,
                        dp_cp_group=self.dp_cp_group,
                    )

    def _log_summary(self, requested_elems: int | None, disable_bucketing: bool) -> None:
        size = resolve_bucket_size(
            configured_elems=getattr(self.runtime.config.bucketing, 'bucket_size_elems', None),
            ddp_bucket_size_elems=requested_elems,
            num_buckets=self.ddp_config.num_buckets,
            overlap_grad_reduce=self.ddp_config.overlap_grad_reduce,
            disable_bucketing=disable_bucketing,
            pp_rank=self._pp_rank(),
            dp_size=self.dp_group.size(),
            dp_cp_size=self.dp_cp_group.size(),
        )
        assert size.elems == self.bucket_size, (size, self.bucket_size)
        resolved = 'none' if size.elems is None else f'{size.elems:,} elements'
        log_on_each_pipeline_stage(
            logger,
            logging.INFO,
            f'bucket size: {resolved} ({size.reason}); {len(self._all_buffers())} buffers, '
            f'{sum(len(buffer.buckets) for buffer in self._all_buffers())} buckets, '
            f'{len(self._all_groups())} bucket groups; buffer config {self.runtime.config.source} '
            f'({self.runtime.hash})',
            tp_group=self.tp_group,
            dp_cp_group=self.dp_cp_group,
        )

    def _check_rank_agreement(self) -> None:
        """The config over the whole job, layouts and groups over the ranks that share them."""
        wanted = self.runtime.config.checks.rank_agreement
        generation = runtime_module.generation(self.runtime)
        if generation is not None:
            # A rank that does not take part in the comparisons below would leave the others waiting.
            check_against_first(
                'checks.rank_agreement', f'wanted/{generation}', str(wanted).lower()
            )
        if not wanted:
            return
        own = f'megatron-buffer {__version__}, config hash {self.runtime.hash}'
        versions = '; '.join([own, *third_party_origins(self.runtime.config)])

        @cache
        def dense() -> list[str]:
            return [
                versions,
                *_describe(self.buffers, self.bucket_groups),
                f'{len(self.expert_parallel_buffers)} expert buffers',
            ]

        def experts() -> list[str]:
            return _describe(self.expert_parallel_buffers, self.expert_parallel_bucket_groups)

        comparisons: list[tuple[Any, str, Callable[[], list[str]]]] = [
            (self.dp_cp_group, 'data-parallel', dense),
            (self.tp_group, 'tensor-parallel', dense),
        ]
        if self.expert_parallel_buffers:
            comparisons.append((self.expt_dp_group, 'expert data-parallel', experts))
        found: list[RankMismatchError] = []
        for group, name, describe in comparisons:
            try:
                check_agreement('the buffer', group, name, describe)
            except RankMismatchError as error:  # the next group's ranks wait for this one too
                found.append(error)
        if found:
            raise found[0]
        if generation is not None:
            check_against_first('the installed buffer config', f'config/{generation}', versions)
            check_tied_embeddings(self, generation)


def _named_chunk(module: torch.nn.Module) -> ModelChunk:
    """The chunk with the names of its parameters, as upstream's constructor will call them.

    LayerWise lays out its own buffers before there are names, so its chunks go without.
    """
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    if any(getattr(p, 'is_managed_by_layer_wise_optimizer', False) for _, p in named):
        named = []
    inner: Any = module
    while isinstance(getattr(inner, 'module', None), torch.nn.Module):
        inner = inner.module
    pp_rank = 0
    if parallel_state.model_parallel_is_initialized():
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    return ModelChunk(
        {param: name for name, param in named}, pp_rank, getattr(inner, 'vp_stage', None) or 0, {}
    )


def _merge_config(runtime: Runtime, ddp_config: Any) -> None:
    """Writes what the config sets into our copy of ddp_config, and refuses other kinds of buffers."""
    if ddp_config.use_megatron_fsdp:
        raise ConflictError(
            'use_megatron_fsdp has buffers of its own, on which megatron-buffer has no effect: turn '
            'one of them off'
        )
    configured = getattr(runtime.config.bucketing, 'bucket_size_elems', None)
    if configured is not None and ddp_config.overlap_grad_reduce:
        ddp_config.bucket_size = configured
    high_busbw = getattr(runtime.config.padding, 'high_busbw', None)
    if high_busbw is not None:
        if ddp_config.pad_buckets_for_high_nccl_busbw and not high_busbw:
            raise ConflictError(
                f'padding.high_busbw is false in {runtime.config.source}, and '
                'ddp_config.pad_buckets_for_high_nccl_busbw is true; set one of them',
                yaml_path='padding.high_busbw',
                source=runtime.config.source,
            )
        ddp_config.pad_buckets_for_high_nccl_busbw = high_busbw


@contextlib.contextmanager
def _constructor_names() -> Iterator[None]:
    """Lets upstream's constructor find our classes; a no-op where ``install()`` did so already."""
    wanted = (
        (_ddp, '_ParamAndGradBuffer', ParamAndGradBuffer),
        (_ddp, 'partition_buckets', partition_buckets),
        (_ddp, 'group_params_for_buffers', group_params_for_buffers),
        (_do, 'group_params_for_buffers', group_params_for_buffers),
        (_do, 'DistributedOptimizer', DistributedOptimizer),
    )
    with contextlib.ExitStack() as undo:
        for module, name, ours in wanted:
            theirs = getattr(module, name)
            if theirs is not ours:
                setattr(module, name, ours)
                undo.callback(setattr, module, name, theirs)
        yield


def _describe(buffers: list[Any], groups: list[Any]) -> list[str]:
    """Parameters in layout order, bucket ends and groups, a line each, for comparing ranks."""
    lines: list[str] = []
    for index, buffer in enumerate(buffers):
        kind = f'buffer {index} ({buffer.param_dtype} parameters, {buffer.grad_dtype} gradients)'
        for bucket in buffer.buckets:
            for param in bucket.params_list:
                start, end, _ = buffer.param_index_map[param]
                name = buffer.param_to_name[param]
                lines.append(f'{name} at [{start}, {end}) in bucket {bucket.bucket_id} of {kind}')
            end = bucket.offset + bucket.grad_data.numel()
            lines.append(f'the end of bucket {bucket.bucket_id} at {end} of {kind}')
    for index, group in enumerate(groups):
        first = [buffers[0].param_to_name[bucket.params_list[0]] for bucket in group.buckets]
        lines.append(f'bucket group {index} with the buckets that start with {", ".join(first)}')
    return lines

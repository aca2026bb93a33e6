"""What ``install()`` replaces in ``megatron.*``, and what it relies upon without replacing it.

Two tables and nothing else. A target's replacement is named, not imported: our classes subclass
upstream's, so their modules may only be imported once upstream's sources have passed the gate.
Every symbol in either table is fingerprinted (``fingerprints.py``) for each supported version.
"""

from __future__ import annotations

from dataclasses import dataclass

PGB = 'megatron.core.distributed.param_and_grad_buffer'
DDP = 'megatron.core.distributed.distributed_data_parallel'
DIST_OPT = 'megatron.core.optimizer.distrib_optimizer'
LAYER_WISE = 'megatron.core.optimizer.layer_wise_optimizer'
FINALIZE = 'megatron.core.distributed.finalize_model_grads'
SERIALIZATION = 'megatron.core.dist_checkpointing.serialization'
ARGUMENTS = 'megatron.training.arguments'

CORE = 'core'
TRAINING = 'training'
"""Groups: ``core`` is always installed, ``training`` only when the launcher asks for it."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One name that is replaced in its defining module, and from there in every holder.

    Exactly one of ``replacement`` and ``wrapper`` is set.
    """

    group: str
    """``core`` or ``training``."""
    module: str
    """The defining module, for ``importlib.import_module``."""
    qualname: str
    """Name in that module; ``Class.method`` reaches into a class."""
    replacement: str = ''
    """``module:attribute`` of the object that takes its place."""
    wrapper: str = ''
    """``module:attribute`` of a factory that is given the original and returns what replaces it."""

    @property
    def symbol(self) -> str:
        """``module:qualname``, as messages and the manifest spell it."""
        return f'{self.module}:{self.qualname}'


@dataclass(frozen=True, kw_only=True)
class Reliance:
    """Symbols of one module whose source must be known, and what depends on them.

    A name is a function, a class (which stands for its own statement, without methods, and for each
    of its methods), ``Class.method``, ``Class.<class>`` (the statement alone), a module-level
    variable, or ``*`` for every function and class of the module.
    """

    group: str
    module: str
    names: tuple[str, ...]
    why: str


def _core(module: str, qualname: str, replacement: str) -> Target:
    return Target(
        group=CORE, module=module, qualname=qualname, replacement=f'megatron_buffer.{replacement}'
    )


TARGETS: tuple[Target, ...] = (
    _core(PGB, '_ParamAndGradBuffer', 'buffer:ParamAndGradBuffer'),
    _core(PGB, '_ParamAndGradBucketGroup', 'bucket_groups:ParamAndGradBucketGroup'),
    _core(PGB, 'partition_buckets', 'bucket_groups:partition_buckets'),
    _core(PGB, 'group_params_for_buffers', 'param_layout:group_params_for_buffers'),
    _core(
        PGB,
        '_compute_default_per_buffer_param_layout',
        'param_layout:compute_default_per_buffer_param_layout',
    ),
    _core(DDP, 'DistributedDataParallel', 'ddp:DistributedDataParallel'),
    _core(DIST_OPT, 'DistributedOptimizer', 'optimizer:DistributedOptimizer'),
    _core(FINALIZE, 'finalize_model_grads', 'finalize:finalize_model_grads'),
    Target(
        group=CORE,
        module=SERIALIZATION,
        qualname='load',
        wrapper='megatron_buffer.checkpoint_guard:wrap_load',
    ),
    Target(
        group=TRAINING,
        module=ARGUMENTS,
        qualname='add_megatron_arguments',
        wrapper='megatron_buffer.launch:wrap_add_megatron_arguments',
    ),
    Target(
        group=TRAINING,
        module=ARGUMENTS,
        qualname='parse_args',
        wrapper='megatron_buffer.launch:wrap_parse_args',
    ),
)
"""Everything that is ever replaced."""

_DIST_OPT_METHODS = (
    '<class>',
    '__init__',
    # layout: our overrides call these, and upstream calls them by the class's hard-coded name
    '_compute_per_buffer_param_layout',
    'compute_full_param_layout',
    # shard ranges: computed from the layout, one bucket per parameter
    '_build_model_gbuf_param_range_map',
    '_build_model_gbuf_range',
    '_build_gbuf_range_map',
    # what reads and writes the buffers around the step
    '_copy_model_grads_to_main_grads',
    '_copy_main_params_to_model_params',
    '_copy_main_params_to_param_buffer',
    'start_param_sync_for_bucket_group_subset',
    'step_with_ready_grads',
    'zero_grad',
    # checkpoints: the layout guard and the repair of fully_reshardable
    '_get_model_param_range_map',
    '_get_main_param_and_optimizer_states',
    '_set_main_param_and_optimizer_states',
    'state_dict',
    'load_state_dict',
    'sharded_state_dict',
    'get_parameter_state_dp_reshardable',
    'get_parameter_state_dp_zero',
    'sharded_param_state_dp_reshardable',
    'sharded_param_state_dp_zero',
    'sharded_param_state_fully_reshardable',
    'load_parameter_state_from_dp_reshardable',
    'load_parameter_state_from_dp_zero',
    'load_parameter_state_from_fully_reshardable',
    'split_state_dict_if_needed',
)

RELIED_UPON: tuple[Reliance, ...] = (
    Reliance(
        group=CORE,
        module=PGB,
        names=(
            '_ParamAndGradBuffer',
            '_ParamAndGradBucketGroup',
            '_ParamAndGradBucket',
            'partition_buckets',
            'group_params_for_buffers',
            '_compute_default_per_buffer_param_layout',
            'shard_buffer',
            'BufferType',
            'dist_reduce_scatter_func',
        ),
        why='buffers, buckets and groups are subclassed, and upstream looks their names up here',
    ),
    Reliance(
        group=CORE,
        module=DDP,
        names=('DistributedDataParallel',),
        why='subclassed: hooks, wiring of the groups, layout checks',
    ),
    Reliance(
        group=CORE,
        module='megatron.core.distributed.data_parallel_base',
        names=('_BaseDataParallel',),
        why='base of DistributedDataParallel',
    ),
    Reliance(
        group=CORE,
        module='megatron.core.distributed.distributed_data_parallel_config',
        names=('DistributedDataParallelConfig',),
        why='copied per model; its fields and their normalisation decide buckets and collectives',
    ),
    Reliance(
        group=CORE,
        module='megatron.core.distributed.reduce_scatter_with_fp32_accumulation',
        names=('*',),
        why='chosen per bucket group instead of per process',
    ),
    Reliance(group=CORE, module=FINALIZE, names=('*',), why='finalize runs these as named steps'),
    Reliance(
        group=CORE,
        module='megatron.core.optimizer.param_layout',
        names=('*',),
        why='the layouts we compute are handed over as these classes, padded by these rules',
    ),
    Reliance(
        group=CORE,
        module=DIST_OPT,
        names=tuple(f'DistributedOptimizer.{name}' for name in _DIST_OPT_METHODS),
        why='subclassed: layout, shard ranges, checkpoints',
    ),
    Reliance(
        group=CORE,
        module=SERIALIZATION,
        names=('load',),
        why='wrapped: a load that fails because the layouts differ says so',
    ),
    Reliance(
        group=CORE,
        module=LAYER_WISE,
        names=(
            'LayerWiseDistributedOptimizer._compute_per_buffer_param_layout',
            'LayerWiseDistributedOptimizer.compute_full_param_layout',
        ),
        why='calls group_params_for_buffers and the layout of DistributedOptimizer',
    ),
    Reliance(
        group=CORE,
        module='megatron.core.process_groups_config',
        names=('ProcessGroupCollection.setup_process_groups_for_ddp',),
        why='tells which groups a buffer is reduced over',
    ),
    Reliance(
        group=TRAINING,
        module='megatron.training.training',
        names=('get_model', 'resolve_ddp_bucket_size', 'wrap_model_chunks_with_ddp'),
        why='wrap site of the training loop',
    ),
    Reliance(
        group=TRAINING,
        module='megatron.training.models.dist_utils',
        names=('_ddp_wrap',),
        why='wrap site of the model builders',
    ),
    Reliance(
        group=TRAINING,
        module=ARGUMENTS,
        names=('parse_args', 'add_megatron_arguments'),
        why='the launcher adds our flags here',
    ),
)
"""Everything that is fingerprinted; it contains every target."""

"""What a wrapped model's collectives cannot do, found when it is wrapped.

Upstream asserts some of this in the middle of training (``_ParamAndGradBucketGroup.start_grad_sync``,
``megatron/core/distributed/param_and_grad_buffer.py``) and knows nothing of the rest. What a config alone
can tell is refused when it is loaded; here it meets ``ddp_config``, the dtypes and the backend.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron_buffer import runtime as runtime_module
from megatron_buffer.collectives_a2a import wire_dtype_of
from megatron_buffer.errors import ConflictError, LayoutError
from megatron_buffer.param_layout import is_pipeline_synced

if TYPE_CHECKING:
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup

logger = logging.getLogger(__name__)


def check_collectives(ddp: Any) -> None:
    """Refuses what would fail, or be silently wrong, in the middle of training.

    Args:
        ddp: A ``DistributedDataParallel`` of ours, whose groups have their ``reduce_choice`` and
            ``scaling_plan``.

    Raises:
        ConflictError: If the config asks for what ``ddp_config``, the model or the backend rule out.
        LayoutError: If a group holds more buckets than its collective takes.
    """
    checks = _Checks(ddp)
    for group in ddp._all_groups():
        checks.reduce(group)
        checks.wire(group)
        checks.scaling(group)
    checks.gather()
    checks.pipeline_synced()
    checks.grad_dtypes()
    for level, message in checks.notes:
        log_single_rank(logger, level, message)


class _Checks:
    """The checks of one model.

    Attributes:
        notes: Level and text of what is no error but should be said, each once.
    """

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        self.ddp_config = ddp.ddp_config
        self.config = ddp.runtime.config
        self.notes: dict[tuple[int, str], None] = {}

    def grad_dtypes(self) -> None:
        """Without the distributed optimizer fp32 parameters are stepped with their main_grad itself."""
        if self.ddp_config.use_distributed_optimizer:
            return
        for buffer in self.ddp._all_buffers():
            if buffer.param_dtype == torch.float32 and buffer.grad_dtype != torch.float32:
                raise self.refuse(
                    'buffer_grouping',
                    f'and gives fp32 parameters {_short(buffer.grad_dtype)} gradients (the first is '
                    f'{buffer.param_to_name[buffer.params[0]]}), which torch takes under the distributed '
                    'optimizer only; turn use_distributed_optimizer on, or drop the rule',
                )

    def pipeline_synced(self) -> None:
        """What finalize sums over pipeline stages must be sharded alike on all of them."""
        ddp, config = self.ddp, self.ddp.config
        sums = getattr(config, 'has_cond_embedder', False) or getattr(config, 'flextron', False)
        if not (sums and self.ddp_config.use_distributed_optimizer) or ddp._pp_size() == 1:
            return
        for group in ddp._all_groups():
            for bucket in group.buckets:
                marked = [p for p in bucket.params_list if is_pipeline_synced(p)]
                if marked and len(bucket.params_list) > 1:
                    self.note(
                        logging.WARNING,
                        'bucket_isolation',
                        f'and {group.names(marked)[0]} shares its bucket with other parameters: its '
                        'gradient is summed over pipeline stages, whose shards do not match, so it is '
                        'wrong; set bucket_isolation: {name: shared_embedding, pipeline_synced: true}',
                    )

    def refuse(self, axis: str, problem: str, key: str = 'name') -> ConflictError:
        """The error that names the axis's value, where it was set, and the problem."""
        params = getattr(self.config, axis)
        return ConflictError(
            f'{axis}.{key} is {getattr(params, key)} in {self.config.source}, {problem}',
            yaml_path=f'{axis}.{key}',
            source=self.config.source,
        )

    def note(self, level: int, axis: str, text: str, key: str = 'name') -> None:
        value = getattr(getattr(self.config, axis), key)
        self.notes[level, f'{axis}.{key} is {value} in {self.config.source}, {text}'] = None

    def reduce(self, group: ParamAndGradBucketGroup) -> None:
        """Whether the collective exists here, and whether ddp_config wants the same one."""
        kind = group.reduce_choice.kind
        dist_opt = self.ddp_config.use_distributed_optimizer
        fp32_flag = self.ddp_config.reduce_scatter_with_fp32_accumulation
        if not dist_opt and kind != 'all_reduce':
            raise self.refuse(
                'grad_reduce',
                'and ddp_config.use_distributed_optimizer is false: no rank owns a shard of a bucket '
                'then. Turn the distributed optimizer on, or choose grad_reduce: upstream or all_reduce',
            )
        if dist_opt and fp32_flag and kind in ('all_reduce', 'reduce_scatter'):
            raise self.refuse(
                'grad_reduce',
                'and ddp_config.reduce_scatter_with_fp32_accumulation asks for an all-to-all; turn that '
                'off, or choose grad_reduce: upstream or a2a_fp32_sum',
            )
        if kind == 'a2a' and fp32_flag:
            self.note(
                logging.INFO,
                'grad_reduce',
                'and ddp_config.reduce_scatter_with_fp32_accumulation asks for the same: '
                "megatron-buffer's all-to-all is used, not upstream's",
            )
        if kind != 'upstream_a2a':
            return
        if self.ddp_config.average_in_collective:
            raise ConflictError(
                'ddp_config.reduce_scatter_with_fp32_accumulation sums at the owner and cannot average: '
                'turn ddp_config.average_in_collective off, or choose grad_reduce: a2a_fp32_sum, which '
                'can',
                source=self.config.source,
            )
        if group.scaling_plan.op != 'sum':
            raise self.refuse(
                'scaling',
                "and ddp_config.reduce_scatter_with_fp32_accumulation's own all-to-all can only sum. "
                'Choose scaling: prescale or shard_postscale, or turn that flag off and choose '
                'grad_reduce: a2a_fp32_sum',
            )
        if len(group.buckets) > 1 and self.ddp_config.overlap_grad_reduce:
            raise LayoutError(
                f'reduce_scatter_with_fp32_accumulation takes one bucket per group, and a group '
                f'holds {len(group.buckets)}: bucketing is disabled for this model chunk, which '
                'puts buffers of several dtypes into one group. Give the chunk parameters of one '
                'dtype, or turn reduce_scatter_with_fp32_accumulation or overlap_grad_reduce off.'
            )

    def wire(self, group: ParamAndGradBucketGroup) -> None:
        """What becomes of gradients that are rounded for the wire."""
        wanted = group.reduce_choice.wire_dtype
        if group.reduce_choice.kind != 'a2a' or wanted is None:
            return
        plan = group.scaling_plan
        for grad_dtype in {bucket.grad_data.dtype for bucket in group.buckets}:
            sent = wire_dtype_of(wanted, grad_dtype)
            if sent == grad_dtype and _short(grad_dtype) != wanted:
                self.note(
                    logging.WARNING,
                    'grad_reduce',
                    f'which has no effect on {_short(grad_dtype)} gradients: it would not make them '
                    'smaller, so they are sent as they are',
                    key='wire_dtype',
                )
            unscaled = plan.op != 'sum' or plan.post_factor != 1.0
            if sent == torch.float16 != grad_dtype and unscaled:
                raise self.refuse(
                    'grad_reduce',
                    f'and scaling.name is {self.config.scaling.name}: what is sent is not divided by the '
                    'data-parallel size yet, and fp16 can overflow. Choose wire_dtype: bf16, or '
                    'scaling: prescale with ddp_config.average_in_collective off',
                    key='wire_dtype',
                )

    def scaling(self, group: ParamAndGradBucketGroup) -> None:
        """Whether ddp_config, the dtype and the backend allow for where the scaling is done."""
        plan = group.scaling_plan
        if self.ddp_config.average_in_collective and plan.op != 'avg':
            raise self.refuse(
                'scaling',
                'and ddp_config.average_in_collective is true, which divides in the collective. Turn it '
                'off, or choose scaling: prescale or average',
            )
        if plan.op == 'avg' and self._weight_remat():
            raise self.refuse(
                'scaling',
                'and gradients are averaged over data-parallel ranks without those that rematerialize '
                'weights (gtp_weight_remat_size > 1), which would miss a factor. Choose scaling: prescale',
            )
        fp16 = any(bucket.grad_data.dtype == torch.float16 for bucket in group.buckets)
        if plan.post_factor != 1.0 and fp16:
            raise self.refuse(
                'scaling',
                'and gradients are fp16, which an unscaled sum can overflow. Turn '
                'ddp_config.grad_reduce_in_fp32 on, or choose scaling: prescale or average',
            )
        if plan.op == 'premul' and not _is_nccl(group):
            raise self.refuse(
                'scaling',
                'which only NCCL can do, and these gradients are reduced by '
                f'{dist.get_backend(group.communication_group)}. Choose scaling: prescale, average or '
                'shard_postscale',
            )

    def _weight_remat(self) -> bool:
        sizes = ('gtp_weight_remat_size', 'expert_gtp_weight_remat_size')
        return max(getattr(self.ddp.config, size, 1) for size in sizes) > 1

    def gather(self) -> None:
        """Whether a gather may be under way between the optimizer's step and the forward pass."""
        if not getattr(self.ddp.runtime.param_gather, 'eager', False):
            return
        if self.ddp_config.overlap_param_gather and not self.ddp_config.use_distributed_optimizer:
            raise self.refuse(
                'param_gather',
                'and ddp_config.use_distributed_optimizer is false: the layer-wise optimizer gathers '
                'into the grad buffer, which is zeroed before forward. Choose param_gather: upstream',
            )
        if getattr(self.ddp_config, 'reuse_grad_buf_for_mxfp8_param_ag', False):
            raise self.refuse(
                'param_gather',
                'and ddp_config.reuse_grad_buf_for_mxfp8_param_ag gathers into the grad buffer, which '
                'is zeroed before forward. Turn it off, or choose param_gather: upstream',
            )
        if getattr(self.ddp.config, 'qk_clip', False):
            raise self.refuse(
                'param_gather',
                'and qk_clip of the transformer config changes weights after the optimizer step, while '
                'they would be on their way. Turn it off, or choose param_gather: upstream',
            )
        if not self.ddp_config.overlap_param_gather:
            self.note(
                logging.WARNING,
                'param_gather',
                'which has no effect: ddp_config.overlap_param_gather is false',
            )
        elif self.ddp_config.align_param_gather:
            self.note(
                logging.WARNING,
                'param_gather',
                'which has no effect: under ddp_config.align_param_gather the pipeline schedule starts '
                'the gathers',
            )
        elif runtime_module.installed() is not self.ddp.runtime:
            self.note(
                logging.WARNING,
                'param_gather',
                "which has no effect without megatron_buffer.install(): the optimizer is Megatron's",
            )


def _short(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: 'bf16', torch.float16: 'fp16', torch.float32: 'fp32'}
    return names.get(dtype, str(dtype).removeprefix('torch.'))


def _is_nccl(group: ParamAndGradBucketGroup) -> bool:
    """Whether NCCL reduces these gradients; a group may have another backend for CPU tensors."""
    backends = str(dist.get_backend_config(group.communication_group))
    return 'nccl' in backends and all(bucket.grad_data.is_cuda for bucket in group.buckets)

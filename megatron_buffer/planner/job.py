"""A job: its parallelism, which chunk of the model is looked at, and how DDP is asked to work.

Stands for the arithmetic of ``initialize_model_parallel`` (``megatron/core/parallel_state.py``) and for
the fields of ``DistributedDataParallelConfig`` that shape a buffer. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_buffer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Job:
    """Parallel sizes, and one pipeline stage's model chunk.

    Raises:
        ConfigError: If the sizes do not fit each other, naming the command line's options.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks per pipeline stage."""
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallelism of experts; None is ``tp``, as in Megatron."""
    instances: int = 1
    """``num_distributed_optimizer_instances``."""
    pp_rank: int = 0
    """The pipeline stage that is looked at."""
    chunk: int = 0
    """The stage's model chunk that is looked at."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ('pp_rank', 'chunk') else 1
            if value is not None and value < least:
                raise ConfigError(f'{_option(field.name)} {value}: must be at least {least}')
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                f'--vpp {self.vpp}: several model chunks per stage need a pipeline; set --pp as well'
            )
        for name, size, of in (('pp_rank', self.pp, '--pp'), ('chunk', self.vpp, '--vpp')):
            value = getattr(self, name)
            if value >= size:
                raise ConfigError(
                    f'{_option(name)} {value}: with {of} {size} it is at most {size - 1}'
                )
        if self.stage_size % self.expert_model_size:
            least = math.lcm(self.tp * self.cp, self.expert_model_size) // (self.tp * self.cp)
            raise ConfigError(
                f'--ep {self.ep} and --etp {self.expert_tp}: experts are spread over ep x etp = '
                f'{self.expert_model_size} ranks of a stage, which must divide its tp x cp x dp = '
                f'{self.stage_size} ranks; --dp must be a multiple of {least}'
            )
        for what, size in (
            ('data-parallel ranks (dp x cp)', self.dp_cp_size),
            ('expert data-parallel ranks', self.expert_dp_size),
        ):
            if size % self.instances:
                raise ConfigError(
                    f'--instances {self.instances}: does not divide the {size} {what}'
                )

    def sizes(self) -> dict[str, int]:
        """The parallel sizes, as JSON names them."""
        return {
            'world_size': self.world_size,
            'tp': self.tp,
            'pp': self.pp,
            'vpp': self.vpp,
            'dp': self.dp,
            'cp': self.cp,
            'ep': self.ep,
            'etp': self.expert_tp,
            'expert_dp': self.expert_dp_size,
            'instances': self.instances,
        }

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_model_size(self) -> int:
        """Ranks that one copy of a stage's experts is spread over."""
        return self.ep * self.expert_tp

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.stage_size * self.pp

    @property
    def dp_cp_size(self) -> int:
        """Ranks that hold the same dense parameters."""
        return self.dp * self.cp

    @property
    def expert_dp_size(self) -> int:
        """Ranks that hold the same expert parameters."""
        return self.stage_size // self.expert_model_size

    def num_shards(self, is_expert_parallel: bool) -> int:
        """Ranks that a buffer is reduced over and, with the distributed optimizer, sharded over."""
        size = self.expert_dp_size if is_expert_parallel else self.dp_cp_size
        return size // self.instances


@dataclass(frozen=True, kw_only=True)
class DdpOptions:
    """The fields of ``ddp_config`` that shape a buffer, under upstream's names."""

    use_distributed_optimizer: bool = True
    overlap: bool = True
    """Both ``overlap_grad_reduce`` and ``overlap_param_gather``."""
    grad_reduce_in_fp32: bool = True
    bucket_size: int | None = None
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    values_per_byte: int = 1
    """Elements that share a byte of quantized parameters: 2 for NVFP4."""

    def __post_init__(self) -> None:
        for option, value in (
            ('--bucket-size', self.bucket_size),
            ('--num-buckets', self.num_buckets),
        ):
            if value is not None and value < 1:
                raise ConfigError(f'{option} {value}: must be at least 1')
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ConfigError('--bucket-size and --num-buckets exclude each other')


def _option(field: str) -> str:
    return {'pp_rank': '--rank-stage'}.get(field, f'--{field}')

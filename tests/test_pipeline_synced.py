"""Parameters whose gradients finalize sums over pipeline stages, under the distributed optimizer.

Each stage has other parameters around them, so without a bucket of their own they are sharded differently
on each stage, and shards that do not match are summed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import run_ranks

# Kind: Megatron's mark on the parameter, and the flag of the config that makes finalize sum it.
KINDS: dict[str, tuple[str, dict[str, bool]]] = {
    'tied': ('shared_embedding', {}),
    'conditional': ('pipeline_parallel', {'has_cond_embedder': True}),
    'flextron': ('flextron_router_pp_sync', {'flextron': True}),
}


class Stage(torch.nn.Module):
    """A replicated parameter between two others, whose sizes differ between the stages."""

    def __init__(self, is_first: bool, mark: str) -> None:
        super().__init__()
        self.pre_process = is_first
        self.share_embeddings_and_output_weights = mark == 'shared_embedding'
        self.before = torch.nn.Parameter(torch.zeros(7 if is_first else 300))
        self.replica = torch.nn.Parameter(torch.zeros(13, 8))
        setattr(self.replica, mark, True)
        self.after = torch.nn.Parameter(torch.zeros(24 if is_first else 9))

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """Where Megatron looks for a tied embedding."""
        return self.replica

    def forward(self, slopes: dict[str, torch.Tensor]) -> torch.Tensor:
        """A loss whose gradients are ``slopes``."""
        losses = [(param * slopes[name]).sum() for name, param in self.named_parameters()]
        return torch.stack(losses).sum()


def _slopes(is_first: bool, mark: str, dp_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * is_first + dp_rank)
    return {
        name: torch.randn(param.shape, generator=generator)
        for name, param in Stage(is_first, mark).named_parameters()
    }


def _grads(rank: int, world_size: int, kind: str, arm: str) -> dict[str, list[str]]:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer import TransformerConfig

    import megatron_buffer
    from megatron_buffer import finalize as ours
    from tests import small_model as sm
    from tests.test_window import _log_records

    records = _log_records()
    mark, flags = KINDS[kind]
    parallel_state.initialize_model_parallel(1, 2)
    is_first = parallel_state.is_pipeline_first_stage()
    dp_rank = parallel_state.get_data_parallel_rank()
    dp_size = parallel_state.get_data_parallel_world_size()
    config: Any = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    for name, value in flags.items():
        setattr(config, name, value)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=100
    )
    stage = Stage(is_first, mark)
    if arm == 'stock':
        model = DistributedDataParallel(config, ddp_config, stage)
        finish: Any = finalize_model_grads
    else:
        model = megatron_buffer.DistributedDataParallel(
            config, ddp_config, stage, buffer_config=arm
        )
        finish = ours.finalize_model_grads
    model.zero_grad_buffer()
    model(_slopes(is_first, mark, dp_rank)).backward()
    finish([model])

    def mean(name: str, first: bool) -> torch.Tensor:
        return sum(_slopes(first, mark, r)[name].flatten() / dp_size for r in range(dp_size))

    expected = {name: mean(name, is_first) for name in ('before', 'after')}
    expected['replica'] = mean('replica', True) + mean('replica', False)
    return {
        'wrong': sm.differences(sm.owned_main_grads(model), expected),
        'warned': [text for text in records if 'pipeline_synced: true' in text],
    }


@pytest.mark.parametrize('kind', KINDS)
def test_replicas_on_several_stages_are_summed_right(kind: str) -> None:
    for found in run_ranks(_grads, 4, kind, 'recommended'):
        assert found == {'wrong': [], 'warned': []}


@pytest.mark.parametrize('kind', ['conditional', 'flextron'])
def test_with_upstreams_choices_a_replica_in_a_shared_bucket_is_named(kind: str) -> None:
    results = run_ranks(_grads, 4, kind, 'upstream')
    assert any('replica' in text for found in results for text in found['warned'])


@pytest.mark.stock_fault
@pytest.mark.parametrize('kind', ['conditional', 'flextron'])
def test_stock_sums_shards_that_do_not_match(kind: str) -> None:
    results = run_ranks(_grads, 4, kind, 'stock')
    if not any(found['wrong'] for found in results):
        pytest.skip(f'stock now right: {kind} parameters over pipeline stages')


def _stages_unlike(rank: int, world_size: int, what: str) -> None:
    """Two stages whose copies of the tied embedding cannot be summed as they lie."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    import megatron_buffer

    parallel_state.initialize_model_parallel(1, 2)
    is_first = parallel_state.is_pipeline_first_stage()
    config: Any = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.bfloat16,
    )
    stage = Stage(is_first, 'shared_embedding').bfloat16()
    stage.replica.shared_embedding = True  # type: ignore[attr-defined]
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=what == 'bucket',
        pad_buckets_for_high_nccl_busbw=what == 'bucket' and is_first,
        grad_reduce_in_fp32=what == 'dtype' and is_first,
        overlap_grad_reduce=True,
        bucket_size=100,
    )
    with megatron_buffer.errors.guard(), megatron_buffer.activated('upstream'):
        model = megatron_buffer.DistributedDataParallel(config, ddp_config, stage)
        torch.distributed.barrier()
        del model


@pytest.mark.parametrize(
    ('what', 'found'),
    [
        ('dtype', ['104 elements with torch.float32', '104 elements with torch.bfloat16']),
        ('bucket', ['a bucket of 128 elements', 'a bucket of 65536 elements']),
    ],
)
def test_stages_that_hold_the_tied_embedding_in_other_ways_stop(
    what: str, found: list[str]
) -> None:
    for outcome in run_ranks(_stages_unlike, 2, what, expect_failure=True, timeout_s=240):
        assert outcome.failed
        assert 'the tied embedding' in outcome.error
        for words in found:
            assert words in outcome.error


def test_stages_that_agree_are_left_alone() -> None:
    assert run_ranks(_stages_unlike, 2, 'nothing') == [None, None]

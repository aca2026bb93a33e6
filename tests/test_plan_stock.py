"""`megatron-buffer plan` against a real run over pipeline stages, and against stock's layouts of large jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.test_plan_exact import OVERLAP, check_against_run
from tests.tiny_gpt import TrainCase


def test_plan_is_what_both_stages_of_a_pipeline_allocate_and_send(tmp_path: Path) -> None:
    case = TrainCase(pp=2, dist_opt=True, dtype='bf16', bucket_size=3000, tied=False, **OVERLAP)
    check_against_run(tmp_path, case, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('case', 'ranks'),
    [
        (TrainCase(pp=2, dist_opt=True, dtype='bf16', bucket_size=3000, tied=False, **OVERLAP), 4),
        (TrainCase(tp=2, pp=2, dist_opt=True, dtype='bf16', tied=False, **OVERLAP), 4),
    ],
    ids=str,
)
def test_plan_is_what_larger_pipelines_allocate_and_send(
    tmp_path: Path, case: TrainCase, ranks: int
) -> None:
    check_against_run(tmp_path, case, ranks)


def _layouts(rank: int, world_size: int, model: str, sizes: dict[str, int], **ddp: Any) -> int:
    """Compares our layout of a stage with stock's of the same meta model; returns how many buckets."""
    import torch

    from megatron_buffer.config import load_config
    from megatron_buffer.planner import ledger
    from megatron_buffer.planner.architecture import load_architecture
    from megatron_buffer.planner.job import DdpOptions, Job
    from megatron_buffer.planner.model import _build_chunk, _params_of
    from megatron_buffer.planner.stages import Ask, stage_ledger
    from megatron_buffer.planner.world import fake_world, quiet
    from megatron_buffer.runtime import Runtime

    job, architecture = Job(**sizes), load_architecture(model)
    with quiet(), fake_world(job):
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        chunk = _build_chunk(architecture, job, torch.bfloat16, 0)
        names = {param: name for name, param in chunk.named_parameters()}
        size = max(40_000_000, 1_000_000 * job.dp_cp_size) if job.pp_rank == 0 else None
        stock: Any = DistributedOptimizer.compute_full_param_layout(
            list(chunk.parameters()),
            size,
            job.dp_cp_size,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_fp32=True, **ddp
            ),
            expert_data_parallel_world_size=job.expert_dp_size,
        )
    ask = Ask(
        model=model,
        runtime=Runtime(load_config(None)),
        ddp=DdpOptions(**ddp),
        dtype=torch.bfloat16,
        recipe=None,
        optimizer=ledger.OptimizerDtypes(),
    )
    ours = stage_ledger({0: _params_of(chunk)}, job, ask).chunks[0]
    by_kind = {buffer.view.key.is_expert_parallel: buffer.view for buffer in ours.buffers}
    assert len(stock.layouts) == len(ours.buffers) == len(by_kind)
    for key, layout in stock.layouts.items():
        view = by_kind[key.is_expert_parallel]
        spans = [(span.start_elems, span.end_elems) for span in view.layout.buckets]
        assert spans == list(layout.bucket_indices)
        assert [
            span.numel_unpadded for span in view.layout.buckets
        ] == layout.per_bucket_numel_unpadded
        assert {names[p]: place for p, place in layout.param_index_map.items()} == {
            view.params[slot.param].name: (slot.start_elems, slot.end_elems, slot.bucket)
            for slot in view.layout.slots
        }
    return sum(len(buffer.view.layout.buckets) for buffer in ours.buffers)


DENSE = {'tp': 8, 'pp': 16, 'dp': 128}


def test_a_stage_of_16384_ranks_is_laid_out_as_stock_does() -> None:
    (found,) = run_ranks(_layouts, 1, 'llama3_405b', DENSE, init=False)
    assert found > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ('model', 'sizes', 'ddp'),
    [
        ('llama3_405b', {**DENSE, 'pp_rank': 7}, {}),
        ('llama3_405b', {**DENSE, 'pp_rank': 15}, {}),
        ('mixtral_8x7b', {'tp': 2, 'ep': 8, 'dp': 96}, {'pad_buckets_for_high_nccl_busbw': True}),
        ('qwen3_32b', {'tp': 4, 'dp': 24, 'cp': 2}, {}),
    ],
)
def test_other_large_jobs_are_laid_out_as_stock_does(
    model: str, sizes: dict[str, int], ddp: dict[str, Any]
) -> None:
    run_ranks(_layouts, 1, model, sizes, init=False, **ddp)

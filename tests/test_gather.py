"""param_gather: which gathers are launched together, and the eager one, which starts before forward asks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_buffer.config import load_config
from megatron_buffer.runtime import Runtime
from megatron_buffer.strategies.gather import chain_heads
from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase, compare, init_parallel, run_backward, same_bits, train, wrap
from tests.tiny_results import copied, named_params

EAGER = {'param_gather': 'eager'}
FULL = TrainCase(
    bucket_size=2000,
    dist_opt=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    dtype='bf16',
    steps=4,
    micro_batches=2,
)
slow = pytest.mark.slow


# ------------------------------------------------------------------ which gathers, and which first


@pytest.mark.parametrize('backend', ['nccl', 'gloo'])
@pytest.mark.parametrize('name', ['upstream', 'eager', 'per_dtype'])
def test_launches(name: str, backend: str) -> None:
    gather = Runtime(load_config({'param_gather': name})).param_gather
    together = backend == 'nccl' and name != 'per_dtype'
    launches = gather.launches(['uint8', 'bf16', 'uint8', 'fp32'], backend)
    assert launches == ([[0, 1, 2, 3]] if together else [[0, 2], [1], [3]])
    assert gather.launches(['bf16', 'bf16'], backend) == [[0, 1]]
    assert gather.eager == (name == 'eager')


def test_the_first_gathers_are_those_that_no_other_one_starts() -> None:
    dense = [SimpleNamespace(next_param_gather_bucket_group=None) for _ in range(3)]
    experts = [SimpleNamespace(next_param_gather_bucket_group=None) for _ in range(2)]
    for groups in (
        dense,
        experts,
    ):  # as upstream chains them: from the last in the list to the first
        for group, follower in zip(groups[1:], groups, strict=False):
            group.next_param_gather_bucket_group = follower
    assert chain_heads(dense + experts) == [dense[-1], experts[-1]]
    dense[2].next_param_gather_bucket_group = None  # another chain: 1, 0, 2
    dense[0].next_param_gather_bucket_group = dense[2]
    assert chain_heads(dense) == [dense[1]]
    assert chain_heads([]) == []


# ------------------------------------------------------------------ bits


def _same_bits(rank: int, world_size: int, case: TrainCase, config: Any) -> list[str]:
    return compare(train(case), train(case, config))


BITS = [
    (2, FULL, EAGER),
    pytest.param(4, replace(FULL, moe=True, ep=2), EAGER, marks=slow),
    pytest.param(2, FULL, {'param_gather': 'per_dtype'}, marks=slow),
    pytest.param(2, replace(FULL, bucket_size=1), EAGER, marks=slow),
    pytest.param(2, replace(FULL, pp=2), EAGER, marks=slow),
    pytest.param(4, replace(FULL, pp=2, align=False), EAGER, marks=slow),
    pytest.param(
        4, replace(FULL, pp=2, vpp=2, layers=4, micro_batches=4, align=False), EAGER, marks=slow
    ),
    pytest.param(4, replace(FULL, pp=2, vpp=2, layers=4, micro_batches=4), EAGER, marks=slow),
    pytest.param(4, replace(FULL, instances=2), EAGER, marks=slow),
    pytest.param(2, replace(FULL, dtype='fp16'), EAGER, marks=slow),
]


@pytest.mark.long
@pytest.mark.parametrize(('world_size', 'case', 'config'), BITS)
def test_training_has_the_bits_of_stock(world_size: int, case: TrainCase, config: Any) -> None:
    results = run_ranks(_same_bits, world_size, case, config, timeout_s=240)
    assert results == [[]] * world_size


# ------------------------------------------------------------------ what is in flight when


def with_training(case: TrainCase, arm: Any, body: Callable[[SimpleNamespace], Any]) -> Any:
    """Calls ``body`` with a wrapped model and its optimizer, as stock or under a config of ours."""
    from megatron.core import parallel_state

    import megatron_buffer

    scope = contextlib.nullcontext() if arm == 'stock' else megatron_buffer.activated(arm)
    with scope:
        init_parallel(case)
        result = body(wrap(case))
        gc.collect()  # activated() refuses to end while a model of ours lives
    parallel_state.destroy_model_parallel()
    return result


def in_flight(run: SimpleNamespace) -> list[list[bool]]:
    """Per list of bucket groups: whether each one's gather is under way."""
    lists = [(c.bucket_groups, c.expert_parallel_bucket_groups) for c in run.chunks]
    return [
        [group.param_gather_handle is not None for group in groups]
        for pair in lists
        for groups in pair
        if groups
    ]


def _after_the_step(rank: int, world_size: int, case: TrainCase, arm: Any) -> list[Any]:
    def body(run: SimpleNamespace) -> list[Any]:
        found = []
        for step in range(3):
            run_backward(case, run, step)
            assert not any(map(any, in_flight(run))), 'forward has waited for every gather'
            run.optimizer.step()
            found.append(in_flight(run))
        return found

    return with_training(case, arm, body)


@pytest.mark.parametrize(
    ('case', 'arm', 'num_lists', 'is_eager'),
    [
        (FULL, EAGER, 1, True),
        pytest.param(replace(FULL, moe=True, ep=2), EAGER, 2, True, marks=slow),
        (FULL, 'upstream', 1, False),
        pytest.param(replace(FULL, overlap_param_gather=False), EAGER, 1, False, marks=slow),
    ],
)
def test_the_gather_that_forward_needs_first_is_in_flight_after_the_step(
    case: TrainCase, arm: Any, num_lists: int, is_eager: bool
) -> None:
    for steps in run_ranks(_after_the_step, 2, case, arm):
        for groups in steps:
            assert len(groups) == num_lists
            assert len(groups[0]) > 2
            assert groups == [[False] * (len(each) - 1) + [is_eager] for each in groups]


def _chained(rank: int, world_size: int) -> list[list[str]]:
    """Whose gathers the dense and the expert optimizer start, one after the other."""

    def body(run: SimpleNamespace) -> list[list[str]]:
        [chunk] = run.chunks
        lists = {'dense': chunk.bucket_groups, 'expert': chunk.expert_parallel_bucket_groups}
        names = {
            id(group): f'{name} {index - len(groups)}'
            for name, groups in lists.items()
            for index, group in enumerate(groups)
        }
        return [
            [names[id(group)] for group in optimizer._eager_groups()]
            for optimizer in run.optimizer.chained_optimizers
        ]

    return with_training(replace(FULL, moe=True, ep=2), EAGER, body)


def test_an_optimizer_starts_only_gathers_of_what_it_has_updated() -> None:
    assert run_ranks(_chained, 2) == [[['dense -1'], ['expert -1']]] * 2


def _left_alone(rank: int, world_size: int) -> dict[str, int]:
    """How many gathers would be started, where somebody else starts them or nobody waits for them."""

    def body(run: SimpleNamespace) -> dict[str, int]:
        [chunk], [optimizer] = run.chunks, run.optimizer.chained_optimizers
        found = {'eager': len(optimizer._eager_groups())}
        for owner, name, value in (
            (chunk.config, 'param_sync_func', chunk.start_param_sync),
            (optimizer.config, 'overlap_param_gather_with_optimizer_step', True),
            (optimizer.config, 'optimizer_cuda_graph', True),
            (optimizer.ddp_config, 'align_param_gather', True),
            (optimizer, 'is_stub_optimizer', True),
        ):
            before = getattr(owner, name)
            setattr(owner, name, value)
            found[name] = len(optimizer._eager_groups())
            setattr(owner, name, before)
        chunk.disable_forward_pre_hook(param_sync=False)
        found['hooks off'] = len(optimizer._eager_groups())
        chunk.enable_forward_pre_hook()
        found['eager again'] = len(optimizer._eager_groups())
        return found

    return with_training(FULL, EAGER, body)


def test_no_gather_is_started_where_somebody_else_does_it_or_nobody_waits() -> None:
    for found in run_ranks(_left_alone, 2):
        assert found.pop('eager') == found.pop('eager again') == 1
        assert set(found.values()) == {0}, found


def _overflow(rank: int, world_size: int) -> tuple[bool, list[Any]]:
    case = replace(FULL, dtype='fp16')

    def body(run: SimpleNamespace) -> tuple[bool, list[Any]]:
        run_backward(case, run, 0)
        run.chunks[0].buffers[0].grad_data.fill_(float('inf'))
        updated, _, _ = run.optimizer.step()
        skipped = in_flight(run)
        run_backward(case, run, 1)
        return updated, skipped

    return with_training(case, EAGER, body)


def test_nothing_is_gathered_after_a_skipped_step() -> None:
    for updated, groups in run_ranks(_overflow, 2):
        assert not updated
        assert not any(map(any, groups))


def _interrupted(rank: int, world_size: int) -> list[str]:
    """Evaluation, a checkpoint, and steps without a forward pass between them, in both arms."""
    stock = with_training(FULL, 'stock', _train_with_interruptions)
    ours = with_training(FULL, EAGER, _train_with_interruptions)
    assert stock.keys() == ours.keys()
    return [name for name in stock if not same_bits(stock[name], ours[name])]


def _train_with_interruptions(run: SimpleNamespace) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    [chunk] = run.chunks

    def look(when: str) -> None:
        seen.update({f'{when}/{name}': copied(p) for name, p in named_params(run.chunks)})

    losses.append(run_backward(FULL, run, 0))
    run.optimizer.step()
    chunk.disable_forward_pre_hook()  # before an evaluation: whole parameters on every rank
    look('evaluation')
    chunk.enable_forward_pre_hook()
    losses.append(run_backward(FULL, run, 1))
    run.optimizer.step()
    chunk.start_param_sync(force_sync=True)  # before a checkpoint
    look('checkpoint')
    losses.append(run_backward(FULL, run, 2))
    run.optimizer.step()
    run.optimizer.step()  # the same gradients again; no forward pass has waited for a gather
    losses.append(run_backward(FULL, run, 3))
    run.optimizer.step()
    chunk.free_overlap_buffers()
    losses.append(run_backward(FULL, run, 4))
    run.optimizer.step()
    chunk.start_param_sync(force_sync=True)
    look('end')
    return {**seen, 'losses': torch.tensor(losses, dtype=torch.float64)}


def test_evaluation_checkpoints_and_repeated_steps_see_the_parameters_of_stock() -> None:
    assert run_ranks(_interrupted, 2) == [[], []]

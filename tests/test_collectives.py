"""Every reduction against closed forms, on real bucket groups and real gloo ranks; NCCL where there is a GPU.

Contributions are small integers, so that every sum is exact in every dtype and equality is to the bit.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
FACTOR = 0.25  # of the op `premul`


def make_group(
    dtype: str, *, dist_opt: bool, overlap: bool, mixed: bool = False, instances: int = 1
) -> Any:
    """The only bucket group of a small model of ours; ``mixed`` adds an fp32 bucket to it."""
    from megatron.core.distributed import DistributedDataParallelConfig

    import megatron_buffer
    from tests import small_model as sm

    sm.init_parallel()
    net = sm.make_net(dtype=DTYPES[dtype])
    if mixed:
        net.second.to(torch.float32)
    model = megatron_buffer.DistributedDataParallel(
        sm.transformer_config(),
        DistributedDataParallelConfig(
            use_distributed_optimizer=dist_opt,
            overlap_grad_reduce=overlap,
            num_distributed_optimizer_instances=instances,
        ),
        net.to(device_of_group()),
        disable_bucketing=True,
        buffer_config='upstream',
    )
    [group] = model.bucket_groups
    assert [str(bucket.grad_data.dtype) for bucket in group.buckets] == [
        str(kind) for kind in dict.fromkeys(param.dtype for param in net.parameters())
    ]
    return group


def device_of_group() -> str:
    return 'cuda' if torch.distributed.get_backend() == 'nccl' else 'cpu'


def contribution(rank: int, index: int, like: torch.Tensor) -> torch.Tensor:
    """What a rank puts into bucket ``index``: integers up to 14."""
    pattern = torch.arange(like.numel(), device=like.device) % 7
    return (pattern + 2 * rank + index).to(like.dtype)


def fill(group: Any, rank: int) -> None:
    for index, bucket in enumerate(group.buckets):
        bucket.grad_data.copy_(contribution(rank, index, bucket.grad_data))


def total(ranks: Any, index: int, like: torch.Tensor) -> torch.Tensor:
    """The exact sum over ``ranks``, in float64."""
    return sum(contribution(rank, index, like).double() for rank in ranks)  # type: ignore[return-value]


def owned(group: Any, index: int, data: torch.Tensor) -> torch.Tensor:
    """This rank's shard of anything that is laid out like bucket ``index``."""
    size = group.intra_distributed_optimizer_instance_size
    return data.view(size, -1)[group.intra_distributed_optimizer_instance_rank]


def weight_of(op: str, num_ranks: int) -> float:
    return {'sum': 1.0, 'avg': 1.0 / num_ranks, 'premul': FACTOR}[op]


def cases(dist_opt: bool) -> list[tuple[Any, Any]]:
    """Every choice with every plan that it takes; gloo has no PREMUL_SUM, our own sums have."""
    from megatron_buffer.strategies.reduce import ReduceChoice
    from megatron_buffer.strategies.scaling import ScalingPlan

    choices = [ReduceChoice('all_reduce')]
    if dist_opt:
        choices += [ReduceChoice('reduce_scatter'), ReduceChoice('upstream_a2a')]
        choices += [ReduceChoice('a2a', wire) for wire in (None, 'bf16', 'fp16', 'fp32')]
    found = []
    for choice, op, post in itertools.product(choices, ('sum', 'avg', 'premul'), (1.0, 0.5)):
        takes = {'upstream_a2a': ('sum',), 'a2a': ('sum', 'avg', 'premul')}
        if op in takes.get(choice.kind, ('sum', 'avg')):
            found.append((choice, ScalingPlan(FACTOR if op == 'premul' else 1.0, op, post)))
    return found


def _reduce_all(rank: int, world_size: int, overlap: bool) -> list[str]:
    from megatron_buffer.collectives import launch_grad_reduce
    from megatron_buffer.collectives_a2a import live_exchanges

    wrong = []
    for dtype, mixed, dist_opt in itertools.product(DTYPES, (False, True), (False, True)):
        if mixed and dtype == 'fp32':
            continue
        group = make_group(dtype, dist_opt=dist_opt, overlap=overlap, mixed=mixed)
        for choice, plan in cases(dist_opt):
            name = f'{choice} {plan} {dtype=} {mixed=} {dist_opt=}'
            fill(group, rank)
            handle = launch_grad_reduce(group, choice=choice, plan=plan)
            assert (handle is not None) == overlap, name
            if handle is not None:
                assert live_exchanges() == (len(group.buckets) if choice.kind == 'a2a' else 0), name
                handle.wait()
                if choice.kind != 'upstream_a2a':
                    handle.wait()  # the second time does nothing
            assert live_exchanges() == 0, name
            weight = weight_of(plan.op, world_size) * plan.post_factor
            for index, bucket in enumerate(group.buckets):
                found = bucket.grad_data
                expected = (total(range(world_size), index, found) * weight).to(found.dtype)
                if choice.kind != 'all_reduce':
                    expected, found = owned(group, index, expected), owned(group, index, found)
                if not torch.equal(found, expected):
                    wrong.append(f'{name} bucket {index}: {found[:3]} for {expected[:3]}')
    return wrong


@pytest.mark.long
@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize('overlap', [False, True])
def test_every_reduction_equals_the_closed_form(overlap: bool, world_size: int) -> None:
    """All kinds, ops, scalings, gradient dtypes (one or two of them in the group) and wire dtypes."""
    assert run_ranks(_reduce_all, world_size, overlap) == [[]] * world_size


def _launches(rank: int, world_size: int) -> list[list[int]]:
    """The number of launches of each collective in c10d, for one gradient dtype and for two."""
    from megatron_buffer.collectives import launch_grad_reduce
    from megatron_buffer.strategies.reduce import ReduceChoice
    from megatron_buffer.strategies.scaling import UNSCALED

    launched: list[str] = []

    def counting(method: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            launched.append(kind)
            return method(*args, **kwargs)

        return launch

    for name in (
        'allreduce',
        'allreduce_coalesced',
        '_reduce_scatter_base',
        'reduce_scatter_single',
        'reduce_scatter_tensor_coalesced',
        'reduce_scatter_single_coalesced',
    ):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, counting(getattr(dist.ProcessGroup, name)))
    found = []
    for mixed in (False, True):
        group = make_group('bf16', dist_opt=True, overlap=True, mixed=mixed)
        for kind in ('all_reduce', 'reduce_scatter'):
            handle = launch_grad_reduce(group, choice=ReduceChoice(kind), plan=UNSCALED)
            assert handle is not None
            handle.wait()
        found.append([launched.count(kind) for kind in ('all_reduce', 'reduce_scatter')])
        launched.clear()
    return found


def test_one_launch_per_gradient_dtype() -> None:
    assert run_ranks(_launches, 2) == [[[1, 1], [2, 2]]] * 2


def _alone(rank: int, world_size: int) -> list[str]:
    from megatron_buffer.collectives import launch_grad_reduce, launch_param_gather
    from megatron_buffer.observe.collectives import SeenCollectives

    wrong = []
    for dist_opt, overlap in itertools.product([False, True], repeat=2):
        group = make_group('bf16', dist_opt=dist_opt, overlap=overlap)
        [bucket] = group.buckets
        for choice, plan in cases(dist_opt):
            if plan.op == 'premul':  # the collective multiplies
                continue
            fill(group, rank)
            with SeenCollectives(lambda: None) as seen:
                handles = [launch_grad_reduce(group, choice=choice, plan=plan)]
                if dist_opt:
                    handles.append(launch_param_gather(group, async_op=overlap))
                assert all((handle is not None) == overlap for handle in handles)
                for handle in handles * overlap:
                    handle.wait()
            right = contribution(rank, 0, bucket.grad_data) * plan.post_factor
            if seen.calls or not torch.equal(bucket.grad_data, right):
                wrong.append(f'{choice} {plan} {dist_opt=} {overlap=}: {seen.calls}')
    return wrong


def test_a_single_rank_launches_nothing() -> None:
    assert run_ranks(_alone, 1) == [[]]


def _over_instances(rank: int, world_size: int) -> list[str]:
    """Two optimizer instances of two ranks: ranks 0, 1 and 2, 3; owners of one shard are two apart."""
    from megatron.core import parallel_state

    from megatron_buffer.collectives import launch_grad_reduce

    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    instance = range(rank // 2 * 2, rank // 2 * 2 + 2)
    wrong = []
    for overlap in (False, True):
        group = make_group('bf16', dist_opt=True, overlap=overlap, instances=2)
        assert group.intra_distributed_optimizer_instance_size == len(instance)
        [bucket] = group.buckets
        everywhere = total(range(world_size), 0, bucket.grad_data)
        within = total(instance, 0, bucket.grad_data)
        size = bucket.grad_data.numel() // 2
        mine = slice(size * (rank % 2), size * (rank % 2) + size)
        for choice, plan in cases(dist_opt=True):
            if choice.kind == 'upstream_a2a':
                continue  # upstream refuses it with several instances
            fill(group, rank)
            assert launch_grad_reduce(group, choice=choice, plan=plan) is None
            expected = within * weight_of(plan.op, 2) * plan.post_factor
            if choice.kind != 'all_reduce':
                expected[:] = bucket.grad_data.double()  # nobody reads what others own
            expected[mine] = everywhere[mine] * weight_of(plan.op, 4) * plan.post_factor
            if not torch.equal(bucket.grad_data, expected.to(torch.bfloat16)):
                wrong.append(f'{choice} {plan} {overlap=}')
    return wrong


def test_several_optimizer_instances() -> None:
    """A mean of means is the mean, a factor counts once, and the result is scaled after both reductions."""
    assert run_ranks(_over_instances, 4) == [[]] * 4


# ------------------------------------------------------------------ the all-to-all with fp32 sums


def noise(rank: int, num_elems: int) -> torch.Tensor:
    """Gradients over six orders of magnitude, in fp32."""
    generator = torch.Generator().manual_seed(rank + 1)
    values = torch.randn(num_elems, generator=generator)
    return values * 10.0 ** torch.randint(-4, 3, (num_elems,), generator=generator)


# Dtype of the gradients, the one asked for on the wire, the one that they are sent in.
WIRES = [
    ('fp32', None, 'fp32'),
    ('fp32', 'bf16', 'bf16'),
    ('fp32', 'fp16', 'fp16'),
    ('bf16', None, 'bf16'),
    ('bf16', 'fp16', 'bf16'),  # no smaller on the wire: sent as it is
    ('fp16', 'fp32', 'fp16'),
]


def _noisy_sums(rank: int, world_size: int) -> list[dict[str, Any]]:
    from megatron_buffer.collectives import launch_grad_reduce
    from megatron_buffer.strategies.reduce import ReduceChoice
    from megatron_buffer.strategies.scaling import UNSCALED

    results = []
    for grad_dtype, wire, _ in WIRES:
        group = make_group(grad_dtype, dist_opt=True, overlap=True)
        [data] = [bucket.grad_data for bucket in group.buckets]
        grads = [noise(r, data.numel()).to(data.dtype) for r in range(world_size)]
        data.copy_(grads[rank])
        choice: Any = ReduceChoice('a2a', wire)  # type: ignore[arg-type]
        handle = launch_grad_reduce(group, choice=choice, plan=UNSCALED)
        assert handle is not None
        handle.wait()
        contributions = [owned(group, 0, grad).clone() for grad in grads]
        results.append({'found': owned(group, 0, data).clone(), 'contributions': contributions})
    return results


@pytest.mark.parametrize('world_size', [2, 4])
def test_narrow_contributions_are_summed_in_fp32_and_ones_own_is_not_rounded(
    world_size: int,
) -> None:
    for rank, results in enumerate(run_ranks(_noisy_sums, world_size)):
        for (grad_dtype, _, sent), result in zip(WIRES, results, strict=True):
            arrived = [
                (grad if other == rank else grad.to(DTYPES[sent])).float().numpy()
                for other, grad in enumerate(result['contributions'])
            ]
            in_fp32 = np.zeros_like(arrived[0])
            for values in arrived:  # numpy's own fp32 additions, in rank order
                in_fp32 = in_fp32 + values
            expected = torch.from_numpy(in_fp32).to(DTYPES[grad_dtype])
            assert torch.equal(result['found'], expected), (grad_dtype, sent)
            exact = np.sum([values.astype(np.float64) for values in arrived], axis=0)
            bound = 2.0**-23 * np.sum([np.abs(values) for values in arrived], axis=0) * world_size
            if grad_dtype != 'fp32':
                bound = bound + torch.finfo(DTYPES[grad_dtype]).eps * np.abs(exact)
            assert (np.abs(result['found'].double().numpy() - exact) <= bound).all()


def _bytes_sent(rank: int, world_size: int) -> dict[Any, tuple[int, int]]:
    """Bytes per element on the wire, and the largest temporary of the sum, for each wire dtype."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron_buffer.collectives import launch_grad_reduce
    from megatron_buffer.strategies.reduce import ReduceChoice
    from megatron_buffer.strategies.scaling import UNSCALED

    sent: list[torch.Tensor] = []
    largest = [0]
    exchange = torch.distributed.all_to_all_single

    def watched(output: torch.Tensor, input: torch.Tensor, **kwargs: Any) -> Any:
        sent.append(input)
        return exchange(output, input, **kwargs)

    class Fp32Sizes(TorchDispatchMode):
        """Remembers the largest fp32 tensor that an operation returned."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                largest[0] = max(largest[0], result.numel())
            return result

    torch.distributed.all_to_all_single = watched
    group = make_group('bf16', dist_opt=True, overlap=True)
    [bucket] = group.buckets
    found: dict[Any, tuple[int, int]] = {}
    fill(group, rank)
    handle = launch_grad_reduce(group, choice=ReduceChoice('a2a'), plan=UNSCALED)
    assert handle is not None
    with Fp32Sizes():
        handle.wait()
    assert sent[0].data_ptr() == bucket.grad_data.data_ptr(), 'sent without a copy'
    found['bf16'] = sent[0].element_size(), largest[0] * world_size // bucket.grad_data.numel()
    group = make_group('fp32', dist_opt=True, overlap=True)
    fill(group, rank)
    handle = launch_grad_reduce(group, choice=ReduceChoice('a2a', 'bf16'), plan=UNSCALED)
    assert handle is not None
    handle.wait()
    found['fp32 as bf16'] = sent[1].element_size(), 0
    return found


def test_half_the_bytes_are_sent_and_only_one_shard_is_summed_in_fp32() -> None:
    for found in run_ranks(_bytes_sent, 2):
        assert found == {'bf16': (2, 1), 'fp32 as bf16': (2, 0)}


def _temporaries_in_training(rank: int, world_size: int) -> tuple[int, int, list[str]]:
    """The number of bucket groups, the most exchanges alive at once, and what is wrong."""
    import megatron_buffer
    from megatron_buffer.collectives_a2a import live_exchanges
    from tests import small_model as sm

    alive: list[int] = []
    exchange = torch.distributed.all_to_all_single

    def watched(*args: Any, **kwargs: Any) -> Any:
        alive.append(live_exchanges())
        return exchange(*args, **kwargs)

    torch.distributed.all_to_all_single = watched
    model = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        buffer_config={'grad_reduce': {'name': 'a2a_fp32_sum', 'wire_dtype': 'bf16'}},
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=1,
    )
    wrong = []
    for step in range(3):
        sm.run_window(model, rank, step)
        expected = sm.oracle_grads(rank, world_size, step)
        wrong += sm.differences(sm.owned_main_grads(model), expected, rtol=2.0**-8)
        assert live_exchanges() == 0
    return len(model.bucket_groups), max(alive), wrong


def test_at_most_two_groups_have_temporaries() -> None:
    for num_groups, most_alive, wrong in run_ranks(_temporaries_in_training, 2):
        assert num_groups == 6
        assert 1 <= most_alive <= 2
        assert wrong == []


# ------------------------------------------------------------------ NCCL


def reduce_on_one_rank(backend: str) -> None:
    """Every reduction on one rank: nothing is added, but everything is sent and scaled."""
    from megatron_buffer.collectives import launch_grad_reduce
    from megatron_buffer.collectives_a2a import live_exchanges
    from megatron_buffer.strategies.reduce import ReduceChoice
    from megatron_buffer.strategies.scaling import ScalingPlan

    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(os.path.join(folder, 'store'), 1)
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        plans = cases(dist_opt=True)
        if backend == 'nccl':
            plans += [
                (ReduceChoice(kind), ScalingPlan(FACTOR, 'premul', post))
                for kind in ('all_reduce', 'reduce_scatter')
                for post in (1.0, 0.5)
            ]
        for dtype, overlap in itertools.product(DTYPES, (False, True)):
            group = make_group(dtype, dist_opt=True, overlap=overlap)
            for choice, plan in plans:
                fill(group, 0)
                handle = launch_grad_reduce(group, choice=choice, plan=plan)
                if handle is not None:
                    handle.wait()
                [bucket] = group.buckets
                weight = weight_of(plan.op, 1) * plan.post_factor
                expected = (total([0], 0, bucket.grad_data) * weight).to(DTYPES[dtype])
                assert torch.equal(bucket.grad_data, expected), (dtype, overlap, choice, plan)
                assert live_exchanges() == 0
        torch.distributed.destroy_process_group()


def run_on_one_rank(backend: str, **env: str) -> None:
    code = f'from tests.test_collectives import reduce_on_one_rank as run; run({backend!r})'
    done = subprocess.run(
        [sys.executable, '-c', code],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_reductions_and_premultiplied_sums_on_nccl() -> None:
    run_on_one_rank('nccl')

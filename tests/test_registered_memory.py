"""`nccl_ub` as far as a CPU shows it: what is allocated inside the registered pool, and who must not free it.

NCCL's allocator is replaced by one that notes what it is asked for; `test_gpu` has the real one.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import run_ranks


def _allocated(rank: int, world_size: int, arm: str, flags: dict[str, bool]) -> dict[str, Any]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import megatron_buffer
    from tests import small_model as sm

    pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')
    asked: list[tuple[str, Any]] = []
    inside: list[tuple[int, str]] = []

    class Notes(TorchDispatchMode):
        """What is made while the pool is in force."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                inside.append((made.numel(), str(made.dtype)))
            return made

    @contextlib.contextmanager
    def pool_in_force(pool: Any, group: Any, symmetric: bool) -> Iterator[None]:
        asked.append(('mem', (pool, group.size(), symmetric)))
        with Notes():
            yield

    def make_pool(symmetric: bool) -> str:
        asked.append(('pool', symmetric))
        return 'the pool'

    pgb.nccl_allocator.init = lambda: asked.append(('init', None))
    pgb.nccl_allocator.create_nccl_mem_pool = make_pool
    pgb.nccl_allocator.nccl_mem = pool_in_force
    cls = sm.ddp_class() if arm == 'stock' else megatron_buffer.DistributedDataParallel
    ours = {} if arm == 'stock' else {'buffer_config': arm}
    model = sm.wrap(
        sm.make_net(),
        cls,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        **flags,
        **ours,
    )
    sm.run_window(model, rank, 0)
    [buffer] = model.buffers
    wrong = sm.differences(sm.owned_main_grads(model), sm.oracle_grads(rank, world_size, 0))
    refused = ''
    if arm != 'stock':
        try:
            model.offload_grad_buffers()
        except megatron_buffer.errors.ParamStorageError as error:
            refused = str(error)
    return {
        'asked': asked,
        'inside': inside,
        'pool': buffer.nccl_mem_pool,
        'sizes': [(t.numel(), str(t.dtype)) for t in (buffer.param_data, buffer.grad_data)],
        'wrong': wrong,
        'refused': refused,
    }


@pytest.mark.parametrize('arm', ['stock', 'upstream', 'recommended'])
def test_both_buffers_lie_in_the_registered_pool(arm: str) -> None:
    for symmetric in (True, False):
        flags = {'nccl_ub': True, 'disable_symmetric_registration': not symmetric}
        for found in run_ranks(_allocated, 2, arm, flags):
            assert found['asked'] == [
                ('init', None),
                ('pool', symmetric),
                ('mem', ('the pool', 2, symmetric)),
            ]
            assert found['inside'] == found['sizes'], 'both, and nothing else'
            assert found['pool'] == 'the pool'
            assert found['wrong'] == []
            assert ('nccl_ub' in found['refused']) is (arm != 'stock')


@pytest.mark.parametrize('arm', ['upstream', 'recommended'])
def test_no_pool_where_nobody_asks_for_one(arm: str) -> None:
    for found in run_ranks(_allocated, 2, arm, {}):
        assert (found['asked'], found['inside'], found['pool']) == ([], [], None)
        assert found['wrong'] == []
        assert found['refused'] == ''

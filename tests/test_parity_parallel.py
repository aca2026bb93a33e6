"""Same bits under every parallelism: tensor, sequence, pipeline, virtual pipeline, expert, context.

Stock and ours train the same cases in the same processes (`tests.parity_run`), and so does
`recommended.yaml`, which keeps stock's bits wherever stock is right. The slow groups go through every
neighbour of a default one: tied and untied, aligned and not, plain DDP, each dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.parity_run import check, everywhere, full
from tests.tiny_gpt import TrainCase

UPSTREAM = ('upstream',)
BOTH = ('upstream', 'recommended')
PLAIN: dict[str, Any] = {'dist_opt': False, 'overlap_param_gather': False, 'dtype': 'fp32'}
NO_OVERLAP: dict[str, Any] = {'overlap_grad_reduce': False, 'overlap_param_gather': False}
BF16_GRADS: dict[str, Any] = {'grad_reduce_in_fp32': False}
VPP: dict[str, Any] = {'pp': 2, 'vpp': 2, 'layers': 4, 'micro_batches': 4}
MOE: dict[str, Any] = {'moe': True}
EP_TP: dict[str, Any] = {**MOE, 'ep': 2, 'tp': 2, 'sp': True}
CP: dict[str, Any] = {'cp': 2, 'attention': False}


@dataclass(frozen=True)
class Group:
    """Cases that share their process groups."""

    name: str
    ranks: int
    cases: list[TrainCase]
    configs: tuple[str, ...] = BOTH


DEFAULT = [Group('pp2 x vpp2 untied', 4, [full(**VPP, tied=False)], UPSTREAM)]
LONG = [
    Group('ep2 x tp2', 4, [full(**EP_TP)]),
    Group('instances', 4, [full(instances=2)], UPSTREAM),
]
SLOW = [
    Group(
        'tp2',
        2,
        [
            full(tp=2),
            full(tp=2, sp=True),
            full(tp=2, sp=True, per_token_loss=True),
            full(tp=2, sp=True, **PLAIN),
        ],
    ),
    Group('tp2 x dp2', 4, [full(tp=2), full(tp=2, sp=True, tied=False), full(tp=2, **PLAIN)]),
    Group('pp2', 2, [full(pp=2), full(pp=2, tied=False), full(pp=2, align=False)]),
    Group(
        'pp2 x dp2',
        4,
        [
            full(pp=2),
            full(pp=2, align=False),
            full(pp=2, tied=False),
            full(pp=2, tied=False, align=False),
        ],
    ),
    Group(
        'pp2 x dp2, other paths',
        4,
        [
            full(pp=2, overlap_param_gather=False),
            full(pp=2, **NO_OVERLAP),
            full(pp=2, **PLAIN),
            full(pp=2, per_token_loss=True, micro_batches=5),
        ],
    ),
    Group('pp2 x vpp2', 2, [full(**VPP), full(**VPP, tied=False)]),
    Group('pp2 x vpp2 x dp2', 4, [full(**VPP), full(**VPP, align=False)]),
    Group(
        'pp2 x vpp2 x dp2, other paths',
        4,
        [full(**VPP, tied=False, align=False), full(**VPP, **NO_OVERLAP), full(**VPP, **PLAIN)],
    ),
    Group('tp2 x pp2', 4, [full(tp=2, pp=2, tied=False), full(tp=2, pp=2, sp=True)]),
    Group(
        'ep2',
        2,
        [full(**MOE, ep=2), full(**MOE, ep=2, dispatcher='allgather'), full(**MOE, ep=2, **PLAIN)],
    ),
    Group(
        'ep2 x edp2',
        4,
        [
            full(**MOE, ep=2),
            full(**MOE, ep=2, dispatcher='allgather'),
            full(**MOE, ep=2, average_in_collective=True),
        ],
    ),
    Group(
        'ep2 x edp2, other paths',
        4,
        [
            full(**MOE, ep=2, per_token_loss=True),
            full(**MOE, ep=2, **PLAIN),
            full(**MOE, ep=2, **NO_OVERLAP),
        ],
    ),
    Group(
        'ep2 x tp2, allgather', 4, [full(**EP_TP, dispatcher='allgather'), full(**EP_TP, **PLAIN)]
    ),
    Group(
        'ep2 x tp2 with experts whole',
        4,
        [
            full(**EP_TP, etp=1),
            full(**EP_TP, etp=1, dispatcher='allgather'),
            full(**EP_TP, etp=1, average_in_collective=True),
            full(**EP_TP, etp=1, **PLAIN),
        ],
    ),
    Group(
        'experts cut, the rest whole',
        4,
        [full(**MOE, etp=2), full(**MOE, etp=2, dispatcher='allgather')],
    ),
    Group('pp2 x ep2', 4, [full(**MOE, pp=2, ep=2), full(**MOE, pp=2, ep=2, tied=False)]),
    Group(
        'instances, other paths',
        4,
        [
            full(instances=2, **NO_OVERLAP),
            full(instances=2, overlap_param_gather=False),
            full(instances=2, average_in_collective=True),
            full(instances=2, per_token_loss=True, dtype='fp32'),
        ],
    ),
    Group('instances of experts', 4, [full(**MOE, instances=2)]),
    Group(
        'ep2 x instances',
        4,
        [
            full(**MOE, ep=2, instances=2),
            full(**MOE, ep=2, instances=2, average_in_collective=True, **BF16_GRADS),
        ],
    ),
    Group('tp2 x pp2 x dp2', 8, [full(tp=2, pp=2, sp=True)]),
    Group('pp4 x dp2', 8, [full(pp=4, layers=4)], UPSTREAM),
    Group('pp2 x ep2 x edp2', 8, [full(**MOE, pp=2, ep=2)]),
    Group('ep2 x edp4, instances', 8, [full(**MOE, ep=2, instances=2)], UPSTREAM),
    Group('cp2', 2, [full(**CP), full(**CP, per_token_loss=True)]),
    Group('cp2 x dp2', 4, [full(**CP), full(**CP, **PLAIN)]),
    Group('cp2 x tp2', 4, [full(**CP, tp=2, sp=True)]),
]
GROUPS = [
    *[pytest.param(group, id=group.name) for group in DEFAULT],
    *[pytest.param(group, id=group.name, marks=pytest.mark.long) for group in LONG],
    *[pytest.param(group, id=group.name, marks=pytest.mark.slow) for group in SLOW],
]


@pytest.mark.parametrize('group', GROUPS)
def test_same_bits(group: Group) -> None:
    results = check(group.ranks, group.cases, group.configs, observe=_sizes)
    for case, ranks in zip(group.cases, results, strict=True):
        sizes = everywhere(ranks)
        dense = group.ranks // (case.tp * case.pp)
        expert = group.ranks // (case.pp * case.ep * (case.etp or case.tp))
        assert sizes['dense'] == dense // case.instances
        apart = case.moe and (case.ep > 1 or (case.etp or case.tp) != case.tp)
        assert sizes['expert'] == ([expert // case.instances] if apart else [])
        assert sizes['sharded'] == case.dist_opt
        assert sizes['dispatchers'] == ([DISPATCHERS[case.dispatcher]] if case.moe else [])
        assert sizes['aligned'] == (case.align and case.pp > 1 and case.overlap_grad_reduce)
        if any(getattr(case, name) != getattr(group.cases[0], name) for name in NUMERIC):
            assert any(one['changed'] for one in ranks), f'{case} trains as {group.cases[0]}'


NUMERIC = ('per_token_loss', 'tied', 'dtype', 'micro_batches')
"""Fields that change the numbers; overlap, alignment and dispatchers need not."""


DISPATCHERS = {'alltoall': 'MoEAlltoAllTokenDispatcher', 'allgather': 'MoEAllGatherTokenDispatcher'}


def _sizes(run: Any) -> dict[str, Any]:
    """Sizes of the groups that gradients are reduced over, and who dispatches tokens; who starts them."""
    groups = [group for chunk in run.chunks for group in chunk.bucket_groups]
    experts = [group for chunk in run.chunks for group in chunk.expert_parallel_bucket_groups]
    sharded = groups[0].ddp_config.use_distributed_optimizer
    modules = [module for chunk in run.chunks for module in chunk.modules()]
    found = [m.token_dispatcher for m in modules if hasattr(m, 'token_dispatcher')]
    return {
        'dense': _size(groups[0]),
        'expert': sorted({_size(group) for group in experts}),
        'sharded': sharded,
        'aligned': all(chunk.config.grad_sync_func is not None for chunk in run.chunks),
        'dispatchers': sorted({type(dispatcher).__name__ for dispatcher in found}),
    }


def _size(group: Any) -> int:
    if group.ddp_config.use_distributed_optimizer:
        return int(group.intra_distributed_optimizer_instance_size)
    return int(group.data_parallel_group.size())

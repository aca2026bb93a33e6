"""``dispatch_order``: the sequence, on its own and with model chunks that take turns."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_buffer.strategies.dispatch import ArrivalDispatcher, InOrderDispatcher, Peers
from tests.harness import run_ranks


@dataclass(eq=False)
class Group:
    """The part of a bucket group that a dispatcher sees; writes its name into a shared journal."""

    name: str
    journal: list[str]
    grad_reduce_dispatched: bool = field(default=False)

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        assert not self.grad_reduce_dispatched
        self.grad_reduce_dispatched = True
        self.journal.append(self.name)


def _groups(ready_at: dict[str, int]) -> tuple[list[Group], InOrderDispatcher, list[str]]:
    journal: list[str] = []
    groups = [Group(name, journal) for name in ready_at]
    return groups, InOrderDispatcher(groups, list(ready_at.values()), None), journal


# A bf16 buffer with the embedding (forward index 0) at its end, and an fp32 buffer; lists go buffer by
# buffer. Backward completes a group when it gets to the group's lowest forward index.
TWO_BUFFERS = {'bf16 0': 9, 'bf16 1': 5, 'bf16 embedding': 0, 'fp32 0': 7, 'fp32 1': 3}


def test_no_group_of_another_buffer_waits_for_the_embedding() -> None:
    groups, dispatcher, journal = _groups(TWO_BUFFERS)
    for name in sorted(TWO_BUFFERS, key=lambda name: -TWO_BUFFERS[name]):
        dispatcher.group_ready(next(g for g in groups if g.name == name), False)
        assert journal[-1] == name  # started as soon as it was complete
    assert journal == ['bf16 0', 'fp32 0', 'bf16 1', 'fp32 1', 'bf16 embedding']


@given(st.permutations(sorted(TWO_BUFFERS)), st.integers(0, 5))
def test_the_order_is_the_same_however_groups_complete(completed: list[str], number: int) -> None:
    groups, dispatcher, journal = _groups(TWO_BUFFERS)
    for name in completed[:number]:
        dispatcher.group_ready(next(g for g in groups if g.name == name), False)
    dispatcher.flush(False)
    assert journal == sorted(TWO_BUFFERS, key=lambda name: -TWO_BUFFERS[name])


def test_groups_that_nobody_uses_go_last_and_hold_up_nobody() -> None:
    groups, dispatcher, journal = _groups({'a': 3, 'unused': 2, 'b': 1})
    dispatcher.hold([groups[0], groups[2]])
    dispatcher.group_ready(groups[0], False)
    dispatcher.group_ready(groups[2], False)
    assert journal == ['a']  # agreed in this window, in force from the next one on
    dispatcher.flush(False)
    assert journal == ['a', 'unused', 'b']
    for group in groups:
        group.grad_reduce_dispatched = False
    journal.clear()
    dispatcher.reset()
    dispatcher.group_ready(groups[0], False)
    dispatcher.group_ready(groups[2], False)
    assert journal == ['a', 'b']
    dispatcher.flush(False)
    assert journal == ['a', 'b', 'unused']


def test_arrival_starts_at_once() -> None:
    journal: list[str] = []
    a, b = Group('a', journal), Group('b', journal)
    dispatcher = ArrivalDispatcher()
    dispatcher.group_ready(b, False)
    dispatcher.group_ready(a, False)
    dispatcher.flush(False)
    assert journal == ['b', 'a']


@pytest.mark.parametrize('seed', range(20))
def test_chunks_take_turns_though_a_rank_skips_modules(seed: int) -> None:
    """Backward goes through chunk 1, then chunk 0; each rank completes some of the groups only."""
    journals = []
    for rank in range(3):
        draw = random.Random(100 * seed + rank)
        journal: list[str] = []
        peers = Peers()
        chunks = []
        for chunk in (0, 1):
            groups = [Group(f'chunk {chunk} group {i}', journal) for i in range(3)]
            chunks.append((groups, InOrderDispatcher(groups, [2, 1, 0], peers)))
        for groups, dispatcher in reversed(chunks):
            dispatcher.begin_backward()
            for group in groups:
                if draw.random() < 0.6:
                    dispatcher.group_ready(group, False)
        for _, dispatcher in chunks:
            dispatcher.flush(False)
        journals.append(journal)
    assert journals[0] == journals[1] == journals[2]
    assert journals[0] == [f'chunk {c} group {i}' for c in (1, 0) for i in range(3)]


# On real model chunks ----------------------------------------------------------------------------


def _vpp(rank: int, world_size: int) -> dict[str, Any]:
    """PP2 x VPP2 x DP2, where data-parallel rank 1 skips the layers whose number divides by 3."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    import megatron_buffer
    from megatron_buffer.bucket_groups import ParamAndGradBucketGroup
    from tests.tiny_gpt import TrainCase, compare, train

    orders: list[list[str]] = []
    start, forward = ParamAndGradBucketGroup.start_grad_sync, TransformerLayer.forward

    def noted(self: Any, force_all_reduce: bool | None = False) -> None:
        fresh = not self.grad_reduce_dispatched
        start(self, force_all_reduce)
        if fresh:
            orders[-1].append(self.names(self.param_to_bucket)[0])

    def skipping(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if rank % 2 == 1 and self.layer_number % 3 == 0:
            return hidden_states, kwargs.get('context')
        return forward(self, hidden_states, *args, **kwargs)

    ParamAndGradBucketGroup.start_grad_sync = noted  # type: ignore[method-assign]
    TransformerLayer.forward = skipping
    case = TrainCase(
        pp=2,
        vpp=2,
        layers=4,
        micro_batches=4,
        steps=3,
        align=False,
        dist_opt=True,
        overlap_grad_reduce=True,
        bucket_size=2000,
    )
    results = []
    # The second one starts nothing before backward is over: the reference.
    for changed in ({}, {'readiness': 'deferred'}):
        orders.append([])
        config = {'dispatch_order': 'in_order', 'unused_params': 'zero_fill', **changed}
        with megatron_buffer.activated(config):
            results.append(train(case, config))
    return {'orders': orders, 'differ': compare(*results)}


@pytest.mark.long
def test_interleaved_chunks_are_reduced_in_one_order_where_a_rank_skips_layers() -> None:
    results = run_ranks(_vpp, 4, timeout_s=240)
    for stage in (results[:2], results[2:]):  # ranks 0 and 1 are stage 0's data-parallel ranks
        assert stage[0]['orders'] == stage[1]['orders']
        assert len(stage[0]['orders'][0]) >= 6
    assert [found['differ'] for found in results] == [[]] * 4

"""Which tensors of a module overlap in memory, against a look at every element's address."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_buffer.param_checks import shared_storage

STORAGES, ELEMS = 2, 12
VIEWS = st.tuples(
    st.integers(0, STORAGES - 1),
    st.integers(0, 5),  # first element
    st.integers(0, 3),  # rows
    st.integers(1, 3),  # row stride
    st.booleans(),  # trainable
)


def _addresses(tensor: torch.Tensor) -> set[int]:
    """Of all elements between the first and the last, read or not: a stride does not make a gap."""
    flat = [tensor[i].data_ptr() for i in range(tensor.numel())]
    return set(range(min(flat), max(flat) + tensor.element_size())) if flat else set()


@given(st.lists(VIEWS, min_size=2, max_size=6))
def test_overlaps_are_those_of_the_addresses(views: list[tuple[int, int, int, int, bool]]) -> None:
    storages = [torch.zeros(ELEMS) for _ in range(STORAGES)]
    net = torch.nn.Module()
    for number, (storage, start, rows, stride, trains) in enumerate(views):
        view = storages[storage].as_strided((rows,), (stride,), start)
        net.register_parameter(f'p{number}', torch.nn.Parameter(view, requires_grad=trains))
    params = dict(net.named_parameters())
    expected = {
        frozenset((a, b))
        for a in params
        for b in params
        if a < b
        and _addresses(params[a]) & _addresses(params[b])
        and (params[a].requires_grad or params[b].requires_grad)
    }
    found = shared_storage(net)
    assert {frozenset(pair.names) for pair in found} == expected
    assert all(params[pair.names[0]].requires_grad for pair in found)


def test_storages_that_were_freed_are_nobodys() -> None:
    net = torch.nn.Module()
    for name in ('a', 'b'):
        flat = torch.zeros(8)
        net.register_parameter(name, torch.nn.Parameter(flat[4:]))
        flat.untyped_storage().resize_(0)
    assert shared_storage(net) == []

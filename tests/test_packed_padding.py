"""Padding of parameters that share bytes (NVFP4): no parameter and no shard starts inside one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer.config import AXES, BufferConfig
from megatron_buffer.layout import LayoutStrategies, ParamSpec, compute_buffer_layout
from megatron_buffer.strategies.padding import Alignment, in_whole_bytes
from megatron_buffer.strategies.registry import make_strategy
from megatron_buffer.strategies.specs import BufferTraits

PADDINGS = AXES['padding'].strategies
WHOLE: dict[str, dict[str, bool]] = {'megatron': {'whole_bytes': True}}  # the others always do


@pytest.mark.parametrize(
    ('alignment', 'dp', 'expected'),
    [
        ((64, 128), 6, (64, 384)),  # a shard of 64: 32 bytes
        ((64, 128), 8, (64, 128)),
        ((64, 128), 128, (64, 256)),  # a shard of 1 would be half a byte
        ((64, 768), 256, (64, 1536)),
        ((1, 7), 7, (2, 14)),
    ],
)
def test_in_whole_bytes(alignment: tuple[int, int], dp: int, expected: tuple[int, int]) -> None:
    packed = BufferTraits(dp_size=dp, param_bytes=1, values_per_byte=2)
    assert in_whole_bytes(Alignment(*alignment), packed) == expected
    if alignment[1] % dp == 0:  # else the strategy itself would be wrong
        plain = packed._replace(values_per_byte=1)
        assert in_whole_bytes(Alignment(*alignment), plain) == alignment


def test_byte_aligned_counts_bytes_of_the_storage() -> None:
    """48 bytes of fp4 are 96 values; in fp32 any 12 values are 48 bytes."""
    padding = make_strategy('padding', PADDINGS['byte_aligned'](param_start_bytes=48))
    packed = BufferTraits(dp_size=3, param_bytes=1, grad_bytes=4, values_per_byte=2)
    assert padding.alignment(packed).param_start_elems == 96
    assert padding.alignment(packed._replace(values_per_byte=1)).param_start_elems == 48


@pytest.mark.parametrize('name', PADDINGS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    numels=st.lists(st.integers(1, 300).map(lambda n: 2 * n), min_size=1, max_size=8),
    dp=st.integers(1, 300),
    bucket_size=st.one_of(st.none(), st.integers(1, 600)),
)
def test_shards_hold_whole_bytes(
    name: str, numels: list[int], dp: int, bucket_size: int | None
) -> None:
    strategies = LayoutStrategies.from_config(
        BufferConfig(padding=PADDINGS[name](**WHOLE.get(name, {})))
    )
    specs = [ParamSpec(numel_elems=numel) for numel in numels]
    layout = compute_buffer_layout(
        specs,
        strategies,
        bucket_size_elems=bucket_size,
        dist_opt=True,
        buffer=BufferTraits(dp_size=dp, param_bytes=1, values_per_byte=2),
    )
    layout.check(specs, isolate=True)
    assert all(slot.start_elems % 2 == 0 for slot in layout.slots)
    assert all(span.numel_elems % (2 * dp) == 0 for span in layout.buckets)

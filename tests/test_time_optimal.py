"""`bucketing: time_optimal`: the best cuts of the model, against every other way to cut."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer.config import load_config
from megatron_buffer.config_layout import (
    CountBucketing,
    FixedSizeBucketing,
    PatternIsolation,
    TimeOptimalBucketing,
)
from megatron_buffer.config_network import PRESETS, Network, load_network
from megatron_buffer.errors import ConfigError, LayoutError
from megatron_buffer.layout import BufferLayout, LayoutStrategies, compute_buffer_layout
from megatron_buffer.profile import (
    ChunkProfile,
    ParamProfile,
    Profile,
    World,
    dense_positions,
    dump_profile,
)
from megatron_buffer.strategies.registry import make_strategy
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec
from megatron_buffer.strategies.time_optimal import TimeOptimal
from megatron_buffer.strategies.timed_cuts import Row, earliest_cuts
from tests.cut_rows import buckets, every_cut, fixed, rows
from tests.harness import run_ranks

# The cuts alone -----------------------------------------------------------------------------------


def end_of(row: Row, cuts: Sequence[int]) -> float:
    """When the last reduction ends, one bucket after the other, straight from the definition."""
    free = 0.0
    for members, elems in buckets(row, cuts):
        took = min(alpha + beta * elems for alpha, beta in row.lines)
        free = max(free, *(row.ready_s[i] for i in members)) + took
    return free


# Gradients in any order; a parameter may have no elements.
ANY_ROW = st.booleans().flatmap(
    lambda sorts: rows(most=8, in_order=sorts, gathered=False, least_elems=0)
)


@given(ANY_ROW)
@settings(deadline=None, max_examples=150)
def test_no_cuts_end_earlier(row: Row) -> None:
    cuts, end = earliest_cuts(row)
    assert end_of(row, cuts) == pytest.approx(end, abs=1e-10)
    assert end == pytest.approx(min(end_of(row, other) for other in every_cut(row)), abs=1e-10)


@given(ANY_ROW, st.integers(1, 200))
@settings(deadline=None)
def test_no_fixed_size_ends_earlier(row: Row, size: int) -> None:
    assert earliest_cuts(row)[1] <= end_of(row, fixed(row, size)) + 1e-10


def test_known_answers() -> None:
    def cuts(ready: list[float], alpha: float, beta: float) -> tuple[list[int], float]:
        count = len(ready)
        row = Row(
            ready_s=ready,
            starts_elems=[10 * i for i in range(count)],
            ends_elems=[10 * i + 10 for i in range(count)],
            alone=[False] * count,
            divisor_elems=1,
            lines=[(alpha, beta)],
        )
        found, end = earliest_cuts(row)
        return found, round(end, 9)

    assert cuts([], 1, 1) == ([], 0.0)
    # A network without startup times: the last gradient alone, and before it what is done in time.
    assert cuts([1.0, 2.0, 3.0, 4.0], 0.0, 0.01) == ([2], 4.1)
    # So slow to start that one reduction is best.
    assert cuts([1.0, 2.0, 3.0, 4.0], 5.0, 0.01) == ([], 9.4)
    # In between: the first two go while the others are computed.
    assert cuts([1.0, 2.0, 3.0, 4.0], 1.0, 0.05) == ([1], 6.0)
    # Always busy: nothing is gained by a cut that costs a startup time more than it hides.
    assert cuts([0.0, 0.0, 0.0, 0.0], 1.0, 1.0) == ([], 41.0)


def test_ten_thousand_parameters() -> None:
    """A second or so on an idle core; the bound only keeps it from being cubic."""
    elems = [4096, 4096 * 4096, 4096 * 6144, 4096, 14336 * 8192, 14336 * 4096] * 1670
    ends = list(itertools.accumulate(elems))
    ready = [end * 4 * 8192 / 400e12 for end in ends]
    begin = time.process_time()
    for beta in (1e-12, 1e-10):
        row = Row(
            ready_s=ready,
            starts_elems=[0, *ends[:-1]],
            ends_elems=ends,
            alone=[False] * len(ends),
            divisor_elems=8192,
            lines=[(1e-4, beta)],
        )
        cuts, end = earliest_cuts(row)
        assert end >= ready[-1]
        assert end_of(row, cuts) == pytest.approx(end)
    assert time.process_time() - begin < 30


# In a layout --------------------------------------------------------------------------------------

SIZES = (400, 16, 900, 900, 16, 250, 30, 700)


def profile_of(
    times: Sequence[float | None], sizes: Sequence[int] = SIZES, **world: int
) -> Profile:
    """A profile of parameters p0, p1, ... in registration order."""
    names = [f'p{i}' for i in range(len(times))]
    places = dense_positions(times, names)
    params = tuple(
        ParamProfile(
            name=name,
            numel_elems=size,
            dtype='float32',
            grad_arrival=place,
            grad_time_s=when,
            forward_use=index,
            forward_time_s=index * 1e-3,
            gradients_per_backward=1.0,
        )
        for index, (name, size, place, when) in enumerate(
            zip(names, sizes, places, times, strict=True)
        )
    )
    chunk = ChunkProfile(
        params=params,
        steps=1,
        ranks=2,
        clock='host',
        agreed=True,
        differing_grad_arrivals=0,
        differing_forward_uses=0,
    )
    sizes_of_world = {'tp': 1, 'pp': 1, 'vpp': 1, 'dp': 2, 'ep': 1, **world}
    return Profile(
        schema_version=1,
        megatron_buffer='0',
        megatron_core='0',
        created='',
        world=World(**sizes_of_world),
        chunks={'pp0.vp0': chunk},
    )


def write(path: Path, profile: Profile) -> str:
    path.write_text(dump_profile(profile))
    return str(path)


BACKWARD = [0.007 - 0.001 * i for i in range(len(SIZES))]
SLOW = 'base: h100\ninter_gbit_per_s: 0.02\nintra_gbyte_per_s: 0.004\nlaunch_us: 300\n'


@functools.cache
def upstream() -> LayoutStrategies:
    return LayoutStrategies.from_config(load_config(None))


def lay_out(
    bucketing: Any,
    isolation: Any = None,
    *,
    dist_opt: bool = True,
    dp_size: int = 4,
    names: bool = True,
    size: int | None = 1000,
) -> BufferLayout:
    specs = [ParamSpec(numel_elems=n, name=f'p{i}' if names else '') for i, n in enumerate(SIZES)]
    base = upstream()
    strategies = LayoutStrategies(
        bucketing=bucketing,
        bucket_isolation=(
            make_strategy('bucket_isolation', isolation) if isolation else base.bucket_isolation
        ),
        padding=base.padding,
        param_order=base.param_order,
    )
    layout = compute_buffer_layout(
        specs,
        strategies,
        bucket_size_elems=size,
        dist_opt=dist_opt,
        buffer=BufferTraits(dp_size=dp_size),
    )
    layout.check(specs, isolate=dist_opt)
    return layout


def end_of_layout(layout: BufferLayout, network: Network, kind: Any = 'reduce_scatter') -> float:
    """When a layout's last reduction ends, from the layout that came out, padding included."""
    group = network.placement(4, 1)
    free = 0.0
    for span, slots in zip(layout.buckets, layout.slots_by_bucket(), strict=True):
        ready = max(BACKWARD[slot.param] for slot in slots)
        free = max(free, ready) + network.seconds(kind, 4 * span.numel_elems, group)
    return free


@pytest.mark.parametrize('isolation', [None, PatternIsolation(patterns=('p2', 'p5'))])
@pytest.mark.parametrize('dist_opt', [True, False])
def test_it_beats_every_fixed_size_in_the_real_layout(
    tmp_path: Path, isolation: Any, dist_opt: bool
) -> None:
    slow = tmp_path / 'net.yaml'
    slow.write_text(SLOW)
    network = load_network(str(slow))
    path = write(tmp_path / 'p.json', profile_of(BACKWARD, dp=4))
    params = TimeOptimalBucketing(profile=path, network=str(slow))
    kind = 'reduce_scatter' if dist_opt else 'all_reduce'
    best = end_of_layout(
        lay_out(make_strategy('bucketing', params), isolation, dist_opt=dist_opt), network, kind
    )
    others = [FixedSizeBucketing(bucket_size_elems=size) for size in range(1, 4000, 130)]
    more = [CountBucketing(num_buckets=count) for count in range(1, 9)]
    ends = [
        end_of_layout(
            lay_out(make_strategy('bucketing', other), isolation, dist_opt=dist_opt), network, kind
        )
        for other in [*others, *more]
    ]
    assert best <= min(ends) + 1e-9
    assert isolation or best < max(ends)


def test_one_bucket_where_megatron_wants_one_and_the_size_where_names_are_unknown() -> None:
    strategy = TimeOptimal(TimeOptimalBucketing(profile='-'), profile_of(BACKWARD))
    assert len(lay_out(strategy, size=None).buckets) == 1
    fixed = make_strategy('bucketing', FixedSizeBucketing(bucket_size_elems=1000))
    assert lay_out(strategy, names=False).buckets == lay_out(fixed, names=False).buckets


def test_a_gradient_that_never_came_is_the_last() -> None:
    times: list[float | None] = [*BACKWARD]
    times[6] = None
    network = Network(launch_us=0, intra_latency_us=0, intra_gbyte_per_s=0.02)
    params = TimeOptimalBucketing(profile='-')
    layout = lay_out(TimeOptimal(params, profile_of(times, dp=4), network))
    first = [slot.param for slot in layout.slots_by_bucket()[0]]
    assert 6 not in first or len(layout.buckets) == 1


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / 'p.json', profile_of([0.0, 1.0], SIZES[:2]))
    strategy = make_strategy('bucketing', TimeOptimalBucketing(profile=path))
    with pytest.raises(LayoutError, match=r'bucketing.profile: .*has no parameter p7 among its 2'):
        lay_out(strategy)
    with pytest.raises(ConfigError, match=r'bucketing.profile: /none.json no such file'):
        make_strategy('bucketing', TimeOptimalBucketing(profile='/none.json'))
    with pytest.raises(ConfigError, match=r"bucketing.network: no network 'h10'.*'h100'"):
        make_strategy('bucketing', TimeOptimalBucketing(profile=path, network='h10'))
    with pytest.raises(ConfigError, match='bucketing: profile is missing'):
        load_config({'bucketing': 'time_optimal'})
    broken = json.loads(Path(path).read_text())
    broken['chunks'] = {}
    Path(path).write_text(json.dumps(broken))
    strategy = make_strategy('bucketing', TimeOptimalBucketing(profile=path))
    with pytest.raises(LayoutError, match=r'model chunk pp0.vp0 of .* is missing'):
        lay_out(strategy)


# The network --------------------------------------------------------------------------------------


def test_rings_and_trees() -> None:
    network = Network(
        launch_us=10,
        intra_latency_us=1,
        inter_latency_us=5,
        intra_gbyte_per_s=400,
        inter_gbit_per_s=400,
        efficiency=1.0,
        tree_efficiency=0.5,
    )
    inside = network.placement(8, 1)
    assert (inside.per_node, inside.nodes) == (8, 1)
    (ring,) = network.lines('reduce_scatter', inside)
    assert ring.alpha_s == pytest.approx((10 + 7 * 1) / 1e6)
    assert ring.beta_s_per_byte == pytest.approx(7 / 8 / 400e9)
    # 64 ranks, 4 of them in each of 16 nodes: every node has 4 links of 50 GB/s.
    spread = network.placement(64, 2)
    assert (spread.per_node, spread.nodes) == (4, 16)
    (ring,) = network.lines('reduce_scatter', spread)
    assert ring.alpha_s == pytest.approx((10 + 15 * 5 + 48 * 1) / 1e6)
    assert ring.beta_s_per_byte == pytest.approx(63 / 64 / 200e9)
    ring, tree = network.lines('all_reduce', spread)
    assert ring.alpha_s == pytest.approx((10 + 2 * (15 * 5 + 48)) / 1e6)
    assert tree.alpha_s == pytest.approx((10 + 2 * (4 * 5 + 3)) / 1e6)
    assert tree.beta_s_per_byte == pytest.approx(2 * ring.beta_s_per_byte)
    assert len(network.lines('all_gather', network.placement(64, 8))) == 2
    assert network.seconds('all_gather', 10**9, network.placement(1, 1)) == 0.0


def test_network_files(tmp_path: Path) -> None:
    path = tmp_path / 'net.yaml'
    path.write_text('base: h200\ninter_gbit_per_s: 200\n')
    found = load_network(str(path))
    assert found.inter_gbit_per_s == 200.0
    assert found.memory_gbyte_per_s == PRESETS['h200'].memory_gbyte_per_s
    for text, message in (
        ('inter_gbits: 3\n', "unknown key 'inter_gbits'.*Did you mean 'inter_gbit_per_s'"),
        ('launch_us: -1\n', 'launch_us: found -1: .*greater than or equal to 0'),
        ('efficiency: 1.5\n', 'efficiency: found 1.5'),
        ('gpus_per_node: 1.5\n', 'gpus_per_node: found 1.5'),
        ('base: v100\n', "base: found 'v100', expected one of h100, h200"),
        ('- 3\n', 'expected values such as'),
        ('launch_us: 1\nlaunch_us: 2\n', 'given twice'),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_network(str(path))


# In a run -----------------------------------------------------------------------------------------


def _train(rank: int, world_size: int, folder: str, differing: bool) -> list[list[int]] | str:
    import megatron_buffer
    from megatron_buffer.errors import RankMismatchError
    from tests import small_model as sm

    names = [name for name, _ in sm.make_net().named_parameters()]
    sizes = [param.numel() for param in sm.make_net().parameters()]
    profile = profile_of([0.005 - 0.001 * i for i in range(6)], sizes, dp=world_size)
    text = dump_profile(profile)
    for index, name in enumerate(names):
        text = text.replace(f'"p{index}"', f'"{name}"')
    if differing and rank == 1:
        text = text.replace('"grad_time_s": 0.001', '"grad_time_s": 0.005')
    home = Path(folder) / f'rank{rank}'  # as on nodes with disks of their own
    home.mkdir()
    os.chdir(home)
    Path('p.json').write_text(text)
    Path('net.yaml').write_text(
        'launch_us: 0\nintra_latency_us: 0\nintra_gbyte_per_s: 0.001\nefficiency: 1\n'
    )
    config = {
        'bucketing': {'name': 'time_optimal', 'profile': 'p.json', 'network': 'net.yaml'},
        'checks': {'rank_agreement': True},
    }
    flags = {'use_distributed_optimizer': True, 'overlap_grad_reduce': True}
    try:
        model = sm.wrap(
            sm.make_net(),
            megatron_buffer.DistributedDataParallel,
            buffer_config=megatron_buffer.load_config(config),
            **flags,
        )
    except RankMismatchError as error:
        return str(error)
    sm.run_window(model, rank, 0)
    wrong = sm.differences(sm.owned_main_grads(model), sm.oracle_grads(rank, world_size, 0))
    assert wrong == []
    return [[len(bucket.params_list) for bucket in b.buckets] for b in model.buffers]


def test_a_run_is_cut_by_the_profile_and_trains_right(tmp_path: Path) -> None:
    found, other = run_ranks(_train, 2, str(tmp_path), False)
    assert found == other
    (buckets,) = found
    assert sum(buckets) == 6
    assert len(buckets) > 1


def test_ranks_with_other_profiles_are_found_out(tmp_path: Path) -> None:
    for message in run_ranks(_train, 2, str(tmp_path), True):
        assert message.startswith('the buffer differs')
        assert 'in bucket' in message

"""Layout, bucket groups, scaling and bucket size: ours against the installed Megatron-Core's own functions.

Nothing is installed and nothing rebound: stock's functions are called as they are, ours inside
`runtime.scope`. Parameters are on the meta device, so that no size costs memory.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_buffer import bucket_groups, optimizer, param_layout
from megatron_buffer.bucket_size import BucketSize, default_bucket_size, resolve_bucket_size
from megatron_buffer.config import BufferConfig
from megatron_buffer.errors import LayoutError
from megatron_buffer.layout import BufferLayout, ParamSpec, compute_buffer_layout, plan_layout
from megatron_buffer.runtime import Runtime, scope
from megatron_buffer.strategies.bucket_groups import BucketRef, BufferBuckets
from megatron_buffer.strategies.padding import Alignment
from megatron_buffer.strategies.scaling import ScalingContext
from megatron_buffer.strategies.specs import BufferTraits

_ddp = importlib.import_module('megatron.core.distributed.distributed_data_parallel')
_do = importlib.import_module('megatron.core.optimizer.distrib_optimizer')
_layer_wise = importlib.import_module('megatron.core.optimizer.layer_wise_optimizer')
_layouts = importlib.import_module('megatron.core.optimizer.param_layout')
_pgb = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')

Stock = _do.DistributedOptimizer
Ours = optimizer.DistributedOptimizer
UPSTREAM = Runtime(BufferConfig())

FAST = settings(max_examples=200, deadline=None, derandomize=True, database=None)
THOROUGH = settings(
    max_examples=4000,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope='module', autouse=True)
def _stock_is_stock() -> Iterator[None]:
    """Nothing is rebound, and a mark on a parameter stands for Transformer Engine's quantized storage."""
    for symbol in (Stock, _pgb.group_params_for_buffers, _pgb.partition_buckets):
        assert symbol.__module__.startswith('megatron.core.'), f'{symbol} is rebound'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pgb, 'is_float8tensor', lambda param: getattr(param, 'quantized', False))
        yield


# ------------------------------------------------------------------ what is drawn


class Kind(NamedTuple):
    """Marks of a parameter; None leaves the attribute away, as most models do."""

    dtype: torch.dtype
    allreduce: bool | None = None
    layer_wise: bool | None = None
    quantized: bool = False


class Param(NamedTuple):
    """A parameter on paper."""

    numel: int
    kind: Kind = Kind(torch.bfloat16)
    shared_embedding: bool = False

    def make(self, device: str = 'meta') -> torch.nn.Parameter:
        """The parameter; on the meta device it has no storage."""
        param = torch.nn.Parameter(torch.empty(self.numel, dtype=self.kind.dtype, device=device))
        marks = {
            'allreduce': self.kind.allreduce,
            'is_managed_by_layer_wise_optimizer': self.kind.layer_wise,
            'quantized': self.kind.quantized or None,
            'shared_embedding': self.shared_embedding or None,
        }
        for name, value in marks.items():
            if value is not None:
                setattr(param, name, value)
        return param

    def spec(self) -> ParamSpec:
        """The same for the pure functions."""
        return ParamSpec(numel_elems=self.numel, shared_embedding=self.shared_embedding)


class Case(NamedTuple):
    """One call of the layout functions."""

    params: list[Param]
    bucket_size: int | None
    dp: int
    expert_dp: int | None = None
    high_busbw: bool = False
    grad_reduce_in_fp32: bool = True

    def make(self) -> tuple[list[torch.nn.Parameter], DistributedDataParallelConfig]:
        """Parameters and DDP config."""
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=self.grad_reduce_in_fp32,
            pad_buckets_for_high_nccl_busbw=self.high_busbw,
        )
        return [param.make() for param in self.params], config


KINDS = [
    Kind(*kind)
    for kind in itertools.product(
        (torch.bfloat16, torch.float32, torch.float16),
        (None, False, True),
        (None, True, False),
        (False, True),
    )
]
EDGES = (1, 63, 64, 65, 127, 128, 129, 2**16 - 1, 2**16, 2**16 + 1, 2**20, 2**21 - 1, 2**21)
NUMELS = st.integers(1, 2**21) | st.sampled_from(EDGES) | st.integers(1, 300)
DP_SIZES = st.sampled_from((1, 2, 3, 6, 7, 8, 48, 96, 127, 128, 1000, 1024)) | st.integers(1, 1024)


@st.composite
def cases(draw: st.DrawFn, max_params: int = 24) -> Case:
    """Parameter lists of a few kinds each, so that buffers get long, and sizes that matter to them."""
    palette = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    count = draw(st.integers(0, max_params))
    rows = st.tuples(NUMELS, st.integers(0, len(palette) * 6 - 1))
    params = [
        Param(numel, palette[k // 6], shared_embedding=k % 6 == 1)
        for numel, k in draw(st.lists(rows, min_size=count, max_size=count))
    ]
    return Case(
        params,
        draw(bucket_sizes(params)),
        draw(DP_SIZES),
        draw(st.none() | DP_SIZES),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@st.composite
def bucket_sizes(draw: st.DrawFn, params: Sequence[Param]) -> int | None:
    """None, one element, small, huge, or within one element of where some run of parameters ends."""
    plain = st.sampled_from((None, 1, 40_000_000, 2**62)) | st.integers(1, 2**22)
    if not params or draw(st.booleans()):
        return draw(plain)
    first, last = sorted(draw(st.tuples(*[st.integers(0, len(params))] * 2)))
    numels = [param.numel for param in params[first:last]]
    if draw(st.booleans()):  # as the distributed optimizer counts, gaps included
        numels = [-(-numel // 64) * 64 for numel in numels[1:]] + numels[:1]
    return max(1, sum(numels) + draw(st.integers(-1, 1)))


# ------------------------------------------------------------------ layouts, field by field

Comparable = dict[str, Any]


def fields_of(layout: Any, params: Sequence[torch.nn.Parameter]) -> Comparable:
    """All fields of a `PerBufferParamLayout`; the map as a list, because its order counts too."""
    position = {param: index for index, param in enumerate(params)}
    found = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    found['param_index_map'] = [
        (position[param], *span) for param, span in layout.param_index_map.items()
    ]
    return found


def full_fields(layout: Any, params: Sequence[torch.nn.Parameter]) -> list[tuple[Any, Comparable]]:
    """All fields of a `FullParamLayout`."""
    assert isinstance(layout, _layouts.FullParamLayout)
    assert [field.name for field in dataclasses.fields(layout)] == ['layouts']
    return [(key, fields_of(of_buffer, params)) for key, of_buffer in layout.layouts.items()]


def pure_fields(layout: BufferLayout) -> Comparable:
    """The same fields of the pure layout."""
    return {
        'param_index_map': [
            (slot.param, slot.start_elems, slot.end_elems, slot.bucket) for slot in layout.slots
        ],
        'bucket_indices': [(span.start_elems, span.end_elems) for span in layout.buckets],
        'per_bucket_numel_unpadded': [span.numel_unpadded for span in layout.buckets],
    }


def check_grouping(case: Case) -> None:
    """`group_params_for_buffers`: keys, their order, members, indices."""
    params, _ = case.make()
    position = {param: index for index, param in enumerate(params)}
    stock = _pgb.group_params_for_buffers(params, case.grad_reduce_in_fp32)
    with scope(UPSTREAM):
        ours = param_layout.group_params_for_buffers(params, case.grad_reduce_in_fp32)
    assert all(type(key) is _layouts.BufferKey for key in ours)
    assert [
        (key, [position[param] for param in members], indices)
        for key, (members, indices) in ours.items()
    ] == [
        (key, [position[param] for param in members], indices)
        for key, (members, indices) in stock.items()
    ]


def check_per_buffer(case: Case) -> None:
    """`DistributedOptimizer._compute_per_buffer_param_layout`, with and without indices."""
    params, config = case.make()
    for indices in ((), (list(range(7, 7 + len(params))),)):
        stock = Stock._compute_per_buffer_param_layout(
            params, case.bucket_size, case.dp, config, *indices
        )
        with scope(UPSTREAM):
            ours = Ours._compute_per_buffer_param_layout(
                params, case.bucket_size, case.dp, config, *indices
            )
        assert type(ours) is type(stock)
        assert fields_of(ours, params) == fields_of(stock, params)


def check_full(case: Case) -> None:
    """`DistributedOptimizer.compute_full_param_layout`."""
    params, config = case.make()
    args = (params, case.bucket_size, case.dp, config, case.expert_dp)
    stock = Stock.compute_full_param_layout(*args)
    with scope(UPSTREAM):
        ours = Ours.compute_full_param_layout(*args)
    assert full_fields(ours, params) == full_fields(stock, params)


def check_default(case: Case) -> None:
    """`_compute_default_per_buffer_param_layout`: without the distributed optimizer."""
    params, _ = case.make()
    stock = _pgb._compute_default_per_buffer_param_layout(params, case.bucket_size)
    with scope(UPSTREAM):
        ours = param_layout.compute_default_per_buffer_param_layout(params, case.bucket_size)
    assert type(ours) is type(stock)
    assert fields_of(ours, params) == fields_of(stock, params)


def check_pure(case: Case) -> None:
    """`compute_buffer_layout` and `plan_layout`, which see sizes only, and stock, with and without dist-opt."""
    params, config = case.make()
    specs = [param.spec() for param in case.params]
    stock = {
        True: Stock._compute_per_buffer_param_layout(params, case.bucket_size, case.dp, config),
        False: _pgb._compute_default_per_buffer_param_layout(params, case.bucket_size),
    }
    for dist_opt, layout in stock.items():
        how: dict[str, Any] = {
            'bucket_size_elems': case.bucket_size,
            'dp_size': case.dp,
            'dist_opt': dist_opt,
            'high_busbw': case.high_busbw,
        }
        ours = compute_buffer_layout(
            specs,
            UPSTREAM.layout,
            bucket_size_elems=case.bucket_size,
            dist_opt=dist_opt,
            buffer=BufferTraits(dp_size=case.dp, high_busbw=case.high_busbw),
        )
        expected = fields_of(layout, params)
        assert pure_fields(ours) == {name: expected[name] for name in pure_fields(ours)}
        assert plan_layout(specs, config=UPSTREAM.config, **how) == ours
        if not any(param.shared_embedding for param in case.params):
            numels = [param.numel for param in case.params]
            assert plan_layout(numels, config=UPSTREAM.config, **how) == ours
        assert ours.numel_elems == (layout.bucket_indices[-1][1] if case.params else 0)
        assert ours.numel_params_elems + ours.padding_elems == ours.numel_elems
        assert ours.numel_params_elems == sum(param.numel for param in case.params)
        assert [len(slots) for slots in ours.slots_by_bucket()] == [
            sum(span[2] == bucket for span in layout.param_index_map.values())
            for bucket in range(len(layout.bucket_indices))
        ]


def check_layer_wise(case: Case) -> None:
    """LayerWise's `compute_full_param_layout`, stock and with our names where install() puts them."""
    params, config = case.make()
    args = (params, case.bucket_size, case.dp, config, case.expert_dp)
    stock = LayerWiseDistributedOptimizer.compute_full_param_layout(*args)
    with pytest.MonkeyPatch.context() as patch, scope(UPSTREAM):
        patch.setattr(_do, 'DistributedOptimizer', Ours)
        for module in (_do, _layer_wise):
            patch.setattr(module, 'group_params_for_buffers', param_layout.group_params_for_buffers)
        rebound = LayerWiseDistributedOptimizer.compute_full_param_layout(*args)
    assert full_fields(rebound, params) == full_fields(stock, params)


CHECKS = (check_grouping, check_per_buffer, check_full, check_default, check_pure, check_layer_wise)
TIED = Param(129, shared_embedding=True)


@pytest.mark.parametrize('check', CHECKS)
@FAST
@given(case=cases())
@example(case=Case([], None, 1))
@example(case=Case([TIED], 1, 3))
@example(case=Case([TIED, TIED, Param(1)], 1, 1024, high_busbw=True))
@example(case=Case([TIED, Param(64), TIED, Param(5), TIED], None, 6))
@example(case=Case([Param(2**21)] * 24, 2**62, 1023, high_busbw=True))
@example(case=Case([Param(0), TIED, Param(0), Param(3), Param(0)], 1, 4))
@example(case=Case([Param(5), Param(6)], 0, 4))  # num_buckets above the number of parameters
def test_equals_stock(check: Callable[[Case], None], case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize('check', CHECKS)
@THOROUGH
@given(case=cases(max_params=60))
def test_equals_stock_thoroughly(check: Callable[[Case], None], case: Case) -> None:
    check(case)


@pytest.mark.parametrize('high_busbw', [False, True])
def test_alignment_equals_stock(high_busbw: bool) -> None:
    for dp in range(1, 1025):
        alignment = UPSTREAM.layout.padding.alignment(BufferTraits(dp, high_busbw))
        assert alignment == Alignment(64, _layouts.bucket_end_divisor(dp, high_busbw))
    assert _layouts.pad_param_start(1) == 64


def test_frozen_parameters_are_refused_as_stock_refuses_them() -> None:
    params = [Param(4).make(), Param(4).make().requires_grad_(False)]
    with pytest.raises(AssertionError):
        _pgb.group_params_for_buffers(params, True)
    with scope(UPSTREAM), pytest.raises(ValueError, match='parameter 1'):
        param_layout.group_params_for_buffers(params, True)


# ------------------------------------------------------------------ bucket groups


class Made(NamedTuple):
    """A bucket group as its constructor was called."""

    buckets: list[BucketRef]
    ddp_config: Any
    group: Any
    group_size: int
    runtime: Any = None


class FakeBucket(BucketRef):
    """A reference to itself; it holds no parameters."""

    params_list = ()


def fake_buffers(num_buckets: Sequence[int], fp8: Sequence[int], **attributes: Any) -> list[Any]:
    """Buffers as far as partitioning looks at them; their buckets are references."""
    plain = (torch.bfloat16, torch.float32)
    shared = {
        'ddp_config': object(),
        'data_parallel_group': object(),
        'data_parallel_world_size': 8,
    }
    return [
        SimpleNamespace(
            param_dtype=torch.uint8 if index in fp8 else plain[index % 2],
            buckets=[FakeBucket(index, bucket) for bucket in range(count)],
            **shared | attributes,
        )
        for index, count in enumerate(num_buckets)
    ]


def partition(module: Any, name: str, buffers: list[Any], *flags: bool) -> list[Made]:
    """Calls a `partition_buckets` that makes records instead of groups."""
    with pytest.MonkeyPatch.context() as patch, scope(UPSTREAM):
        patch.setattr(module, name, Made)
        return module.partition_buckets(buffers, *flags)


@pytest.mark.parametrize('fp32_accumulation', [False, True])
@pytest.mark.parametrize('single', [False, True])
def test_bucket_groups_equal_stock(single: bool, fp32_accumulation: bool) -> None:
    """Up to 4 buffers of 1 to 3 buckets each, without fp8 or with the fp8 buffer at any position."""
    for length in range(5):
        for counts in itertools.product((1, 2, 3), repeat=length):
            for fp8 in [(), *((index,) for index in range(length))]:
                buffers = fake_buffers(counts, fp8)
                flags = (single, fp32_accumulation)
                stock = partition(_pgb, '_ParamAndGradBucketGroup', buffers, *flags)
                ours = partition(bucket_groups, 'ParamAndGradBucketGroup', buffers, *flags)
                assert [made[:4] for made in ours] == [made[:4] for made in stock]
                assert all(made.runtime is UPSTREAM for made in ours)
                if not counts:
                    continue
                pure = UPSTREAM.bucket_groups.partition(
                    [
                        BufferBuckets(index in fp8, [0] * count)
                        for index, count in enumerate(counts)
                    ],
                    single_group=single,
                    one_bucket_per_group=fp32_accumulation,
                )
                assert pure == [made.buckets for made in stock]
                assert sorted(itertools.chain(*pure)) == sorted(
                    BucketRef(i, j) for i, count in enumerate(counts) for j in range(count)
                )


@pytest.mark.parametrize('flags', list(itertools.product([False, True], repeat=2)))
def test_two_fp8_buffers_are_refused_where_stock_asserts(flags: tuple[bool, bool]) -> None:
    for counts, fp8 in (((1, 1), (0, 1)), ((2, 1, 3), (0, 2)), ((1, 1, 1), (0, 1, 2))):
        buffers = fake_buffers(counts, fp8)
        with pytest.raises(AssertionError):
            partition(_pgb, '_ParamAndGradBucketGroup', buffers, *flags)
        with pytest.raises(LayoutError, match=f'{len(fp8)} buffers of quantized parameters'):
            partition(bucket_groups, 'ParamAndGradBucketGroup', buffers, *flags)


def test_a_group_across_process_groups_is_refused() -> None:
    dense, expert = fake_buffers([1], [0])[0], fake_buffers([1, 1], [])[1]
    with pytest.raises(LayoutError, match='different data-parallel groups'):
        partition(bucket_groups, 'ParamAndGradBucketGroup', [dense, expert])


# ------------------------------------------------------------------ stock's DistributedDataParallel as oracle


class FakeGroup:
    """A process group, as far as DDP's constructor looks at it."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Model(torch.nn.Module):
    """Dense and expert parameters of two dtypes and a tied embedding, in one list."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (Kind(torch.float32), Kind(torch.bfloat16), Kind(torch.float32, allreduce=False))
        self.papers = [
            Param(numel, kinds[index % 3], shared_embedding=index == 3)
            for index, numel in enumerate((70, 130, 8, 200, 64, 1, 33, 500, 129))
        ]
        for index, paper in enumerate(self.papers):
            self.register_parameter(f'p{index}', paper.make('cpu'))


def stock_ddp(
    *,
    dp: int = 8,
    dp_cp: int | None = None,
    expert_dp: int = 8,
    pp_rank: int = 0,
    per_token: bool = False,
    disable_bucketing: bool = False,
    **ddp_config: Any,
) -> Any:
    """Stock's own wrapper on one process; only the device and a log line that needs ranks are replaced."""
    one = FakeGroup(1)
    groups = ProcessGroupCollection(
        dp=FakeGroup(dp),
        dp_cp=FakeGroup(dp_cp or dp),
        expt_dp=FakeGroup(expert_dp),
        tp=one,
        ep=one,
        pp=FakeGroup(4, pp_rank),
    )
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=per_token
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, 'current_device', lambda: 'cpu')
        patch.setattr(_pgb, 'log_on_each_pipeline_stage', lambda *args, **kwargs: None)
        return _ddp.DistributedDataParallel(
            config,
            DistributedDataParallelConfig(**ddp_config),
            Model(),
            disable_bucketing=disable_bucketing,
            pg_collection=groups,
        )


@FAST
@given(
    dp=DP_SIZES,
    cp=st.sampled_from((1, 2, 4)),
    expert_dp=DP_SIZES,
    average=st.booleans(),
    per_token=st.booleans(),
)
@example(dp=8, cp=1, expert_dp=2, average=True, per_token=False)
@example(dp=6, cp=2, expert_dp=3, average=True, per_token=False)
@example(dp=2, cp=1, expert_dp=4, average=True, per_token=False)
def test_scaling_equals_stock(
    dp: int, cp: int, expert_dp: int, average: bool, per_token: bool
) -> None:
    """The factor that stock DDP puts on every bucket of dense and expert buffers."""
    assume(not (average and per_token))  # refused by stock
    try:
        stock = stock_ddp(
            dp=dp,
            dp_cp=dp * cp,
            expert_dp=expert_dp,
            per_token=per_token,
            average_in_collective=average,
        )
    except AssertionError:
        # Stock compares (edp / dp) / edp with 1 / dp exactly, and rounding may be against it.
        assume(expert_dp / (dp * cp) / expert_dp == 1 / (dp * cp))
        raise
    for expert, buffers in ((False, stock.buffers), (True, stock.expert_parallel_buffers)):
        plan = UPSTREAM.scaling.plan(ScalingContext(dp * cp, expert_dp, expert, average, per_token))
        factors = {bucket.gradient_scaling_factor for b in buffers for bucket in b.buckets}
        assert factors == {plan.factor}
        assert plan.op == ('avg' if average else 'sum')


@pytest.mark.parametrize(
    ('dp', 'expert_dp', 'expert', 'average', 'per_token', 'factor', 'op'),
    [
        (8, 2, False, False, False, 1 / 8, 'sum'),
        (8, 2, True, False, False, 1 / 8, 'sum'),
        (8, 2, False, True, False, 1.0, 'avg'),
        (8, 2, True, True, False, 0.25, 'avg'),
        (8, 16, True, True, False, 2.0, 'avg'),
        (8, 2, False, False, True, 1.0, 'sum'),
        (8, 2, True, False, True, 1.0, 'sum'),
        (1, 1, False, False, False, 1.0, 'sum'),
    ],
)
def test_scaling_by_hand(
    dp: int, expert_dp: int, expert: bool, average: bool, per_token: bool, factor: float, op: str
) -> None:
    context = ScalingContext(dp, expert_dp, expert, average, per_token)
    assert UPSTREAM.scaling.plan(context) == (factor, op, 1.0)


@pytest.mark.long
@pytest.mark.parametrize('dist_opt', [False, True])
@pytest.mark.parametrize('bucket_size', [None, 1, 130, 200, 10**6])
def test_a_stock_model_lies_as_planned(dist_opt: bool, bucket_size: int | None) -> None:
    """Buffers as stock mounts them, every bucket and parameter, from sizes and flags alone."""
    for dp, expert_dp, overlap, fp32 in itertools.product((1, 3, 8), (1, 6), *[(False, True)] * 2):
        stock = stock_ddp(
            dp=dp,
            expert_dp=expert_dp,
            use_distributed_optimizer=dist_opt,
            overlap_grad_reduce=overlap,
            grad_reduce_in_fp32=fp32,
            bucket_size=bucket_size,
        )
        paper_of = dict(zip(stock.module.parameters(), stock.module.papers, strict=True))
        for buffer in [*stock.buffers, *stock.expert_parallel_buffers]:
            papers = [paper_of[param] for param in buffer.params]
            ours = plan_layout(
                [paper.spec() for paper in papers],
                bucket_size_elems=stock.bucket_size,
                dp_size=expert_dp if papers[0].kind.allreduce is False else dp,
                dist_opt=dist_opt,
            )
            assert buffer.numel == ours.numel_elems
            assert buffer.numel_unpadded == sum(span.numel_unpadded for span in ours.buckets)
            assert [
                (bucket.offset, bucket.offset + bucket.grad_data.numel(), bucket.numel_unpadded)
                for bucket in buffer.buckets
            ] == [(b.start_elems, b.end_elems, b.numel_unpadded) for b in ours.buckets]
            for slot in ours.slots:
                span = (slot.start_elems, slot.end_elems, slot.bucket)
                assert buffer.param_index_map[buffer.params[slot.param]] == span


# ------------------------------------------------------------------ bucket size


def resolved(**changes: Any) -> BucketSize:
    """`resolve_bucket_size` for a first pipeline stage with overlap, with changes."""
    plain: dict[str, Any] = {
        'configured_elems': None,
        'ddp_bucket_size_elems': None,
        'num_buckets': None,
        'overlap_grad_reduce': True,
        'disable_bucketing': False,
        'pp_rank': 0,
        'dp_size': 8,
    }
    size = resolve_bucket_size(**plain | changes)
    assert ('one bucket' in size.reason) == (size.elems is None)
    return size


def test_bucket_size_equals_stock_ddp() -> None:
    for size, overlap, disabled, pp_rank, dp, cp in itertools.product(
        (None, 1, 100, 40_000_000), (False, True), (False, True), (0, 1, 3), (1, 64), (1, 2)
    ):
        stock = stock_ddp(
            dp=dp,
            dp_cp=dp * cp,
            pp_rank=pp_rank,
            disable_bucketing=disabled,
            bucket_size=size,
            overlap_grad_reduce=overlap,
        )
        assert (
            stock.bucket_size
            == resolved(
                ddp_bucket_size_elems=size,
                overlap_grad_reduce=overlap,
                disable_bucketing=disabled,
                pp_rank=pp_rank,
                dp_size=dp,
            ).elems
        )


@FAST
@given(
    bucket_size=st.none() | st.integers(1, 2**40),
    num_buckets=st.none() | st.integers(1, 10**7),
    overlap=st.booleans(),
    dp=DP_SIZES,
    num_params=st.integers(1, 2**41),
)
def test_bucket_size_equals_stock_training(
    bucket_size: int | None, num_buckets: int | None, overlap: bool, dp: int, num_params: int
) -> None:
    """training.py turns num_buckets into a size; from there on ours gives the same."""
    training = importlib.import_module('megatron.training.training')
    if not hasattr(training, 'resolve_ddp_bucket_size'):
        pytest.skip('megatron.training of this version has no resolve_ddp_bucket_size')
    ddp_config = SimpleNamespace(bucket_size=bucket_size, num_buckets=num_buckets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, 'get_pg_size', lambda group: group.size())
        stock = training.resolve_ddp_bucket_size(ddp_config, FakeGroup(dp), overlap, num_params)
    ours = resolved(
        ddp_bucket_size_elems=bucket_size if num_buckets is None else num_params // num_buckets,
        num_buckets=num_buckets,
        overlap_grad_reduce=overlap,
        dp_size=dp,
    )
    assert ours.elems == stock


@pytest.mark.parametrize(
    ('changes', 'expected', 'why'),
    [
        ({'dp_size': 1}, 40_000_000, 'default'),
        ({'dp_size': 40}, 40_000_000, 'default'),
        ({'dp_size': 41}, 41_000_000, 'default'),
        ({'dp_size': 1024}, 1_024_000_000, 'dp_size=1024'),
        ({'ddp_bucket_size_elems': 40_000_000}, 40_000_000, 'default'),
        ({'ddp_bucket_size_elems': 7}, 7, 'ddp_config.bucket_size'),
        ({'ddp_bucket_size_elems': 7, 'num_buckets': 3}, 7, 'num_buckets=3'),
        ({'configured_elems': 5}, 5, 'bucketing.bucket_size_elems'),
        ({'configured_elems': 5, 'overlap_grad_reduce': False}, None, 'overlap_grad_reduce'),
        ({'configured_elems': 5, 'pp_rank': 1}, None, 'pipeline rank 1'),
        ({'configured_elems': 5, 'disable_bucketing': True}, None, 'disabled'),
        ({'ddp_bucket_size_elems': 7, 'overlap_grad_reduce': False}, None, 'overlap_grad_reduce'),
        ({'ddp_bucket_size_elems': 7, 'pp_rank': 2}, None, 'pipeline rank 2'),
        ({'ddp_bucket_size_elems': 7, 'disable_bucketing': True}, None, 'disabled'),
    ],
)
def test_bucket_size_by_hand(changes: dict[str, Any], expected: int | None, why: str) -> None:
    size = resolved(**changes)
    assert size.elems == expected
    assert why in size.reason


def test_default_bucket_size() -> None:
    assert [default_bucket_size(dp) for dp in (1, 40, 41)] == [40_000_000, 40_000_000, 41_000_000]

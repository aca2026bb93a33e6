"""The layout guard: what each checkpoint format depends on, and what happens when that differs.

The comparison is pure and tested as such; then the same on 2 ranks, through Megatron's own saving and
loading.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_buffer.checkpoint_guard import LayoutGuard
from megatron_buffer.checkpoint_layout import (
    DP_RESHARDABLE,
    DP_ZERO,
    IndexedBuffer,
    compare,
    merge_quantized,
    place_as_stock,
    refusal,
)
from megatron_buffer.checkpoint_record import Placed, SavedBucket, SavedBuffer, StateLayout
from megatron_buffer.config import load_config
from megatron_buffer.layout import BufferLayout, ParamSpec, plan_layout
from megatron_buffer.runtime import Runtime
from tests.checkpoint_case import Bag, Ended, Hop, Run, arm, chains, differing
from tests.harness import run_ranks

DTYPES = '(torch.bfloat16, torch.float32)'


def record(*buffers: SavedBuffer, config: str = 'a.yaml') -> StateLayout:
    return StateLayout(config=config, config_hash='123abc', choices='upstream', buffers=buffers)


def as_saved(layout: BufferLayout, dtypes: str = DTYPES) -> SavedBuffer:
    """A planned layout as it would be recorded."""
    return SavedBuffer(
        dtypes,
        tuple(
            SavedBucket(
                span.numel_unpadded,
                tuple(
                    Placed(
                        layout.names[slot.param] or f'p{slot.param}',
                        slot.start_elems - span.start_elems,
                        slot.end_elems - slot.start_elems,
                    )
                    for slot in slots
                ),
            )
            for span, slots in zip(layout.buckets, layout.slots_by_bucket(), strict=True)
        ),
    )


def planned(sizes: list[int], names: list[str] | None = None, **kwargs: Any) -> StateLayout:
    names = names or [f'p{i}' for i in range(len(sizes))]
    specs = [ParamSpec(numel_elems=s, name=n) for s, n in zip(sizes, names, strict=True)]
    return record(as_saved(plan_layout(specs, **kwargs)))


def differs(format_name: str, saved: StateLayout, current: StateLayout) -> str:
    return compare(format_name, saved, current).difference


SIZES = [200, 100, 64, 128, 100]
FORWARD = {'schema_version': 1, 'param_order': 'forward'}


def test_the_number_of_ranks_and_end_pads_do_not_matter() -> None:
    two = planned(SIZES, bucket_size_elems=150, dp_size=2)
    for other in (
        planned(SIZES, bucket_size_elems=150, dp_size=3),
        planned(SIZES, bucket_size_elems=150, dp_size=2, high_busbw=True),
    ):
        assert differs(DP_RESHARDABLE, two, other) == differs(DP_ZERO, two, other) == ''


def test_order_matters_to_both_and_is_told_by_name() -> None:
    same_sizes = [128] * 3
    reverse = planned(same_sizes, bucket_size_elems=100)
    forward = planned(same_sizes, bucket_size_elems=100, config=FORWARD)
    for format_name in (DP_RESHARDABLE, DP_ZERO):
        assert differs(format_name, reverse, forward) == (
            f'buffer 0 {DTYPES}: parameter 0 in layout order is p2 (128 elements) in the checkpoint and '
            'p0 (128 elements) here'
        )
    for format_name in ('fully_reshardable', 'fully_sharded_model_space'):
        assert differs(format_name, reverse, forward) == ''


def test_cuts_matter_to_one_and_to_the_other_through_start_pads() -> None:
    even, odd = [128, 64, 192], [100, 100, 100]
    for sizes in (even, odd):
        whole, cut = planned(sizes), planned(sizes, bucket_size_elems=50)
        found = differs(DP_RESHARDABLE, whole, cut)
        assert 'only this run cuts between p2 and p1 (1 buckets in the checkpoint, 3 here)' in found
        assert 'only the checkpoint cuts' in differs(DP_RESHARDABLE, cut, whole)
    assert differs(DP_ZERO, planned(even), planned(even, bucket_size_elems=50)) == ''
    found = differs(DP_ZERO, planned(odd), planned(odd, bucket_size_elems=50))
    assert 'p1 starts at element 128 in the checkpoint and at 100 here' in found


def test_start_pads_matter_to_both() -> None:
    saved = planned([100, 100])
    closer = planned([100, 100], config={'schema_version': 1, 'padding': 'minimal'})
    assert 'p0 starts at element 128 of bucket 0' in differs(DP_RESHARDABLE, saved, closer)
    assert 'p0 starts at element 128 in the' in differs(DP_ZERO, saved, closer)


def test_a_tied_embedding_moves_the_end_that_is_recorded() -> None:
    def layout(shared: bool, bucket_size_elems: int) -> StateLayout:
        specs = [
            ParamSpec(numel_elems=100, name='tied', shared_embedding=shared),
            ParamSpec(numel_elems=100, name='other'),
        ]
        return record(as_saved(plan_layout(specs, bucket_size_elems=bucket_size_elems)))

    found = differs(DP_RESHARDABLE, layout(False, 100), layout(True, 1000))
    assert 'bucket 0 has 100 elements without its end pad in the checkpoint and 128 here' in found


def test_buffers_are_compared_by_number_and_dtypes() -> None:
    one = as_saved(plan_layout([64]))
    other = as_saved(plan_layout([64]), '(torch.float32, torch.float32)')
    assert 'saved 1 buffers' in differs(DP_ZERO, record(one), record(one, other))
    assert 'gradient dtype' in differs(DP_ZERO, record(one), record(other))


def test_another_model_is_told_by_its_first_parameter() -> None:
    found = differs(DP_ZERO, planned([64, 128]), planned([64, 192]))
    assert 'p1 (128 elements) in the checkpoint and p1 (192 elements) here' in found
    longer, shorter = planned([64, 128, 64]), planned([128, 64], names=['p1', 'p2'])
    assert 'only the checkpoint has parameter 2, p0 (64' in differs(DP_ZERO, longer, shorter)
    assert 'only this run has parameter 2, p0 (64' in differs(DP_ZERO, shorter, longer)


def test_new_names_in_the_same_places_load_and_swapped_names_do_not() -> None:
    saved = planned([64, 64, 64], names=['a', 'b', 'c'])
    renamed = compare(DP_RESHARDABLE, saved, planned([64, 64, 64], names=['a', 'x', 'c']))
    assert renamed == ('', ('b -> x',))
    assert compare(
        DP_ZERO, saved, planned([64] * 3, names=['module.a', 'module.b', 'module.c'])
    ) == ('', ())
    assert 'is b (64' in differs(DP_ZERO, saved, planned([64, 64, 64], names=['b', 'x', 'c']))


def test_parameters_without_elements_hold_no_state() -> None:
    assert (
        differs(
            DP_RESHARDABLE, planned([64, 0, 64], ['a', 'z', 'b']), planned([64, 64], ['a', 'b'])
        )
        == ''
    )


def test_the_record_goes_through_text_and_knows_its_version() -> None:
    layout = planned(SIZES, bucket_size_elems=150)
    assert StateLayout.from_text(layout.to_text()) == layout
    summary = layout.to_text(with_buffers=False)
    assert StateLayout.from_text(summary) is None
    assert json.loads(summary)['config_hash'] == '123abc'
    assert StateLayout.from_text(json.dumps({**json.loads(layout.to_text()), 'version': 2})) is None


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    bucket=st.integers(1, 500) | st.none(),
    tied=st.sets(st.integers(0, 11)),
    dp=st.sampled_from([1, 2, 3, 8]),
)
def test_stocks_layout_follows_from_its_bucket_sizes(
    sizes: list[int], bucket: int | None, tied: set[int], dp: int
) -> None:
    """Only the sizes are in a checkpoint of stock's."""
    if not any(sizes):
        return
    specs = [
        ParamSpec(numel_elems=size, name=f'p{i}', shared_embedding=i in tied and size > 0)
        for i, size in enumerate(sizes)
    ]
    saved = as_saved(plan_layout(specs, bucket_size_elems=bucket, dp_size=dp))
    wanted = [bucket.unpadded_elems for bucket in saved.buckets]
    if any(not any(p.numel_elems for p in b.params) for b in saved.buckets):
        return  # a bucket of empty parameters has no size to tell
    found = place_as_stock([(s.name, s.numel_elems) for s in reversed(specs)], wanted)
    assert found is not None
    assert differs(DP_RESHARDABLE, record(found._replace(dtypes=DTYPES)), record(saved)) == ''


@pytest.mark.parametrize('sizes', [[99], [100, 100, 1], [228], [100], [300, 100]])
def test_sizes_that_stock_cannot_have_made(sizes: list[int]) -> None:
    assert place_as_stock([('b', 100), ('a', 200)], sizes) is None
    assert place_as_stock([('b', 100), ('a', 200)], [100, 200]) is not None


def _quantized(order: list[int], weights: list[int]) -> tuple[StateLayout, list[IndexedBuffer]]:
    """Parameters 0 to 3 of 64 elements, of which ``weights`` are quantized, in layout order."""
    fp8, bf16 = '(torch.uint8, torch.float32)', '(torch.bfloat16, torch.float32)'
    buffers, indexed = [], []
    for dtypes, members in ((fp8, weights), (bf16, [i for i in range(4) if i not in weights])):
        inside = [i for i in order if i in members]
        placed = tuple(Placed(f'p{i}', 64 * at, 64) for at, i in enumerate(inside))
        buffers.append(SavedBuffer(dtypes, (SavedBucket(64 * len(inside), placed),)))
        indexed.append(IndexedBuffer(dtypes, bf16, tuple(inside)))
    return record(*buffers), indexed


def test_state_of_unquantized_parameters_is_expected_by_falling_index() -> None:
    layout, indexed = _quantized([3, 2, 1, 0], weights=[0, 2])
    expected, problem = merge_quantized(layout, indexed)
    assert problem == ''
    assert expected is not None
    assert differs(DP_ZERO, planned([64] * 4), expected) == ''
    forward = planned([64] * 4, config=FORWARD)
    assert 'parameter 0' in differs(DP_ZERO, forward, expected)


def test_unquantized_state_needs_the_reverse_order() -> None:
    expected, problem = merge_quantized(*_quantized([0, 1, 2, 3], weights=[0, 2]))
    assert expected is None
    assert 'param_order: reverse' in problem


def _fake_optimizer(config: Any, order: list[int]) -> Any:
    """Parameters 0 to 3, of which 0 and 2 are quantized, as far as the guard looks at an optimizer."""
    net = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(64)) for _ in range(4)])
    buffers = []
    for dtype, members in ((torch.uint8, (0, 2)), (torch.bfloat16, (1, 3))):
        inside = [i for i in order if i in members]
        buffers.append(
            SimpleNamespace(
                param_dtype=dtype,
                grad_dtype=torch.float32,
                params=[net[i].bfloat16() for i in inside[::-1]],
                param_indices=inside[::-1],
                buckets=[SimpleNamespace(offset=0, numel_unpadded=128)],
            )
        )
        buffers[-1].param_index_map = {
            param: (64 * at, 64 * at + 64, 0) for at, param in enumerate(buffers[-1].params[::-1])
        }
    named = {
        str(i): p
        for buffer in buffers
        for i, p in zip(buffer.param_indices, buffer.params, strict=True)
    }
    chunk = SimpleNamespace(
        runtime=Runtime(load_config(config)),
        module=SimpleNamespace(named_parameters=lambda: sorted(named.items())),
    )
    return _Fake(model_chunks=[chunk], buffers=buffers)


class _Fake(SimpleNamespace):
    __hash__ = object.__hash__


def test_unquantized_state_is_loaded_into_quantized_parameters_in_reverse_order_only() -> None:
    """Upstream splits it by parameter index (``split_state_dict_if_needed``)."""
    bf16 = (torch.bfloat16, torch.float32)
    optimizer = _fake_optimizer('upstream', [3, 2, 1, 0])
    guard = LayoutGuard(optimizer)

    def found(guard: LayoutGuard, saved: StateLayout | None, dtypes: Any = bf16) -> str:
        state: dict[Any, Any] = {'buckets_coalesced': True, 0: {dtypes: {}}}
        if saved is not None:
            state['megatron_buffer_layout'] = {'record': saved.to_text()}
        return guard.dp_zero_difference(DP_ZERO, state)

    def names(order: str) -> StateLayout:
        return planned(
            [64] * 4, names=list('0123'), config={'schema_version': 1, 'param_order': order}
        )

    assert found(guard, None) == ''
    assert found(guard, names('reverse')) == ''
    assert 'parameter 0 in layout order is 0' in found(guard, names('forward'))
    other = _fake_optimizer(FORWARD, [0, 1, 2, 3])
    for saved in (None, names('reverse'), names('forward')):
        assert 'needs param_order: reverse' in found(LayoutGuard(other), saved)
    same = found(LayoutGuard(other), LayoutGuard(other).layout, (torch.uint8, torch.float32))
    assert same == '', 'state of quantized parameters is not split'


def test_a_refusal_names_both_configs_and_what_to_do() -> None:
    text = refusal(
        DP_RESHARDABLE, 'the difference', record(config='old.yaml'), record(config='new.yaml')
    )
    assert 'dp_reshardable holds every bucket as it lies in memory' in text
    for part in (
        'first difference: the difference',
        'saved under: old.yaml (hash 123abc: upstream)',
        'this run: new.yaml (hash 123abc: upstream)',
        '--dist-ckpt-optim-fully-reshardable',
        'checkpoint.layout_guard: false',
    ):
        assert part in text


# On two ranks -------------------------------------------------------------------------------------

SAME = Bag(sizes=(128, 128, 128), dtype=torch.bfloat16)
F7 = Bag(sizes=(200, 100))
FOUR = (100, 200, 100, 100)
ZERO = DP_ZERO
UNGUARDED = {**FORWARD, 'checkpoint': {'layout_guard': False}}
LONG_STARTS = {'schema_version': 1, 'padding': {'name': 'megatron', 'param_start_elems': 128}}
LONG_ENDS = {'schema_version': 1, 'padding': {'name': 'megatron', 'bucket_end_elems': 512}}


def _pair(
    bag: Bag, saved: Any, loaded: Any, format_name: str = DP_RESHARDABLE, other: Any = None
) -> list[Hop]:
    return [
        Hop(bag=bag, arm=saved, format=format_name),
        Hop(bag=other or bag, arm=loaded, format=format_name),
    ]


REFUSED: dict[str, tuple[list[Hop], str]] = {
    'order': (_pair(SAME, 'upstream', FORWARD), 'parameter 0 in layout order is p2'),
    'order back': (_pair(SAME, FORWARD, 'upstream'), 'parameter 0 in layout order is p0'),
    "order, stock's state": (_pair(SAME, 'stock', FORWARD), 'saved under: stock Megatron-Core'),
    'start pads': (
        _pair(Bag(sizes=(64, 64), bucket_size=None), 'upstream', LONG_STARTS),
        'p0 starts at element 64 of bucket 0',
    ),
    'more cuts': (
        _pair(F7, 'upstream', 'upstream', other=Bag(bucket_size=None)),
        'only the checkpoint cuts between p1 and p0 (2 buckets in the checkpoint, 1 here)',
    ),
    'fewer cuts': (
        _pair(Bag(bucket_size=None), 'upstream', 'upstream', other=F7),
        'only this run cuts between p1 and p0',
    ),
    'other cuts': (
        _pair(
            Bag(sizes=FOUR, bucket_size=150),
            'stock',
            'upstream',
            other=Bag(sizes=FOUR, bucket_size=350),
        ),
        'only the checkpoint cuts between p2 and p1 (3 buckets in the checkpoint, 2 here)',
    ),
    'dp_zero order': (_pair(SAME, 'upstream', FORWARD, ZERO), 'parameter 0 in layout order is p2'),
    "dp_zero order, stock's state": (_pair(SAME, 'stock', FORWARD, ZERO), 'stock Megatron-Core'),
    'dp_zero cuts with pads': (
        _pair(F7, 'upstream', 'upstream', ZERO, Bag(bucket_size=None)),
        'p0 starts at element 100 in the checkpoint and at 128 here',
    ),
}
LOADED: dict[str, list[Hop]] = {
    'end pads': _pair(F7, 'upstream', LONG_ENDS),
    "stock's state": _pair(SAME, 'stock', 'upstream'),
    "stock's state, end pads": _pair(F7, 'stock', LONG_ENDS),
    'dp_zero to stock': _pair(F7, 'upstream', 'stock', ZERO),
    "dp_zero, stock's state": _pair(F7, 'stock', 'upstream', ZERO),
    'dp_zero cuts without pads': _pair(
        SAME,
        'upstream',
        'upstream',
        ZERO,
        Bag(sizes=SAME.sizes, dtype=SAME.dtype, bucket_size=None),
    ),
    "dp_zero cuts without pads, stock's state": _pair(
        SAME, 'stock', {'schema_version': 1, 'bucketing': {'name': 'count', 'num_buckets': 2}}, ZERO
    ),
}
WRONG: dict[str, list[Hop]] = {
    'to stock': _pair(SAME, FORWARD, 'stock'),
    'unguarded': _pair(SAME, 'upstream', UNGUARDED),
    'dp_zero unguarded': _pair(SAME, 'upstream', UNGUARDED, ZERO),
}


@pytest.fixture(scope='module')
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Ended]]]:
    """How all of them ended, by rank."""
    refused = {name: hops for name, (hops, _) in REFUSED.items()}
    folder = str(tmp_path_factory.mktemp('guard'))
    return run_ranks(chains, 2, folder, {**refused, **LOADED, **WRONG}, timeout_s=300)


@pytest.mark.long
@pytest.mark.parametrize('name', REFUSED)
def test_refused_on_every_rank_with_the_first_difference(ended: Any, name: str) -> None:
    for rank in (0, 1):
        saved, loaded = ended[rank][name]
        assert saved.error == ''
        assert loaded.error_type == 'CheckpointLayoutError', loaded.error
        assert REFUSED[name][1] in loaded.error
        assert 'what to do:' in loaded.error
    assert ended[0][name][1].error == ended[1][name][1].error


@pytest.mark.long
@pytest.mark.parametrize('name', LOADED)
def test_what_the_format_does_not_depend_on_may_differ(ended: Any, name: str) -> None:
    saved, loaded = ended[0][name]
    assert (saved.error, loaded.error) == ('', '')
    assert differing(saved.state, loaded.state) == []
    assert differing(saved.end, loaded.end) == []


@pytest.mark.long
@pytest.mark.stock_fault
def test_stock_loads_another_order_into_the_wrong_parameters(ended: Any) -> None:
    saved, loaded = ended[0]['to stock']
    if loaded.error:
        pytest.skip('stock now right: it refuses another order')
    wrong = differing(saved.state, loaded.state)
    assert {name.split('/')[0] for name in wrong} == {'p0', 'p2'}
    assert {name.split('/')[1] for name in wrong} == {'param', 'exp_avg', 'exp_avg_sq'}


@pytest.mark.long
@pytest.mark.parametrize('name', ['unguarded', 'dp_zero unguarded'])
def test_the_guard_can_be_turned_off_and_then_warns(ended: Any, name: str) -> None:
    saved, loaded = ended[0][name]
    assert loaded.error == ''
    assert 'p0/exp_avg' in differing(saved.state, loaded.state)
    (warning,) = (line for line in loaded.log if 'checkpoint.layout_guard is false' in line)
    assert 'parameter 0 in layout order is p2' in warning


def _legacy(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The old files: a state_dict of one rank, and the parameters' state in a file of DP rank 0's."""
    path = str(Path(folder, 'distrib_optim.pt'))
    result: dict[str, Any] = {}
    with arm('upstream'):
        run = Run(SAME)
        run.train(0, 2)
        before = run.state()
        if (
            rank == 0
        ):  # as Megatron's legacy checkpoints are written: the other ranks do not come here
            result['state_dict'] = run.chained.state_dict()
        run.chained.save_parameter_state(path)
        dist.barrier()
        copies = [copy.deepcopy(run.sharded(Hop(), loading=True)['optimizer']['optimizer'])]
        copies.append(pickle.loads(pickle.dumps(copies[0])))
        result['copies'] = [c.megatron_buffer_guard for c in copies]
        del run
    for name, config in {'same': 'upstream', 'forward': FORWARD, 'stock': 'stock'}.items():
        with arm(config):
            run = Run(SAME)
            run.train(0, 1)
            try:
                run.chained.load_parameter_state(path)
                result[name] = differing(before, run.state())
            except Exception as error:
                result[name] = f'{type(error).__name__}: {error}'
            del run
    return result


def test_legacy_files_are_guarded_too(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(_legacy, 2, str(tmp_path))):
        assert result['same'] == []
        assert result['forward'].startswith('CheckpointLayoutError: ')
        assert 'parameter 0 in layout order is p2' in result['forward']
        assert result['stock'] == [], 'stock loads our file'
        assert result['copies'] == [None, None]
        if rank == 0:
            record_text = result['state_dict']['optimizer']['megatron_buffer_layout']
            layout = StateLayout.from_text(record_text)
            assert layout is not None
            assert layout.config == 'upstream'
            assert [p.name for b in layout.buffers[0].buckets for p in b.params] == [
                'p2',
                'p1',
                'p0',
            ]
            with contextlib.suppress(KeyError):
                torch.save(result['state_dict'], tmp_path / 'plain.pt')
                torch.load(tmp_path / 'plain.pt', weights_only=True)

"""The profile file, what is computed for it, and the orders that are taken from it."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_buffer import profile as profiles
from megatron_buffer.config_layout import RecordedOrder as RecordedOrderParams
from megatron_buffer.errors import ConfigError, LayoutError
from megatron_buffer.profile import ChunkProfile, ParamProfile, Profile, World
from megatron_buffer.record_request import RecordRequest, check_writable, requested
from megatron_buffer.strategies.recorded import RecordedOrder
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec


def param(name: str, arrival: int | None, use: int | None) -> ParamProfile:
    return ParamProfile(
        name=name,
        numel_elems=64,
        dtype='bfloat16',
        grad_arrival=arrival,
        grad_time_s=None if arrival is None else arrival / 7,
        forward_use=use,
        forward_time_s=None if use is None else use / 3,
        gradients_per_backward=float(arrival is not None),
    )


def chunk(*params: ParamProfile) -> ChunkProfile:
    return ChunkProfile(
        params=params,
        steps=5,
        ranks=2,
        clock='host',
        agreed=True,
        differing_grad_arrivals=0,
        differing_forward_uses=0,
    )


def profile(**chunks: ChunkProfile) -> Profile:
    return Profile(
        schema_version=1,
        megatron_buffer='0.1.0',
        megatron_core='0.19.2',
        created='2026-01-02T03:04:05+00:00',
        world=World(tp=1, pp=len(chunks), vpp=1, dp=2, ep=1),
        chunks={key.replace('_', '.'): value for key, value in chunks.items()},
    )


ABC = chunk(param('a', 2, 0), param('b', 0, 2), param('c', 1, 1), param('d', None, None))


@st.composite
def numberings(draw: st.DrawFn, size: int) -> list[int | None]:
    """Places 0, 1, ... of some of ``size`` parameters, in any order."""
    places = draw(st.permutations(range(draw(st.integers(0, size)))))
    return draw(st.permutations([*places, *[None] * (size - len(places))]))


@st.composite
def chunks(draw: st.DrawFn) -> ChunkProfile:
    names = draw(st.lists(st.text(min_size=1), unique=True, max_size=8))
    arrivals, uses = draw(numberings(len(names))), draw(numberings(len(names)))
    return chunk(*map(param, names, arrivals, uses))


# The file


@given(st.dictionaries(st.sampled_from(['pp0_vp0', 'pp0_vp1', 'pp1_vp0']), chunks()))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, made: dict[str, ChunkProfile]
) -> None:
    path = str(tmp_path_factory.mktemp('profile') / 'p.json')
    profiles.write_profile(path, profile(**made))
    assert profiles.load_profile(path) == profile(**made)


@given(st.dictionaries(st.sampled_from(['pp0.vp0', 'pp0.vp1']), chunks()))
def test_chunks_survive_the_way_between_ranks(made: dict[str, ChunkProfile]) -> None:
    assert profiles.load_chunks(profiles.dump_chunks(made)) == made


def test_a_line_for_each_parameter(tmp_path: Path) -> None:
    path = tmp_path / 'p.json'
    profiles.write_profile(str(path), profile(pp0_vp0=ABC))
    lines = [line for line in path.read_text().splitlines() if '"name"' in line]
    assert [json.loads(line.strip().rstrip(',]}') + '}')['name'] for line in lines] == list('abcd')


def test_a_file_is_replaced_in_one_step_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'p.json'
    path.write_text('old')

    def fail(source: str, target: str) -> None:
        raise OSError('no space left')

    with monkeypatch.context() as patch:
        patch.setattr(os, 'replace', fail)
        with pytest.raises(OSError, match='no space left'):
            profiles.write_profile(str(path), profile(pp0_vp0=ABC))
    assert path.read_text() == 'old'
    assert os.listdir(tmp_path) == ['p.json']
    profiles.write_profile(str(path), profile(pp0_vp0=ABC))
    assert os.listdir(tmp_path) == ['p.json']
    (tmp_path / 'plain').write_text('')
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / 'plain').stat().st_mode)


def change(plain: dict[str, Any], path: str, value: Any) -> str:
    *folders, last = path.split('/')
    inner: Any = plain
    for folder in folders:
        inner = inner[int(folder) if folder.isdecimal() else folder]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(plain)


@pytest.mark.parametrize(
    ('path', 'value', 'message'),
    [
        ('schema_version', None, 'has no schema_version'),
        ('schema_version', 2, 'has schema_version 2, and this megatron-buffer reads 1'),
        ('world/tp', 'two', 'world.tp: Input should be a valid integer'),
        ('world', None, 'world: Field required'),
        ('chunks/pp0.vp0/params/1/grad_arrival', -1, 'chunks.pp0.vp0.params.1.grad_arrival: '),
        ('chunks/pp0.vp0/params/1/grad_arrival', 2, 'grad_arrival must number the parameters'),
        ('chunks/pp0.vp0/params/2/forward_use', 7, 'forward_use must number the parameters'),
        ('chunks/pp0.vp0/params/1/name', 'a', 'holds the parameter a twice'),
        ('chunks/pp0.vp0/params/0/speed', 1, 'chunks.pp0.vp0.params.0.speed: '),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, path: str, value: Any, message: str) -> None:
    plain = json.loads(profiles.dump_profile(profile(pp0_vp0=ABC)))
    file = tmp_path / 'p.json'
    file.write_text(change(plain, path, value))
    with pytest.raises(ConfigError) as caught:
        profiles.load_profile(str(file))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f'param_order.profile: {file} ')
    assert caught.value.yaml_path == 'param_order.profile'


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (None, 'no such file'),
        (b'{', 'is not JSON'),
        (b'[1]', 'no schema_version'),
        (b'\xff', 'JSON'),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / 'p.json'
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        RecordedOrder(RecordedOrderParams(profile=str(file)))
    with pytest.raises(ConfigError, match='cannot be read'):
        RecordedOrder(RecordedOrderParams(profile=str(tmp_path)))


# What is asked for


def test_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('MEGATRON_BUFFER_RECORD', raising=False)
    assert requested() is None
    monkeypatch.setenv('MEGATRON_BUFFER_RECORD', 'p.json')
    assert requested() == RecordRequest(path=str(tmp_path / 'p.json'), steps=5)
    monkeypatch.setenv('MEGATRON_BUFFER_RECORD_STEPS', '1')
    assert requested() == RecordRequest(path=str(tmp_path / 'p.json'), steps=1)
    for wrong in ('0', '-1', 'x', '1.5', '²'):
        monkeypatch.setenv('MEGATRON_BUFFER_RECORD_STEPS', wrong)
        with pytest.raises(ConfigError, match='MEGATRON_BUFFER_RECORD_STEPS is'):
            requested()


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(str(tmp_path / 'new.json'))
    with pytest.raises(ConfigError, match='it is a folder'):
        check_writable(str(tmp_path))
    with pytest.raises(ConfigError, match='does not exist; make it first'):
        check_writable(str(tmp_path / 'x' / 'p.json'))
    monkeypatch.setattr(os, 'access', lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match='may not be written to'):
        check_writable(str(tmp_path / 'p.json'))


# What is computed


@given(st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, 2.0]))), st.randoms())
def test_places_are_dense_by_score_then_name(
    scores: list[float | None], order: random.Random
) -> None:
    names = [f'p{i}' for i in range(len(scores))]
    order.shuffle(names)
    places = profiles.dense_positions(scores, names)
    for mine, place in zip(scores, places, strict=True):
        assert (mine is None) == (place is None)
    seen = {p: (scores[i], names[i]) for i, p in enumerate(places) if p is not None}
    assert sorted(seen) == list(range(len(seen)))
    assert [seen[p] for p in sorted(seen)] == sorted(seen.values())


# The strategy


def strategy(tmp_path: Path, made: Profile, **params: Any) -> RecordedOrder:
    path = tmp_path / 'p.json'
    profiles.write_profile(str(path), made)
    return RecordedOrder(RecordedOrderParams(profile=str(path), **params))


def specs(names: str) -> list[ParamSpec]:
    return [ParamSpec(numel_elems=64, name=name) for name in names]


def names_in(order: RecordedOrder, names: str, **buffer: Any) -> str:
    return ''.join(names[i] for i in order.layout_order(specs(names), BufferTraits(**buffer)))


def test_the_order_of_gradients_and_of_forward(tmp_path: Path) -> None:
    other = chunk(param('a', 0, 0), param('b', 1, 1))
    made = profile(pp0_vp0=ABC, pp1_vp2=other)
    by_grad = strategy(tmp_path, made)
    assert by_grad.needs_names
    assert names_in(by_grad, 'abcd') == 'bcad'
    assert names_in(by_grad, 'dca') == 'cad'  # another buffer holds b
    assert names_in(by_grad, 'ab', pp_rank=1, vp_stage=2) == 'ab'
    by_forward = strategy(tmp_path, made, layout_by='forward_use')
    assert names_in(by_forward, 'abcd') == 'bcad'
    assert names_in(by_forward, 'ab', pp_rank=1, vp_stage=2) == 'ba'
    nameless = [ParamSpec(numel_elems=1)] * 3
    assert list(by_grad.layout_order(nameless, BufferTraits(pp_rank=9))) == [2, 1, 0]


@given(data=st.data(), by=st.sampled_from(['grad_arrival', 'forward_use']))
def test_layouts_are_permutations_in_recorded_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, by: Any
) -> None:
    made = data.draw(chunks())
    some = data.draw(st.lists(st.sampled_from(made.params), unique=True)) if made.params else []
    order = strategy(tmp_path_factory.mktemp('p'), profile(pp0_vp0=made), layout_by=by)
    result = order.layout_order(
        [ParamSpec(numel_elems=1, name=p.name) for p in some], BufferTraits()
    )
    assert sorted(result) == list(range(len(some)))
    places = [getattr(some[i], by) for i in result]
    seen = [p for p in places if p is not None]
    assert places == [*seen, *[None] * (len(places) - len(seen))]
    assert seen == sorted(seen, reverse=by == 'forward_use')
    unseen = list(result)[len(seen) :]
    assert unseen == sorted(unseen, reverse=True)


def test_another_model_is_named(tmp_path: Path) -> None:
    order = strategy(tmp_path, profile(pp0_vp0=ABC))
    with pytest.raises(LayoutError) as caught:
        names_in(order, 'abx')
    for part in ('param_order.profile', str(tmp_path / 'p.json'), 'no parameter x', 'pp0.vp0'):
        assert part in str(caught.value)
    assert '--custom-buffer-record' in str(caught.value)
    with pytest.raises(LayoutError, match=r'no model chunk pp1.vp0 .* it holds pp0.vp0'):
        names_in(order, 'ab', pp_rank=1)


def test_the_order_of_gathers(tmp_path: Path) -> None:
    order = strategy(tmp_path, profile(pp0_vp0=ABC))
    # Forward reads a, then c, then b; d is never read. Megatron would go from the last to the first.
    assert order.gather_order([['d'], ['c'], ['a'], ['b']], 0, 0) == [2, 1, 3, 0]
    assert order.gather_order([['b', 'd'], ['c', 'a']], 0, 0) == [1, 0]
    assert order.gather_order([['d'], ['unknown']], 0, 0) == [1, 0]
    assert order.gather_order([], 0, 0) == []
    unchained = strategy(tmp_path, profile(pp0_vp0=ABC), chain_gathers=False)
    assert unchained.gather_order([['b'], ['a']], 0, 0) is None

"""Optimizer checkpoints on 1 to 4 ranks: what is saved equals memory, and any number of ranks goes on.

What stock does in the same situation is shown by the tests marked ``stock_fault``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_case import Bag, Ended, Hop, Run, arm, chains, differing, far, load_saved
from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase, compare

# UPSTREAM's F7: the second bucket follows one whose end is padded.
F7 = Bag(sizes=(200, 100), bucket_size=50)
MIXED = Bag(sizes=(100, 1, 300, 64, 7, 1, 130), bucket_size=150, dtype=torch.bfloat16)
# Both parameters of the last bucket are tiny: on 4 ranks one owns nothing but the pad between them, and
# another one nothing but the pad at the end.
TINY = Bag(sizes=(1, 1, 300), bucket_size=250)
# On 3 ranks the third owns no parameter at all, on 4 the second has only the pad between them.
FEW = Bag(sizes=(1, 1), bucket_size=None)
# The bucket before a tied embedding is recorded up to an aligned start.
TIED = Bag(sizes=(100, 100, 100), shared=1, bucket_size=None)
# A pad up to a multiple of 2**16, much of it on ranks that own a part of the bucket.
WIDE = Bag(sizes=(100, 100, 100), shared=1, bucket_size=None, high_busbw=True)
BAGS = {'f7': F7, 'mixed': MIXED, 'tiny': TINY, 'few': FEW, 'tied': TIED}
FULLY = 'fully_reshardable'
LONG_S = 400.0

SAVED_BY_TWO = {
    f'{name} {format_name}{" mem_efficient" * lean}': Hop(
        bag=bag, format=format_name, mem_efficient=lean
    )
    for name, bag in BAGS.items()
    for format_name, lean in (('dp_reshardable', False), (FULLY, False), (FULLY, True))
    if name in ('f7', 'mixed') or not lean
}
FORWARD = {'schema_version': 1, 'param_order': 'forward', 'padding': {'name': 'minimal'}}
CHAINS = {
    'stock to ours and back': [
        Hop(arm='stock', bag=MIXED),
        Hop(bag=MIXED),
        Hop(arm='stock', bag=MIXED),
    ],
    'another layout and back': [
        Hop(bag=MIXED, format=FULLY),
        Hop(bag=MIXED, arm=FORWARD, format=FULLY),
        Hop(bag=MIXED, arm='stock'),
    ],
    'wide': [Hop(bag=WIDE)] * 2,
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('checkpoints')


@pytest.fixture(scope='module')
def by_two(folder: Path) -> dict[str, list[Ended]]:
    """The runs of two ranks, as rank 0 saw them; all that is compared is the same on both."""
    named: dict[str, Any] = {name: [hop] for name, hop in SAVED_BY_TWO.items()}
    return run_ranks(chains, 2, str(folder), {**named, **CHAINS}, timeout_s=LONG_S)[0]


def _loaded_by(world_size: int, folder: Path) -> dict[str, Ended]:
    return run_ranks(load_saved, world_size, str(folder), SAVED_BY_TWO, timeout_s=LONG_S)[0]


@pytest.fixture(scope='module')
def by_one(folder: Path, by_two: Any) -> dict[str, Ended]:
    return _loaded_by(1, folder)


@pytest.fixture(scope='module')
def by_three(folder: Path, by_two: Any) -> dict[str, Ended]:
    return _loaded_by(3, folder)


@pytest.fixture(scope='module')
def by_four(folder: Path, by_two: Any) -> dict[str, Ended]:
    return _loaded_by(4, folder)


@pytest.mark.long
@pytest.mark.parametrize('name', SAVED_BY_TWO)
@pytest.mark.parametrize(
    'size',
    ['by_one', *(pytest.param(size, marks=pytest.mark.slow) for size in ('by_three', 'by_four'))],
)
def test_state_of_two_ranks_goes_on_at_another_number(
    request: pytest.FixtureRequest, by_two: Any, name: str, size: str
) -> None:
    (saved,) = by_two[name]
    loaded = request.getfixturevalue(size)[name]
    assert (saved.error, loaded.error) == ('', '')
    assert differing(saved.state, loaded.state) == []
    assert loaded.losses == pytest.approx(saved.losses, rel=1e-3)
    rounded = SAVED_BY_TWO[name].bag.dtype == torch.bfloat16  # gradients, before they are summed
    assert far(saved.end, loaded.end, atol=5e-3 if rounded else 1e-4) == []
    assert far(saved.state, saved.end, atol=1e-2), 'training on would have changed nothing'


@pytest.mark.parametrize('name', CHAINS)
def test_a_chain_of_runs_ends_where_one_run_does(by_two: Any, name: str) -> None:
    first, *others = by_two[name]
    for run in others:
        assert run.error == ''
        assert differing(first.state, run.state) == []
        assert differing(first.end, run.end) == []
        assert run.losses == first.losses


@pytest.mark.slow
def test_the_cases_are_what_they_are_meant_to_be(by_two: Any, by_four: Any) -> None:
    assert by_two['f7 fully_reshardable'][0].layout == [(0, 128, 100), (128, 256, 200)]
    assert by_four['tiny dp_reshardable'].layout == [(0, 384, 300), (384, 128, 65)]
    assert by_four['few dp_reshardable'].layout == [(0, 128, 65)]
    assert by_two['tied dp_reshardable'][0].layout == [
        (0, 128, 128),
        (128, 128, 100),
        (256, 128, 100),
    ]
    assert by_two['wide'][0].layout[0][1:] == (2**16, 128)
    forward = by_two['another layout and back'][1].layout
    assert forward[0][2] == 401
    assert forward != by_two['another layout and back'][0].layout


@pytest.mark.long
def test_nobody_is_warned_of_what_was_put_right(by_two: Any, by_one: Any) -> None:
    for ended in (by_two['f7 fully_reshardable'][0], by_one['f7 fully_reshardable']):
        said = '\n'.join(ended.log)
        assert 'padded with zeros' not in said
    if any('corrupt' in line for line in by_two['f7 fully_reshardable'][0].log):
        pytest.fail('upstream still says that it corrupts what was put right')


NEVER = {'schema_version': 1, 'checkpoint': {'repair_fully_reshardable': 'never'}}
ALWAYS = {'schema_version': 1, 'checkpoint': {'repair_fully_reshardable': 'always'}}
ARMS = {'stock': 'stock', 'auto': 'upstream', 'always': ALWAYS, 'never': NEVER}


def _f7_chains() -> dict[str, list[Hop]]:
    return {name: [Hop(bag=F7, format=FULLY, arm=a)] * 2 for name, a in ARMS.items()}


@pytest.fixture(scope='module')
def f7(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[Ended]]]:
    """F7 by the number of ranks, with every setting."""
    folder = tmp_path_factory.mktemp('f7')
    return {
        size: run_ranks(chains, size, str(folder / str(size)), _f7_chains(), timeout_s=LONG_S)[0]
        for size in (1, 4)
    }


@pytest.mark.long
@pytest.mark.parametrize(('size', 'setting'), list(itertools.product((1, 4), ('auto', 'always'))))
def test_fully_reshardable_equals_memory(f7: Any, size: int, setting: str) -> None:
    saved, loaded = f7[size][setting]
    assert (saved.error, loaded.error) == ('', '')
    assert differing(saved.state, loaded.state) == []
    assert differing(saved.end, loaded.end) == []


@pytest.mark.long
@pytest.mark.stock_fault
@pytest.mark.parametrize('size', [1, 4])
def test_stock_saves_what_is_not_in_memory(f7: Any, size: int) -> None:
    saved, loaded = f7[size]['stock']
    wrong = differing(saved.state, loaded.state)
    if not wrong:
        pytest.skip('stock now right: fully_reshardable behind a padded bucket end')
    assert wrong == ['p0/param', 'p0/exp_avg', 'p0/exp_avg_sq']
    never, loaded = f7[size]['never']
    assert differing(never.state, loaded.state) == wrong
    assert any('differ from memory' in line and 'p0' in line for line in never.log)


@pytest.mark.stock_fault
def test_stock_declares_less_than_it_saves_before_a_tied_embedding(tmp_path: Path) -> None:
    """The bucket ends at 30 and is recorded up to 64, its pad is written up to 128."""
    bag = Bag(sizes=(100, 100, 30), shared=1, bucket_size=None)
    hops = {'stock': [Hop(bag=bag, arm='stock')], 'ours': [Hop(bag=bag)] * 2}
    [ended] = run_ranks(chains, 1, str(tmp_path), hops)
    saved, loaded = ended['ours']
    assert (saved.error, loaded.error) == ('', '')
    assert saved.layout[0] == (0, 128, 64)
    assert differing(saved.state, loaded.state) == []
    if not ended['stock'][0].error:
        pytest.skip('stock now right: pads before a tied embedding')
    assert 'out of bounds' in ended['stock'][0].error


def _prepare_to_save(rank: int, world_size: int) -> str:
    """What stock says when it is asked for its sharded state, which takes no communication here."""
    with arm('stock'):
        run = Run(F7)
        run.train(0, 1)
        try:
            run.sharded(Hop(), loading=False)
        except AssertionError as error:
            return str(error)
        finally:
            del run
    return ''


@pytest.mark.stock_fault
def test_stock_cannot_save_where_a_rank_owns_only_padding() -> None:
    said = run_ranks(_prepare_to_save, 4)
    if not any(said):
        pytest.skip('stock now right: ranks that own only padding')
    assert 'empty bucket encountered' in said


def _gpt(rank: int, world_size: int, folder: str, case: Any, format_name: str) -> list[str]:
    """Stock trains a GPT and saves; ours loads, saves and trains on; stock loads that and trains on.

    Returns:
        What differs at the end from the first run, to the bit.
    """
    from tests import checkpoint_gpt

    with arm('stock'):
        whole = checkpoint_gpt.train(case, format_name, saves=f'{folder}/0')
    with arm('upstream'):
        ours = checkpoint_gpt.train(case, format_name, loads=f'{folder}/0', saves=f'{folder}/1')
    with arm('stock'):
        back = checkpoint_gpt.train(case, format_name, loads=f'{folder}/1')
    return [*compare(whole, ours), *compare(whole, back)]


GPT = {'dist_opt': True, 'dtype': 'bf16', 'overlap_grad_reduce': True}
GPT_CASES = [
    (TrainCase(pp=2, **GPT), 'dp_reshardable'),
    (TrainCase(pp=2, **GPT), FULLY),
    (TrainCase(moe=True, ep=2, **GPT), 'dp_reshardable'),
    (TrainCase(moe=True, ep=2, **GPT), FULLY),
    (TrainCase(tp=2, sp=True, **GPT), 'dp_reshardable'),
    (TrainCase(pp=2, vpp=2, layers=4, micro_batches=4, **GPT), 'dp_reshardable'),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ('case', 'format_name'),
    [
        pytest.param(case, name, id=f'{case} {name}', marks=[pytest.mark.slow] if i else [])
        for i, (case, name) in enumerate(GPT_CASES)
    ],
)
def test_a_gpt_goes_from_stock_to_ours_and_back(
    tmp_path: Path, case: TrainCase, format_name: str
) -> None:
    """Each pipeline stage, and dense and expert optimizers, compare with a record of their own."""
    assert run_ranks(_gpt, 2, str(tmp_path), case, format_name, timeout_s=LONG_S) == [[], []]

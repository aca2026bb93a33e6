"""Configs that nobody chose: 200 of them in which all pairs of choices meet train as they should.

Each trains the tiny GPT for three steps of three micro-batches, among other things with tied embeddings over
two pipeline stages and with experts on two ranks. Where one process can hold the model the reference is an
unwrapped copy that sees every rank's data, else stock Megatron-Core in the same processes.
"""

from __future__ import annotations

import fnmatch
import functools
import gc
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_buffer.config import AXES, load_config
from megatron_buffer.config_compat import incompatibilities
from tests.covering import Choice, Row, covering_rows, pairs_of, possible_pairs
from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase

COUNT, BY_DEFAULT = 200, 12
ROWS_AT_ONCE = 25
PROFILE = 'PROFILE'  # stands for the path of a recorded profile
NARROW_RTOL = 2.0**-6
NORMS = '*layernorm*'

# ------------------------------------------------------------------ what can be chosen

VALUES: dict[str, dict[str, Any]] = {
    'buffer_grouping': {
        'upstream': 'upstream',
        'grad_dtype_rules': {
            'name': 'grad_dtype_rules',
            'rules': [{'pattern': NORMS, 'grad_dtype': 'bf16'}],
        },
    },
    'param_order': {
        'reverse': 'reverse',
        'forward': 'forward',
        'random': {'name': 'random', 'seed': 11},
        'recorded': {'name': 'recorded', 'profile': PROFILE},
        'recorded, forward_use': {
            'name': 'recorded',
            'profile': PROFILE,
            'layout_by': 'forward_use',
            'chain_gathers': False,
        },
    },
    'bucketing': {
        'fixed_size': 'fixed_size',
        'fixed_size, 3000': {'name': 'fixed_size', 'bucket_size_elems': 3000},
        'count': {'name': 'count', 'num_buckets': 4},
        'first_last': {'name': 'first_last', 'first_size_elems': 500, 'last_size_elems': 900},
        'balanced': 'balanced',
        'per_module': 'per_module',
        'explicit': {'name': 'explicit', 'boundaries': ['*linear_fc1.weight', '*proj.bias']},
        'time_optimal': {'name': 'time_optimal', 'profile': PROFILE},
    },
    'bucket_isolation': {
        'shared_embedding': 'shared_embedding',
        'patterns': {'name': 'patterns', 'patterns': ['*linear_qkv.weight', '*router*']},
    },
    'padding': {
        'megatron': 'megatron',
        'megatron, 32 and 2': {'name': 'megatron', 'param_start_elems': 32, 'bucket_end_elems': 2},
        'byte_aligned': 'byte_aligned',
        'minimal': 'minimal',
    },
    'bucket_groups': {name: name for name in AXES['bucket_groups'].strategies},
    'readiness': {
        'golden_lazy': 'golden_lazy',
        'golden_static': 'golden_static',
        'golden_checked': 'golden_checked',
        'golden_checked, error': {'name': 'golden_checked', 'on_late': 'error'},
        'deferred': 'deferred',
    },
    'dispatch_order': {'arrival': 'arrival', 'in_order': 'in_order'},
    'unused_params': {'upstream': 'upstream', 'error': 'error', 'zero_fill': 'zero_fill'},
    'scaling': {'prescale': 'prescale', 'average': 'average', 'shard_postscale': 'shard_postscale'},
    'accumulation': {name: name for name in AXES['accumulation'].strategies},
    'grad_reduce': {
        'upstream': 'upstream',
        'all_reduce': 'all_reduce',
        'reduce_scatter': 'reduce_scatter',
        'a2a_fp32_sum': 'a2a_fp32_sum',
        'a2a_fp32_sum, bf16': {'name': 'a2a_fp32_sum', 'wire_dtype': 'bf16'},
    },
    'param_gather': {'upstream': 'upstream', 'eager': 'eager', 'per_dtype': 'per_dtype'},
    'finalize': {
        'upstream': 'upstream',
        'steps': {'name': 'steps', 'options': {'non_tp_grads': {'chunk_bytes': 256}}},
    },
}
"""A few values of every strategy, by axis and a short name."""
NEEDS_CUDA = {('scaling', 'premul_sum')}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    'dp2': (2, {}),
    'dp4': (4, {}),
    'pp2': (4, {'pp': 2}),
    'ep2': (4, {'moe': True, 'ep': 2}),
    'pp2 ep2': (4, {'pp': 2, 'moe': True, 'ep': 2}),
}
"""Ranks and parallelism of the model."""
NO, YES = 'no', 'yes'
SETTINGS: dict[str, list[str]] = {
    'layout': list(LAYOUTS),
    'tied': [YES, NO],
    'dist_opt': [YES, NO],
    'overlap_grad_reduce': [YES, NO],
    'overlap_param_gather': [YES, NO],
    'average_in_collective': [YES, NO],
    'align': [YES, NO],
    'bucket_size': ['2000', '1', 'none'],
}
FACTORS: dict[str, list[str]] = {
    **SETTINGS,
    **{axis: list(values) for axis, values in VALUES.items()},
}


@functools.cache
def allowed(one: Choice, other: Choice) -> bool:
    """What the config's own table does not rule out, nor Megatron's flags."""
    pair = {one, other}
    if ('overlap_param_gather', YES) in pair and ('dist_opt', NO) in pair:
        return False  # nothing is gathered then
    if ('dist_opt', NO) in pair and ('buffer_grouping', 'grad_dtype_rules') in pair:
        return False  # then a parameter's .grad is its main_grad, and must have its dtype
    sharding = {('grad_reduce', name) for name in VALUES['grad_reduce'] if _shards(name)}
    if ('dist_opt', NO) in pair and pair & sharding:
        return False  # nobody owns a shard then
    if ('average_in_collective', YES) in pair and ('scaling', 'shard_postscale') in pair:
        return False  # two places that divide
    chosen = {axis: VALUES[axis][name] for axis, name in pair if axis in VALUES}
    return not incompatibilities({axis: _params(axis, str(said)) for axis, said in chosen.items()})


def _shards(name: str) -> bool:
    return name.startswith(('reduce_scatter', 'a2a'))


@functools.cache
def _params(axis: str, said: str) -> Any:
    """The parameters that a value of ``VALUES`` stands for."""
    value = next(value for value in VALUES[axis].values() if str(value) == said)
    return getattr(load_config({axis: value}), axis)


ROWS = covering_rows(FACTORS, allowed, at_least=COUNT)


def config_of(row: Row, profile: str) -> dict[str, Any]:
    """The config of a row, as YAML would give it."""
    config = {axis: VALUES[axis][row[axis]] for axis in VALUES}
    for axis in ('param_order', 'bucketing'):
        if PROFILE in str(config[axis]):
            config[axis] = {**config[axis], 'profile': profile}
    return config


def case_of(row: Row) -> TrainCase:
    """What is trained in a row."""
    sized = row['bucketing'] == 'fixed_size, 3000'  # another size in the flags would be a conflict
    size = None if sized or row['bucket_size'] == 'none' else int(row['bucket_size'])
    flags = {name: row[name] == YES for name in SETTINGS if SETTINGS[name] == [YES, NO]}
    return TrainCase(
        bucket_size=size, steps=3, micro_batches=3, **flags, **LAYOUTS[row['layout']][1]
    )


def told(row: Row) -> str:
    """A row in one line: what is not each factor's first choice."""
    return (
        ', '.join(f'{k}: {v}' for k, v in row.items() if v != FACTORS[k][0]) or 'all first choices'
    )


# ------------------------------------------------------------------ in each rank


def train_rows(rank: int, world_size: int, rows: Sequence[Row], folder: str) -> list[list[str]]:
    """What is wrong with each row; all of them have the same layout and the same model."""
    from megatron.core import parallel_state

    import megatron_buffer
    from megatron_buffer import runtime as runtime_module
    from megatron_buffer.testing.tiny_gpt import init_parallel, seed_everything, train_in_scope

    logging.getLogger('megatron_buffer').setLevel(logging.ERROR)
    base = case_of({**rows[0], 'bucketing': 'fixed_size', 'bucket_size': '2000'})
    wanted = reference(base)
    gc.collect()
    found: list[list[str]] = []
    profile = f'{folder}/profile.json'
    if any(PROFILE in str(config_of(row, PROFILE)) for row in rows):
        record(base, profile)
    with megatron_buffer.activated('upstream'):
        init_parallel(base)
        for row in rows:
            config = config_of(row, profile)
            try:
                runtime_module.set_installed(runtime_module.Runtime(load_config(config)))
                seed_everything(base)
                result = train_in_scope(case_of(row), True)
            except Exception as error:
                error.add_note(f'in the row {told(row)}, which is {config} with {case_of(row)}')
                raise
            found.append(list(differences(row, result, wanted)))
            del result
            gc.collect()
    parallel_state.destroy_model_parallel()
    return found


def reference(case: TrainCase) -> dict[str, Any]:
    """The oracle's results where one process can hold the model, else stock's."""
    from dataclasses import replace

    from megatron.core import parallel_state

    from megatron_buffer.testing.tiny_gpt import init_parallel, oracle, train

    if case.pp > 1 or case.moe:
        plain = {'overlap_grad_reduce': False, 'overlap_param_gather': False}
        return train(replace(case, dist_opt=True, **plain), whole_grads=True)
    init_parallel(case)
    result = oracle(case)
    parallel_state.destroy_model_parallel()
    return {
        'losses': result.losses,
        'grad_norms': result.grad_norms,
        'params': result.params,
        'whole_grads': [{name: grad.flatten() for name, grad in sorted(result.grads.items())}],
    }


def record(case: TrainCase, path: str) -> None:
    """Writes a profile of the model as --custom-buffer-record does."""
    from megatron_buffer.testing.tiny_gpt import train

    os.environ.update(MEGATRON_BUFFER_RECORD=path, MEGATRON_BUFFER_RECORD_STEPS='1')
    train(case, 'upstream')
    del os.environ['MEGATRON_BUFFER_RECORD'], os.environ['MEGATRON_BUFFER_RECORD_STEPS']


def differences(row: Row, result: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """How a row's results differ from the reference, beyond what its dtypes explain."""
    from megatron_buffer.testing.runtime_cases import gpt_problems

    # A reference of one process has the gradients of the first step only.
    steps = len(wanted['whole_grads'])
    result = {**result, 'whole_grads': result['whole_grads'][:steps]}
    if row['grad_reduce'].endswith('bf16'):
        yield from map(str, gpt_problems(result, wanted, NARROW_RTOL))
        return
    if row['buffer_grouping'] == 'upstream':
        yield from map(str, gpt_problems(result, wanted, 2e-6))
        return
    yield from map(str, gpt_problems(result, wanted, NARROW_RTOL))
    exact, exact_wanted = (
        {**found, 'whole_grads': [_without(g, NORMS) for g in found['whole_grads'][:1]]}
        for found in (result, wanted)
    )
    for what, detail in gpt_problems(exact, exact_wanted, 2e-6):
        if what == 'gradients are right':
            yield f'{what}: {detail}'


def _without(grads: dict[str, Any], pattern: str) -> dict[str, Any]:
    return {name: grad for name, grad in grads.items() if not fnmatch.fnmatchcase(name, pattern)}


# ------------------------------------------------------------------ the tests


def batches(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that can share processes, by a name."""

    def kind(row: Row) -> tuple[str, str]:
        return row['layout'], row['tied']

    made: list[tuple[str, list[Row]]] = []
    for (layout, tied), of_kind in itertools.groupby(sorted(rows, key=kind), key=kind):
        members = list(of_kind)
        for start in range(0, len(members), ROWS_AT_ONCE):
            name = f'{layout}{" tied" if tied == YES else ""} {start // ROWS_AT_ONCE}'
            made.append((name, members[start : start + ROWS_AT_ONCE]))
    return made


def check(rows: list[Row]) -> None:
    world_size, _ = LAYOUTS[rows[0]['layout']]
    with tempfile.TemporaryDirectory(prefix='rows-') as folder:
        of_ranks = run_ranks(train_rows, world_size, rows, folder, timeout_s=280)
    wrong = [
        f'rank {rank}, {told(row)}: {problem}'
        for rank, found in enumerate(of_ranks)
        for row, problems in zip(rows, found, strict=True)
        for problem in problems
    ]
    assert not wrong, '\n'.join(wrong)


def by_default(rows: Sequence[Row]) -> list[Row]:
    """The first rows of two layouts: few processes, many choices."""
    taken: list[Row] = []
    for layout, tied in (('dp2', NO), ('pp2 ep2', YES)):
        of_kind = [row for row in rows if (row['layout'], row['tied']) == (layout, tied)]
        taken += of_kind[: BY_DEFAULT // 2]
    return taken


DEFAULT = by_default(ROWS)
REST = [row for row in ROWS if row not in DEFAULT]


@pytest.mark.long
@pytest.mark.parametrize('rows', [pytest.param(rows, id=name) for name, rows in batches(DEFAULT)])
def test_some_random_configs_train_right(rows: list[Row]) -> None:
    check(rows)


@pytest.mark.slow
@pytest.mark.parametrize('rows', [pytest.param(rows, id=name) for name, rows in batches(REST)])
def test_all_random_configs_train_right(rows: list[Row]) -> None:
    check(rows)


def test_all_pairs_of_choices_meet(record_property: Any) -> None:
    """Every built strategy is among the choices, and every possible pair of choices is in some row."""
    assert len(ROWS) >= COUNT
    assert len({tuple(row.items()) for row in ROWS}) == len(ROWS)
    for key, axis in AXES.items():
        named = {_params(key, str(value)).name for value in VALUES[key].values()}
        missing = set(axis.strategies) - named - {name for at, name in NEEDS_CUDA if at == key}
        assert not missing, f'{key}: give {missing} a value in VALUES'
    wanted, met = possible_pairs(FACTORS, allowed), pairs_of(ROWS)
    assert wanted == met
    lines = []
    for a, b in itertools.combinations(FACTORS, 2):
        count = sum({factor for factor, _ in pair} == {a, b} for pair in met)
        lines.append(f'{a} x {b}: {count} of {len(FACTORS[a]) * len(FACTORS[b])}')
    covered = f'{len(met)} pairs in {len(ROWS)} configs ({len(pairs_of(DEFAULT))} by default)'
    record_property('pairs', covered)
    print(covered, *lines, sep='\n')


def test_rows_load_as_configs() -> None:
    """No row is refused by the config's own table; the profile is not read before it is used."""
    for row in ROWS:
        load_config(config_of(row, 'profile.json'))
    assert not Path('profile.json').exists()

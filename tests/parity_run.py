"""Stock and ours train the same cases in the same processes; what the parity tests have in common.

The cases of one call share their process groups and one installation, which take longer than a case.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from tests.harness import run_ranks
from tests.tiny_gpt import TrainCase, compare, flat_tensors, init_parallel, seed_everything
from tests.tiny_gpt import train_in_scope as train

SMALL_BUCKET_ELEMS = 2000
FULL = {
    'bucket_size': SMALL_BUCKET_ELEMS,
    'dist_opt': True,
    'overlap_grad_reduce': True,
    'overlap_param_gather': True,
    'dtype': 'bf16',
}
"""Everything overlapped, several buckets."""

Alter = Callable[[Any], None]
Observe = Callable[[Any], Any]


def full(**fields: Any) -> TrainCase:
    """A case with everything overlapped."""
    return TrainCase(**{**FULL, **fields})


def check(
    world_size: int,
    cases: Sequence[TrainCase],
    configs: Sequence[Any] = ('upstream',),
    *,
    alter: Alter | Sequence[Alter | None] | None = None,
    observe: Observe | None = None,
    prepare: Callable[[], None] | None = None,
    same_layout: bool = True,
    timeout_s: float = 280,
) -> list[list[dict[str, Any]]]:
    """Stock against ours: not a bit differs.

    Args:
        world_size: Number of ranks.
        cases: Cases of one layout of process groups.
        configs: Ours, each of them.
        alter: Changes each bare model chunk before it is wrapped; one for all cases, or one for each.
        observe: Shows something of a run at its end.
        prepare: Called first on each rank; its process has nothing else to do.
        same_layout: The buckets have to be the same too.
        timeout_s: For all cases together.

    Returns:
        Per case, per rank: `observed` and `updated` of stock and of each of ours, stock's `layout` and `saved`, and
        `changed`: what stock's result differs in from that of the first case, so that an option can be
        seen to have an effect.
    """
    assert len({case.groups for case in cases}) == 1, 'cases of one call share their process groups'
    assert not any(case.rs_fp32_accum for case in cases[:-1]), 'stock keeps it for the process'
    alters = list(alter) if isinstance(alter, Sequence) else [alter] * len(cases)
    how = (alters, observe, prepare)
    ranks = run_ranks(_parity, world_size, list(cases), list(configs), *how, timeout_s=timeout_s)
    found = [list(results) for results in zip(*ranks, strict=True)]
    for case, results in zip(cases, found, strict=True):
        _judge(case, results, same_layout)
    return found


def everywhere(results: list[dict[str, Any]]) -> Any:
    """What was observed, in stock and in ours and on every rank the same."""
    seen = [value for one in results for value in one['observed']]
    assert all(value == seen[0] for value in seen), seen
    return seen[0]


def _judge(case: TrainCase, results: list[dict[str, Any]], same_layout: bool) -> None:
    differ = {f'rank {r}': one['differ'] for r, one in enumerate(results) if one['differ']}
    assert not differ, f'{case}: ours differs from stock in {differ}'
    assert sum(one['tensors'] for one in results) > 50 * case.layers
    assert all(one['trained'] for one in results), f'{case}: the loss stays, or no step is made'
    assert all(made == one['updated'][0] for one in results for made in one['updated'])
    if same_layout:
        assert all(one['same_layout'] for one in results), f'{case}: the layouts differ'
    if case.overlap_grad_reduce and case.bucket_size == SMALL_BUCKET_ELEMS and case.pp == 1:
        buckets = min(sum(len(buffer['buckets']) for buffer in one['layout']) for one in results)
        assert buckets > 4 // case.tp, f'{case}: {buckets} buckets show little'


def _parity(
    rank: int,
    world_size: int,
    cases: Sequence[TrainCase],
    configs: Sequence[Any],
    alters: Sequence[Alter | None],
    observe: Observe | None,
    prepare: Callable[[], None] | None,
) -> list[dict[str, Any]]:
    from megatron.core import distributed

    import megatron_buffer

    if prepare:
        prepare()

    def arm(name: str) -> list[dict[str, Any]]:
        return [
            _train(case, name, alter, observe) for case, alter in zip(cases, alters, strict=True)
        ]

    init_parallel(cases[0])
    stock = arm('stock')
    ours: dict[str, list[dict[str, Any]]] = {}
    stocks_class = distributed.DistributedDataParallel
    for config in configs:
        with megatron_buffer.activated(config):
            assert distributed.DistributedDataParallel is megatron_buffer.DistributedDataParallel
            ours[str(config)] = arm(str(config))
            gc.collect()  # activated() refuses to end while a model of ours lives
        assert distributed.DistributedDataParallel is stocks_class
    return [
        _found(stock[i], stock[0], {config: results[i] for config, results in ours.items()})
        for i in range(len(cases))
    ]


def _train(
    case: TrainCase, arm: str, alter: Alter | None, observe: Observe | None
) -> dict[str, Any]:
    seed_everything(case)
    try:
        return train(case, alter=alter, observe=observe)
    except Exception as error:
        error.add_note(f'in {arm}, case {case}')
        raise


def _found(
    stock: dict[str, Any], first: dict[str, Any], ours: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    differ = {config: compare(stock, result)[:8] for config, result in ours.items()}
    arms = [stock, *ours.values()]
    return {
        'differ': {config: names for config, names in differ.items() if names},
        'tensors': len(flat_tensors(stock)),
        'updated': [result['updated'] for result in arms],
        'same_layout': all(result['layout'] == stock['layout'] for result in ours.values()),
        'layout': stock['layout'],
        # Off the last stage of a pipeline the loss is NaN, which differs from itself.
        'trained': stock['losses'][0] != stock['losses'][-1] and any(stock['updated']),
        'changed': compare(first, stock)[:8],
        'saved': stock['saved'],
        'observed': [result.get('observed') for result in arms],
    }

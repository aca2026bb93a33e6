"""``check_layout_strategy``: everything a layout has to hold to, on paper and in Megatron's own buffers.

Upstream has no counterpart; see :mod:`megatron_buffer.testing.layout_checks` for what it stands for.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from megatron_buffer.config import BufferConfig
from megatron_buffer.errors import MegatronBufferError
from megatron_buffer.layout import LayoutStrategies
from megatron_buffer.testing.choice import LAYOUT_AXES, Choice
from megatron_buffer.testing.examples import Example, smallest
from megatron_buffer.testing.examples import examples as make_examples
from megatron_buffer.testing.group_checks import check_grouping, check_groups
from megatron_buffer.testing.harness import RanksFailed, run_ranks
from megatron_buffer.testing.layout_checks import (
    Plain,
    faults,
    lay_out,
    padding_only_shards,
    replay,
)
from megatron_buffer.testing.mount import Mounted, examples_to_mount, lay_out_and_mount
from megatron_buffer.testing.report import Report

_REPLAYED = 150


def check_layout_strategy(
    strategy: Any,
    implementation: Any = None,
    *,
    config: Any = None,
    examples: int | Sequence[Example] = 300,
    seed: int = 0,
    mount: int = 20,
) -> Report:
    """Checks that layouts are ones that Megatron-Core can work with, and that all ranks agree on.

    On paper, over many buffers: every element of every parameter exactly once, no overlap, buckets
    contiguous and numbered without gaps, equal shards, a tied embedding alone and sharded alike on both
    pipeline stages, and the same layout each time. Then in two real processes: the same layouts once more,
    with another PYTHONHASHSEED and as two ranks; and upstream's own constructors and shard maps over
    models made of such parameters.

    Args:
        strategy: A config (shipped name, path, mapping or ``BufferConfig``), or the key of an axis.
        implementation: The strategy object, if ``strategy`` is the key of an axis.
        config: With a strategy object: the config of the other axes; None is ``upstream``.
        examples: How many buffers to try on paper, or the buffers themselves.
        seed: Seed for them; the same seed tries the same ones.
        mount: How many models to build in Megatron's own buffers, in two rank processes; 0 starts none,
            and layouts are then not compared between processes either.

    Returns:
        The report. Exceptions of the strategies are in it.

    Raises:
        ConfigError: If the config is wrong.
        RegistryError: If a strategy that it names cannot be made.
    """
    choice = Choice.of(strategy, implementation, config)
    report = Report(f'layout of {choice}')
    misplaced = [axis for axis in choice.objects if axis not in LAYOUT_AXES]
    if misplaced:
        report.add(
            'the axis shapes a layout',
            f'{misplaced[0]} does not; use check_runtime_strategy for it',
        )
        return report
    tried = make_examples(examples, seed) if isinstance(examples, int) else list(examples)
    strategies = choice.layout_strategies()
    _check_on_paper(strategies, tried, report)
    check_grouping(choice.strategy('buffer_grouping'), report)
    check_groups(choice.strategy('bucket_groups'), report, count=len(tried), seed=seed)
    if report.ok:
        _note_checkpoints(strategies, tried, report)
    if mount:
        _check_in_processes(choice, tried[:_REPLAYED], mount, seed, report)
    else:
        report.notes.append('not tried in other processes, as asked for (mount=0)')
    return report


def _check_on_paper(strategies: LayoutStrategies, tried: Sequence[Example], report: Report) -> None:
    """All invariants over all examples; each broken one is reported with the smallest example."""
    first: dict[str, Example] = {}
    refused: list[str] = []
    for example in tried:
        found, refusal = _outcome(strategies, example)
        if refusal:
            refused.append(refusal)
        for what in found:
            first.setdefault(what, example)
    for what, example in first.items():
        shows: Callable[[Example], bool] = lambda e, what=what: what in _outcome(strategies, e)[0]
        example = smallest(example, shows)
        report.add(what, _outcome(strategies, example)[0][what], str(example))
    if tried and len(refused) == len(tried):
        report.add('a layout is made', f'every buffer is refused: {refused[0]}')
    else:
        report.refused += [
            f'{refused.count(text)} of {len(tried)} buffers: {text}'
            for text in dict.fromkeys(refused)
        ]
    report.checked.append(f'layouts of {len(tried)} buffers on paper')


def _outcome(strategies: LayoutStrategies, example: Example) -> tuple[dict[str, str], str]:
    """Broken invariants by name, and why the example was refused, if it was."""
    try:
        return {fault.what: fault.detail for fault in reversed(faults(example, strategies))}, ''
    except MegatronBufferError as error:
        return {}, f'{type(error).__name__}: {error}'
    except Exception as error:
        return {'a layout is made': f'{type(error).__name__}: {error}'}, ''


def _check_in_processes(
    choice: Choice, tried: Sequence[Example], count: int, seed: int, report: Report
) -> None:
    """Two ranks lay the same examples out again, and wrap models with upstream's own constructors."""
    models = examples_to_mount(count, seed)
    try:
        pickle.dumps(choice)
        of_rank = run_ranks(lay_out_and_mount, 2, choice, tried, models, timeout_s=300.0)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        report.notes.append(
            f'not tried in other processes: the strategy does not travel there ({error}). Define its '
            'class at the top of a module'
        )
        return
    except RanksFailed as error:
        report.add('a model can be wrapped', str(error))
        return
    here = replay(choice.layout_strategies(), tried)
    for rank, (there, _) in enumerate(of_rank):
        _compare_layouts(tried, here, there, rank, report)
    _compare_mounted(models, [mounted for _, mounted in of_rank], report)
    report.checked += [
        f'{len(tried)} of them again in two processes with another PYTHONHASHSEED, as ranks 0 and 1',
        f"{len(models)} models wrapped by Megatron-Core's own constructors in both",
    ]


def _compare_layouts(
    tried: Sequence[Example],
    here: Sequence[Plain | str],
    there: Sequence[Plain | str],
    rank: int,
    report: Report,
) -> None:
    for example, mine, other in zip(tried, here, there, strict=True):
        if mine != other:
            report.add(
                'the same layout in every process',
                f'rank {rank}, a process with another PYTHONHASHSEED and RANK={rank}, lays a buffer '
                f'out differently: {_first_difference(mine, other)}',
                str(example),
            )
            return


def _first_difference(mine: Plain | str, other: Plain | str) -> str:
    if isinstance(mine, str) or isinstance(other, str):
        return f'{mine if isinstance(mine, str) else "a layout"} here, {other} there'
    for a, b in zip([*mine[0], *mine[1]], [*other[0], *other[1]], strict=False):
        if a != b:
            return f'(parameter, start, end, bucket) {a} here and {b} there'
    return f'{len(mine[1])} buckets here and {len(other[1])} there'


def _compare_mounted(
    models: Sequence[Example], of_rank: Sequence[Sequence[Mounted]], report: Report
) -> None:
    """Faults of either rank, and differences between them."""
    refused: list[str] = []
    for example, first, last in zip(models, *of_rank, strict=True):
        for fault in [*first.faults, *last.faults]:
            if all(problem.what != fault.what for problem in report.problems):
                report.add(fault.what, fault.detail, str(example))
        if first.refused:
            refused.append(first.refused)
        mine, other = (
            [m.refused or 'no refusal', *m.description, 'nothing more'] for m in (first, last)
        )
        if mine != other and report.ok:
            a, b = next(pair for pair in zip(mine, other, strict=False) if pair[0] != pair[1])
            report.add(
                'the same layout on every rank', f'rank 0 has {a}; rank 1 has {b}', str(example)
            )
    if refused and len(refused) == len(models):
        report.add('a model can be wrapped', f'every model is refused: {refused[0]}')
    else:
        report.refused += [
            f'{refused.count(text)} of {len(models)} models: {text}'
            for text in dict.fromkeys(refused)
        ]


def _note_checkpoints(
    strategies: LayoutStrategies, tried: Sequence[Example], report: Report
) -> None:
    """What optimizer checkpoints of these layouts can and cannot be exchanged with stock's."""
    stock = Choice(BufferConfig()).layout_strategies()
    differs: dict[str, int] = dict.fromkeys(('order', 'cuts', 'starts', 'ends'), 0)
    idle, idle_stock, sharded = 0, 0, 0
    smallest_idle: str = ''
    for example in tried:
        if not example.dist_opt:
            continue
        try:
            ours, theirs = lay_out(example, strategies), lay_out(example, stock)
        except MegatronBufferError:
            continue
        sharded += 1
        differs['order'] += [s.param for s in ours.slots] != [s.param for s in theirs.slots]
        differs['cuts'] += {s.param: s.bucket for s in ours.slots} != {
            s.param: s.bucket for s in theirs.slots
        }
        differs['starts'] += ours.alignment.param_start_elems != theirs.alignment.param_start_elems
        differs['ends'] += ours.alignment.bucket_end_elems != theirs.alignment.bucket_end_elems
        for bucket, rank in padding_only_shards(ours):
            idle += 1
            told = f'rank {rank} of {ours.dp_size} in bucket {bucket} of {len(ours.buckets)}'
            smallest_idle = smallest_idle or told
            break
        idle_stock += any(True for _ in padding_only_shards(theirs))
    told = {
        'order': 'parameters lie in another order than stock\'s: dp_reshardable and dp_zero state '
        'would be loaded into the wrong parameters, silently in stock, and bf16 state cannot be '
        'converted to fp8 while loading; fully_reshardable is safe',
        'cuts': 'buckets are cut elsewhere than stock\'s: dp_reshardable state of one layout is '
        'refused by the other; fully_reshardable is safe',
        'starts': 'parameters start at other multiples than stock\'s: dp_reshardable and dp_zero '
        'state cannot be exchanged; fully_reshardable is safe',
        'ends': 'buckets end at other multiples than stock\'s: fully_reshardable state is right only '
        'where saving skips the pads (not in Megatron-Core up to 0.19.2 without a repair)',
    }
    for what, count in differs.items():
        if count:
            report.notes.append(f'in {count} of {sharded} sharded buffers {told[what]}')
    if idle:
        report.notes.append(
            f'in {idle} of {sharded} sharded buffers (stock: {idle_stock}) a rank owns only padding of '
            f'a bucket, such as {smallest_idle}: saving as dp_reshardable asserts there'
        )

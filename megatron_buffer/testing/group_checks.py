"""What a grouping of buckets, and a grouping of parameters into buffers, must hold to.

Stands for what ``partition_buckets`` and ``group_params_for_buffers``
(``megatron/core/distributed/param_and_grad_buffer.py``) give their callers without saying so.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_buffer.config_layout import MergeIntoLastFp8 as MergeIntoLastFp8Params
from megatron_buffer.errors import LayoutError, MegatronBufferError
from megatron_buffer.strategies.bucket_groups import BucketRef, BufferBuckets, MergeIntoLastFp8
from megatron_buffer.testing.layout_checks import Fault
from megatron_buffer.testing.report import Report

LATE = 0.25
"""Part of backward that a group may wait longer than its main bucket needs, before it counts as late."""

Case = tuple[tuple[BufferBuckets, ...], bool, bool]
"""Buffers, ``single_group``, ``one_bucket_per_group``."""


def check_groups(partition: Any, report: Report, *, count: int, seed: int) -> None:
    """Tries a bucket grouping on many sets of buffers, and says when its groups can be reduced.

    Args:
        partition: A ``BucketGrouping``.
        report: Where findings go.
        count: How many sets of buffers.
        seed: Seed for them.
    """
    rng = random.Random(seed)
    refused: dict[str, int] = {}
    wrong: dict[str, tuple[Case, str]] = {}
    cases = [_case(rng) for _ in range(count)]
    for case in cases:
        try:
            for fault in _faults(partition, case):
                known = wrong.get(fault.what)
                if known is None or _size(case) < _size(known[0]):
                    wrong[fault.what] = (case, fault.detail)
        except LayoutError as error:
            refused.setdefault(str(error), 0)
            refused[str(error)] += 1
        except Exception as error:
            wrong.setdefault('groups are made', (case, f'{type(error).__name__}: {error}'))
    for what, (case, detail) in wrong.items():
        report.add(what, detail, _told(case))
    if sum(refused.values()) == count:
        report.add('groups are made', f'every set of buffers is refused: {next(iter(refused))}')
    else:
        report.refused += [
            f'bucket groups of {times} of {count} sets of buffers: {text}'
            for text, times in refused.items()
        ]
    report.checked.append(f'bucket groups of {count} sets of buffers')
    if not wrong:
        for title, buffers, names, length in _models():
            _dispatch(partition, report, title, buffers, names, length)


def _faults(partition: Any, case: Case) -> Iterator[Fault]:
    buffers, single, one_bucket = case
    how = {'single_group': single, 'one_bucket_per_group': one_bucket}
    before = copy.deepcopy(buffers)
    groups = [list(group) for group in partition.partition(buffers, **how)]
    again = [list(group) for group in partition.partition(copy.deepcopy(before), **how)]
    if groups != again or buffers != before:
        yield Fault(
            'same buffers, same groups',
            'a second call gave other groups; DDP and DistributedOptimizer both call it',
        )
    wanted = [
        BucketRef(i, j) for i, buffer in enumerate(buffers) for j in range(buffer.num_buckets)
    ]
    given = [BucketRef(*ref) for group in groups for ref in group]
    if sorted(given) != wanted:
        missing = [tuple(ref) for ref in wanted if ref not in given]
        twice = sorted({tuple(ref) for ref in given if given.count(ref) > 1})
        foreign = [tuple(ref) for ref in given if ref not in wanted]
        yield Fault(
            'every bucket in exactly one group',
            f'as (buffer, bucket): missing {missing or "none"}, several times {twice or "none"}, '
            f'not there at all {foreign or "none"}',
        )
        return
    if any(not group for group in groups):
        yield Fault('no group is empty', f'groups of {[len(group) for group in groups]} buckets')
    if single:  # stock takes everything there, and DDP refuses what cannot work
        if not one_bucket and len(groups) > len({buffer.is_layer_wise for buffer in buffers}):
            yield Fault(
                'one group where bucketing is off',
                f'{len(groups)} groups for a chunk whose bucketing is off (single_group)',
            )
        return
    for group in groups if groups != _as_stock(case) else ():
        if len({buffers[ref[0]].is_layer_wise for ref in group}) > 1:
            yield Fault(
                'LayerWise buckets keep to themselves',
                f'the group {[tuple(ref) for ref in group]} mixes them with others; upstream decides '
                'from the first bucket of a group how all of them are gathered',
            )
            break
    if one_bucket and any(len(group) > 1 for group in groups):
        yield Fault(
            'one bucket per group where the collective takes one',
            f'groups of {[len(group) for group in groups]} buckets; split them, or raise LayoutError',
        )


def _as_stock(case: Case) -> list[list[BucketRef]] | None:
    """Stock's groups, which mix LayerWise buckets into an fp8 group; None where stock asserts."""
    buffers, single, one_bucket = case
    stock = MergeIntoLastFp8(MergeIntoLastFp8Params())
    try:
        return stock.partition(buffers, single_group=single, one_bucket_per_group=one_bucket)
    except LayoutError:
        return None


def _case(rng: random.Random) -> Case:
    buffers: list[BufferBuckets] = []
    next_index = rng.randint(4, 40)
    fp8_at = rng.choice((None, 0, 1, 2))
    for position in range(rng.randint(1, 4)):
        count = rng.randint(1, 5)
        ready = sorted((rng.randrange(next_index) for _ in range(count)), reverse=True)
        if rng.random() < 0.2:
            rng.shuffle(ready)
        is_fp8 = position == fp8_at or rng.random() < 0.05
        buffers.append(BufferBuckets(is_fp8, tuple(ready), rng.random() < 0.15))
    return tuple(buffers), rng.random() < 0.15, rng.random() < 0.15


def _size(case: Case) -> int:
    return sum(1 + buffer.num_buckets for buffer in case[0])


def _told(case: Case) -> str:
    buffers, single, one_bucket = case
    lines = [f'single_group={single}, one_bucket_per_group={one_bucket}']
    lines += [f'buffer {i}: {buffer}' for i, buffer in enumerate(buffers)]
    return '\n'.join(lines)


# ------------------------------------------------------------------ when groups can be reduced


def _models() -> Iterator[tuple[str, list[BufferBuckets], list[str], int]]:
    """An fp8 and a bf16 + fp32 transformer of 8 layers: title, buffers, their names, parameters."""
    kinds = ['bf16']  # the embedding
    for _ in range(8):
        kinds += ['bf16', 'fp8', 'fp8', 'bf16', 'fp8', 'fp8']
    kinds.append('bf16')  # the last norm
    for title, names in (('an fp8 model', ('fp8', 'bf16')), ('a bf16 model', ('bf16', 'fp32'))):
        buffers: list[BufferBuckets] = []
        for kind, name, parts in (('fp8', names[0], 4), ('bf16', names[1], 3)):
            indices = [i for i, found in enumerate(kinds) if found == kind][::-1]
            size = -(-len(indices) // parts)
            cut = [indices[at : at + size] for at in range(0, len(indices), size)]
            buffers.append(BufferBuckets(name == 'fp8', tuple(map(min, cut)), False))
        yield title, buffers, list(names), len(kinds)


def _dispatch(
    partition: Any,
    report: Report,
    title: str,
    buffers: Sequence[BufferBuckets],
    names: Sequence[str],
    length: int,
) -> None:
    """How far backward must be before each group is complete, and whether merging made it late."""
    try:
        groups = partition.partition(buffers, single_group=False, one_bucket_per_group=False)
    except MegatronBufferError as error:
        report.notes.append(f'groups of {title} are refused: {error}')
        return
    done = lambda ready_at: (length - ready_at) / length
    has_fp8 = any(buffer.is_fp8 for buffer in buffers)
    for index, group in enumerate(groups):
        ready = done(min(buffers[b].ready_at[k] for b, k in group))
        # The other buckets of an fp8 model are small; a group is judged by what weighs most in it.
        main = [(b, k) for b, k in group if buffers[b].is_fp8 or not has_fp8] or list(group)
        earliest = min(done(buffers[b].ready_at[k]) for b, k in main)
        told = ', '.join(f'{names[b]} bucket {k}' for b, k in group)
        late = ready - earliest > LATE and len(groups) > 1
        report.dispatch.append(
            f'{title}, group {index} ({told}): complete after {ready:.0%} of backward, '
            f'at the earliest {earliest:.0%}' + (', LATE' if late else '')
        )
        if late:
            report.add(
                'a group is not made to wait by what is merged into it',
                f'in {title}, group {index} ({told}) can be reduced only after {ready:.0%} of '
                f'backward; {names[main[0][0]]} bucket {main[0][1]} alone is complete after '
                f'{earliest:.0%}',
            )
    if len(groups) == 1:
        report.notes.append(
            f'{title} has one bucket group: nothing is reduced before backward ends'
        )


# ------------------------------------------------------------------ which parameters share a buffer


def check_grouping(grouping: Any, report: Report) -> None:
    """Tries a buffer grouping on every kind of parameter that Megatron has."""
    import itertools

    import torch

    from megatron_buffer.strategies.grouping import GroupKey, ParamTraits

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    names = ('', 'embedding.word_embeddings.weight', 'decoder.layers.1.mlp.router.weight')
    cases = itertools.product(names, dtypes, (False, True), (False, True), (False, True))
    count = 0
    for case in cases:
        traits = ParamTraits(*case)
        for in_fp32 in (False, True):
            count += 1
            key = GroupKey(*grouping.key(traits, in_fp32))
            if GroupKey(*grouping.key(traits, in_fp32)) != key:
                report.add('same parameter, same buffer', f'two calls differ for {traits}')
            storage = torch.uint8 if traits.has_quantized_storage else traits.dtype
            wanted = (storage, traits.is_expert_parallel, traits.is_managed_by_layer_wise_optimizer)
            if (key[0], key[2], key[3]) != wanted:
                report.add(
                    'a buffer holds parameters of one kind',
                    'the key must carry the storage dtype, and whether the parameter is '
                    f'expert-parallel and LayerWise: expected {wanted} in {key}',
                    str(traits),
                )
            if not key.grad_dtype.is_floating_point:
                report.add('gradients are floating-point', f'found {key.grad_dtype} for {traits}')
    report.checked.append(f'buffer keys of {count} kinds of parameters')

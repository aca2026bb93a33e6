"""The conformance kit: it passes what is right, and each negative control fails it, in words."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_buffer.errors import ConfigError, LayoutError
from megatron_buffer.strategies.bucket_groups import BucketRef, BufferBuckets
from megatron_buffer.strategies.bucketing import OpenBucket
from megatron_buffer.strategies.dispatch import ArrivalDispatcher
from megatron_buffer.strategies.grouping import GroupKey, ParamTraits
from megatron_buffer.strategies.padding import Alignment
from megatron_buffer.strategies.readiness import CountTracker
from megatron_buffer.strategies.scaling import ScalingContext, ScalingPlan
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec
from megatron_buffer.testing import (
    ConformanceError,
    Report,
    RuntimeCase,
    check_layout_strategy,
    check_runtime_strategy,
)
from megatron_buffer.testing.choice import LAYOUT_AXES
from megatron_buffer.testing.examples import Example, examples, smallest
from megatron_buffer.testing.runtime_kit import tolerance
from tests.harness import ROOT
from tests.test_random_configs import PROFILE, VALUES

SHARDED = {'use_distributed_optimizer': True}
OVERLAP = {'overlap_grad_reduce': True}
CASES = [RuntimeCase(**OVERLAP), RuntimeCase(**SHARDED, **OVERLAP, overlap_param_gather=True)]


def layout_report(axis: str, strategy: Any, **how: Any) -> Report:
    """A check without rank processes, unless asked for."""
    return check_layout_strategy(axis, strategy, **{'mount': 0, 'examples': 200, **how})


def runtime_report(axis: str, strategy: Any, **how: Any) -> Report:
    """Two cases on two ranks."""
    return check_runtime_strategy(axis, strategy, **{'cases': CASES, 'parallel': False, **how})


def rules(report: Report) -> list[str]:
    return [problem.what for problem in report.problems]


# ------------------------------------------------------------------ what is right


@pytest.mark.parametrize(
    'config',
    [
        'upstream',
        {'param_order': {'name': 'random', 'seed': 3}, 'padding': 'minimal'},
        {'bucketing': {'name': 'count', 'num_buckets': 3}, 'bucket_groups': 'nearest_ready'},
        {
            'bucketing': {'name': 'per_module'},
            'bucket_isolation': {'name': 'patterns', 'patterns': ['*bias*']},
        },
    ],
    ids=str,
)
def test_built_in_layouts_pass(config: Any) -> None:
    report = check_layout_strategy(config, mount=6)
    assert report.ok, str(report)
    assert report.raise_if_failed() is report
    assert any('PYTHONHASHSEED' in line for line in report.checked)
    assert any("Megatron-Core's own constructors" in line for line in report.checked)
    assert 'passes' in str(report).splitlines()[0]


@pytest.mark.long
def test_upstream_trains_right_and_the_report_says_what_was_tried() -> None:
    report = check_runtime_strategy({}, parallel=False)
    assert report.ok, str(report)
    assert 'average_in_collective' in report.checked[0]
    assert not report.refused


@pytest.mark.long
@pytest.mark.slow
def test_models_spread_over_ranks_train_right() -> None:
    report = check_runtime_strategy({'param_order': 'forward'}, world_sizes=())
    assert report.ok, str(report)
    assert report.checked == [line for line in report.checked if 'pp=2' in line and 'ep=2' in line]


def test_checkpoint_constraints_are_notes() -> None:
    notes = '\n'.join(check_layout_strategy({'param_order': 'forward'}, mount=0).notes)
    assert 'parameters lie in another order' in notes
    assert 'fp8' in notes
    notes = '\n'.join(check_layout_strategy({'padding': 'minimal'}, mount=0).notes)
    assert 'start at other multiples' in notes
    assert 'order' not in notes
    assert 'owns only padding' in '\n'.join(check_layout_strategy('upstream', mount=0).notes)


def test_an_axis_or_a_config_that_is_none_is_the_callers_error() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bucketing'"):
        check_layout_strategy('bucketin', object())
    with pytest.raises(ConfigError, match='give the strategy object'):
        check_layout_strategy('bucketing')
    with pytest.raises(ConfigError):
        check_runtime_strategy({'bucketing': 'nothing_like_it'})
    assert 'use check_runtime_strategy' in str(layout_report('scaling', object()))


# Every value but each axis's first, which is upstream's.
CHOICES = [(axis, value) for axis in VALUES for value in list(VALUES[axis].values())[1:]]
LAYOUT_CHOICES = [
    (axis, value)
    for axis, value in CHOICES
    if axis in LAYOUT_AXES and PROFILE not in str(value) and value != 'merge_into_first_fp8'
]
RUNTIME_CHOICES = [(axis, value) for axis, value in CHOICES if axis not in LAYOUT_AXES]


@pytest.mark.slow
@pytest.mark.parametrize(('axis', 'value'), LAYOUT_CHOICES, ids=str)
def test_every_layout_strategy_passes(axis: str, value: Any) -> None:
    report = check_layout_strategy({axis: value}, examples=2000, seed=5, mount=10)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(('axis', 'value'), RUNTIME_CHOICES, ids=str)
def test_every_runtime_strategy_passes(axis: str, value: Any) -> None:
    """2 and 4 ranks, every usual case; pipeline stages and experts are in test_random_configs."""
    report = check_runtime_strategy({axis: value}, world_sizes=(2, 4), parallel=False)
    assert report.ok, str(report)


# ------------------------------------------------------------------ layouts that are wrong


class NeverAlone:
    """An embedding put in a shared bucket."""

    def is_alone(self, name: str, shared_embedding: bool) -> bool:
        return False


class AloneByName:
    """By a name that it has on one pipeline stage only."""

    def is_alone(self, name: str, shared_embedding: bool) -> bool:
        return name.startswith('embedding')


class BackwardsPadding:
    """Rounds down: a parameter begins inside the one before."""

    def alignment(self, buffer: BufferTraits) -> Alignment:
        return Alignment(-64, 128 * buffer.dp_size)


class OddPadding:
    """Bucket ends that do not divide by the number of ranks."""

    def alignment(self, buffer: BufferTraits) -> Alignment:
        return Alignment(1, 5)


class NoPadding:
    """A division by zero."""

    def alignment(self, buffer: BufferTraits) -> Alignment:
        return Alignment(0, 0)


class GrowingPadding:
    """Another answer each time."""

    def __init__(self) -> None:
        self.calls = 0

    def alignment(self, buffer: BufferTraits) -> Alignment:
        self.calls += 1
        return Alignment(self.calls, buffer.dp_size)


class RankOrder:
    """Rank 1 goes the other way, as its environment says."""

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        order = range(len(params))
        return order if os.environ.get('RANK') == '1' else order[::-1]


class GroupRankOrder:
    """Rank 1 goes the other way, as torch.distributed says."""

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        order = range(len(params))
        odd = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return order if odd else order[::-1]


class HashOrder:
    """As a set of names would come."""

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        return sorted(range(len(params)), key=lambda i: hash(params[i].name))


class LossyOrder:
    """Forgets the last parameter of a larger buffer."""

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        return range(max(1, len(params) - 1))


class ShardOrder:
    """Looks at what is not known yet."""

    def layout_order(self, params: Sequence[ParamSpec], buffer: BufferTraits) -> Sequence[int]:
        order = list(range(len(params)))
        random.Random(buffer.dp_size).shuffle(order)
        return order


class EagerCuts:
    """Cuts where Megatron wants one bucket."""

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Callable[[OpenBucket], bool]:
        return lambda bucket: True


class RefusesAll:
    """Accepts nothing."""

    def cutter(
        self, params: Sequence[ParamSpec], alone: Sequence[bool], bucket_size_elems: int | None
    ) -> Callable[[OpenBucket], bool]:
        raise LayoutError('bucketing: not today')


@pytest.mark.parametrize(
    ('axis', 'strategy', 'rule', 'says'),
    [
        (
            'bucket_isolation',
            NeverAlone(),
            'a tied embedding is alone in its bucket',
            'shares bucket',
        ),
        (
            'bucket_isolation',
            AloneByName(),
            'a tied embedding is alone in its bucket',
            'output_layer',
        ),
        ('padding', BackwardsPadding(), 'parameters do not overlap', 'is at ['),
        ('padding', OddPadding(), 'shards are equal', 'data-parallel ranks'),
        ('padding', NoPadding(), 'a layout is made', 'ZeroDivisionError'),
        ('padding', GrowingPadding(), 'same input, same layout', 'second call'),
        ('param_order', LossyOrder(), 'an order is a permutation', 'missing: '),
        ('param_order', ShardOrder(), 'an order looks at the parameters only', 'dp_size'),
        ('bucketing', EagerCuts(), 'one bucket where Megatron wants one', 'buckets instead of 1'),
        ('bucketing', RefusesAll(), 'a layout is made', 'not today'),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else '',
)
def test_a_wrong_layout_fails(axis: str, strategy: Any, rule: str, says: str) -> None:
    report = layout_report(axis, strategy)
    assert rule in rules(report), str(report)
    problem = next(problem for problem in report.problems if problem.what == rule)
    assert says in problem.detail
    with pytest.raises(ConformanceError, match=rule):
        report.raise_if_failed()


def test_the_smallest_example_is_small() -> None:
    [problem] = [
        problem
        for problem in layout_report('bucket_isolation', NeverAlone()).problems
        if problem.what == 'a tied embedding is alone in its bucket'
    ]
    assert len(problem.example.splitlines()) == 3  # circumstances and two parameters
    assert ': 1 elements, tied embedding' in problem.example


def test_the_search_for_the_smallest_keeps_the_fault() -> None:
    def fails(example: Example) -> bool:
        return max(spec.numel_elems for spec in example.params) > 1000

    large = next(
        example for example in examples(200) if len(example.params) > 10 and fails(example)
    )
    found = smallest(large, fails)
    assert fails(found)
    assert len(found.params) == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize('order', [RankOrder(), GroupRankOrder(), HashOrder()])
def test_an_order_that_differs_between_processes_is_caught(order: Any) -> None:
    report = layout_report('param_order', order, mount=4)
    assert 'the same layout in every process' in rules(report), str(report)
    rank = 0 if isinstance(order, HashOrder) else 1
    assert f'RANK={rank}, lays a buffer out differently' in report.problems[0].detail


# ------------------------------------------------------------------ groups and buffers that are wrong


class Forgets:
    """Leaves the last bucket of the first buffer out."""

    def partition(
        self, buffers: Sequence[BufferBuckets], *, single_group: bool, one_bucket_per_group: bool
    ) -> list[list[BucketRef]]:
        refs = [BucketRef(i, j) for i, b in enumerate(buffers) for j in range(b.num_buckets)]
        return [refs] if single_group else [[ref] for ref in refs[:-1]]


class Alternates:
    """Other groups at every other call."""

    def __init__(self) -> None:
        self.calls = 0

    def partition(
        self, buffers: Sequence[BufferBuckets], *, single_group: bool, one_bucket_per_group: bool
    ) -> list[list[BucketRef]]:
        self.calls += 1
        refs = [BucketRef(i, j) for i, b in enumerate(buffers) for j in range(b.num_buckets)]
        return [refs] if single_group else [[ref] for ref in refs[:: (-1) ** self.calls]]


class MixesExperts:
    """Experts in the buffer of the dense parameters, by the dtype alone."""

    def key(self, param: ParamTraits, grad_reduce_in_fp32: bool) -> GroupKey:
        return GroupKey(param.dtype, torch.float32, False, False)


@pytest.mark.parametrize(
    ('axis', 'strategy', 'rule'),
    [
        ('bucket_groups', Forgets(), 'every bucket in exactly one group'),
        ('bucket_groups', Alternates(), 'same buffers, same groups'),
        ('buffer_grouping', MixesExperts(), 'a buffer holds parameters of one kind'),
    ],
)
def test_wrong_groups_fail(axis: str, strategy: Any, rule: str) -> None:
    report = layout_report(axis, strategy)
    assert rule in rules(report), str(report)


def test_merging_into_the_first_fp8_group_is_late() -> None:
    report = check_layout_strategy({'bucket_groups': 'merge_into_first_fp8'}, mount=0)
    assert rules(report) == ['a group is not made to wait by what is merged into it'], str(report)
    assert 'only after 100% of backward' in report.problems[0].detail
    [late] = [line for line in report.dispatch if 'LATE' in line]
    assert 'an fp8 model, group 0' in late


@pytest.mark.parametrize('groups', ['merge_into_last_fp8', 'separate', 'nearest_ready', 'single'])
def test_other_groups_are_not_late(groups: str) -> None:
    report = check_layout_strategy({'bucket_groups': groups}, mount=0)
    assert report.ok, str(report)
    assert report.dispatch
    assert any('one bucket group' in note for note in report.notes) == (groups == 'single')


# ------------------------------------------------------------------ training that is wrong


class Doubled:
    """Gradients twice as large as they should be."""

    def plan(self, context: ScalingContext) -> ScalingPlan:
        return ScalingPlan(2.0 / context.dp_size, 'sum')


class Skipping:
    """A reduction that leaves the first bucket of a group out."""

    def dispatcher(self, groups: Any, ready_at: Any, peers: Any = None) -> ArrivalDispatcher:
        return SkippingDispatcher()


class SkippingDispatcher(ArrivalDispatcher):
    """See :class:`Skipping`."""

    def group_ready(self, group: Any, force_all_reduce: bool) -> None:
        buckets, group.buckets = group.buckets, group.buckets[1:]
        super().group_ready(group, force_all_reduce)
        group.buckets = buckets


class TooEarly:
    """Calls a group complete at its first gradient."""

    on_late = 'warn'
    predicts = False

    def tracker(self, params: Iterable[Hashable], *, adapts: bool = False) -> CountTracker:
        return EarlyTracker(params, adapts=adapts)

    def known_counts(self, names: Any) -> dict[Hashable, int]:
        return {}


class EarlyTracker(CountTracker):
    """See :class:`TooEarly`."""

    def register(self, param: Hashable) -> bool:
        super().register(param)
        return not self.is_first_batch and sum(self.counts.values()) == 1


@pytest.mark.long
@pytest.mark.slow
def test_a_wrong_scaling_fails_with_its_factor() -> None:
    report = runtime_report('scaling', Doubled())
    assert 'gradients are right' in rules(report), str(report)
    assert 'all are 2 times what they should be' in str(report)


@pytest.mark.long
@pytest.mark.slow
def test_a_reduction_that_skips_a_bucket_fails() -> None:
    case = RuntimeCase(**OVERLAP, mixed=True)
    report = runtime_report(
        'dispatch_order', Skipping(), config={'bucket_groups': 'single'}, cases=[case]
    )
    assert 'gradients are right' in rules(report), str(report)
    assert 'each bucket is reduced exactly once' in rules(report)
    assert '0 times the one of group 0' in str(report)


def test_a_readiness_that_dispatches_too_early_fails() -> None:
    case = RuntimeCase(**OVERLAP, bucket_size=100_000)
    report = runtime_report('readiness', TooEarly(), cases=[case])
    assert not report.ok
    assert 'gradients are right' in rules(report), str(report)


@pytest.mark.slow
def test_a_rank_dependent_order_fails_in_training() -> None:
    report = runtime_report('param_order', GroupRankOrder(), cases=CASES[:1])
    assert rules(report) == ['a model can be trained'], str(report)
    assert 'RankMismatchError' in str(report)
    assert 'rank 1 has' in str(report)


@pytest.mark.long
@pytest.mark.slow
def test_what_a_config_refuses_is_refused_and_not_wrong() -> None:
    report = check_runtime_strategy({'grad_reduce': 'reduce_scatter'}, cases=CASES, parallel=False)
    assert report.ok, str(report)
    assert len(report.refused) == 1
    assert 'grad_reduce' in report.refused[0]
    alone = check_runtime_strategy(
        {'grad_reduce': 'reduce_scatter'}, cases=CASES[:1], parallel=False
    )
    assert rules(alone) == ['some setting is accepted']


def test_an_object_that_does_not_travel_is_a_problem_in_words() -> None:
    class Local(Doubled):
        """Pickle cannot find it again."""

    report = runtime_report('scaling', Local())
    assert rules(report) == ['a strategy object travels to other processes']
    assert 'top of a module' in str(report)


def test_the_tolerance_follows_the_narrowest_dtype() -> None:
    from megatron_buffer.config import load_config

    assert tolerance(load_config({})) == 1e-6
    narrow = {'grad_reduce': {'name': 'a2a_fp32_sum', 'wire_dtype': 'bf16'}}
    assert tolerance(load_config(narrow)) > 1e-3
    rule = {'pattern': '*', 'grad_dtype': 'bf16'}
    assert (
        tolerance(load_config({'buffer_grouping': {'name': 'grad_dtype_rules', 'rules': [rule]}}))
        > 1e-3
    )


# ------------------------------------------------------------------ somebody else's project

_WITHOUT_PYTEST = '''
import importlib.abc, sys

class No(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('pytest', 'hypothesis', 'tests'):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, No())
sys.path.append('lib')
'''


@pytest.mark.long
@pytest.mark.slow
def test_the_example_of_the_docs_works_in_a_project_without_pytest(tmp_path: Path) -> None:
    """The strategy's module is found through sys.path alone, in every process."""
    text = (ROOT / 'docs' / 'testing.md').read_text()
    files = dict(re.findall(r'```python\n# file: (\S+)\n(.*?)```', text, re.DOTALL))
    assert sorted(files) == ['check_my_rules.py', 'my_rules.py']
    (tmp_path / 'lib').mkdir()
    (tmp_path / 'lib' / 'my_rules.py').write_text(files['my_rules.py'])
    script = tmp_path / 'check.py'
    script.write_text(
        _WITHOUT_PYTEST + files['check_my_rules.py'].replace('cases=', 'parallel=False, cases=')
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'layout of param_order=BySize: passes' in done.stdout
    assert 'parameters lie in another order' in done.stdout


def test_importing_the_kit_is_light() -> None:
    code = (
        'import sys, megatron_buffer.testing\n'
        'from megatron_buffer.testing import Report, run_ranks\n'
        'print(sorted(n for n in sys.modules if n.partition(".")[0] in '
        '("torch", "megatron", "pytest", "hypothesis")))\n'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == '[]', done.stderr

"""Choices that cannot work together: the table, and who reads it."""

import itertools

import pytest

from megatron_buffer.config import AXES, BufferConfig, load_config
from megatron_buffer.config_compat import INCOMPATIBLE, check_compatible, incompatibilities
from megatron_buffer.config_layout import SingleGroup
from megatron_buffer.config_runtime import AllToAllFp32Sum, PremulSum
from megatron_buffer.errors import ConfigError
from tests.config_values import example_of


@pytest.mark.parametrize('rule', INCOMPATIBLE, ids=lambda rule: ' x '.join(rule.names))
def test_each_rule_is_complete_and_right(rule):
    for path, choice in zip(rule.paths, rule.choices, strict=True):
        assert choice in AXES[path].strategies.values()
    assert rule.paths[0] != rule.paths[1]
    assert rule.reason[-1] != '.'
    assert rule.way_out.startswith('Choose ')
    params = dict(zip(rule.paths, map(example_of, rule.choices), strict=True))
    with pytest.raises(ConfigError) as caught:
        BufferConfig(source='here', **params)
    message = str(caught.value)
    assert message.startswith(f'{rule.paths[0]}: {rule.choices[0].name!r} cannot be combined with')
    assert f'{rule.paths[1]}: {rule.choices[1].name}' in message
    assert message.endswith(f'{rule.reason}. {rule.way_out}')
    assert (caught.value.yaml_path, caught.value.source) == (rule.paths[0], 'here')


def test_the_way_out_works():
    for groups in ('separate', 'merge_into_last_fp8', 'nearest_ready', 'merge_into_first_fp8'):
        load_config({'grad_reduce': 'a2a_fp32_sum', 'bucket_groups': groups})
    for scaling in ('prescale', 'average', 'shard_postscale'):
        load_config({'grad_reduce': 'a2a_fp32_sum', 'scaling': scaling})
    load_config(
        {'grad_reduce': 'reduce_scatter', 'scaling': 'premul_sum', 'bucket_groups': 'single'}
    )


def test_a_file_names_both_paths_and_all_its_problems(write):
    text = (
        'schema_version: 1\n'
        'bucket_groups: single\n'
        'scaling: premul_sum\n'
        'grad_reduce: {name: a2a_fp32_sum, wire_dtype: bf16}\n'
        'padding: {name: megatron, high_busbw: 3}\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(write(text))
    first, second, third, fourth = str(caught.value).splitlines()
    assert first.endswith('3 problems in this config')
    assert second.startswith(
        "  line 3: scaling: 'premul_sum' cannot be combined with grad_reduce: a2a_fp32_sum: NCCL "
    )
    assert third.startswith(
        "  line 4: grad_reduce: 'a2a_fp32_sum' cannot be combined with bucket_groups: single: it "
    )
    assert third.endswith(
        'Choose bucket_groups: separate or merge_into_last_fp8, or another grad_reduce'
    )
    assert fourth.startswith('  line 5: padding.high_busbw: ')


def test_a_choice_that_is_not_known_breaks_no_rule(write):
    with pytest.raises(ConfigError, match='1 problem in') as caught:
        load_config({'grad_reduce': 'a2a_fp32_sum', 'bucket_groups': 'singel'})
    assert caught.value.yaml_path == 'bucket_groups'
    assert incompatibilities({}) == []
    assert incompatibilities({'grad_reduce': AllToAllFp32Sum(), 'bucket_groups': None}) == []


def test_several_broken_rules_come_together():
    with pytest.raises(ConfigError) as caught:
        BufferConfig(
            grad_reduce=AllToAllFp32Sum(), bucket_groups=SingleGroup(), scaling=PremulSum()
        )
    assert [line.partition(':')[0] for line in str(caught.value).splitlines()] == [
        'grad_reduce',
        'scaling',
    ]


def test_a_condition_on_parameters_counts(monkeypatch):
    rule = INCOMPATIBLE[0]._replace(clash=lambda first, second: first.wire_dtype == 'fp16')
    monkeypatch.setattr('megatron_buffer.config_compat.INCOMPATIBLE', (rule,))
    load_config({'grad_reduce': 'a2a_fp32_sum', 'bucket_groups': 'single'})
    with pytest.raises(ConfigError, match='cannot be combined'):
        load_config(
            {
                'grad_reduce': {'name': 'a2a_fp32_sum', 'wire_dtype': 'fp16'},
                'bucket_groups': 'single',
            }
        )


def test_all_other_pairs_of_choices_make_a_config():
    """Whether they also train right is tested with real models; here they are only accepted."""
    forbidden = {frozenset(rule.choices) for rule in INCOMPATIBLE}
    refused: set[frozenset[type]] = set()
    params = {cls: example_of(cls) for axis in AXES.values() for cls in axis.strategies.values()}
    for one, other in itertools.combinations(AXES.values(), 2):
        for first in one.strategies.values():
            for second in other.strategies.values():
                try:
                    config = BufferConfig(**{one.key: params[first], other.key: params[second]})
                except ConfigError:
                    refused.add(frozenset((first, second)))
                else:
                    check_compatible(config)
    assert refused == forbidden

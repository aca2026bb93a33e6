"""Sweep files: what they can say, what is wrong with them, which runs they mean, and those that are shipped."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_buffer import cli
from megatron_buffer.ablation.launcher import command_of
from megatron_buffer.ablation.plan import runs_of
from megatron_buffer.ablation.read_sweep import KEYS, WORKLOAD_KEYS, load_sweep, shipped_sweeps
from megatron_buffer.config import load_config, shipped_configs
from megatron_buffer.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
SMALL = """
schema_version: 1
arms: {stock: stock, ours: {}}
"""


@pytest.fixture
def sweep(write):
    """Reads a sweep from text."""
    return lambda text: load_sweep(write(text, 'small.yaml'))


def test_the_shortest_sweep_compares_with_stock_on_the_small_gpt(sweep):
    found = sweep(SMALL)
    assert found.baseline == 'stock'
    assert (found.arms['stock'].config, found.arms['ours'].config) == (None, load_config(None))
    assert found.workload.script == ROOT / 'scripts' / 'pretrain_gpt.py'
    assert found.workload.flags['global-batch-size'] == 12  # 2 ranks, 3 micro-batches of 2
    assert (found.repeats, found.seeds, found.workload.ranks) == (3, (1234,), 2)


def test_an_arm_lays_over_the_base(sweep):
    found = sweep("""
schema_version: 1
base: recommended
arms:
  named: {padding: {name: minimal}}           # takes the strategy's place
  changed: {padding: {param_start_elems: 8}}  # changes a parameter of it
  checks: {checks: {nan_in_grad: true}}
  other: {config: ablations/bucketing-count, flags: {lr: 1}, env: {A: 1}}
""")
    recommended = load_config('recommended')
    assert found.arms['named'].config.padding.name == 'minimal'
    padding = found.arms['changed'].config.padding
    assert (padding.param_start_elems, padding.whole_bytes) == (8, True)
    checks = found.arms['checks'].config.checks
    assert (checks.nan_in_grad, checks.export) == (True, recommended.checks.export)
    assert found.arms['other'].config == load_config('ablations/bucketing-count')
    assert found.arms['other'].env == {'A': '1'}


def test_a_grid_is_every_combination(sweep):
    found = sweep("""
schema_version: 1
arms: {stock: stock}
grid:
  bucketing: [balanced, {name: count, num_buckets: 2}]
  padding.param_start_elems: {small: 1, large: 64}
  flags.micro-batch-size: [1]
""")
    assert list(found.arms) == [
        'stock',
        'balanced, small, micro-batch-size=1',
        'balanced, large, micro-batch-size=1',
        'count(num_buckets=2), small, micro-batch-size=1',
        'count(num_buckets=2), large, micro-batch-size=1',
    ]
    last = found.arms['count(num_buckets=2), small, micro-batch-size=1']
    assert (last.config.bucketing.num_buckets, last.config.padding.param_start_elems) == (2, 1)
    assert last.flags == {'micro-batch-size': 1}


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('', "expected a mapping with schema_version"),
        ('arms: {a: {}}', 'schema_version is missing; add the line: schema_version: 1'),
        ('schema_version: 2', 'schema_version: found 2, but this release'),
        ('schema_version: 1', 'there is nothing to run: give arms, or a grid'),
        ('schema_version: 1\narms: {}\ngrid: null', 'there is nothing to run'),
        (SMALL + 'repeat: 3', "line 4: repeat: unknown key. Did you mean 'repeats'?"),
        (SMALL + 'repeats: 0', 'repeats: found 0, expected an integer >= 1'),
        (
            SMALL + "repeats: '3'",
            "repeats: found '3' (text), expected an integer >= 1; write 3, without",
        ),
        (SMALL + 'repeats: 3\nrepeats: 4', 'given twice, on lines 4 and 5'),
        (SMALL + 'base: recomended', "base: no config named 'recomended'"),
        (SMALL + 'baseline: stok', "baseline: there is no arm 'stok'. Did you mean 'stock'?"),
        (SMALL + 'seeds: [1, 1]', 'seeds[1]: 1 is there twice'),
        (SMALL + 'seeds: []', 'seeds: found an empty list'),
        (SMALL + 'workload: {rank: 2}', "workload.rank: unknown key. Did you mean 'ranks'?"),
        (
            SMALL + 'workload: {steps: 2}',
            'workload.steps: found 2, but no time is taken of the first 2',
        ),
        (SMALL + 'workload: {nodes: 2}', 'the default launcher starts ranks on this machine only'),
        (SMALL + 'workload: {ranks: 3, nodes: 2}', '3 ranks cannot be spread evenly over 2 nodes'),
        (
            SMALL + 'workload: {device: cuda}',
            "found 'cuda' (text), expected 'auto' or 'cpu' or 'gpu'",
        ),
        (SMALL + 'workload: {script: no.py}', 'workload.script: no such file (looked for /'),
        (
            SMALL + 'workload: {flags: {custom-buffer-config: x}}',
            'this flag is set by the sweep itself',
        ),
        (
            SMALL + 'workload: {flags: {lr: {a: 1}}}',
            'workload.flags.lr: found a mapping, expected text',
        ),
        (
            SMALL + 'workload: {flags: {seed: 7}}\nseeds: [1, 2]',
            "2 seeds, but no flag or environment",
        ),
        (
            SMALL + 'workload: {flags: {train-iters: 7}}',
            '12 steps, but no flag or environment variable',
        ),
        (SMALL + 'env: {A: true}', 'env.A: found true, expected text or a number'),
        (SMALL + 'max_jobs: 2', 'max_jobs: only for a launcher of your own'),
        (SMALL + 'launcher: torchrun', 'holds neither {command} nor {script} and {arguments}'),
        (
            SMALL + "launcher: '{pythn} {command}'",
            "unknown placeholder {pythn}. Did you mean 'python'?",
        ),
        (
            SMALL + "launcher: 'no-such-launcher {command}'",
            "there is no program 'no-such-launcher'",
        ),
        (
            SMALL + "launcher: '{python} ${NO_SUCH_VARIABLE} {command}'",
            'NO_SUCH_VARIABLE is not set',
        ),
        (
            SMALL + "launcher: '{python} {command}'",
            'workload.device: a launcher of your own may start',
        ),
        (
            SMALL + 'expect: {our: bit_equal}',
            "expect.our: there is no arm 'our'. Did you mean 'ours'?",
        ),
        (SMALL + 'expect: {ours: bitequal}', "Did you mean 'bit_equal'?"),
        (
            SMALL + 'expect: {ours: {faster: {than: me}}}',
            "expect.ours.faster.than: there is no arm 'me'",
        ),
        (SMALL + 'expect: {ours: {loss_close: low}}', 'expected a number >= 0'),
        (SMALL + 'expect: {ours: {faster: 3}}', "unknown option of 'faster'"),
        (
            'schema_version: 1\narms:\n  a:\n    bucketing: {name: count, num_bucket: 2}',
            "line 4: arms.a.bucketing.num_bucket: unknown parameter of strategy 'count'. Did you mean",
        ),
        (
            'schema_version: 1\narms: {a: {pading: minimal}}',
            "arms.a.pading: unknown key of an arm. Did you",
        ),
        (
            'schema_version: 1\narms: {a: {config: stock, padding: minimal}}',
            'stock Megatron-Core has no such',
        ),
        ('schema_version: 1\narms: {a: {config: ablations/x}}', 'arms.a.config: no config named'),
        ('schema_version: 1\narms: {a: {against: b}}', "arms.a.against: there is no arm 'b'"),
        ('schema_version: 1\ngrid: {bucketin: [count]}', "unknown axis. Did you mean 'bucketing'?"),
        (
            'schema_version: 1\ngrid: {bucketing: count}',
            'expected a list of values, or a mapping of named',
        ),
        (
            "schema_version: 1\ngrid:\n  padding:\n  - megatron\n  - minimum",
            "line 5: grid.padding[1]: padding: unknown strategy 'minimum'. Did you mean 'minimal'?",
        ),
        (
            'schema_version: 1\ngrid: {padding: [minimal, minimal]}',
            "the value 'minimal' is there twice",
        ),
        (
            'schema_version: 1\ngrid: {grad_reduce: [a2a_fp32_sum], bucket_groups: [single]}',
            "grid: arm 'a2a_fp32_sum, single': ",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_path(write, text, said):
    with pytest.raises(ConfigError) as error:
        load_sweep(write(text, 'bad.yaml'))
    assert said in str(error.value)


def test_nothing_is_made_for_a_file_that_is_wrong(write, capsys, tmp_path):
    path = write(SMALL + 'repeats: 0', 'bad.yaml')
    assert cli.main(['ablate', path, '-o', str(tmp_path / 'out')]) == 2
    assert capsys.readouterr().err.startswith(
        f'megatron-buffer: error: {path}: 1 problem in this sweep\n  line 4: repeats: found 0'
    )
    assert not (tmp_path / 'out').exists()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats()
    | st.sampled_from(
        ['', 'a', 'stock', 'upstream', 'x/y', '{command}', 'count', 'bit_equal', '~', 'a\0b']
    ),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            [
                *WORKLOAD_KEYS,
                'a',
                'name',
                'config',
                'flags',
                'env',
                'bucketing',
                'bucketing.x',
                'than',
            ]
        ),
        inner,
        max_size=3,
    ),
    max_leaves=6,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from([*KEYS]), PLAIN, max_size=6))
def test_whatever_a_file_says_it_is_read_or_refused_in_words(write, said):
    path = write(json.dumps(said | {'schema_version': 1}), 'any.yaml')
    try:
        found = load_sweep(path)
    except ConfigError as error:
        text = str(error)
    else:
        assert runs_of(found, is_cpu=True)
        return
    assert 'in this sweep' in text


def test_all_problems_are_said_at_once(write):
    path = write(SMALL + 'repeats: 0\nbaseline: x\nexpect: {ours: odd}')
    with pytest.raises(ConfigError, match='3 problems in this sweep'):
        load_sweep(path)


def test_arms_are_interleaved_and_each_round_begins_with_another(sweep):
    found = sweep('schema_version: 1\narms: {a: {}, b: {}, c: {}}\nseeds: [1, 2]\nrepeats: 2')
    runs = runs_of(found, is_cpu=True)
    assert [run.arm for run in runs] == [*'abc', *'bca', *'cab', *'abc']
    assert [(run.repeat, run.seed) for run in runs[::3]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert len({run.name for run in runs}) == 12


def test_a_run_is_another_one_exactly_if_it_does_something_else(sweep):
    def names(text: str) -> set[str]:
        return {run.name for run in runs_of(sweep(text), is_cpu=True)}

    plain = names(SMALL)
    assert names(SMALL + 'question: another one\ntime_limit_s: 5\nexpect: {ours: faster}') == plain
    assert names(SMALL + 'repeats: 4') > plain
    assert names(SMALL.replace('ours: {}', 'ours: {}, more: {}')) > plain
    changed = names(SMALL.replace('ours: {}', 'ours: {padding: minimal}'))
    assert set(changed & plain) == {name for name in plain if '-stock-' in name}
    for other in ('workload: {steps: 13}', 'env: {A: 1}', 'workload: {flags: {lr: 1}}'):
        assert not names(SMALL + other) & plain


def test_the_command_of_a_run(sweep, tmp_path):
    found = sweep(SMALL + 'workload: {flags: {lr: null, bf16: false, mine: [1, 2]}, steps: 20}')
    ours, stock = (
        command_of(found, found.arms[name], 7, tmp_path, is_cpu=True, number=0)
        for name in ('ours', 'stock')
    )
    assert ours[1:6] == ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2', '-m']
    assert ours[6:9] == ['megatron_buffer', 'run', str(found.workload.script)]
    text = ' '.join(ours)
    assert '--train-iters 20 --seed 7 --mine 1 2' in text
    assert '--lr ' not in text
    assert '--bf16' not in ours
    assert '--distributed-backend gloo' in text
    assert text.endswith(
        f'--custom-buffer-cpu --use-custom-buffer --custom-buffer-config {tmp_path}/config.yaml '
        f'--custom-buffer-stats {tmp_path}/stats'
    )
    assert '--use-custom-buffer' not in stock
    assert stock[-2:] == ['--custom-buffer-stats', f'{tmp_path}/stats']


# shipped -------------------------------------------------------------------------------------------


def test_the_sweeps_are_no_configs():
    assert sorted(shipped_sweeps()) == [
        'accumulation_scaling',
        'bucket_size',
        'fp8_merge',
        'golden_counts',
        'order',
        'padding',
        'reduce_precision',
    ]
    assert not any('sweeps' in name for name in shipped_configs())


@pytest.mark.parametrize('name', shipped_sweeps())
def test_a_shipped_sweep_asks_a_question_and_expects_something_of_every_arm(name, capsys, tmp_path):
    text = shipped_sweeps()[name].read_text()
    comment = text.partition('\nschema_version')[0]
    assert comment.startswith('# ')
    assert comment.splitlines()[0].endswith('?')
    assert '\n# Expect: ' in comment
    assert cli.main(['ablate', name, '--dry-run', '--json', '-o', str(tmp_path / 'x')]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan['question'].partition('?')[1]
    assert plan['arms'][plan['baseline']]['short'] == 'stock Megatron-Core'
    assert {*plan['expect'], plan['baseline']} == {*plan['arms']}
    assert len(plan['runs']) == len(plan['arms']) * plan['repeats']
    assert not (tmp_path / 'x').exists()


def test_a_dry_run_lists_arms_order_and_a_command(capsys, tmp_path):
    assert cli.main(['ablate', 'order', '--dry-run', '-o', str(tmp_path / 'x')]) == 0
    said = capsys.readouterr().out
    assert '12 runs of 12 steps on 2 ' in said
    assert re.search(r'random .* param_order: \{name: random, seed: 0\}', said)
    assert (
        said.index('r1-s1234-stock')
        < said.index('r1-s1234-reverse')
        < said.index('r2-s1234-reverse')
    )
    assert '-m torch.distributed.run --standalone' in said


def test_some_arms_of_a_sweep(capsys, tmp_path):
    where = ['--dry-run', '--json', '-o', str(tmp_path / 'x')]
    assert cli.main(['ablate', 'order', '--arm', 'stock', '--arm', 'random', *where]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [*plan['arms']] == ['stock', 'random']
    assert len(plan['runs']) == 6
    # What is expected beside an arm that is left out is not.
    assert [e['kind'] for e in plan['expect']['random']] == ['loss_close', 'same_bytes']
    assert cli.main(['ablate', 'order', '--arm', 'random', *where]) == 2
    assert 'it is compared with stock, which must run too' in capsys.readouterr().err
    assert cli.main(['ablate', 'order', '--arm', 'randm', *where]) == 2
    assert "Did you mean 'random'?" in capsys.readouterr().err


def test_an_unknown_name_is_refused_with_the_nearest(capsys):
    assert cli.main(['ablate', 'bucket_sise']) == 2
    assert "Did you mean 'bucket_size'?" in capsys.readouterr().err


def test_the_sweeps_of_the_documentation_can_be_read(tmp_path, monkeypatch):
    """Also the one for Slurm, with a program called srun."""
    (tmp_path / 'srun').write_text('#!/bin/sh\n')
    (tmp_path / 'srun').chmod(0o755)
    (tmp_path / 'pretrain_gpt.py').write_text('')
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    monkeypatch.setenv('HEAD', 'node1')
    text = (ROOT / 'docs' / 'ablations.md').read_text()
    blocks = [b for b in re.findall(r'```yaml\n(.*?)```', text, re.S) if 'schema_version' in b]
    assert len(blocks) >= 2
    for number, block in enumerate(blocks):
        assert isinstance(yaml.safe_load(block), dict)
        path = tmp_path / f'doc{number}.yaml'
        path.write_text(block)
        found = load_sweep(str(path))
        arm = next(iter(found.arms.values()))
        if found.workload.nodes > 1:
            command = command_of(found, arm, 1, tmp_path, is_cpu=False, number=3)
            assert command[0] == 'srun'
            assert '--nproc-per-node=8' in command
            assert '--rdzv-endpoint=node1:29603' in command


@pytest.mark.slow
def test_the_flags_of_shipped_sweeps_are_megatrons():
    """Also of those that need what this machine lacks."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {flag for action in parser._actions for flag in action.option_strings}
    for name in shipped_sweeps():
        found = load_sweep(name)
        flags = {*found.workload.flags, *(f for arm in found.arms.values() for f in arm.flags)}
        assert {f'--{flag}' for flag in flags} <= known, name

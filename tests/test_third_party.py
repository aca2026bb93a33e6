"""A strategy package of somebody else, installed as such: listed, checked, imported when named, trained with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_buffer.config import config_hash, load_config, third_party_strategies
from megatron_buffer.config_catalog import third_party_origins
from megatron_buffer.errors import ConfigError, RegistryError
from tests.harness import ROOT, run_ranks

PACKAGE = 'mb_example_plugin'
CONFIG = {
    'param_order': {'name': 'by_size'},
    'bucketing': {'name': 'max_params', 'max_params': 2},
    'unused_params': {'name': 'tolerate', 'may_be_unused': ['spare.*']},
    'finalize': [
        'grad_report',
        'finish_grad_sync',
        'non_tp_grads',
        {'name': 'scale_matching', 'patterns': ['second.*', '*.bias'], 'factor': 0.25},
    ],
}


@pytest.fixture(scope='session')
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the package into, without network and without building apart."""
    folder = tmp_path_factory.mktemp('plugin')
    source = shutil.copytree(
        ROOT / 'tests' / 'third_party',
        folder / 'source',
        ignore=shutil.ignore_patterns('build', '*.egg-info', '__pycache__'),
    )
    site = folder / 'site'
    options = ['--quiet', '--no-deps', '--no-index', '--no-build-isolation', '--no-compile']
    command = [sys.executable, '-m', 'pip', 'install', *options, '--target', str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def installed(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package can be imported in this process; none of it has been."""
    monkeypatch.syspath_prepend(str(plugin))
    for name in [name for name in sys.modules if name.partition('.')[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    return plugin


def _distribution(folder: Path, name: str, entry_points: dict[str, str], code: str) -> str:
    info = folder / f'{name}-0.1.dist-info'
    info.mkdir(parents=True)
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n')
    lines = [f'{key} = {value}' for key, value in entry_points.items()]
    (info / 'entry_points.txt').write_text('\n'.join(['[megatron_buffer.strategies]', *lines]))
    (folder / f'{name}_code.py').write_text(code)
    return str(folder)


def _cli(plugin: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-m', 'megatron_buffer', *arguments],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': str(plugin)},
        capture_output=True,
        text=True,
        timeout=240,
    )


# ---------------------------------------------------------------------------------- config and listing


@pytest.mark.long
def test_strategies_lists_them_with_their_origin(plugin: Path) -> None:
    done = _cli(plugin, 'strategies', '--json')
    assert done.returncode == 0, done.stderr
    axes = {axis['key']: axis for axis in json.loads(done.stdout)['axes']}
    found = {
        (key, item['name'], item['origin'])
        for key, axis in axes.items()
        for item in [*axis['strategies'], *axis.get('steps', [])]
        if item['origin'] != 'built-in'
    }
    origin = 'mb-example-plugin 1.4'
    assert found == {
        ('param_order', 'by_size', origin),
        ('bucketing', 'max_params', origin),
        ('unused_params', 'tolerate', origin),
        ('finalize', 'scale_matching', origin),
        ('finalize', 'grad_report', origin),
    }
    steps = {step['name']: step for step in axes['finalize']['steps']}
    assert [param['name'] for param in steps['non_tp_grads']['params']] == ['chunk_bytes']
    table = _cli(plugin, 'strategies').stdout
    assert 'scale_matching' in table
    assert origin in table.replace('\n', ' ')


@pytest.mark.long
def test_validate_checks_their_parameters(plugin: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / 'good.yaml', tmp_path / 'bad.yaml'
    good.write_text(json.dumps({'schema_version': 1, **CONFIG}))
    wrong = {
        'bucketing': {'name': 'max_params', 'max_params': 0},
        'finalize': ['scale_matching', 'finish_grad_sync', {'name': 'grad_report', 'often': 3}],
    }
    bad.write_text(json.dumps({'schema_version': 1, **CONFIG, **wrong}))
    done = _cli(plugin, 'validate', str(good), str(bad))
    assert done.returncode == 2
    assert f'{good}: OK' in done.stdout
    for words in (
        'bucketing.max_params: found 0, expected an integer >= 1',
        'finalize[0]: scale_matching comes before finish_grad_sync',
        "finalize[2].often: unknown parameter of step 'grad_report'",
        'patterns is missing',
    ):
        assert words in done.stderr


def test_code_is_imported_only_when_a_config_names_it(installed: Path) -> None:
    assert ('finalize_step', 'scale_matching') in third_party_strategies()
    load_config()
    load_config({'finalize': ['finish_grad_sync', 'non_tp_grads']})
    assert PACKAGE not in sys.modules
    load_config({'finalize': ['grad_report', 'finish_grad_sync']})
    assert f'{PACKAGE}.finalize' in sys.modules
    assert f'{PACKAGE}.layout' not in sys.modules
    load_config({'param_order': 'by_size'})
    assert f'{PACKAGE}.layout' in sys.modules


def test_the_config_covers_their_parameters(installed: Path) -> None:
    config = load_config(CONFIG)
    assert load_config(CONFIG) == config
    assert config.param_order.largest_first is True  # type: ignore[attr-defined]
    other = {**CONFIG, 'param_order': {'name': 'by_size', 'largest_first': False}}
    assert config_hash(load_config(other)) != config_hash(config)
    changed = [*CONFIG['finalize'][:-1], {**CONFIG['finalize'][-1], 'factor': 0.5}]
    assert config_hash(load_config({**CONFIG, 'finalize': changed})) != config_hash(config)


def test_origins_tell_installations_apart(installed: Path) -> None:
    assert third_party_origins(load_config()) == []
    assert third_party_origins(load_config(CONFIG)) == [
        f'{what} of mb-example-plugin 1.4'
        for what in (
            'param_order by_size',
            'bucketing max_params',
            'unused_params tolerate',
            'finalize_step grad_report',
            'finalize_step scale_matching',
        )
    ]


@pytest.mark.parametrize(
    ('options', 'path', 'words'),
    [
        ({'pattern': []}, 'finalize.options.scale_matching.pattern', "Did you mean 'patterns'?"),
        (
            {'patterns': [1]},
            'finalize.options.scale_matching.patterns[0]',
            'found 1, expected text',
        ),
        (
            {'patterns': [], 'factor': 'half'},
            'finalize.options.scale_matching.factor',
            'expected a number',
        ),
        ({}, 'finalize.options.scale_matching', 'patterns is missing'),
    ],
)
def test_wrong_options_of_their_steps(installed: Path, options: Any, path: str, words: str) -> None:
    steps = {
        'name': 'steps',
        'order': ['finish_grad_sync', 'scale_matching'],
        'options': {'scale_matching': options},
    }
    with pytest.raises(ConfigError) as caught:
        load_config({'finalize': steps})
    assert caught.value.yaml_path == path
    assert words in str(caught.value)


@pytest.mark.parametrize('name', ['bucketing.max_params', 'finalize_step.scale_matching'])
def test_duplicate_names_are_refused(
    name: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(_distribution(tmp_path, 'rival', {name: 'rival_code:X'}, ''))
    with pytest.raises(RegistryError) as caught:
        load_config()
    assert f'are named {name.partition(".")[2]!r}' in str(caught.value)
    assert 'from mb-example-plugin 1.4' in str(caught.value)
    assert 'from rival 0.1' in str(caught.value)


def test_our_own_steps_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {'finalize_step.non_tp_grads': 'rival_code:X'}
    monkeypatch.syspath_prepend(_distribution(tmp_path, 'rival', entry, ''))
    with pytest.raises(
        RegistryError, match=r'finalize: two steps are named .* one from megatron-buffer itself'
    ):
        load_config()


@pytest.mark.parametrize(
    ('code', 'words'),
    [
        ('class X: pass', 'has no dataclass as its attribute Params'),
        ('class X: Params = dict', 'has no dataclass as its attribute Params'),
        ('raise OSError("no lib")', 'cannot be imported: OSError: no lib'),
        (
            'import dataclasses\n@dataclasses.dataclass\nclass P:\n    a: int = 1\n'
            'class X:\n    Params = P\n    def run(self, ctx): pass',
            'its Params must be a frozen dataclass',
        ),
        (
            'import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass P:\n    a: int = 1\n'
            'class X:\n    Params = P',
            'has no method run(self, ctx)',
        ),
    ],
)
def test_unusable_steps(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {'finalize_step.x': 'odd_code:X'}
    monkeypatch.syspath_prepend(_distribution(tmp_path, 'odd', entry, code))
    monkeypatch.delitem(sys.modules, 'odd_code', raising=False)
    with pytest.raises(RegistryError) as caught:
        load_config({'finalize': ['finish_grad_sync', 'x']})
    assert "finalize: step 'x' of odd 0.1 (odd_code:X)" in str(caught.value)
    assert words in str(caught.value)


# ---------------------------------------------------------------------------------------- training


def _train(rank: int, world_size: int, plugin: str, flags: dict[str, Any]) -> dict[str, Any]:
    sys.path.insert(0, plugin)
    import megatron_buffer
    from megatron_buffer.finalize import finalize_model_grads
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(unused=True),
        megatron_buffer.DistributedDataParallel,
        buffer_config=CONFIG,
        **flags,
    )
    wrong: list[str] = []
    for step in range(3):
        model.zero_grad_buffer()
        with model.no_sync():
            for micro_batch in range(2):
                model(sm.batch(rank, step, micro_batch)).square().mean().backward()
        model(sm.batch(rank, step, 2)).square().mean().backward()
        finalize_model_grads([model])
        expected = sm.oracle_grads(rank, world_size, step, unused=True)
        for name, grad in expected.items():
            if name.startswith('second.') or name.endswith('.bias'):
                grad.mul_(0.25)
        wrong += sm.differences(sm.owned_main_grads(model), expected)
    (buffer,) = model.buffers
    names = sm.names_of(model)
    report = model.runtime.finalize.steps()[0].third_party
    return {
        'wrong': wrong,
        'iterations': int(report.iterations),
        'sizes': [p.numel() for bucket in buffer.buckets for p in bucket.params_list],
        'buckets': [[names[p] for p in bucket.params_list] for bucket in buffer.buckets],
    }


@pytest.mark.parametrize('dist_opt', [False, True])
def test_training_with_them_matches_an_unwrapped_model(plugin: Path, dist_opt: bool) -> None:
    flags = {'use_distributed_optimizer': dist_opt, 'overlap_grad_reduce': True, 'bucket_size': 1}
    for found in run_ranks(_train, 2, str(plugin), flags):
        assert found['wrong'] == []
        assert found['iterations'] == 3
        assert found['sizes'] == sorted(found['sizes'], reverse=True)
        assert [len(bucket) for bucket in found['buckets']] == [2, 2, 2, 2]
        assert found['buckets'][0] == ['spare.weight', 'second.weight']


def _untolerated(rank: int, world_size: int, plugin: str) -> str:
    sys.path.insert(0, plugin)
    import megatron_buffer
    from megatron_buffer.errors import ReadinessError
    from tests import small_model as sm

    config = {'unused_params': {'name': 'tolerate', 'may_be_unused': ['spare.bias']}}
    model = sm.wrap(
        sm.make_net(unused=True),
        megatron_buffer.DistributedDataParallel,
        buffer_config=config,
        overlap_grad_reduce=True,
    )
    try:
        sm.run_window(model, rank, 0)
    except ReadinessError as error:
        return str(error)
    return 'no error'


def test_their_policy_decides(plugin: Path) -> None:
    message = 'these parameters must get a gradient: spare.weight'
    assert run_ranks(_untolerated, 2, str(plugin)) == [message] * 2


def _failing_step(rank: int, world_size: int, folder: str, timers: bool) -> list[str]:
    sys.path.insert(0, folder)
    from megatron.core.timers import Timers

    import megatron_buffer
    from megatron_buffer.finalize import finalize_model_grads
    from tests import small_model as sm

    model = sm.wrap(
        sm.make_net(),
        megatron_buffer.DistributedDataParallel,
        buffer_config={'finalize': ['finish_grad_sync', 'failing']},
    )
    model.config.timers = Timers(2, 'minmax')
    model.zero_grad_buffer()
    model(sm.batch(rank, 0, 0)).sum().backward()
    try:
        finalize_model_grads([model])
    except RuntimeError as error:
        return [str(error), *error.__notes__, *model.config.timers._timers]
    return []


def test_a_step_that_fails_is_named(tmp_path: Path) -> None:
    code = (
        'import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass P:\n    pass\n'
        'class Failing:\n    Params = P\n    timer = "failing-step"\n'
        '    def __init__(self, params): pass\n'
        '    def run(self, ctx): raise RuntimeError(f"{len(ctx.model)} chunk")\n'
    )
    entry = {'finalize_step.failing': 'odd_code:Failing'}
    folder = _distribution(tmp_path, 'odd', entry, code)
    assert run_ranks(_failing_step, 1, folder, True) == [
        [
            '1 chunk',
            "raised by the finalize step 'failing' of odd 0.1",
            'all-grads-sync',
            'failing-step',
        ]
    ]


@pytest.mark.parametrize('whole', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_conformance_kit_accepts_them(installed: Path, whole: bool) -> None:
    """As the author would run it; by default on less."""
    from megatron_buffer.testing import RuntimeCase, check_layout_strategy, check_runtime_strategy

    config = {axis: CONFIG[axis] for axis in ('param_order', 'bucketing', 'unused_params')}
    some: dict[str, Any] = {'examples': 100, 'mount': 0}
    report = check_layout_strategy(config, **({} if whole else some)).raise_if_failed()
    assert any('buffers on paper' in what for what in report.checked)
    overlaps = {'overlap_grad_reduce': True, 'overlap_param_gather': True}
    one = {'cases': [RuntimeCase(use_distributed_optimizer=True, **overlaps)], 'parallel': False}
    check_runtime_strategy(config, **({} if whole else one)).raise_if_failed()

"""``scripts/run_upstream_tests.sh``: merging of ranks, comparison, checks of the checkout, and a small run."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_buffer.errors import ConfigError
from megatron_buffer.patching.fingerprints import find_core
from megatron_buffer.testing import upstream_checkout as checkout
from megatron_buffer.testing import upstream_plugin
from megatron_buffer.testing import upstream_results as results
from megatron_buffer.testing import upstream_suite as suite
from megatron_buffer.testing.upstream_results import FileResult, Outcome, RankRecord
from megatron_buffer.testing.upstream_run import Setting, run_file
from tests.harness import ROOT

# Merging and comparing


def rank(running: str | None = None, **outcomes: str) -> RankRecord:
    return RankRecord(
        collected=[*outcomes],
        outcomes={k: Outcome(v, f'{v}!' if v != 'passed' else '') for k, v in outcomes.items()},
        running=running,
    )


@pytest.mark.parametrize(
    ('ranks', 'ended', 'expected'),
    [
        ([rank(t='passed'), rank(t='passed')], 'crashed', ('passed', '')),
        ([rank(t='passed'), rank(t='failed')], 'crashed', ('failed', 'rank 1: failed!')),
        ([rank(t='failed'), rank(t='failed')], 'crashed', ('failed', 'failed!')),
        ([rank(t='passed'), rank(t='skipped')], 'crashed', ('skipped', 'skipped!')),
        ([rank(t='error'), rank(t='skipped')], 'crashed', ('error', 'rank 0: error!')),
        # The rank that hangs waits for the one that failed.
        ([rank(running='t'), rank(t='failed')], 'timeout', ('failed', 'rank 1: failed!')),
        ([rank(running='t'), rank(running='t')], 'timeout', ('timeout', 'rank 0 did not')),
        ([rank(t='passed'), rank(running='t')], 'crashed', ('crashed', 'a rank ended')),
        ([rank(t='passed'), rank()], 'crashed', ('crashed', '')),
    ],
)
def test_a_test_passes_only_if_it_passes_on_all_ranks(
    ranks: list[RankRecord], ended: str, expected: tuple[str, str]
) -> None:
    merged = results.merge_ranks(ranks, ended)
    assert list(merged) == ['t']
    assert merged['t'].outcome == expected[0]
    assert expected[1] in merged['t'].message


def file_result(**outcomes: str) -> FileResult:
    return FileResult(tests={k: Outcome(v, f'why [{v}]') for k, v in outcomes.items()}, seconds=1.0)


def test_only_what_passes_on_stock_can_regress() -> None:
    stock = file_result(a='passed', b='passed', c='failed', d='error', e='skipped', f='passed')
    ours = file_result(a='passed', b='timeout', c='passed', d='failed', e='skipped', f='skipped')
    found = {d.nodeid: d.is_regression for d in results.compare(stock, ours)}
    assert found == {'b': True, 'c': False, 'd': False, 'f': False}
    one_missing = results.compare(file_result(a='passed'), FileResult())
    assert [d.is_regression for d in one_missing] == [True]


def test_the_table() -> None:
    arms = {
        'stock': file_result(a='passed', b='passed', c='skipped'),
        'ours': file_result(a='passed', b='crashed', c='skipped'),
    }
    text = io.StringIO()
    results.show(Console(file=text, width=120), {'tests/unit_tests/x/test_y.py': arms})
    lines = [line.split('│')[1:-1] for line in text.getvalue().splitlines() if '│' in line]
    assert [cell.strip() for cell in lines[0]] == [
        *('x/test_y.py', '2 | 1', '0 | 0', '1 | 1', '0 | 1', '1 | 1')
    ]
    assert [cell.strip() for cell in lines[1]][:2] == ['total', '2 | 1']
    assert 'ours: crashed: why [crashed]' in text.getvalue()
    assert FileResult.from_json(json.loads(json.dumps(arms['ours'].as_json()))) == arms['ours']


def test_a_record_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / 'rank0.jsonl'
    assert results.read_record(path) == RankRecord()
    lines: list[dict[str, Any]] = [
        {'collected': ['a', 'b', 'c']},
        {'started': 'a'},
        {'id': 'a', 'outcome': 'passed', 'message': '', 'seconds': 0.5},
        {'started': 'b'},
    ]
    path.write_text('\n'.join(map(json.dumps, lines)) + '\n{"id": "b", "outc')
    record = results.read_record(path)
    assert record.collected == ['a', 'b', 'c']
    assert record.outcomes == {'a': Outcome('passed', '', 0.5)}
    assert record.running == 'b'


@pytest.mark.parametrize(
    ('mine', 'theirs', 'together'),
    [
        ('passed', 'passed', True),
        ('failed', 'failed', True),
        ('passed', 'failed', False),
        ('passed', None, False),
    ],
)
def test_ranks_go_on_only_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: str, theirs: str | None, together: bool
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(upstream_plugin.os, '_exit', ended.append)
    if theirs is not None:
        other = upstream_plugin.Recorder(tmp_path, rank=1, world_size=2, limit_s=1)
        other.write(id='t', outcome=theirs, message='', seconds=0.0)
        other.write(started='the next one')
    recorder = upstream_plugin.Recorder(tmp_path, rank=0, world_size=2, limit_s=0.05)
    call = SimpleNamespace(when='call', outcome=mine, longrepr=None)
    after = SimpleNamespace(when='teardown', outcome='passed', longrepr=None)
    recorder.pytest_runtest_logstart('t', None)
    for report in (call, after):
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_runtest_logfinish('t', None)
    assert ended == ([] if together else [upstream_plugin.STOPPED_TOGETHER])
    assert results.read_record(tmp_path / 'rank0.jsonl').outcomes['t'].outcome == mine


# The checkout


@pytest.fixture(scope='module')
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that has the installed sources, and two test files of our own."""
    root = tmp_path_factory.mktemp('Megatron-LM')
    installed = find_core().path
    assert installed is not None
    for package in ('core', 'training'):
        source = installed.parent / package
        keep_sources = shutil.ignore_patterns('__pycache__', '*.so')
        shutil.copytree(source, root / 'megatron' / package, ignore=keep_sources)
    for name, code in TESTS.items():
        path = root / 'tests' / 'unit_tests' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
    (root / 'pyproject.toml').write_text(
        '[tool.pytest.ini_options]\naddopts = "--no-such-option"\n'
    )
    return root


TESTS = {
    'distributed/test_a.py': """
        import os
        import pytest
        import torch
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel

        rank = int(os.environ['RANK'])

        @pytest.fixture(scope='module', autouse=True)
        def groups():
            torch.distributed.init_process_group('nccl')
            parallel_state.initialize_model_parallel()

        def test_passes():
            total = torch.ones(1, device='cuda')
            torch.distributed.all_reduce(total)
            assert total.item() == 2

        def test_fails_on_one_rank():
            assert rank == 0, 'no good'
            torch.distributed.barrier()

        def test_still_runs_after_it():
            torch.distributed.barrier()

        @pytest.mark.skip(reason='not here')
        def test_skipped():
            pass

        def test_ours_only():
            assert DistributedDataParallel.__module__.startswith('megatron_buffer.')

        def test_stock_only():
            assert DistributedDataParallel.__module__.startswith('megatron.core.')

        def test_crashes():
            if rank == 1:
                os._exit(9)
            torch.distributed.barrier()

        def test_after_a_crash():
            torch.distributed.barrier()
    """,
    'test_layouts.py': 'import nothing_of_that_name  # param_layout',
    'test_others.py': 'def test_x(): pass',
}


def test_the_matching_checkout_is_accepted(tree: Path) -> None:
    found = checkout.check_checkout(tree)
    assert found.version == found.installed.version
    assert found.other_files == ()
    names = ['tests/unit_tests/distributed/test_a.py', 'tests/unit_tests/test_layouts.py']
    assert checkout.find_tests(tree) == names
    assert checkout.find_tests(tree, 'layout') == names[1:]
    assert checkout.find_tests(tree, '*/test_?.py') == names[:1]
    with pytest.raises(
        ConfigError, match=r'selects none of the test files: distributed/test_a\.py'
    ):
        checkout.find_tests(tree, 'test_others')


def light_copy(tree: Path, folder: Path) -> Path:
    """A copy made of hard links."""
    return Path(shutil.copytree(tree, folder / 'copy', copy_function=os.link))


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.unlink()  # the link, not the file
    path.write_text(text.replace(old, new, 1))


def test_another_version_is_one_sentence(tree: Path, tmp_path: Path) -> None:
    copy = light_copy(tree, tmp_path)
    rewrite(copy / 'megatron/core/package_info.py', 'MINOR = ', 'MINOR = 9')
    with pytest.raises(ConfigError) as caught:
        checkout.check_checkout(copy)
    installed = find_core().version
    assert f'the one installed in {sys.executable} is {installed}' in str(caught.value)
    assert '\n' not in str(caught.value)


def test_other_sources_are_named(tree: Path, tmp_path: Path) -> None:
    copy = light_copy(tree, tmp_path)
    changed = 'megatron/core/optimizer/distrib_optimizer.py'
    unused = 'megatron/core/inference/utils.py'
    for file in (changed, unused):
        rewrite(copy / file, 'import', '# edited\nimport')
    with pytest.raises(ConfigError, match=f'but {changed} is not the same: check out'):
        checkout.check_checkout(copy)
    (copy / changed).unlink()
    os.link(tree / changed, copy / changed)
    assert checkout.check_checkout(copy).other_files == (unused,)


# The command

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--megatron-lm', '/nowhere'], '/nowhere is not a checkout of Megatron-LM'),
        (['--megatron-lm', 'TREE', '--nproc', '0'], '--nproc is 0'),
        (['--megatron-lm', 'TREE', '--timeout', '-1'], '--timeout is -1'),
        (['--megatron-lm', 'TREE', '--config', 'upsteam'], 'upsteam'),
        (['--megatron-lm', 'TREE', '--json', '/nowhere/x.json'], 'the folder /nowhere does not'),
        (['--megatron-lm', 'TREE', '--json', '/'], 'is a folder'),
    ],
)
def test_bad_input(tree: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    given = [str(tree) if a == 'TREE' else a for a in arguments]
    assert suite.main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith('run_upstream_tests.sh: error: ')
    assert message in error
    assert error.count('\n') == 1


def test_nothing_passes_on_stock(
    monkeypatch: pytest.MonkeyPatch, tree: Path, capsys: Capture
) -> None:
    broken = FileResult(tests={'t': Outcome('error', 'no module named x')})
    monkeypatch.setattr(suite, 'run_file', lambda setting, file, config, folder: broken)
    assert suite.main(['--megatron-lm', str(tree), '--only', 'test_a']) == 2
    assert 'the first error is: no module named x' in capsys.readouterr().err


def test_list(tree: Path, capsys: Capture) -> None:
    assert suite.main(['--megatron-lm', str(tree), '--only', 'layout', '--list']) == 0
    assert capsys.readouterr().out == 'tests/unit_tests/test_layouts.py\n'


@pytest.mark.parametrize(
    ('script', 'arguments', 'code'),
    [
        ('test_matrix.sh', ['--help'], 0),
        ('test_matrix.sh', ['18'], 2),
        ('run_upstream_tests.sh', ['--python', '/nowhere/python'], 2),
        ('run_upstream_tests.sh', ['--python'], 2),
    ],
)
def test_arguments_of_scripts(script: str, arguments: list[str], code: int) -> None:
    command = [str(ROOT / 'scripts' / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code
    if code:
        assert done.stderr.startswith(f'{script.removesuffix(".sh")}')
        assert ': error: ' in done.stderr
    else:
        assert 'usage: scripts/test_matrix.sh' in done.stdout


@pytest.mark.slow
def test_a_hang_is_recorded_and_the_run_goes_on(tree: Path, tmp_path: Path) -> None:
    copy = light_copy(tree, tmp_path)
    (copy / 'tests/unit_tests/distributed/test_b.py').write_text(
        'import time\ndef test_1(): time.sleep(600)\ndef test_2(): pass\n'
    )
    setting = Setting(checkout=copy, nproc=1, timeout_s=240, collective_limit_s=15)
    found = run_file(setting, 'tests/unit_tests/distributed/test_b.py', None, tmp_path / 'out')
    assert [test.outcome for test in found.tests.values()] == ['timeout', 'passed']
    assert found.starts == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_of_it(tree: Path, tmp_path: Path) -> None:
    command = [
        *(str(ROOT / 'scripts' / 'run_upstream_tests.sh'), '--python', sys.executable),
        *('--megatron-lm', str(tree), '--json', str(tmp_path / 'x.json'), '--out', str(tmp_path)),
        *('--only', 'test_a'),
    ]
    env = os.environ | {'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run(
        command, cwd=tree, env=env, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    data = json.loads((tmp_path / 'x.json').read_text())
    stock, ours = (
        {
            test.rpartition('::')[2]: outcome['outcome']
            for file in data['files'].values()
            for test, outcome in file[arm]['tests'].items()
        }
        for arm in ('stock', 'ours')
    )
    expected = {
        'test_passes': 'passed',
        'test_fails_on_one_rank': 'failed',
        'test_still_runs_after_it': 'passed',
        'test_skipped': 'skipped',
        'test_ours_only': 'failed',
        'test_stock_only': 'passed',
        'test_crashes': 'crashed',
        'test_after_a_crash': 'passed',
    }
    assert stock == expected
    assert ours == expected | {'test_ours_only': 'passed', 'test_stock_only': 'failed'}
    assert [d['is_regression'] for d in data['differences']] == [False, True]
    assert not list((tree / 'tests').rglob('*.jsonl'))
    # Everything is there already: nothing is run again.
    again = subprocess.run(
        command, cwd=tree, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert again.returncode == 1, again.stderr

"""doctor: what it finds here, and that it reports instead of crashing where things are missing or broken."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_buffer.patching import doctor, fingerprints
from megatron_buffer.patching.targets import TARGETS
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parent.parent


def _render(report: dict[str, Any], width: int = 80) -> str:
    stream = io.StringIO()
    doctor.render(report, Console(file=stream, width=width))
    return stream.getvalue()


def _report_in(*paths: Path, prelude: str = '') -> dict[str, Any]:
    """A report from a fresh process in which some folders come first on the path."""
    code = (
        f'{prelude}\nimport json\nfrom megatron_buffer.patching import doctor_report\n'
        'print(json.dumps(doctor_report()))\n'
    )
    answer = subprocess.run(
        [sys.executable, '-c', code],
        env={
            **os.environ,
            'PYTHONPATH': os.pathsep.join(map(str, [*paths, ROOT])),
            'CUDA_VISIBLE_DEVICES': '',
            'OMP_NUM_THREADS': '1',
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def _reports(rank: int, world_size: int) -> list[Any]:
    from megatron_buffer import patching

    # the harness runs in CPU mode, whose stand-ins must not look like a GPU that is missing
    before = patching.doctor_report()
    patching.install('upstream', training=True)
    during = patching.doctor_report()
    patching.uninstall()
    return [before, during, patching.doctor_report()]


def test_the_report_on_a_working_environment() -> None:
    ((before, during, after),) = run_ranks(_reports, 1)
    assert before['ok'] is True
    assert before['problems'] == []
    assert json.loads(json.dumps(before)) == before
    core = before['megatron_core']
    assert core['version'] in core['matching_versions']
    assert core['kind'] == 'wheel'
    assert core['differences'] == []
    assert core['fingerprinted_symbols'] > 100
    assert before['interpreter']['version'].startswith(f'3.{sys.version_info.minor}')
    assert before['torch']['version']
    targets = {t['symbol']: t for t in before['targets']}
    assert set(targets) == {t.symbol for t in TARGETS}
    assert all(t['fingerprint'] == 'known' and t['resolved'] for t in targets.values())
    held = targets['megatron.core.distributed.distributed_data_parallel:DistributedDataParallel'][
        'holders'
    ]
    assert {
        'megatron.core:DistributedDataParallel',
        'megatron.core.distributed:DistributedDataParallel',
        'megatron.core.distributed.distributed_data_parallel:DistributedDataParallel',
        'megatron.training.training:DDP',
        'megatron.training.training:wrap_model_chunks_with_ddp (DP=)',
        'megatron.training.models.dist_utils:DistributedDataParallel',
    } <= set(held)
    assert before['installed'] is None
    assert during['installed']['config'] == 'upstream'
    assert during['ok'] is True
    assert [t['holders'] for t in during['targets']] == [t['holders'] for t in before['targets']]
    assert after['installed'] is None

    text = _render(before)
    assert max(map(len, text.splitlines())) <= 80
    assert 'The buffer can be installed here.' in text
    for word in ('partition_buckets', 'training.training: DDP', core['version'], 'known'):
        assert word in text


def test_no_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, 'find_core', lambda: fingerprints.CoreInstall(path=None))
    monkeypatch.setattr(doctor, 'collect', lambda *_: {})
    report = doctor.doctor_report()
    assert report['ok'] is False
    assert any("pip install 'megatron-core" in problem for problem in report['problems'])
    assert {t['fingerprint'] for t in report['targets']} == {'missing'}
    assert 'not installed' in _render(report)
    json.dumps(report)


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    there = doctor._is_there
    monkeypatch.setattr(doctor, '_is_there', lambda name: name != 'torch' and there(name))
    report = doctor.doctor_report()
    assert report['ok'] is False
    assert any(p.startswith('torch is not installed') for p in report['problems'])
    assert report['megatron_core']['error'] == 'not imported, because torch is missing or broken'
    _render(report)


def test_an_old_version_is_explained(tmp_path: Path) -> None:
    core = tmp_path / 'megatron/core'
    (core / 'distributed').mkdir(parents=True)
    (core / '__init__.py').write_text('raise AssertionError("imported")')
    (core / 'distributed/__init__.py').touch()
    (core / 'package_info.py').write_text('MAJOR = 0\nMINOR = 17\nPATCH = 1\n')
    buffer = core / 'distributed/param_and_grad_buffer.py'
    buffer.write_text('class _ParamAndGradBuffer:\n    def __init__(self):\n        pass\n')
    report = _report_in(tmp_path)
    assert report['ok'] is False
    (problem,) = [p for p in report['problems'] if '0.17.1' in p]
    assert 'closures inside the constructor' in problem
    states = {t['symbol'].partition(':')[2]: t['fingerprint'] for t in report['targets']}
    assert states['_ParamAndGradBuffer'] == 'changed'
    assert states['DistributedDataParallel'] == 'missing'
    assert any('two trees are mixed' in note for note in report['notes'])
    _render(report)


def test_an_import_that_fails_is_reported(tmp_path: Path) -> None:
    installed = fingerprints.find_core().path
    assert installed is not None
    shutil.copytree(
        installed, tmp_path / 'megatron/core', ignore=shutil.ignore_patterns('__pycache__')
    )
    (tmp_path / 'megatron/core/__init__.py').write_text(
        'raise OSError("libsomething.so: no such file")'
    )
    report = _report_in(tmp_path)
    assert report['ok'] is False
    assert report['megatron_core']['matching_versions'], 'the fingerprinted files are unchanged'
    assert 'libsomething.so' in report['megatron_core']['error']
    assert any('libsomething.so' in p for p in report['problems'])
    assert all(t['fingerprint'] == 'known' for t in report['targets'] if t['group'] == 'core')


def test_transformer_engine_without_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / 'transformer_engine'
    package.mkdir()
    (package / '__init__.py').write_text('raise AssertionError("imported")')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, '_has_driver', lambda: False)
    report: dict[str, Any] = {'problems': [], 'notes': []}
    assert doctor._transformer_engine(report) == {
        'present': True,
        'version': None,
        'importable': False,
    }
    assert 'libcuda.so.1' in report['problems'][0]
    monkeypatch.setattr(doctor, '_has_driver', lambda: True)
    report = {'problems': [], 'notes': []}
    assert doctor._transformer_engine(report)['importable'] is True
    assert report['problems'] == []


@pytest.mark.parametrize(
    ('kind', 'folders', 'summary'),
    [
        ('impostor', ['antispam', 'lib'], 'Toolkit for authentication in a Pyramid application'),
        ('nvidia', ['multi_tensor_apply', 'optimizers'], 'PyTorch Extensions written by NVIDIA'),
        ('unknown', ['other'], 'Something else'),
    ],
)
def test_apex_and_its_impostor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, folders: list[str], summary: str
) -> None:
    for folder in folders:
        (tmp_path / 'apex' / folder).mkdir(parents=True)
    (tmp_path / 'apex/__init__.py').write_text('raise AssertionError("imported")')
    (tmp_path / 'apex-0.9.dist-info').mkdir()
    (tmp_path / 'apex-0.9.dist-info/METADATA').write_text(
        f'Metadata-Version: 2.1\nName: apex\nVersion: 0.9\nSummary: {summary}\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    report: dict[str, Any] = {'problems': [], 'notes': []}
    found = doctor._apex(report)
    assert found['kind'] == kind
    assert found['path'] == str(tmp_path / 'apex')
    if kind == 'nvidia':
        assert report['problems'] == []
    else:
        assert 'pip uninstall apex' in report['problems'][0]


def test_a_fork_of_the_argument_parser_is_a_problem_for_the_launcher_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = doctor.collect

    def with_a_change(*arguments: Any) -> dict[str, Any]:
        found = real(*arguments)
        del found['megatron.training.arguments:parse_args']
        return found

    monkeypatch.setattr(doctor, 'collect', with_a_change)
    monkeypatch.setattr(doctor, '_transactions', lambda *_: [])
    report = doctor.doctor_report()
    (problem,) = report['problems']
    assert problem.startswith("'megatron-buffer run' refuses (install() in Python doesn't)")
    assert 'parse_args is missing' in problem

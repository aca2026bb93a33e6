"""The gate: which sources are known, what a refusal names, and that the manifest holds no source text."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_buffer.errors import FingerprintError, UnsupportedVersionError
from megatron_buffer.patching import fingerprints as fp
from megatron_buffer.patching.sources import collect, live_state, locate, read_symbols
from megatron_buffer.patching.targets import CORE, RELIED_UPON, TARGETS, TRAINING, Reliance

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = '''\
import functools

try:
    CHOSEN = max
except NameError:
    CHOSEN = None

if True:
    def guarded(x):
        """Sits inside an if."""
        return x

@functools.cache
def decorated(
    x,
):
    return x

class Thing(dict):
    """Doc."""

    limit = 3

    @staticmethod
    def static(x):
        return x

    def method(self):
        return 1

    other = 4
'''
FILES = sorted({r.module.replace('.', '/') + '.py' for r in RELIED_UPON})


def _symbols(tmp_path: Path, text: str, *names: str, newline: str = '\n') -> dict[str, Any]:
    path = tmp_path / 'sample.py'
    path.write_bytes(text.replace('\n', newline).encode())
    return read_symbols('sample', path, names)


def _tree(folder: Path, **replaced: str) -> Path:
    """A folder with only those files of the installed megatron that are fingerprinted."""
    core = fp.find_core().path
    assert core is not None
    source = core.parent.parent
    for name in (*FILES, 'megatron/core/package_info.py', 'megatron/core/__init__.py'):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_file():
            shutil.copy(source / name, target)
        else:
            shutil.copy(fp.find_core().training_path.parent.parent / name, target)  # type: ignore[union-attr]
    for package in (
        'megatron/core/dist_checkpointing',
        'megatron/core/distributed',
        'megatron/core/optimizer',
        'megatron/training',
        'megatron/training/models',
    ):
        (folder / package / '__init__.py').touch()
    (folder / 'megatron/core/__init__.py').write_text('')
    if 'version' in replaced:
        numbers = replaced['version'].split('.')
        lines = [
            f'{key} = {n}' for key, n in zip(('MAJOR', 'MINOR', 'PATCH'), numbers, strict=True)
        ]
        (folder / 'megatron/core/package_info.py').write_text('\n'.join(lines))
    return folder


def _verdict(folder: Path, training: bool = True) -> tuple[fp.CoreInstall, fp.Verdict]:
    core = fp.find_core([str(folder)])
    reliances = fp.reliances_for(core, training)
    sources = collect(reliances, [str(folder)])
    return core, fp.compare(sources, fp.Manifest.load(), reliances, core.version)


def _edit(folder: Path, name: str, old: str, new: str) -> int:
    """Changes the only occurrence of a text; returns its line number."""
    path = folder / name
    text = path.read_text()
    assert text.count(old) == 1, (name, old)
    path.write_text(text.replace(old, new))
    return text[: text.index(old)].count('\n') + 1


DDP_FILE = 'megatron/core/distributed/distributed_data_parallel.py'
DDP_CLASS = 'megatron.core.distributed.distributed_data_parallel:DistributedDataParallel'


def test_the_installed_megatron_is_known() -> None:
    core = fp.find_core()
    verdict = fp.compare(collect(), fp.Manifest.load(), version=core.version)
    assert verdict.differences == ()
    assert core.version in verdict.matching
    assert verdict.nearest == core.version
    assert core.kind == 'wheel'
    fp.check_gate(core, verdict)


def test_every_target_is_fingerprinted_in_every_version() -> None:
    manifest = fp.Manifest.load()
    assert {'0.18.2', '0.19.0', '0.19.2'} <= set(manifest.versions)
    for symbols in manifest.versions.values():
        for target in TARGETS:
            assert any(s == target.symbol or s.startswith(target.symbol + '.') for s in symbols)
        for reliance in RELIED_UPON:
            assert any(s.startswith(reliance.module + ':') for s in symbols)
    assert manifest.versions['0.19.0'] == manifest.versions['0.19.2'] != manifest.versions['0.18.2']
    assert f'{DDP_CLASS}._make_backward_post_hook' in manifest.versions['0.19.2']
    old, new = manifest.versions['0.18.2'], manifest.versions['0.19.2']
    absent = 'megatron.training.training:resolve_ddp_bucket_size'
    assert absent in new
    assert absent not in old


def test_the_manifest_holds_no_text() -> None:
    data = json.loads(fp.MANIFEST_PATH.read_text())
    assert set(data) == {'versions', 'sources'}
    for digest, lines in data['sources'].items():
        assert re.fullmatch('[0-9a-f]{64}', digest)
        assert re.fullmatch('([0-9a-f]{6})+', lines)
    used = {d for symbols in fp.Manifest.load().versions.values() for d in symbols.values()}
    assert used == set(data['sources'])


def test_the_manifest_is_what_the_script_makes(tmp_path: Path) -> None:
    answer = subprocess.run(
        [
            sys.executable,
            ROOT / 'scripts/make_manifest.py',
            sys.prefix,
            '--output',
            tmp_path / 'm.json',
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    made = fp.Manifest.load(tmp_path / 'm.json')
    version = fp.find_core().version
    assert made.versions == {version: fp.Manifest.load().versions[version]}
    for digest, lines in made.sources.items():
        assert fp.Manifest.load().sources[digest] == lines


def test_reading_symbols(tmp_path: Path) -> None:
    found = _symbols(tmp_path, SAMPLE, '*')
    assert set(found) == {'guarded', 'decorated', 'Thing.<class>', 'Thing.static', 'Thing.method'}
    assert found['guarded'].lines[0] == (9, 'def guarded(x):')
    assert found['decorated'].lines[0] == (13, '@functools.cache')
    assert found['decorated'].decorated
    assert found['decorated'].last_line == 17
    assert not found['guarded'].decorated
    assert found['Thing.static'].lines[0] == (24, '@staticmethod')
    texts = [text for _, text in found['Thing.<class>'].lines]
    assert 'class Thing(dict):' in texts
    assert '    other = 4' in texts
    assert not any('def ' in text for text in texts)
    assert set(_symbols(tmp_path, SAMPLE, 'Thing')) == {
        'Thing.<class>',
        'Thing.static',
        'Thing.method',
    }
    assert set(_symbols(tmp_path, SAMPLE, 'Thing.method', 'absent')) == {'Thing.method'}
    chosen = _symbols(tmp_path, SAMPLE, 'CHOSEN')['CHOSEN']
    assert [line for _, line in chosen.lines] == ['CHOSEN = max', 'CHOSEN = None']
    assert chosen.kind == 'variable'


def test_line_endings_and_indentation_do_not_count(tmp_path: Path) -> None:
    plain = _symbols(tmp_path, SAMPLE, '*')
    windows = _symbols(tmp_path, SAMPLE, '*', newline='\r\n')
    assert {k: v.sha256 for k, v in plain.items()} == {k: v.sha256 for k, v in windows.items()}
    outside = 'def guarded(x):\n    """Sits inside an if."""\n    return x\n'
    assert _symbols(tmp_path, outside, '*')['guarded'].sha256 == plain['guarded'].sha256


def test_a_tampered_line_is_named_and_shown(tmp_path: Path) -> None:
    folder = _tree(tmp_path)
    old = 'param.main_grad.add_(param.grad.data)'
    line = _edit(folder, DDP_FILE, old, 'param.main_grad.add_(2 * param.grad.data)')
    core, verdict = _verdict(folder)
    assert verdict.matching == ()
    (difference,) = verdict.differences
    assert difference.symbol == f'{DDP_CLASS}._make_backward_post_hook'
    assert [number for number, _ in difference.new_lines] == [line]
    assert difference.lost_lines == 1
    with pytest.raises(FingerprintError) as caught:
        fp.check_gate(core, verdict)
    text = str(caught.value)
    assert '_make_backward_post_hook is changed' in text
    assert f'{folder / DDP_FILE}:{line}' in text
    assert f'{line} |' in text
    assert '2 * param.grad.data' in text
    assert '--custom-buffer-compat warn' in text
    assert "compat='warn'" in text
    assert text.count(' | ') == 1, 'only the line that changed is shown'


def test_new_and_missing_methods_are_differences(tmp_path: Path) -> None:
    folder = _tree(tmp_path)
    _edit(folder, DDP_FILE, 'def scale_gradients(self', 'def rescale_gradients(self')
    kinds = {d.symbol: d.kind for d in _verdict(folder)[1].differences}
    assert kinds == {
        f'{DDP_CLASS}.scale_gradients': 'missing',
        f'{DDP_CLASS}.rescale_gradients': 'new',
    }


def test_a_changed_base_class_is_a_difference(tmp_path: Path) -> None:
    folder = _tree(tmp_path)
    _edit(
        folder,
        DDP_FILE,
        'class DistributedDataParallel(_BaseDataParallel):',
        'class DistributedDataParallel(object):',
    )
    (difference,) = _verdict(folder)[1].differences
    assert difference.symbol == f'{DDP_CLASS}.<class>'


def test_training_counts_only_for_the_launcher(tmp_path: Path) -> None:
    folder = _tree(tmp_path)
    _edit(
        folder, 'megatron/training/arguments.py', 'def parse_args(', 'def parse_args(  # a fork\n'
    )
    assert _verdict(folder, training=False)[1].matching
    (difference,) = _verdict(folder)[1].differences
    assert difference.symbol == 'megatron.training.arguments:parse_args'


@pytest.mark.parametrize('version', ['0.19.1', '0.25.0', '0.17.1'])
def test_known_sources_are_accepted_whatever_the_version_says(tmp_path: Path, version: str) -> None:
    core, verdict = _verdict(_tree(tmp_path, version=version))
    assert core.version == version
    assert core.kind == 'checkout'
    assert fp.find_core().version in verdict.matching
    fp.check_gate(core, verdict)


@pytest.mark.parametrize(
    ('version', 'kind', 'text'),
    [
        ('0.16.1', UnsupportedVersionError, 'closures inside the constructor'),
        ('0.17.1', UnsupportedVersionError, 'closures inside the constructor'),
        ('0.18.1', UnsupportedVersionError, 'supported: >=0.18.2'),
        ('0.19.1', UnsupportedVersionError, 'supported: >=0.18.2'),
        ('0.20.0', UnsupportedVersionError, 'supported: >=0.18.2'),
        ('0.19.3', FingerprintError, '_make_backward_post_hook is changed'),
    ],
)
def test_unknown_sources_are_refused_by_version(
    tmp_path: Path, version: str, kind: type[Exception], text: str
) -> None:
    folder = _tree(tmp_path, version=version)
    _edit(folder, DDP_FILE, 'param.main_grad.add_(param.grad.data)', 'pass')
    with pytest.raises(kind, match=re.escape(text)) as caught:
        fp.check_gate(*_verdict(folder))
    assert version in str(caught.value)


def test_no_megatron_at_all(tmp_path: Path) -> None:
    core = fp.find_core([str(tmp_path)])
    assert core.path is None
    verdict = fp.compare({}, fp.Manifest.load(), version='')
    with pytest.raises(UnsupportedVersionError, match=r'not installed.*pip install'):
        fp.check_gate(core, verdict)


def test_the_manifest_of_two_versions_tells_the_nearest(tmp_path: Path) -> None:
    reliance = Reliance(group=CORE, module='sample', names=('*',), why='test')
    path = tmp_path / 'sample.py'
    versions: dict[str, Any] = {}
    for version, text in (('1', SAMPLE), ('2', SAMPLE.replace('return 1', 'return 2'))):
        path.write_text(text)
        versions[version] = collect([reliance], [str(tmp_path)])
    manifest = fp.Manifest(
        json.loads(json.dumps(fp.make_manifest({**versions, '2.1': versions['2']})))
    )
    path.write_text(SAMPLE.replace('return 1', 'return 2').replace('limit = 3', 'limit = 5'))
    verdict = fp.compare(collect([reliance], [str(tmp_path)]), manifest, [reliance])
    assert verdict.nearest == '2.1'
    (difference,) = verdict.differences
    assert difference.new_lines == ((22, '    limit = 5'),)
    path.write_text(SAMPLE)
    assert fp.compare(collect([reliance], [str(tmp_path)]), manifest, [reliance]).matching == ('1',)


def test_sources_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'live_sample.py').write_text(SAMPLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import live_sample  # type: ignore[import-not-found]

    file = locate('live_sample')
    assert file == tmp_path / 'live_sample.py'
    known = read_symbols('live_sample', file, ['*', 'CHOSEN'])
    thing = live_sample.Thing
    assert live_state(live_sample.guarded, known['guarded']) == 'same'
    assert live_state(thing, known['Thing.<class>']) == 'same'
    assert live_state(vars(thing)['static'], known['Thing.static']) == 'same'
    assert live_state(thing.method, known['Thing.method']) == 'same'
    assert live_state(7, known['CHOSEN']) == 'same'
    assert live_state(thing.method, known['guarded']) == 'replaced'
    assert live_state(lambda x: x, known['guarded']) == 'replaced'
    assert live_state(type('Thing', (), {}), known['Thing.<class>']) == 'replaced'
    original = live_sample.guarded

    @functools.wraps(original)
    def wraps(x: Any) -> Any:
        return original(x)

    assert live_state(wraps, known['guarded']) == 'wrapped'
    assert live_state(lambda x: original(x), known['guarded']) == 'wrapped'
    del sys.modules['live_sample']


def _install(folder: Path, compat: str) -> subprocess.CompletedProcess[str]:
    code = (
        'import logging, sys, time; logging.basicConfig(level=logging.WARNING)\n'
        'import megatron_buffer\n'
        'from megatron_buffer.patching import installed_config\n'
        f'for _ in range(2): megatron_buffer.install(compat={compat!r}); megatron_buffer.uninstall()\n'
        'import megatron.core; print(megatron.core.__file__)\n'
    )
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code],
        env={**os.environ, 'PYTHONPATH': paths, 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.long
def test_a_tampered_package_on_the_path_is_refused_or_warned_of(tmp_path: Path) -> None:
    core = fp.find_core().path
    assert core is not None
    shutil.copytree(core, tmp_path / 'megatron/core', ignore=shutil.ignore_patterns('__pycache__'))
    line = _edit(
        tmp_path,
        DDP_FILE,
        'param.main_grad.add_(param.grad.data)',
        'param.main_grad.sub_(param.grad.data)',
    )
    refused = _install(tmp_path, 'strict')
    assert refused.returncode == 1
    assert 'FingerprintError' in refused.stderr
    assert f'{line} |' in refused.stderr
    assert 'main_grad.sub_' in refused.stderr
    warned = _install(tmp_path, 'warn')
    assert warned.returncode == 0, warned.stderr
    assert warned.stdout.startswith(str(tmp_path))
    assert warned.stderr.count('main_grad.sub_') == 1, 'warned of once'


def test_every_group_has_targets() -> None:
    assert {t.group for t in TARGETS} == {r.group for r in RELIED_UPON} == {CORE, TRAINING}

"""``patches/`` and ``scripts/apply_patches.sh``, on trees that are made here: no checkout is needed."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_buffer import launch, launch_flags
from megatron_buffer.launch_flags import Flags
from tests.harness import ROOT

PATCHES = ROOT / 'patches'
TAGS = ('core_v0.18.2', 'core_v0.19.0', 'main')
FILES = (
    'megatron/training/arguments.py',
    'megatron/training/config/common_config.py',
    'pretrain_gpt.py',
)


def load_script() -> ModuleType:
    path = ROOT / 'scripts' / 'apply_patches.py'
    spec = importlib.util.spec_from_file_location('apply_patches', path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules['apply_patches'] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


apply_patches = load_script()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# What is in the repository


def test_every_tag_has_its_folder() -> None:
    manifest = json.loads((PATCHES / 'manifest.json').read_text())
    assert set(manifest) == set(TAGS) == {path.name for path in PATCHES.iterdir() if path.is_dir()}


@pytest.mark.parametrize('tag', TAGS)
def test_a_patch_only_adds_and_shows_nothing_of_upstream(tag: str) -> None:
    text = (PATCHES / tag / 'custom-buffer.patch').read_text()
    kinds = {line[0] for line in text.splitlines()}
    assert kinds == {'-', '+', '@'}
    assert [line for line in text.splitlines() if line[0] == '-'] == [f'--- a/{f}' for f in FILES]
    for line in text.splitlines():
        if line[0] == '@':
            old, new = re.fullmatch(r'@@ -(\S+) \+(\S+) @@', line).groups()  # type: ignore[union-attr]
            start, count = old.split(',')
            assert count == '0'
            assert new.split(',')[0] == str(int(start) + 1)
    assert tuple(apply_patches.parse_patch(text)) == FILES
    assert max(map(len, text.splitlines())) < 120


@pytest.mark.parametrize('tag', TAGS)
def test_readme_and_manifest_agree(tag: str) -> None:
    (known,) = (t for t in apply_patches.read_manifest() if t.name == tag)
    readme = (PATCHES / tag / 'README.md').read_text()
    assert known.commit in readme
    assert tuple(known.files) == FILES
    hashes = [
        h for file in FILES for h in (known.files[file]['before'], known.files[file]['after'])
    ]
    assert re.findall(r'\b[0-9a-f]{64}\b', readme) == hashes
    assert len(known.commit) == 40


def test_the_added_python_is_the_same_everywhere_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook does nothing without one of our flags, not even an import."""
    patches = [
        apply_patches.parse_patch((PATCHES / tag / 'custom-buffer.patch').read_text())
        for tag in TAGS
    ]
    for file in FILES:
        added = {patch[file][0].lines for patch in patches}
        assert len(added) == 1
    hook = b''.join(patches[0]['pretrain_gpt.py'][0].lines).decode()
    calls: list[int] = []
    monkeypatch.setattr(launch, 'take_flags', lambda: calls.append(1))
    for argv, expected in ((['x', '--lr', '1'], 0), (['x', '--use-custom-buffer'], 1)):
        monkeypatch.setattr(sys, 'argv', argv)
        exec(compile(hook, 'hook', 'exec'), {})
        assert len(calls) == expected


# Flags of a patched tree


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parts of take_flags that change the process are replaced; what they were called with."""
    done: list[Any] = []
    monkeypatch.setattr(launch, '_launched', None)
    monkeypatch.setattr(launch, '_turn_cpu_mode_on', lambda flags: None)
    monkeypatch.setattr(launch, '_install', lambda config, flags: done.append((config, flags)))
    monkeypatch.setattr(sys, 'excepthook', sys.__excepthook__)
    return done


def test_flags_are_taken_out_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, process: list[Any]
) -> None:
    monkeypatch.setattr(sys, 'argv', ['p.py', '--lr', '1', '--use-custom-buffer', '--bf16'])
    launch.take_flags()
    assert sys.argv == ['p.py', '--lr', '1', '--bf16']
    ((config, flags),) = process
    assert config.source == 'upstream'
    assert flags == Flags(use_custom_buffer=True)
    launch.take_flags()  # the second hook
    assert len(process) == 1


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--use-custom-bufer', '--custom-buffer-cpu'], 'did you mean --use-custom-buffer?'),
        (['--custom-buffer-config', 'x.yaml'], 'has no effect without --use-custom-buffer'),
        (['--use-custom-buffer', '--custom-buffer-config', 'nothing.yaml'], 'nothing.yaml'),
    ],
)
def test_bad_flags_end_the_run_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    process: list[Any],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, 'argv', ['p.py', *arguments])
    with pytest.raises(SystemExit) as caught:
        launch.take_flags()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith('megatron-buffer: error: ')
    assert message in error
    assert not process


def test_the_launcher_on_a_patched_tree() -> None:
    """Megatron's parser has two of our flags already; the launcher's values are the defaults then."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--use-custom-buffer', action='store_true')
    parser.add_argument('--custom-buffer-config', default=None)
    flags = Flags(
        use_custom_buffer=True, custom_buffer_config='x.yaml', custom_buffer_compat='warn'
    )
    launch_flags.add_flags(parser, flags)
    assert Flags(**vars(parser.parse_args([]))) == flags


# Trees


TEXTS = {
    FILES[0]: 'import os\n\n\ndef f(x):\n    return x\n',
    FILES[1]: 'class A:\n    """A."""\n\n    b: int = 0\n',
    FILES[2]: '"""S."""\nimport json\n',
}
PATCH = """\
--- a/megatron/training/arguments.py
+++ b/megatron/training/arguments.py
@@ -4,0 +5,2 @@
+    x += 1
+
--- a/megatron/training/config/common_config.py
+++ b/megatron/training/config/common_config.py
@@ -3,0 +4 @@
+    c: int = 1
--- a/pretrain_gpt.py
+++ b/pretrain_gpt.py
@@ -0,0 +1 @@
+# first
@@ -2,0 +4,2 @@
+
+# last
"""
PATCHED = {
    FILES[0]: 'import os\n\n\ndef f(x):\n    x += 1\n\n    return x\n',
    FILES[1]: 'class A:\n    """A."""\n\n    c: int = 1\n    b: int = 0\n',
    FILES[2]: '# first\n"""S."""\nimport json\n\n# last\n',
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / 'tree'
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / FILES[2]).chmod(0o755)
    return root


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / 'patches'
    (folder / 'v1').mkdir(parents=True)
    (folder / 'v1' / 'custom-buffer.patch').write_text(PATCH)
    hashes = {
        name: {'before': digest(TEXTS[name].encode()), 'after': digest(PATCHED[name].encode())}
        for name in TEXTS
    }
    tag = {'commit': 'c' * 40, 'version': '1.0.0', 'files': hashes}
    (folder / 'manifest.json').write_text(json.dumps({'v1': tag}))
    return folder


def contents(tree: Path) -> dict[str, str]:
    return {
        str(path.relative_to(tree)): path.read_text() for path in tree.rglob('*') if path.is_file()
    }


def run(
    capsys: pytest.CaptureFixture[str], tree: Path, patches: Path, *flags: str
) -> tuple[int, str]:
    code = apply_patches.main(['--megatron-lm', str(tree), *flags], patches)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_apply_check_and_revert(
    tree: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def expect(flags: tuple[str, ...], said: str, after: dict[str, str]) -> None:
        code, text = run(capsys, tree, patches, *flags)
        assert (code, contents(tree)) == (0, after), text
        assert said in text

    expect(('--check',), 'can be applied', TEXTS)
    expect(('--revert',), 'not applied', TEXTS)
    expect((), 'patched: ', PATCHED)
    expect((), 'applied already', PATCHED)
    expect(('--check',), 'is applied', PATCHED)
    assert (tree / FILES[2]).stat().st_mode & 0o777 == 0o755
    (tree / FILES[1]).write_text(TEXTS[FILES[1]])  # half of it undone by hand
    expect(('--check',), 'half applied', PATCHED | {FILES[1]: TEXTS[FILES[1]]})
    expect((), 'patched: megatron/training/config/common_config.py\n', PATCHED)
    (tree / FILES[1]).write_text(TEXTS[FILES[1]])
    expect(('--revert',), 'reverted: ', TEXTS)
    assert (tree / FILES[2]).stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize('flags', [(), ('--check',), ('--revert',)])
@pytest.mark.parametrize('patched', [False, True])
def test_a_tampered_tree_is_left_as_it_is(
    tree: Path,
    patches: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    patched: bool,
) -> None:
    if patched:
        run(capsys, tree, patches)
    file = tree / FILES[1]
    file.write_text(file.read_text() + '\n')
    before = contents(tree)
    code, text = run(capsys, tree, patches, *flags)
    assert code == 2
    assert contents(tree) == before
    assert FILES[1] in text
    assert FILES[0] not in text
    assert digest(TEXTS[FILES[1]].encode()) in text
    assert digest(file.read_bytes()) in text
    assert f'git -C {tree} checkout {"c" * 12} -- {FILES[1]}' in text


def test_another_version_is_not_given_single_files_of_this_one(
    tmp_path: Path, tree: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path with a space is quoted, so that the line can be pasted."""
    tree = tree.rename(tmp_path / 'a tree')
    info = tree / 'megatron' / 'core' / 'package_info.py'
    info.parent.mkdir()
    (tree / FILES[1]).write_text('other\n')
    for version, said in (('1', f' -- {FILES[1]}\n'), ('2', '\n')):
        info.write_text(f'MAJOR = {version}\nMINOR = 0\nPATCH = 0\n')
        code, text = run(capsys, tree, patches)
        assert code == 2
        assert f"git -C '{tree}' checkout {'c' * 12}{said}" in text


def test_a_file_that_is_missing(
    tree: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / FILES[2]).unlink()
    code, text = run(capsys, tree, patches)
    assert (code, 'no such file' in text) == (2, True)
    assert contents(tree) == {name: TEXTS[name] for name in FILES[:2]}


@pytest.mark.parametrize('name', ['nothing', 'patches'])
def test_what_is_no_checkout(
    tmp_path: Path, patches: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, text = run(capsys, tmp_path / name, patches)
    assert code == 2
    assert text.count('\n') == 1


def test_all_or_nothing(
    tree: Path, patches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, calls = apply_patches.os.replace, []

    def fail_at_the_third(source: str, target: Path) -> None:
        calls.append(target)
        if len(calls) == 3:
            raise OSError(28, 'No space left on device')
        replace(source, target)

    monkeypatch.setattr(apply_patches.os, 'replace', fail_at_the_third)
    code, text = run(capsys, tree, patches)
    assert code == 2
    assert (
        'pretrain_gpt.py cannot be written: No space left on device; the tree is as it was' in text
    )
    assert contents(tree) == TEXTS


def test_a_link_to_a_file_elsewhere_is_followed(
    tmp_path: Path, tree: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link stays one, and what it points to gets the patch and loses it again."""
    outside, link = tmp_path / 'shared.py', tree / FILES[2]
    link.rename(outside)
    link.symlink_to(outside)
    for flags, after in (((), PATCHED), (('--revert',), TEXTS)):
        code, text = run(capsys, tree, patches, *flags)
        assert (code, contents(tree)) == (0, after), text
        assert FILES[2] in text
        assert link.is_symlink()


def test_a_damaged_patch_changes_nothing(
    tree: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (patches / 'v1' / 'custom-buffer.patch').write_text(PATCH.replace('# last', '# lost'))
    code, text = run(capsys, tree, patches)
    assert (code, 'is damaged' in text) == (2, True)
    assert contents(tree) == TEXTS


def test_git_agrees(tree: Path, patches: Path) -> None:
    """The same diff, applied by git where there is one."""
    command = ['git', 'apply', '--unidiff-zero', str(patches / 'v1' / 'custom-buffer.patch')]
    try:
        subprocess.run(
            command, cwd=tree, check=True, timeout=240, env={'GIT_CEILING_DIRECTORIES': '/'}
        )
    except FileNotFoundError:
        pytest.skip('no git here')
    assert contents(tree) == PATCHED


@given(
    st.lists(st.sampled_from(['a\n', 'b\n', '\n']), max_size=8),
    st.dictionaries(st.integers(0, 8), st.lists(st.sampled_from(['a\n', 'x\n']), min_size=1)),
)
def test_what_was_added_is_taken_out_again(lines: list[str], added: dict[int, list[str]]) -> None:
    at = sorted(place for place in added if place <= len(lines))
    text, shift = '--- a/f\n+++ b/f\n', 0
    for place in at:
        count = len(added[place])
        text += f'@@ -{place},0 +{place + shift + 1},{count} @@\n'
        text += ''.join('+' + line for line in added[place])
        shift += count
    hunks = apply_patches.parse_patch(text)['f']
    content = ''.join(lines).encode()
    expected: list[str] = []
    for place in range(len(lines) + 1):
        expected += added.get(place, []) + lines[place : place + 1]
    changed = apply_patches.add_lines(content, hunks)
    assert changed == ''.join(expected).encode()
    assert apply_patches.take_lines(changed, hunks) == content


@pytest.mark.parametrize(
    'text',
    [
        PATCH.replace('+# first', ' # first'),
        PATCH.replace('+# first', '-# first'),
        PATCH.replace('-0,0', '-1,1'),
        PATCH.replace('+5,2', '+5,3'),
        PATCH.removesuffix('\n'),
        'diff --git a/f b/f\n' + PATCH,
    ],
)
def test_other_diffs_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        apply_patches.parse_patch(text)


def test_the_command(tree: Path) -> None:
    """As a user calls it; the real manifest does not know the tree."""
    command = [str(ROOT / 'scripts' / 'apply_patches.sh'), '--megatron-lm', str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert 'apply_patches.sh: error: ' in done.stderr
    assert 'Nearest: ' in done.stderr
    assert contents(tree) == TEXTS

"""megatron-buffer diff: what it prints at each width, as HTML and JSON, and against another version."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_buffer import cli
from megatron_buffer.patching import fingerprints
from megatron_buffer.patching.sources import collect, locate
from megatron_buffer.patching.targets import RELIED_UPON
from megatron_buffer.reference.mapping import load_mapping

PGB = 'megatron/core/distributed/param_and_grad_buffer.py'
DDP = 'megatron/core/distributed/distributed_data_parallel.py'
START = '_ParamAndGradBucketGroup.start_grad_sync'


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('COLUMNS', 'FORCE_COLOR', 'NO_COLOR'):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(['diff', *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize('width', [80, 120, 200])
def test_a_symbol_fits_the_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv('COLUMNS', str(width))
    code, out, _ = run(capsys, '--symbol', START)
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    assert '\x1b' not in out, 'no colour codes in a pipe'
    assert out.splitlines()[1].startswith(f'{PGB}:')
    assert START in ' '.join(out.splitlines()[1:3])
    for wanted in ('replaces', 'F4', 'F6', '(grad_reduce)', '(scaling)'):
        assert wanted in out
    two_columns = re.search(r'^ *\d+ def start_grad_sync.* ~ +\d+ def start_grad_sync', out, re.M)
    assert bool(two_columns) == (width >= 120)


def test_colours_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('FORCE_COLOR', '1')
    _, out, _ = run(capsys, '--symbol', 'partition_buckets')
    assert '\x1b[' in out
    monkeypatch.setenv('NO_COLOR', '1')
    _, out, _ = run(capsys, '--symbol', 'partition_buckets')
    assert not re.search(r'\x1b\[[\d;]*3\d', out)


def test_upstream_s_lines_come_from_the_installed_file(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, '--symbol', 'DistributedDataParallel.scale_gradients', '--full')
    file = locate('megatron.core.distributed.distributed_data_parallel')
    assert file is not None
    lines = file.read_text().splitlines()
    numbers = [int(n) for n in re.findall(r'^ *(\d+) +.*\|', out, re.M)]
    assert numbers, 'upstream runs as it is'
    assert 'for ' in lines[numbers[0] - 1]


def test_a_class_brings_its_methods(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, '--symbol', '_ParamAndGradBuffer', '--json')
    names = [symbol['name'] for symbol in json.loads(out)['symbols']]
    assert code == 0
    assert names[0] == '_ParamAndGradBuffer'
    assert {'_ParamAndGradBuffer.__init__', '_ParamAndGradBuffer.reset'} <= set(names)


@pytest.mark.parametrize(
    'query',
    [
        'start_grad_sync',
        START,
        'param_and_grad_buffer.py: ' + START,
        'megatron.core.distributed.param_and_grad_buffer:' + START,
        'ParamAndGradBucketGroup.start_grad_sync',
    ],
)
def test_names_of_a_symbol(capsys: pytest.CaptureFixture[str], query: str) -> None:
    code, out, _ = run(capsys, '--symbol', query, '--json')
    assert code == 0
    assert [symbol['name'] for symbol in json.loads(out)['symbols']] == [START]


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['--symbol', 'strat_grad_sync'], f'no such symbol. Near: {START}'),
        (['--symbol', 'reset'], 'can mean 2 symbols'),
        (['--symbol', ''], '--symbol is empty'),
        (['--source', 'x'], 'give --against VERSION too'),
        (['--against', 'main'], 'no version number'),
        (['--against', '0.18.2', '--source', '/no/such/folder'], 'no such folder or wheel'),
        (['--html', '/no/such/folder/x.html'], 'there is no folder'),
        (['--html', 'x.html', '--json'], 'cannot be combined'),
        (['--html', 'x.html', '--against', '0.18.2'], 'leave one of them out'),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ''
    assert err.startswith('megatron-buffer: error: ')
    assert said in err


@pytest.mark.parametrize('width', [80, 120])
def test_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv('COLUMNS', str(width))
    code, out, _ = run(capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    assert 'used as they are' in out
    counted = re.search(r'(\d+) symbols', out)
    assert counted is not None
    listed = run(capsys, '--json')[1]
    data = json.loads(listed)
    assert len(data['symbols']) == int(counted[1]) == sum(data['counts']['relations'].values())
    assert set(collect(RELIED_UPON)) <= {symbol['symbol'] for symbol in data['symbols']}
    every = run(capsys, '--list')[1]
    assert len(every.splitlines()) > len(out.splitlines())


class _Page(HTMLParser):
    """Checks that elements close in order, and remembers what the page consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given['id'] or ''] if 'id' in given else []
        self.links += [given['href'] or ''] if 'href' in given else []
        self.loads += [given['src'] or ''] if 'src' in given else []
        if tag not in ('meta', 'input', 'col'):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, '--html', str(tmp_path / 'all.html'))
    assert code == 0
    assert 'wrote' in err
    text = (tmp_path / 'all.html').read_text(encoding='utf-8')
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links} <= set(page.ids), 'every link leads somewhere'
    assert page.loads == [], 'nothing is loaded'
    assert 'url(' not in text
    assert f'param_and_grad_buffer-{START}' in page.ids
    for wanted in ('prefers-color-scheme', '@media print', 'value="strategy"', 'F11'):
        assert wanted in text


# --------------------------------------------------------------------------- against another version


def _tree(folder: Path) -> Path:
    """The installed megatron-core's files that are looked at, as a checkout."""
    core = fingerprints.find_core()
    assert core.path is not None
    top = core.path.parent.parent
    modules = {symbol.partition(':')[0] for symbol in [*collect(RELIED_UPON), *load_mapping()]}
    files = [file for module in modules if (file := locate(module)) is not None]
    folders = {
        folder for file in files for folder in file.parents if top / 'megatron' in folder.parents
    }
    packages = [init for one in folders if (init := one / '__init__.py').is_file()]
    for file in [*files, *packages, core.path / 'package_info.py']:
        target = folder / file.relative_to(top)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    info = folder / 'megatron/core/package_info.py'
    info.write_text(re.sub(r'^MINOR = \d+', 'MINOR = 99', info.read_text(), flags=re.M))
    return folder


def test_the_same_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, '--against', '0.99.0', '--source', str(_tree(tmp_path)))
    assert code == 0
    assert ' unchanged' in out
    assert ' changed' not in out.replace('unchanged', '')


def test_changed_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tree = _tree(tmp_path / 'tree')
    edited = (tree / DDP).read_text()
    edited = edited.replace('    def no_sync(self):', '    def no_sync(self, other=None):')
    edited = edited.replace('    def start_grad_sync(', '    def start_gradient_sync(')
    (tree / DDP).write_text(edited)
    code, out, _ = run(capsys, '--against', '0.99.0', '--source', str(tree), '--json')
    assert code == 1
    found = json.loads(out)
    statuses = {s['symbol'].partition(':')[2]: s for s in found['symbols']}
    assert statuses['DistributedDataParallel.no_sync']['status'] == 'changed'
    assert statuses['DistributedDataParallel.start_grad_sync']['status'] == 'gone'
    assert statuses['DistributedDataParallel.start_gradient_sync']['status'] == 'new'
    assert '+def no_sync(self, other=None):' in statuses['DistributedDataParallel.no_sync']['diff']
    differing = [s for s in found['symbols'] if s['status'] != 'unchanged']
    assert len(differing) == 3
    assert found['newer'] == '0.99.0'

    # the same from a wheel, and as text
    wheel = tmp_path / 'megatron_core-0.99.0-py3-none-any.whl'
    with zipfile.ZipFile(wheel, 'w') as archive:
        for file in tree.rglob('*.py'):
            archive.write(file, file.relative_to(tree))
    code, out, _ = run(capsys, '--against', '0.99.0', '--source', str(wheel))
    assert code == 1
    assert '+def no_sync(self, other=None):' in out
    assert 'how to proceed' in out
    assert re.search(r'\d+ unchanged, 1 changed, 1 gone, 1 new', out)
    one = ['--symbol', 'DistributedDataParallel.zero_grad_buffer']
    assert run(capsys, '--against', '0.99.0', '--source', str(wheel), *one)[0] == 0


def test_a_folder_that_is_no_checkout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, '--against', '0.18.2', '--source', str(tmp_path))
    assert code == 2
    assert 'no megatron/core in this folder' in err
    (tmp_path / 'x.whl').write_text('no archive')
    code, _, err = run(capsys, '--against', '0.18.2', '--source', str(tmp_path / 'x.whl'))
    assert code == 2
    assert 'is not a wheel' in err


def test_offline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PIP_NO_INDEX', '1')
    monkeypatch.setenv('PIP_CONFIG_FILE', '/dev/null')
    code, _, err = run(capsys, '--against', '0.18.2')
    assert code == 2
    assert 'cannot be had from pip' in err
    assert '--source PATH' in err


def test_a_refusal_names_the_symbols_and_the_command(tmp_path: Path) -> None:
    """A checkout is not on the command's own path, so it says where."""
    tree = _tree(tmp_path / 'a tree')
    (tree / DDP).write_text(
        (tree / DDP).read_text().replace('def no_sync(self)', 'def no_sync(self, a=0)')
    )
    core = fingerprints.find_core([str(tree)])
    verdict = fingerprints.compare(
        collect(RELIED_UPON, [str(tree)]), fingerprints.Manifest.load(), version=core.version
    )
    with pytest.raises(fingerprints.UnsupportedVersionError) as caught:
        fingerprints.check_gate(core, verdict)
    end = str(caught.value).splitlines()
    assert end[-2] == '  distributed_data_parallel.py: DistributedDataParallel.no_sync'
    command = f'megatron-buffer diff --against {verdict.nearest}'
    assert end[-1].endswith(f"PYTHONPATH='{tree}' {command}")
    installed = dataclasses.replace(core, kind='wheel')
    assert fingerprints.how_to_proceed(installed, verdict).endswith(f"'{command}'")

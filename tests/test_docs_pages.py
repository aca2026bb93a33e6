"""The site's reference pages leave nothing out; its own links fit (scripts/docs_pages.py, docs_hooks.py)."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import megatron_buffer
from megatron_buffer import cli, launch_flags, testing
from megatron_buffer.config import AXES
from tests.harness import ROOT


@pytest.fixture(scope='module')
def pages() -> Iterator[Any]:
    """scripts/docs_pages.py, which mkdocs imports from there."""
    sys.path.insert(0, str(ROOT / 'scripts'))
    yield importlib.import_module('docs_pages')
    sys.path.remove(str(ROOT / 'scripts'))


def test_every_axis_strategy_and_parameter_is_on_the_config_page(
    pages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = pages.config_page()
    cli.main(['strategies', '--json'])
    listing = json.loads(capsys.readouterr().out)
    assert [axis['key'] for axis in listing['axes']] == list(AXES)
    for axis in listing['axes']:
        (section,) = re.findall(
            rf'^## `{axis["key"]}`\n(.*?)(?=^## )', text, re.MULTILINE | re.DOTALL
        )
        for item in axis['strategies'] + axis['steps']:
            assert f'# `{item["name"]}`' in section
            for param in item['params'] or ():
                assert f'| `{param["name"]}` | ' in section
    for key in ('layout_guard', 'stale_read', 'replaced_param_data'):
        assert f'| `{key}` | ' in text
    assert len(re.findall(r'^- .* with .*: ', text, re.MULTILINE)) == len(listing['incompatible'])
    assert not re.search(r'^\|.*[^\\]\|\|', text, re.MULTILINE)


def test_every_command_and_flag_has_its_place(pages: Any) -> None:
    commands = pages.cli_page()
    for name in ('validate', 'schema', 'strategies', 'layout', 'plan', 'diff', 'doctor', 'run'):
        assert f'\n## {name}\n' in commands
    flags = pages.launcher_page()
    for name in vars(launch_flags.Flags()):
        assert f'| `{launch_flags.flag_of(name)}` | ' in flags


def test_every_public_name_is_on_a_page(pages: Any) -> None:
    for text, module in ((pages.python_page(), megatron_buffer), (pages.testing_page(), testing)):
        shown = re.findall(r'^::: (\S+)$', text, re.MULTILINE)
        assert sorted(shown) == sorted(f'{module.__name__}.{name}' for name in module.__all__)


def test_json_keys_are_described_or_listed(pages: Any) -> None:
    text = pages.json_page()
    for page in ('layout.md', 'plan.md'):
        assert f'](../{page}#json' in text
    assert '\n  strategies[]\n    name\n' in text


def test_links_out_of_the_docs_become_paths(pages: Any) -> None:
    pytest.importorskip('mkdocs', reason='scripts/docs.sh installs it')
    hooks = importlib.import_module('docs_hooks')
    known = {'faults.md', 'howto/debug.md'}

    def on(page: str, text: str) -> str:
        return hooks.links_for_site(text, page, known)

    assert (
        on('howto/debug.md', '[faults](../faults.md#gradients)')
        == '[faults](../faults.md#gradients)'
    )
    assert on('faults.md', '[the readme](../README.md)') == 'the readme (`README.md`)'
    assert on('howto/debug.md', '[`README.md`](../../README.md)') == '`README.md`'
    assert on('howto/debug.md', 'see `docs/faults.md`') == 'see [`docs/faults.md`](../faults.md)'
    assert on('faults.md', '[x](https://example.org/a.md)') == '[x](https://example.org/a.md)'
    with pytest.raises(FileNotFoundError, match=r'docs/faults.md links to nowhere.md'):
        on('faults.md', '[x](../nowhere.md)')

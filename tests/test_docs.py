"""The documentation says what is true: the commands of the tour and the how-tos are run, links are followed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.docs_blocks import Command, commands_of, differences, problems
from tests.harness import ROOT, run_ranks

DOCS = ROOT / 'docs'
TOUR, TOUR_ZH = DOCS / 'tour.md', DOCS / 'zh' / 'tour.md'
WITH_COMMANDS = [TOUR, *sorted((DOCS / 'howto').glob('*.md'))]
LINK = re.compile(r'\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]*)?\)')
CODE = re.compile(r'^ *```.*?^ *```|`[^`\n]*`', re.MULTILINE | re.DOTALL)


def _problems(rank: int, world_size: int, commands: list[Command]) -> list[str]:
    return problems(commands)


def test_what_the_pages_show_is_what_the_commands_print() -> None:
    commands = [c for page in WITH_COMMANDS for c in commands_of(page) if not c.is_script]
    assert len([c for c in commands if c.page == 'docs/tour.md']) >= 12
    (found,) = run_ranks(_problems, 1, commands, init=False, timeout_s=280)
    assert not found, '\n'.join(found)


def test_the_example_of_the_pages_prints_what_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / 'scripts' / 'examples'))
    one_iteration = importlib.import_module('one_iteration')
    commands = [c for page in WITH_COMMANDS for c in commands_of(page) if c.is_script]
    assert len(commands) >= 3
    for command in commands:
        assert one_iteration.main(command.command.split()[2:]) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert not differences(command.shown, printed), command


def test_the_example_shows_stock_as_upstream_and_refuses_what_is_no_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / 'scripts' / 'examples'))
    one_iteration = importlib.import_module('one_iteration')
    said = []
    for choice in ('stock', 'upstream'):
        assert one_iteration.main([choice]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert one_iteration.main(['recomended']) == 2
    assert 'recommended' in capsys.readouterr().err


def test_both_languages_show_the_same_commands() -> None:
    english, chinese = ([c[2:] for c in commands_of(page)] for page in (TOUR, TOUR_ZH))
    assert english == chinese
    sections = [
        re.findall(r'^## (\d+)', page.read_text(), re.MULTILINE) for page in (TOUR, TOUR_ZH)
    ]
    assert sections[0] == sections[1] == [str(n) for n in range(1, 12)]


def test_a_difference_is_seen() -> None:
    printed = ['a', 'b', 'c', 'd']
    assert not differences(['a', 'b', 'c', 'd'], printed)
    assert not differences(['...', 'b', '...', 'd'], printed)
    assert not differences(['a', '...'], printed)
    assert not differences(['first w...', 'second'], ['first word', 'second'])
    assert differences(['first w...'], ['second word'])
    assert differences(['a', 'b', 'd'], printed) == ['shown:\n  d\nprinted there:\n  c']
    assert differences(['a', 'b', 'c'], printed) == ['not shown:\n  d']
    assert differences(['...', 'x'], printed)
    assert differences(['...', 'c', '...', 'b'], printed)


@pytest.mark.parametrize('page', sorted(DOCS.rglob('*.md')), ids=lambda p: str(p.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    text = CODE.sub('', page.read_text())
    for target, anchor in LINK.findall(text):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f'{page.name} links to {target}'
        if anchor and there.suffix == '.md':
            assert anchor[1:] in anchors(there), f'{page.name} links to {target}{anchor}'


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as file viewers and mkdocs both make them for plain English."""
    headings = re.findall(r'^#+ (.*)$', page.read_text(), re.MULTILINE)
    return {re.sub(r'[\s-]+', '-', re.sub(r'[^\w\s-]', '', h.lower()).strip()) for h in headings}

"""The commands that the pages show with their output: found, run, and compared line by line.

A block ``console`` has commands behind ``$`` and what they print, a line ``...`` for lines that are left out and
``...`` at the end of a line for the rest of it; a block ``pycon`` is an interactive Python session. Commands run in the root of the checkout. Blocks of other
kinds are only read.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tests.harness import ROOT

BLOCK = re.compile(r'^```(console|pycon)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LEFT_OUT = '...'
OPTIONS = doctest.ELLIPSIS | doctest.REPORT_NDIFF
SCRIPT = 'python scripts/examples/one_iteration.py'


class Command(NamedTuple):
    """A command of a page, or an interactive session (``pycon``), and what the page shows of its output."""

    page: str
    line: int
    command: str
    shown: list[str]

    @property
    def is_script(self) -> bool:
        """Whether it is the example script, which starts processes of its own."""
        return self.command.startswith(SCRIPT)


def commands_of(path: Path) -> list[Command]:
    """All commands of a page, in their order."""
    text = path.read_text()
    page = str(path.relative_to(ROOT))
    found: list[Command] = []
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count('\n') + 2
        kind, body = block.groups()
        if kind == 'pycon':
            found.append(Command(page, line, 'pycon', body.splitlines()))
            continue
        lines = iter(enumerate(body.splitlines(), start=line))
        for number, words in lines:
            if words.startswith('$ '):
                command = words[2:]
                while command.endswith('\\'):
                    command = command[:-1] + next(lines)[1].strip()
                found.append(Command(page, number, command, []))
            else:
                found[-1].shown.append(words.rstrip())
    return found


def run(command: Command) -> str:
    """What a command prints, in this process; it may load Megatron.

    Raises:
        ValueError: A page shows a kind of command that nobody runs.
    """
    program, *arguments = shlex.split(command.command)
    if program == 'cat':
        return ''.join((ROOT / name).read_text() for name in arguments)
    if program != 'megatron-buffer':
        raise ValueError(f'{command.page}:{command.line}: {program} is not run by the tests')
    from megatron_buffer import cli

    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.chdir(ROOT),
        contextlib.suppress(SystemExit),  # argparse
    ):
        cli.main(arguments)
    return out.getvalue()


def problems(commands: list[Command]) -> list[str]:
    """Runs commands one after another; says where a page and the output differ."""
    os.environ.pop('COLUMNS', None)  # output that goes to a file is as wide as on any machine
    found: list[str] = []
    names: dict[str, object] = {}
    printed: dict[str, list[str]] = {}
    for command in commands:
        where = f'{command.page}:{command.line}'
        if command.command == 'pycon':
            found += _session(command, where, names)
            continue
        if command.command not in printed:
            printed[command.command] = [line.rstrip() for line in run(command).splitlines()]
        found += [
            f'{where}: {text}' for text in differences(command.shown, printed[command.command])
        ]
    return found


def differences(shown: list[str], printed: list[str]) -> list[str]:
    """Holds what a page shows against what was printed.

    Args:
        shown: Lines of the page; ``...`` stands for any number of lines, and at a line's end for its rest.
        printed: Lines of the output.

    Returns:
        At most one sentence.
    """
    at, anywhere = 0, False
    for line in shown:
        if line == LEFT_OUT:
            anywhere = True
            continue
        there = next((i for i in range(at, len(printed)) if _fits(line, printed[i])), -1)
        if there < 0 or (there > at and not anywhere):
            instead = printed[at] if at < len(printed) else '(the end)'
            return [f'shown:\n  {line}\nprinted there:\n  {instead}']
        at, anywhere = there + 1, False
    if at < len(printed) and not anywhere:
        return [f'not shown:\n  {printed[at]}']
    return []


def _fits(shown: str, printed: str) -> bool:
    if shown.endswith(LEFT_OUT):
        return printed.startswith(shown.removesuffix(LEFT_OUT))
    return shown == printed


def _session(command: Command, where: str, names: dict[str, object]) -> list[str]:
    text = '\n'.join(command.shown) + '\n'
    test = doctest.DocTestParser().get_doctest(text, {}, where, command.page, command.line)
    test.globs = names
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS)
    runner.run(test, out=said.write, clear_globs=False)
    return [f'{where}:\n{said.getvalue()}'] if runner.failures else []

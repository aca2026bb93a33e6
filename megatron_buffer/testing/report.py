"""What the conformance kit found, in words. Upstream has no counterpart."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

_INDENT = '    '


class ConformanceError(AssertionError):
    """A strategy breaks something that Megatron-Core or training relies on; the message is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: The rule that is broken, in a few words; the same words wherever it is broken.
        detail: What was found and what was expected, with the parameters concerned.
        example: The smallest input that shows it; '' where there is none to show.
    """

    what: str
    detail: str
    example: str = ''

    def __str__(self) -> str:
        """The problem on one line, its example below."""
        lines = [f'{self.what}: {self.detail}']
        if self.example:
            lines += ['smallest example found:', textwrap.indent(self.example, _INDENT)]
        return '\n'.join(lines)


@dataclass
class Report:
    """The outcome of one check.

    Attributes:
        subject: What was checked.
        checked: What was looked at, a sentence each.
        problems: What is wrong; empty if all is well.
        refused: Combinations of settings that the strategies refuse with an error of ours, and the
            error. That is their right, as long as something is left that they accept.
        notes: What a user should know, and what is no fault: consequences for checkpoints, checks that
            could not be made.
        dispatch: How far backward has to be before each bucket group can be reduced, compared with the
            earliest that is possible.
    """

    subject: str
    checked: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dispatch: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when no problem was found."""
        return not self.problems

    def add(self, what: str, detail: str, example: str = '') -> None:
        """Adds a problem, unless the same one is there already."""
        problem = Problem(what, detail, example)
        if problem not in self.problems:
            self.problems.append(problem)

    def raise_if_failed(self) -> Report:
        """Returns the report if all is well.

        Raises:
            ConformanceError: If there is a problem; also an AssertionError, for test runners.
        """
        if self.problems:
            raise ConformanceError(self)
        return self

    def __str__(self) -> str:
        """The whole report, the problems first."""
        count = len(self.problems)
        verdict = 'passes' if self.ok else f'{count} problem{"s" if count > 1 else ""}'
        lines = [f'{self.subject}: {verdict}']
        for title, entries in (
            ('problems', [str(problem) for problem in self.problems]),
            ('refused, with an error that says why', self.refused),
            ('dispatch', self.dispatch),
            ('notes', self.notes),
            ('checked', self.checked),
        ):
            if entries:
                lines.append(f'{title}:')
                lines += [_item(entry) for entry in entries]
        return '\n'.join(lines)


def _item(text: str) -> str:
    return textwrap.indent(text, _INDENT).replace(_INDENT, '  - ', 1)

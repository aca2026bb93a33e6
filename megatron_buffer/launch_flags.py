"""The launcher's own flags: what they are, and how they are told from the script's.

Imports neither torch nor megatron. Upstream has no counterpart.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from typing import Any, NoReturn

from megatron_buffer.errors import ConfigError
from megatron_buffer.observe import request as observation
from megatron_buffer.record_request import DEFAULT_STEPS, WARMUP_STEPS, check_flags

USAGE = (
    'usage: megatron-buffer run SCRIPT [the flags of SCRIPT] [--use-custom-buffer] '
    '[--custom-buffer-config CONFIG] [--custom-buffer-compat strict|warn] [--custom-buffer-cpu] '
    '[--custom-buffer-record PROFILE] [--custom-buffer-record-steps N] '
    '[--custom-buffer-stats DIR] [--custom-buffer-trace DIR] [--custom-buffer-trace-steps N] '
    '[--custom-buffer-metrics]'
)

_OUR_PREFIX = '--custom-buffer'
_SIMILARITY = 0.85  # the most similar of Megatron's own flags has 0.57


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Our flags; the field names are the names in Megatron's ``args``."""

    use_custom_buffer: bool = False
    """Replace Megatron-Core's data-parallel buffer by ours."""

    custom_buffer_config: str | None = None
    """YAML file or name of a shipped config; None means upstream."""

    custom_buffer_compat: str | None = None
    """What to do about an unknown Megatron-Core source: strict (refuse) or warn; None means strict."""

    custom_buffer_cpu: bool = False
    """Run on the CPU with gloo."""

    custom_buffer_record: str | None = None
    """Profile to write, for ``param_order: recorded``; None records nothing."""

    custom_buffer_record_steps: int | None = None
    """Iterations to record."""

    custom_buffer_stats: str | None = None
    """Folder for statistics of every iteration; None keeps none."""

    custom_buffer_trace: str | None = None
    """Folder for traces; None traces nothing."""

    custom_buffer_trace_steps: int | None = None
    """Iterations to trace."""

    custom_buffer_metrics: bool = False
    """Write to Megatron's own TensorBoard and Weights & Biases writers."""

    def as_args(self) -> dict[str, str | int]:
        """Plain strings, numbers and bools, because ``args`` is stored in checkpoints."""
        return {
            'use_custom_buffer': self.use_custom_buffer,
            'custom_buffer_config': self.custom_buffer_config or 'upstream',
            'custom_buffer_compat': self.custom_buffer_compat or 'strict',
            'custom_buffer_cpu': self.custom_buffer_cpu,
            'custom_buffer_record': self.custom_buffer_record or '',
            'custom_buffer_record_steps': self.custom_buffer_record_steps or DEFAULT_STEPS,
            'custom_buffer_stats': self.custom_buffer_stats or '',
            'custom_buffer_trace': self.custom_buffer_trace or '',
            'custom_buffer_trace_steps': self.custom_buffer_trace_steps
            or observation.DEFAULT_TRACE_STEPS,
            'custom_buffer_metrics': self.custom_buffer_metrics,
        }


def parse_command_line(argv: list[str]) -> tuple[Flags, str, list[str]]:
    """Splits a command line into our flags, the script and the script's own flags.

    Raises:
        ConfigError: There is no script to run, or one of our flags is misspelt or misused.
    """
    if not argv or argv[0].startswith('-'):
        raise ConfigError(f'the script to run comes first, then its flags\n{USAGE}')
    script = argv[0]
    flags, rest = take_own_flags(argv[1:])
    if os.path.isdir(script) or not os.path.exists(script):
        what = 'is a folder, not a file' if os.path.isdir(script) else 'does not exist'
        raise ConfigError(f'script {script!r} {what} (current folder: {os.getcwd()})')
    if not os.access(script, os.R_OK):
        raise ConfigError(f'script {script!r} cannot be read: permission denied')
    return flags, script, rest


def take_own_flags(arguments: list[str]) -> tuple[Flags, list[str]]:
    """Our flags, checked for what one alone cannot mean, and everything else in its order.

    Raises:
        ConfigError: One of our flags is misspelt, misused, or has no effect without another.
    """
    flags, rest = split_flags(arguments)
    if not flags.use_custom_buffer:
        for flag, value in (
            ('--custom-buffer-config', flags.custom_buffer_config),
            ('--custom-buffer-compat', flags.custom_buffer_compat),
            ('--custom-buffer-record', flags.custom_buffer_record),
        ):
            if value is not None:
                raise ConfigError(
                    f'{flag} {value} has no effect without --use-custom-buffer: add '
                    '--use-custom-buffer to train through the custom buffer, or leave it out'
                )
    check_flags(flags.custom_buffer_record, flags.custom_buffer_record_steps)
    observation.check_flags(
        stats=flags.custom_buffer_stats,
        trace=flags.custom_buffer_trace,
        trace_steps=flags.custom_buffer_trace_steps,
    )
    return flags, rest


def split_flags(arguments: list[str]) -> tuple[Flags, list[str]]:
    """Takes our flags out of ``arguments``; everything else comes back in its order.

    Raises:
        ConfigError: One of our flags is misused, or a flag looks like a misspelt one of ours.
    """
    parser = _Parser(prog='megatron-buffer run', add_help=False, allow_abbrev=False)
    add_flags(parser, Flags())
    known, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if argument == '--':
            break
        _refuse_misspelling(argument)
    return (
        Flags(**{field.name: getattr(known, field.name) for field in dataclasses.fields(Flags)}),
        rest,
    )


def add_flags(parser: argparse.ArgumentParser, defaults: Flags) -> None:
    """Adds our flags to a parser, ours or Megatron's; a patched tree's parser has some of them already."""
    group = parser.add_argument_group('custom buffer')

    def add(name: str, **options: Any) -> None:
        default = getattr(defaults, name)
        try:
            group.add_argument(flag_of(name), default=default, **options)
        except argparse.ArgumentError:
            parser.set_defaults(**{name: default})

    add(
        'use_custom_buffer',
        action='store_true',
        help='Replace the data-parallel buffer of Megatron-Core by the one of megatron-buffer.',
    )
    add(
        'custom_buffer_config',
        metavar='CONFIG',
        help='YAML file, or the name of a config that comes with megatron-buffer '
        '(default: upstream, which changes nothing but who does the work).',
    )
    add(
        'custom_buffer_compat',
        choices=('strict', 'warn'),
        help='What to do when the source of the installed Megatron-Core is not one that '
        'megatron-buffer knows: refuse (strict, the default) or only warn.',
    )
    add(
        'custom_buffer_cpu',
        action='store_true',
        help='Run on the CPU with gloo; refused where a GPU is there.',
    )
    add(
        'custom_buffer_record',
        metavar='PROFILE',
        help='Record in which order gradients arrive and parameters are read, and write it to this '
        'file, for "param_order: {name: recorded, profile: PROFILE}" in later runs.',
    )
    add(
        'custom_buffer_record_steps',
        metavar='N',
        type=int,
        help=f'Iterations to record (default: {DEFAULT_STEPS}), after {WARMUP_STEPS} that are not.',
    )
    add(
        'custom_buffer_stats',
        metavar='DIR',
        help='Write statistics of every iteration, and of the layout, to a file per rank in this '
        'folder; also without --use-custom-buffer.',
    )
    add(
        'custom_buffer_trace',
        metavar='DIR',
        help='Write a trace of what happens to the buffers, for Perfetto and "megatron-buffer trace '
        'DIR", to a file per rank in this folder; also without --use-custom-buffer.',
    )
    add(
        'custom_buffer_trace_steps',
        metavar='N',
        type=int,
        help=f'Iterations to trace, from the first one on (default: {observation.DEFAULT_TRACE_STEPS}).',
    )
    add(
        'custom_buffer_metrics',
        action='store_true',
        help="Log the buffer's metrics to Megatron's own TensorBoard and Weights & Biases writers; also "
        'without --use-custom-buffer.',
    )


def flag_of(name: str) -> str:
    """The flag that fills a field of Megatron's ``args``."""
    return '--' + name.replace('_', '-')


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours instead of a usage text and an exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _refuse_misspelling(argument: str) -> None:
    """A flag that is nearly one of ours would otherwise be passed on, and ours be missing."""
    typed = argument.split('=', 1)[0]
    if not typed.startswith('-') or typed.startswith('---') or len(typed) < 3:
        return
    name = '--' + typed.lstrip('-').replace('_', '-').lower()
    flags = [flag_of(field.name) for field in dataclasses.fields(Flags)]
    close = difflib.get_close_matches(name, flags, n=1, cutoff=_SIMILARITY)
    if not close and name.startswith((_OUR_PREFIX, '--use-custom-buffer')):
        raise ConfigError(
            f'unknown flag {typed}: the flags of megatron-buffer are {", ".join(flags)}'
        )
    if close:
        raise ConfigError(f'unknown flag {typed}: did you mean {close[0]}?')

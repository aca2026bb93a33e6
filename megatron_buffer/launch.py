"""``megatron-buffer run SCRIPT ...``: an unmodified Megatron script with ``--use-custom-buffer``.

    torchrun ... -m megatron_buffer run pretrain_gpt.py <Megatron's flags> \\
        --use-custom-buffer --custom-buffer-config x.yaml

Upstream has no plugin mechanism, so the launcher reads our flags, loads the config before torch and
Megatron are imported (a wrong config is an error within a second, the same on every rank), installs
the buffer and then runs the script as ``python SCRIPT`` would. Without ``--use-custom-buffer`` and
``--custom-buffer-cpu`` it does only the last.

Our flags are taken out of ``sys.argv``, so that scripts with a parser of their own work too;
Megatron's parser learns them by :func:`wrap_add_megatron_arguments` and gives them the launcher's
values, so ``args`` (and the checkpoints that keep it) say what is in use.

Stands for upstream's: ``megatron/training/arguments.py: add_megatron_arguments, parse_args``, wrapped.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib.machinery
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_buffer.errors import (
    ConfigError,
    ConflictError,
    FingerprintError,
    MegatronBufferError,
    PatchError,
    RegistryError,
    UnsupportedVersionError,
    guard,
)

if TYPE_CHECKING:
    from megatron_buffer.config import BufferConfig

logger = logging.getLogger('megatron_buffer.launch')

USAGE = (
    'usage: megatron-buffer run SCRIPT [the flags of SCRIPT] [--use-custom-buffer] '
    '[--custom-buffer-config CONFIG] [--custom-buffer-compat strict|warn] [--custom-buffer-cpu]'
)
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

_SET_IN_BOTH = (
    ('bucketing.bucket_size_elems', 'ddp_bucket_size', None),
    ('bucketing.bucket_size_elems', 'ddp_num_buckets', None),
    ('padding.high_busbw', 'ddp_pad_buckets_for_high_nccl_busbw', False),
)
"""(path in the config, name in Megatron's args, its value when the flag is not given)."""

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

    def as_args(self) -> dict[str, str | bool]:
        """Plain strings and bools, because ``args`` is stored in checkpoints."""
        return {
            'use_custom_buffer': self.use_custom_buffer,
            'custom_buffer_config': self.custom_buffer_config or 'upstream',
            'custom_buffer_compat': self.custom_buffer_compat or 'strict',
            'custom_buffer_cpu': self.custom_buffer_cpu,
        }


_launched: Flags | None = None
"""The flags of this process, once :func:`run` has accepted them."""


def run(argv: list[str]) -> int:
    """Runs a script as ``python SCRIPT ...`` would, with our buffer if its flags ask for it.

    The process belongs to the script from then on: ``sys.argv``, ``sys.path``, ``__main__`` and
    whatever was installed stay as they are.

    Args:
        argv: The script's path, then its flags with ours anywhere among them.

    Returns:
        Exit code: 0 when the script ended; 1 when it raised (its traceback is printed) or when our
        buffer cannot be installed here; 2 for bad input: flags, script, config, or a conflict
        between them, each as one sentence on stderr. ``SystemExit`` passes through.
    """
    global _launched
    if argv[:1] in (['-h'], ['--help']):
        sys.stdout.write(USAGE + '\n')
        return 0
    try:
        flags, script, rest = parse_command_line(argv)
        config = _load_config(flags)
        _prepare_process(script, rest)
        _launched = flags
        _turn_cpu_mode_on(flags)
        if config is not None:
            _install(config, flags)
    except (ConfigError, RegistryError) as error:
        return _fail(error, EXIT_BAD_INPUT)
    except (UnsupportedVersionError, FingerprintError, PatchError) as error:
        return _fail(error, EXIT_FAILURE)
    try:
        with guard():
            _run_script(script)
    except (ConfigError, RegistryError) as error:
        return _fail(error, EXIT_BAD_INPUT)
    except Exception as error:
        _drop_launcher_frames(error, os.path.abspath(script))
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_FAILURE
    return 0


def parse_command_line(argv: list[str]) -> tuple[Flags, str, list[str]]:
    """Splits a command line into our flags, the script and the script's own flags.

    Raises:
        ConfigError: There is no script to run, or one of our flags is misspelt or misused.
    """
    if not argv or argv[0].startswith('-'):
        raise ConfigError(f'the script to run comes first, then its flags\n{USAGE}')
    script = argv[0]
    flags, rest = split_flags(argv[1:])
    if not flags.use_custom_buffer:
        for flag, value in (
            ('--custom-buffer-config', flags.custom_buffer_config),
            ('--custom-buffer-compat', flags.custom_buffer_compat),
        ):
            if value is not None:
                raise ConfigError(
                    f'{flag} {value} has no effect without --use-custom-buffer: add '
                    '--use-custom-buffer to train through the custom buffer, or leave it out'
                )
    if os.path.isdir(script) or not os.path.exists(script):
        what = 'is a folder, not a file' if os.path.isdir(script) else 'does not exist'
        raise ConfigError(f'script {script!r} {what} (current folder: {os.getcwd()})')
    if not os.access(script, os.R_OK):
        raise ConfigError(f'script {script!r} cannot be read: permission denied')
    return flags, script, rest


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
    """Adds our flags to a parser, ours or Megatron's."""
    group = parser.add_argument_group('custom buffer')
    group.add_argument(
        '--use-custom-buffer',
        action='store_true',
        default=defaults.use_custom_buffer,
        help='Replace the data-parallel buffer of Megatron-Core by the one of megatron-buffer.',
    )
    group.add_argument(
        '--custom-buffer-config',
        metavar='CONFIG',
        default=defaults.custom_buffer_config,
        help='YAML file, or the name of a config that comes with megatron-buffer '
        '(default: upstream, which changes nothing but who does the work).',
    )
    group.add_argument(
        '--custom-buffer-compat',
        choices=('strict', 'warn'),
        default=defaults.custom_buffer_compat,
        help='What to do when the source of the installed Megatron-Core is not one that '
        'megatron-buffer knows: refuse (strict, the default) or only warn.',
    )
    group.add_argument(
        '--custom-buffer-cpu',
        action='store_true',
        default=defaults.custom_buffer_cpu,
        help='Run on the CPU with gloo; refused where a GPU is there.',
    )


def wrap_add_megatron_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """``add_megatron_arguments`` that also adds our flags, with the launcher's values as defaults."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        add_flags(parser, _launched or Flags())
        return parser

    return add_megatron_arguments


def wrap_parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """``parse_args`` whose result says what is in use, and that refuses contradictory flags.

    Upstream's ``--yaml-cfg`` replaces the parsed ``args`` by what the YAML file says, so that flags
    of the command line vanish: ours are set again.
    """

    @functools.wraps(original)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        from megatron_buffer import runtime

        namespace = original(*args, **kwargs)
        installed = runtime.installed()
        flags = _launched
        if flags is None and installed is not None:  # install() was called from Python
            flags = Flags(use_custom_buffer=True, custom_buffer_config=installed.config.source)
        for name, value in (flags or Flags()).as_args().items():
            setattr(namespace, name, value)
        if installed is not None:
            check_conflicts(installed.config, namespace)
        return namespace

    return parse_args


def check_conflicts(config: BufferConfig, args: Any) -> None:
    """Refuses Megatron flags under which our buffer has no effect or that contradict the config.

    A flag left at its default is not set, a ``null`` in the config neither.

    Args:
        config: The config in force.
        args: Megatron's parsed arguments; under ``--yaml-cfg`` some may be missing.

    Raises:
        ConflictError: The sentence names both sides.
    """
    for name in ('use_megatron_fsdp', 'use_torch_fsdp2'):
        if getattr(args, name, False):
            raise ConflictError(
                f'{_flag(name)} and --use-custom-buffer cannot be combined: FSDP uses other buffers, '
                '--use-custom-buffer has no effect there. Leave one of the two out'
            )
    for path, name, unset in _SET_IN_BOTH:
        wanted, given = _at(config, path), getattr(args, name, unset)
        agree = wanted == given and name != 'ddp_num_buckets'  # a number of buckets is not a size
        if wanted is None or given is unset or agree:
            continue
        raise ConflictError(
            f'{path} is {_yaml(wanted)} in {config.source or "the config"}, but the command line says '
            f'{_flag(name)}{"" if given is True else f" {given}"}: set only one of them (null in the '
            'config means what the command line says)',
            yaml_path=path,
            source=config.source,
        )


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
    flags = [_flag(field.name) for field in dataclasses.fields(Flags)]
    close = difflib.get_close_matches(name, flags, n=1, cutoff=_SIMILARITY)
    if not close and name.startswith((_OUR_PREFIX, '--use-custom-buffer')):
        raise ConfigError(
            f'unknown flag {typed}: the flags of megatron-buffer are {", ".join(flags)}'
        )
    if close:
        raise ConfigError(f'unknown flag {typed}: did you mean {close[0]}?')


def _load_config(flags: Flags) -> BufferConfig | None:
    if not flags.use_custom_buffer:
        return None
    from megatron_buffer.config import load_config

    return load_config(flags.custom_buffer_config)


def _prepare_process(script: str, rest: list[str]) -> None:
    """What ``python SCRIPT`` sets before it starts: a checkout beside the script wins over a wheel."""
    sys.argv[:] = [script, *rest]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))


def _turn_cpu_mode_on(flags: Flags) -> None:
    from megatron_buffer import cpu

    if flags.custom_buffer_cpu or cpu.requested():
        cpu.enable()


def _install(config: BufferConfig, flags: Flags) -> None:
    _show_messages()
    from megatron_buffer import patching

    compat: Any = flags.custom_buffer_compat or 'strict'
    patching.install(config, compat=compat, training=True)
    if flags.custom_buffer_config is None:
        from megatron.core.utils import log_single_rank

        log_single_rank(
            logger,
            logging.INFO,
            '--use-custom-buffer without --custom-buffer-config: using the shipped config "upstream"',
        )


def _show_messages() -> None:
    """Shows our messages from INFO on: without a handler Python shows warnings only."""
    package = logging.getLogger('megatron_buffer')
    if package.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter('megatron-buffer: %(message)s'))
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False  # Megatron may add a handler to the root logger: not twice


def _run_script(script: str) -> None:
    """Runs a file as the ``__main__`` module, with the attributes that Python itself gives it."""
    path = os.path.abspath(script)
    loader = importlib.machinery.SourceFileLoader('__main__', path)
    module = types.ModuleType('__main__')
    vars(module).update(__file__=path, __loader__=loader, __cached__=None, __package__=None)
    sys.modules['__main__'] = module
    with open(path, 'rb') as file:
        code = compile(file.read(), path, 'exec', dont_inherit=True)
    exec(code, vars(module))


def _drop_launcher_frames(error: BaseException | None, path: str) -> None:
    """Makes the tracebacks of an exception and of those behind it begin in the script."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename != path:
            traceback = traceback.tb_next
        if traceback is not None or isinstance(error, SyntaxError):
            error.__traceback__ = traceback
        error = error.__cause__ or error.__context__


def _fail(error: MegatronBufferError, code: int) -> int:
    sys.stderr.write(f'megatron-buffer: error: {error}\n')
    return code


def _flag(name: str) -> str:
    return '--' + name.replace('_', '-')


def _at(config: BufferConfig, path: str) -> Any:
    """The value at a dotted path, or None if the chosen strategy has no such parameter."""
    axis, _, parameter = path.partition('.')
    return getattr(getattr(config, axis), parameter, None)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

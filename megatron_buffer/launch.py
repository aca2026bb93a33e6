"""``megatron-buffer run SCRIPT ...``: an unmodified Megatron script with ``--use-custom-buffer``.

    torchrun ... -m megatron_buffer run pretrain_gpt.py <Megatron's flags> \\
        --use-custom-buffer --custom-buffer-config x.yaml

Upstream has no plugin mechanism, so the launcher reads our flags, loads the config before torch and
Megatron are imported (a wrong config is an error within a second, the same on every rank), installs
the buffer and then runs the script as ``python SCRIPT`` would. Without ``--use-custom-buffer`` and
``--custom-buffer-cpu`` it does only the last.

A tree that was changed by ``patches/`` does the same without the launcher, see :func:`take_flags`.

Our flags are taken out of ``sys.argv``, so that scripts with a parser of their own work too;
Megatron's parser learns them by :func:`wrap_add_megatron_arguments` and gives them the launcher's
values, so ``args`` (and the checkpoints that keep it) say what is in use.

Stands for upstream's: ``megatron/training/arguments.py: add_megatron_arguments, parse_args``, wrapped.
"""

from __future__ import annotations

import argparse
import functools
import importlib.machinery
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
from megatron_buffer.launch_flags import (
    USAGE,
    Flags,
    add_flags,
    flag_of,
    parse_command_line,
    take_own_flags,
)
from megatron_buffer.observe import request as observation
from megatron_buffer.record_request import check_length, request

if TYPE_CHECKING:
    from megatron_buffer.config import BufferConfig

logger = logging.getLogger('megatron_buffer.launch')

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

_SET_IN_BOTH = (
    ('bucketing.bucket_size_elems', 'ddp_bucket_size', None),
    ('bucketing.bucket_size_elems', 'ddp_num_buckets', None),
    ('padding.high_busbw', 'ddp_pad_buckets_for_high_nccl_busbw', False),
)
"""(path in the config, name in Megatron's args, its value when the flag is not given)."""

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
    if argv[:1] in (['-h'], ['--help']):
        sys.stdout.write(USAGE + '\n')
        return 0
    try:
        flags, script, rest = parse_command_line(argv)
        config = _load_config(flags)
        _prepare_process(script, rest)
        _launch(flags, config)
    except (ConfigError, RegistryError) as error:
        return _fail(error, EXIT_BAD_INPUT)
    except (UnsupportedVersionError, FingerprintError, PatchError) as error:
        return _fail(error, EXIT_FAILURE)
    try:
        with guard(), observation.noting_failure():
            _run_script(script)
    except (ConfigError, RegistryError) as error:
        return _fail(error, EXIT_BAD_INPUT)
    except Exception as error:
        _drop_launcher_frames(error, os.path.abspath(script))
        sys.excepthook(type(error), error, error.__traceback__)
        return EXIT_FAILURE
    return 0


def take_flags() -> None:
    """What a tree that was changed by ``patches/`` calls: :func:`run` for a script that runs already.

    Takes our flags out of ``sys.argv`` and does what they ask for. Without such flags nothing happens,
    so a second call is harmless. As under the launcher, an error names the rank that failed first.

    Raises:
        SystemExit: With code 2 for bad input and 1 when our buffer cannot be installed here, each
            after one sentence on stderr.
    """
    try:
        flags, rest = take_own_flags(sys.argv[1:])
        if flags == Flags():
            return
        config = _load_config(flags)
        sys.argv[1:] = rest
        _launch(flags, config)
    except (ConfigError, RegistryError) as error:
        sys.exit(_fail(error, EXIT_BAD_INPUT))
    except (UnsupportedVersionError, FingerprintError, PatchError) as error:
        sys.exit(_fail(error, EXIT_FAILURE))
    sys.excepthook = functools.partial(_show_uncaught, sys.excepthook)


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
                f'{flag_of(name)} and --use-custom-buffer cannot be combined: FSDP uses other buffers, '
                '--use-custom-buffer has no effect there. Leave one of the two out'
            )
    check_length(args)
    for path, name, unset in _SET_IN_BOTH:
        wanted, given = _at(config, path), getattr(args, name, unset)
        agree = wanted == given and name != 'ddp_num_buckets'  # a number of buckets is not a size
        if wanted is None or given is unset or agree:
            continue
        raise ConflictError(
            f'{path} is {_yaml(wanted)} in {config.source or "the config"}, but the command line says '
            f'{flag_of(name)}{"" if given is True else f" {given}"}: set only one of them (null in the '
            'config means what the command line says)',
            yaml_path=path,
            source=config.source,
        )


def _launch(flags: Flags, config: BufferConfig | None) -> None:
    """Does what the flags ask for, before the script or the rest of it runs."""
    global _launched
    _launched = flags
    if flags.custom_buffer_record is not None:
        request(flags.custom_buffer_record, flags.custom_buffer_record_steps)
    observation.request(
        stats=flags.custom_buffer_stats,
        trace=flags.custom_buffer_trace,
        trace_steps=flags.custom_buffer_trace_steps,
        metrics=flags.custom_buffer_metrics,
    )
    _turn_cpu_mode_on(flags)
    if config is not None:
        _install(config, flags)
    elif observation.requested() is not None:
        _observe_stock()


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


def _observe_stock() -> None:
    _show_messages()
    from megatron_buffer.observe import session

    session.observe_stock()


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


def _show_uncaught(
    show: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    traceback: types.TracebackType | None,
) -> None:
    """``sys.excepthook`` of a patched tree: bad input is one sentence, a failure names its rank."""
    if isinstance(error, ConfigError | RegistryError):
        sys.exit(_fail(error, EXIT_BAD_INPUT))  # which an excepthook may do
    try:
        with guard():
            raise error.with_traceback(traceback)
    except BaseException as shown:
        show(type(shown), shown, shown.__traceback__)


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


def _at(config: BufferConfig, path: str) -> Any:
    """The value at a dotted path, or None if the chosen strategy has no such parameter."""
    axis, _, parameter = path.partition('.')
    return getattr(getattr(config, axis), parameter, None)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

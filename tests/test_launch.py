"""The launcher: our flags, and running a script as Python itself would."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_buffer import launch, launch_flags, runtime
from megatron_buffer.config import load_config
from megatron_buffer.errors import ConfigError, ConflictError
from megatron_buffer.launch_flags import Flags
from megatron_buffer.profile import load_profile
from tests.harness import ROOT

OURS = [
    ('--use-custom-buffer',),
    ('--custom-buffer-config', 'x.yaml'),
    ('--custom-buffer-config=x.yaml',),
    ('--custom-buffer-compat', 'warn'),
    ('--custom-buffer-compat=warn',),
    ('--custom-buffer-cpu',),
    ('--custom-buffer-record', 'p.json'),
    ('--custom-buffer-record-steps=3',),
    ('--custom-buffer-stats', 's'),
    ('--custom-buffer-trace=t',),
    ('--custom-buffer-trace-steps', '2'),
    ('--custom-buffer-metrics',),
]
THEIRS = [
    *('--lr', '1e-3', '-1', '-x', '--foo=bar', 'a b', '', '-', 'path/x.py', '--empty=', '-h'),
    *('--help', '--use-nccl-ub', '--use-distributed-optimizer', '--fsdp-double-buffer', '@file'),
    *('--custom', '--use-custom', '--buffer-config', 'use-custom-buffer', '--no-rope-fusion'),
]


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != 'MEGATRON_BUFFER_CPU'}
    kept['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), kept.get('PYTHONPATH')]))
    fixed = {
        'CUDA_VISIBLE_DEVICES': '',
        'GLOO_SOCKET_IFNAME': 'lo',
        'OMP_NUM_THREADS': '1',
        'PYTHONWARNINGS': 'ignore',
    }
    return kept | fixed | changes


def python(
    *arguments: str, cwd: Path | None = None, timeout_s: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def launcher(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return python('-m', 'megatron_buffer', 'run', *arguments, **options)


def make_script(folder: Path, code: str, name: str = 'script.py') -> str:
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


# Flags


@given(
    st.lists(st.sampled_from(THEIRS)), st.lists(st.tuples(st.sampled_from(OURS), st.integers(0)))
)
def test_flags_are_found_anywhere_and_the_rest_is_kept(
    theirs: list[str], ours: list[tuple[tuple[str, ...], int]]
) -> None:
    pieces: list[tuple[str, ...]] = [(argument,) for argument in theirs]
    for flag, position in ours:
        pieces.insert(position % (len(pieces) + 1), flag)
    flags, rest = launch_flags.split_flags([text for piece in pieces for text in piece])
    assert rest == theirs
    given_names = {text.split('=')[0] for piece, _ in ours for text in piece[:1]}
    assert flags == Flags(
        use_custom_buffer='--use-custom-buffer' in given_names,
        custom_buffer_config='x.yaml' if '--custom-buffer-config' in given_names else None,
        custom_buffer_compat='warn' if '--custom-buffer-compat' in given_names else None,
        custom_buffer_cpu='--custom-buffer-cpu' in given_names,
        custom_buffer_record='p.json' if '--custom-buffer-record' in given_names else None,
        custom_buffer_record_steps=3 if '--custom-buffer-record-steps' in given_names else None,
        custom_buffer_stats='s' if '--custom-buffer-stats' in given_names else None,
        custom_buffer_trace='t' if '--custom-buffer-trace' in given_names else None,
        custom_buffer_trace_steps=2 if '--custom-buffer-trace-steps' in given_names else None,
        custom_buffer_metrics='--custom-buffer-metrics' in given_names,
    )


def test_nothing_after_two_dashes_is_ours() -> None:
    arguments = ['--lr', '1', '--', '--use-custom-buffer', '--use-custom-bufer']
    assert launch_flags.split_flags(arguments) == (Flags(), arguments)


@pytest.mark.parametrize(
    ('typed', 'meant'),
    [
        ('--use-custom-bufer', '--use-custom-buffer'),
        ('--use-custom-buf', '--use-custom-buffer'),
        ('--use_custom_buffer', '--use-custom-buffer'),
        ('-use-custom-buffer', '--use-custom-buffer'),
        ('--use-customer-buffer', '--use-custom-buffer'),
        ('--custom-bufer-config', '--custom-buffer-config'),
        ('--custom-buffer-confg=x.yaml', '--custom-buffer-config'),
        ('--custom_buffer_config=x.yaml', '--custom-buffer-config'),
        ('--custom-buffer-compact', '--custom-buffer-compat'),
        ('--Custom-Buffer-CPU', '--custom-buffer-cpu'),
        ('--custom-buffer-recrod=p.json', '--custom-buffer-record'),
        ('--custom-buffer-record-step', '--custom-buffer-record-steps'),
    ],
)
def test_misspelt_flags(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch_flags.split_flags(['--lr', '1', typed, 'x'])
    assert str(caught.value) == f'unknown flag {typed.split("=")[0]}: did you mean {meant}?'


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['--custom-buffer-verbosity', '3'],
            'the flags of megatron-buffer are --use-custom-buffer, ',
        ),
        (['--custom-buffer-config'], 'argument --custom-buffer-config: expected one argument'),
        (
            ['--custom-buffer-config', '--use-custom-buffer'],
            'argument --custom-buffer-config: expected one argument',
        ),
        (['--custom-buffer-compat', 'lax'], "invalid choice: 'lax'"),
        (['--use-custom-buffer=true'], "ignored explicit argument 'true'"),
        (['--custom-buffer-record-steps', 'few'], "invalid int value: 'few'"),
    ],
)
def test_misused_flags(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch_flags.split_flags(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize('flag', ['--custom-buffer-config=x.yaml', '--custom-buffer-compat=warn'])
def test_config_without_the_switch(flag: str) -> None:
    with pytest.raises(ConfigError, match='has no effect without --use-custom-buffer'):
        launch.parse_command_line([__file__, flag])
    launch.parse_command_line([__file__, '--custom-buffer-cpu'])
    launch.parse_command_line([__file__, '--use-custom-buffer', flag])


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--custom-buffer-record', 'p.json'], 'has no effect without --use-custom-buffer'),
        (
            ['--use-custom-buffer', '--custom-buffer-record-steps', '3'],
            'has no effect without --custom-buffer-record',
        ),
        (
            [
                '--use-custom-buffer',
                '--custom-buffer-record=p',
                '--custom-buffer-record-steps',
                '0',
            ],
            'it must be at least 1',
        ),
        (['--use-custom-buffer', '--custom-buffer-record='], 'is empty'),
        (['--use-custom-buffer', '--custom-buffer-record=.'], 'it is a folder'),
        (['--use-custom-buffer', '--custom-buffer-record=no/p.json'], 'no does not exist'),
    ],
)
def test_a_recording_that_cannot_be_kept(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch_flags.parse_command_line([__file__, *flags])


def test_only_the_rank_that_writes_looks_at_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [__file__, '--use-custom-buffer', '--custom-buffer-record=no/p.json']
    monkeypatch.setenv('RANK', '0')
    with pytest.raises(ConfigError, match='no does not exist'):
        launch_flags.parse_command_line(arguments)
    monkeypatch.setenv('RANK', '1')
    launch_flags.parse_command_line(arguments)


def test_scripts_that_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        ([], 'the script to run comes first'),
        (['--use-custom-buffer', 'x.py'], 'the script to run comes first'),
        ([str(tmp_path / 'absent.py')], "absent.py' does not exist"),
        ([str(tmp_path)], 'is a folder'),
    ):
        with pytest.raises(ConfigError, match=message):
            launch.parse_command_line(arguments)
    monkeypatch.setattr(os, 'access', lambda path, mode: False)
    with pytest.raises(ConfigError, match='permission denied'):
        launch.parse_command_line([__file__])


# Bad input on the command line: exit code 2, one sentence, and nothing heavy is imported.


@pytest.fixture
def without_torch(tmp_path: Path) -> str:
    """A PYTHONPATH on which importing torch or megatron ends the process at once."""
    folder = tmp_path / 'forbidden'
    folder.mkdir()
    for name in ('torch', 'megatron'):
        (folder / f'{name}.py').write_text('import os\nos._exit(99)\n')
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.mark.parametrize(
    ('flags', 'yaml', 'message'),
    [
        (['--use-custom-bufer'], '', 'did you mean --use-custom-buffer?'),
        (['--custom-buffer-config', 'x.yaml'], '', 'no effect without --use-custom-buffer'),
        (
            ['--use-custom-buffer', '--custom-buffer-config', 'x.yaml'],
            'schema_version: 1\npadding: {name: megatron, param_start_elem: 64}\n',
            'param_start_elem',
        ),
        (['--use-custom-buffer', '--custom-buffer-config=nowhere.yaml'], '', 'nowhere.yaml'),
        (['--use-custom-buffer', '--custom-buffer-config', 'recomended'], '', 'recomended'),
    ],
    ids=['misspelt', 'switch missing', 'bad key', 'no file', 'no such name'],
)
def test_bad_input_before_torch(
    tmp_path: Path, without_torch: str, flags: list[str], yaml: str, message: str
) -> None:
    (tmp_path / 'x.yaml').write_text(yaml)
    script = make_script(tmp_path, 'raise AssertionError("must not run")')
    results = [
        launcher(script, *flags, cwd=tmp_path, PYTHONPATH=without_torch, RANK=str(rank))
        for rank in (0, 1)
    ]
    for done in results:
        assert done.returncode == 2, done
        assert done.stdout == ''
        assert done.stderr.startswith('megatron-buffer: error: ')
        assert message in done.stderr
        assert 'Traceback' not in done.stderr
    assert results[0].stderr == results[1].stderr


def test_help() -> None:
    done = launcher('--help')
    assert done.returncode == 0
    assert done.stdout.startswith('usage: megatron-buffer run SCRIPT')


# Running a script as Python would

REPORT = """
    import json, sys
    print(json.dumps({
        'argv': sys.argv,
        'path': sys.path,
        'main': sys.modules['__main__'] is sys.modules[__name__],
        'globals': {name: str(globals()[name]) for name in
                    ('__name__', '__file__', '__spec__', '__package__', '__doc__', '__cached__')},
        'loader': type(__loader__).__name__,
    }))
    import pickle
    class Kept: pass
    assert type(pickle.loads(pickle.dumps(Kept()))) is Kept
"""


@pytest.mark.parametrize('relative', [False, True], ids=['absolute', 'relative'])
def test_a_script_sees_what_python_shows_it(
    tmp_path: Path, without_torch: str, relative: bool
) -> None:
    (tmp_path / 'inside').mkdir()
    script = make_script(tmp_path / 'inside', REPORT)
    if relative:
        script = 'inside/script.py'
    arguments = (script, '--lr', '1e-3', '--', '-x', 'a b', '--empty=')
    options = {'cwd': tmp_path, 'PYTHONPATH': without_torch}
    direct, launched = python(*arguments, **options), launcher(*arguments, **options)
    assert direct.returncode == launched.returncode == 0, launched.stderr
    assert json.loads(launched.stdout) == json.loads(direct.stdout)
    assert json.loads(launched.stdout)['path'][0] == str(tmp_path / 'inside')


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / 'real').mkdir()
    make_script(tmp_path / 'real', REPORT)
    (tmp_path / 'link.py').symlink_to('real/script.py')
    options = {'cwd': tmp_path}
    direct, launched = python('link.py', **options), launcher('link.py', **options)
    assert json.loads(launched.stdout) == json.loads(direct.stdout)


@pytest.mark.parametrize(
    'code',
    [
        'pass',
        'import sys; sys.exit()',
        'import sys; sys.exit(3)',
        'import sys; sys.exit("a sentence")',
        'def fail():\n    raise ValueError("reason")\nfail()',
        'try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError("later") from e',
        'this is no Python',
        'import sys\nsys.excepthook = lambda *a: print("hook", a[0].__name__)\n1 / 0',
        'import atexit, __main__\natexit.register(lambda: print("end", __main__.x))\nx = 5',
    ],
    ids=['end', 'exit', 'exit 3', 'exit text', 'raise', 'chain', 'syntax', 'hook', 'atexit'],
)
def test_a_script_ends_as_under_python(tmp_path: Path, without_torch: str, code: str) -> None:
    script = make_script(tmp_path, code)
    options = {'cwd': tmp_path, 'PYTHONPATH': without_torch}
    direct, launched = python(script, **options), launcher(script, **options)
    assert launched.returncode == direct.returncode
    assert launched.stdout == direct.stdout
    assert launched.stderr == direct.stderr


def test_a_checkout_beside_the_script_wins(tmp_path: Path) -> None:
    (tmp_path / 'megatron' / 'core').mkdir(parents=True)
    (tmp_path / 'megatron' / 'core' / '__init__.py').write_text('')
    script = make_script(tmp_path, 'import megatron.core; print(megatron.core.__file__)')
    done = launcher(script)
    assert done.stdout.strip() == str(tmp_path / 'megatron' / 'core' / '__init__.py'), done.stderr


# With the buffer: what is installed, and in which order

STUB = """
    import sys, types
    patching = types.ModuleType('megatron_buffer.patching')
    def install(config, *, compat, training):
        print('install', config.source, compat, training, sys.path[0], sys.argv)
        {effect}
    patching.install = install
    sys.modules['megatron_buffer.patching'] = patching
    import megatron_buffer
    megatron_buffer.patching = patching
    from megatron_buffer import launch
    from megatron_buffer.errors import ConflictError, PatchError, ReadinessError
    sys.exit(launch.run(sys.argv[1:]))
"""


def run_with_stub(
    folder: Path, *arguments: str, effect: str = 'pass', **options: Any
) -> subprocess.CompletedProcess[str]:
    return python('-c', textwrap.dedent(STUB).format(effect=effect), *arguments, **options)


def test_install_comes_before_the_script(tmp_path: Path, without_torch: str) -> None:
    script = make_script(tmp_path, 'import sys; print("script", sys.argv[1:])')
    flags = ['--lr', '1', '--use-custom-buffer', '--custom-buffer-config', 'upstream', '--x']
    done = run_with_stub(tmp_path, script, *flags, PYTHONPATH=without_torch)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"install upstream strict True {tmp_path} ['{script}', '--lr', '1', '--x']"
    assert second == "script ['--lr', '1', '--x']"
    done = run_with_stub(
        tmp_path, script, *flags, '--custom-buffer-compat=warn', PYTHONPATH=without_torch
    )
    assert 'install upstream warn True' in done.stdout


def test_the_environment_tells_what_to_record(tmp_path: Path, without_torch: str) -> None:
    script = make_script(
        tmp_path,
        'from megatron_buffer.record_request import requested\nprint("wanted", requested())',
    )
    flags = ['--use-custom-buffer', '--custom-buffer-config', 'upstream']
    record = ['--custom-buffer-record', 'p.json', '--custom-buffer-record-steps', '3']
    done = run_with_stub(tmp_path, script, *flags, *record, cwd=tmp_path, PYTHONPATH=without_torch)
    assert f"wanted RecordRequest(path='{tmp_path / 'p.json'}', steps=3)" in done.stdout
    done = run_with_stub(tmp_path, script, *flags, PYTHONPATH=without_torch)
    assert 'wanted None' in done.stdout


@pytest.mark.parametrize(
    ('effect', 'code', 'message'),
    [
        ('raise PatchError("cannot")', 1, 'megatron-buffer: error: cannot\n'),
        ('raise ConflictError("both")', 2, 'megatron-buffer: error: both\n'),
    ],
)
def test_install_that_fails(
    tmp_path: Path, without_torch: str, effect: str, code: int, message: str
) -> None:
    script = make_script(tmp_path, 'raise AssertionError("must not run")')
    flags = ['--use-custom-buffer', '--custom-buffer-config', 'upstream']
    done = run_with_stub(tmp_path, script, *flags, effect=effect, PYTHONPATH=without_torch)
    assert (done.returncode, done.stderr) == (code, message)


def test_errors_that_come_while_the_script_runs(tmp_path: Path, without_torch: str) -> None:
    flags = ['--use-custom-buffer', '--custom-buffer-config', 'upstream']
    conflict = make_script(
        tmp_path, 'from megatron_buffer.errors import ConflictError\nraise ConflictError("both")'
    )
    done = run_with_stub(tmp_path, conflict, *flags, PYTHONPATH=without_torch)
    assert (done.returncode, done.stderr) == (2, 'megatron-buffer: error: both\n')
    other = make_script(
        tmp_path,
        'from megatron_buffer.errors import ReadinessError\nraise ReadinessError("missing")',
        name='other.py',
    )
    done = run_with_stub(tmp_path, other, *flags, PYTHONPATH=without_torch)
    assert done.returncode == 1
    assert done.stderr.startswith('Traceback')
    assert 'ReadinessError: missing' in done.stderr
    assert 'launch.py' not in done.stderr


# What the patching targets get


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Flags:
    flags = Flags(
        use_custom_buffer=True, custom_buffer_config='configs/x.yaml', custom_buffer_cpu=True
    )
    monkeypatch.setattr(launch, '_launched', flags)
    return flags


def add_their_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument('--yaml-cfg', default=None)
    parser.add_argument('--ddp-bucket-size', type=int, default=None)
    return parser


def parse_like_megatron(arguments: list[str], yaml: dict[str, Any] | None = None) -> Any:
    """Megatron's parse_args in small: wrapped parser, and ``--yaml-cfg`` that replaces the result."""
    add = launch.wrap_add_megatron_arguments(add_their_arguments)

    def parse_args() -> Any:
        namespace = add(argparse.ArgumentParser(allow_abbrev=False)).parse_args(arguments)
        return namespace if namespace.yaml_cfg is None else SimpleNamespace(**yaml or {})

    return launch.wrap_parse_args(parse_args)()


OUR_ARGS = {
    'use_custom_buffer': True,
    'custom_buffer_config': 'configs/x.yaml',
    'custom_buffer_compat': 'strict',
    'custom_buffer_cpu': True,
    'custom_buffer_record': '',
    'custom_buffer_record_steps': 5,
    'custom_buffer_stats': '',
    'custom_buffer_trace': '',
    'custom_buffer_trace_steps': 5,
    'custom_buffer_metrics': False,
}


def test_args_say_what_the_launcher_was_told(launched: Flags) -> None:
    args = parse_like_megatron(['--ddp-bucket-size', '7'])
    assert vars(args) == {'yaml_cfg': None, 'ddp_bucket_size': 7} | OUR_ARGS


def test_args_survive_a_yaml_cfg(launched: Flags) -> None:
    args = parse_like_megatron(['--yaml-cfg', 'x'], {'use_custom_buffer': False, 'lr': 1.0})
    assert vars(args) == {'lr': 1.0} | OUR_ARGS


def test_megatron_s_parser_accepts_our_flags() -> None:
    args = parse_like_megatron(['--use-custom-buffer', '--custom-buffer-config=x.yaml'])
    assert set(OUR_ARGS) < set(vars(args))
    # Nothing was installed: what the flags say would not be true.
    assert not args.use_custom_buffer


def test_args_of_an_install_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({'bucketing': {'name': 'fixed_size', 'bucket_size_elems': 1000}})
    monkeypatch.setattr(runtime, 'installed', lambda: SimpleNamespace(config=config))
    args = parse_like_megatron([])
    assert args.use_custom_buffer
    assert args.custom_buffer_config == config.source
    assert all(isinstance(getattr(args, name), str | int) for name in OUR_ARGS)
    with pytest.raises(ConflictError):
        parse_like_megatron(['--ddp-bucket-size', '7'])


def check(config: dict[str, Any], **args: Any) -> None:
    defaults = {
        'ddp_bucket_size': None,
        'ddp_num_buckets': None,
        'ddp_pad_buckets_for_high_nccl_busbw': False,
        'use_megatron_fsdp': False,
        'use_torch_fsdp2': False,
    }
    launch.check_conflicts(load_config(config), SimpleNamespace(**defaults | args))


SIZE = {'bucketing': {'name': 'fixed_size', 'bucket_size_elems': 1000}}


def high_busbw(value: bool | None) -> dict[str, Any]:
    return {'padding': {'name': 'megatron', 'high_busbw': value}}


@pytest.mark.parametrize(
    ('config', 'args'),
    [
        ({}, {}),
        ({}, {'ddp_bucket_size': 7, 'ddp_pad_buckets_for_high_nccl_busbw': True}),
        ({}, {'ddp_num_buckets': 7}),
        (SIZE, {}),
        (SIZE, {'ddp_bucket_size': 1000}),
        (high_busbw(True), {}),
        (high_busbw(False), {}),
        (high_busbw(True), {'ddp_pad_buckets_for_high_nccl_busbw': True}),
        (high_busbw(None), {'ddp_pad_buckets_for_high_nccl_busbw': True}),
    ],
)
def test_no_conflict(config: dict[str, Any], args: dict[str, Any]) -> None:
    check(config, **args)


@pytest.mark.parametrize(
    ('config', 'args', 'both'),
    [
        (
            SIZE,
            {'ddp_bucket_size': 7},
            ('bucketing.bucket_size_elems is 1000', '--ddp-bucket-size 7'),
        ),
        (
            SIZE,
            {'ddp_num_buckets': 1000},
            ('bucketing.bucket_size_elems is 1000', '--ddp-num-buckets 1000'),
        ),
        (
            high_busbw(False),
            {'ddp_pad_buckets_for_high_nccl_busbw': True},
            ('padding.high_busbw is false', 'says --ddp-pad-buckets-for-high-nccl-busbw:'),
        ),
        ({}, {'use_megatron_fsdp': True}, ('--use-megatron-fsdp', 'has no effect there')),
        ({}, {'use_torch_fsdp2': True}, ('--use-torch-fsdp2', 'has no effect there')),
    ],
)
def test_conflicts_name_both_sides(
    config: dict[str, Any], args: dict[str, Any], both: tuple[str, str]
) -> None:
    with pytest.raises(ConflictError) as caught:
        check(config, **args)
    for side in both:
        assert side in str(caught.value)


@pytest.mark.parametrize('train_iters', [None, 4, 5])
def test_a_run_that_is_shorter_than_its_recording(
    monkeypatch: pytest.MonkeyPatch, train_iters: int | None
) -> None:
    check({}, train_iters=4)
    monkeypatch.setenv('MEGATRON_BUFFER_RECORD', 'p.json')
    monkeypatch.setenv('MEGATRON_BUFFER_RECORD_STEPS', '3')
    if train_iters == 4:
        with pytest.raises(ConflictError, match=r'takes 5 iterations .* --train-iters is 4'):
            check({}, train_iters=train_iters)
    else:
        check({}, train_iters=train_iters)


def test_missing_args_are_not_set() -> None:
    launch.check_conflicts(load_config(SIZE), SimpleNamespace())


# The whole of it: the real training loop

MEGATRON_FLAGS = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "16",
    "--max-position-embeddings",
    "16",
    "--vocab-size",
    "127",
    "--tokenizer-type",
    "NullTokenizer",
    "--mock-data",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--train-iters",
    "2",
    "--lr",
    "1e-3",
    "--eval-iters",
    "0",
    "--log-interval",
    "1",
    "--num-workers",
    "0",
    "--bf16",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--transformer-impl",
    "local",
    "--attention-backend",
    "unfused",
    "--distributed-backend",
    "gloo",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
]
PRETRAIN = str(ROOT / 'scripts' / 'pretrain_gpt.py')


def test_training_through_the_buffer(tmp_path: Path) -> None:
    (tmp_path / 'x.yaml').write_text(
        'schema_version: 1\nbucketing: {name: fixed_size, bucket_size_elems: 5000}\n'
    )
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']
    flags = ['--use-custom-buffer', '--custom-buffer-config', 'x.yaml', '--custom-buffer-cpu']
    dump = ['--dump-state', str(tmp_path / 'dump')]
    done = python(
        *torchrun,
        *('-m', 'megatron_buffer', 'run', PRETRAIN, *flags[:1], *MEGATRON_FLAGS, *flags[1:], *dump),
        cwd=tmp_path,
        timeout_s=200,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert 'recorded step 2/2: loss ' in done.stdout
    assert 'custom_buffer_config ............................ x.yaml' in done.stdout
    layout = json.loads((tmp_path / 'dump' / 'layout-rank1.json').read_text())
    (buffer,) = layout['buffers']
    assert buffer['class'].startswith('megatron_buffer.')
    assert len(buffer['buckets']) > 2


@pytest.mark.slow
def test_a_profile_is_recorded_and_used(tmp_path: Path) -> None:
    (tmp_path / 'x.yaml').write_text(
        'schema_version: 1\nparam_order: {name: recorded, profile: p.json}\n'
    )
    torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']
    record = ['--custom-buffer-record', 'p.json', '--custom-buffer-record-steps', '1']
    for ours in (record, ['--custom-buffer-config', 'x.yaml']):
        done = python(
            *(*torchrun, '-m', 'megatron_buffer', 'run', PRETRAIN, '--use-custom-buffer', *ours),
            *(*MEGATRON_FLAGS, '--custom-buffer-cpu', '--train-iters', '3'),
            cwd=tmp_path,
            timeout_s=200,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (chunk,) = load_profile(str(tmp_path / 'p.json')).chunks.values()
    assert chunk.agreed
    assert len({param.grad_arrival for param in chunk.params} - {None}) == len(chunk.params)


def test_quickstart_sees_every_kind_of_difference() -> None:
    import torch

    spec = importlib.util.spec_from_file_location('quickstart', ROOT / 'scripts' / 'quickstart.py')
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)

    def state(**tensors: Any) -> dict[str, Any]:
        filled = {'same': torch.tensor([float('nan'), 1.0]), 'step': torch.tensor(3.0)}
        kinds = {kind: dict(filled) for kind in quickstart.KINDS}
        kinds['params'].update(tensors)
        return kinds | {'losses': [1.0, 0.5], 'grad_norms': [2.0, 2.0]}

    def agree(stock: dict[str, Any], ours: dict[str, Any], steps: int = 2) -> bool:
        return quickstart.show_comparison([stock], [ours], steps)

    x = torch.tensor([0.0, 1.0])
    assert agree(state(x=x), state(x=x.clone()))
    for other in (
        state(),
        state(x=x, y=x),
        state(x=x.double()),
        state(x=x.view(2, 1)),
        state(x=torch.tensor([-0.0, 1.0])),
        state(x=x) | {'losses': [1.0, 0.25]},
        state(x=x) | {'grad_norms': [2.0, 1.0]},
    ):
        assert not agree(state(x=x), other)
    assert not agree(state(x=x), state(x=x), steps=3)
    empty = state(x=x) | {'main_grads': {}}
    assert not agree(empty, empty)
    names = [
        'module.module.decoder.layers.1.mlp.fc.bias',
        'module.module.decoder.layers.1.mlp.fc.weight',
    ]
    assert quickstart.summary([*names, 'module.head.weight']) == (
        'decoder.layers.1: mlp.fc.{bias, weight}\nhead: {weight}'
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--use-torch-fsdp2'], '--use-torch-fsdp2 and --use-custom-buffer cannot be combined'),
        (['--ddp-bucket-size', '7'], 'bucketing.bucket_size_elems is 5000 in x.yaml, but'),
    ],
)
def test_a_conflict_ends_a_real_run(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / 'x.yaml').write_text(
        'schema_version: 1\nbucketing: {name: fixed_size, bucket_size_elems: 5000}\n'
    )
    ours = ['--use-custom-buffer', '--custom-buffer-config', 'x.yaml']
    done = launcher(
        PRETRAIN,
        *MEGATRON_FLAGS,
        *flags,
        *ours,
        cwd=tmp_path,
        timeout_s=240,
        MEGATRON_BUFFER_CPU='1',
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if 'error' in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert 'Traceback' not in done.stderr

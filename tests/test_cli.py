"""The command line: what it prints, what it returns, and what it leaves unimported."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

import megatron_buffer
from megatron_buffer import cli, cli_config
from megatron_buffer.config import (
    AXES,
    BufferConfig,
    config_hash,
    json_schema,
    load_config,
    shipped_configs,
    to_dict,
)
from megatron_buffer.config_compat import INCOMPATIBLE
from megatron_buffer.config_steps import STEPS
from megatron_buffer.errors import RegistryError

ROOT = Path(megatron_buffer.__file__).parent.parent


@pytest.fixture
def bad(tmp_path):
    """Path of a config with one problem."""
    path = tmp_path / 'bad.yaml'
    path.write_text('schema_version: 1\npading: megatron\n')
    return str(path)


def shell(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m megatron_buffer``; for exit codes and streams as a shell sees them."""
    return subprocess.run(
        [sys.executable, '-m', 'megatron_buffer', *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
    )


# validate -----------------------------------------------------------------------------------------


def test_validate_says_ok_with_hash_and_short_form(capsys, tmp_path):
    path = tmp_path / 'x.yaml'
    path.write_text('schema_version: 1\npadding: {name: megatron, param_start_elems: 8}\n')
    assert cli.main(['validate', 'upstream', str(path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f'upstream: OK, hash {config_hash(BufferConfig())}, upstream'
    assert second.startswith(f'{path}: OK, hash ')
    assert second.endswith(', padding=megatron(param_start_elems=8)')


def test_validate_notes_protections_that_are_off(capsys, tmp_path):
    path = tmp_path / 'x.yaml'
    path.write_text(
        'schema_version: 1\ncheckpoint: {layout_guard: false, repair_fully_reshardable: never}\n'
    )
    assert cli.main(['validate', str(path)]) == 0
    _, guard, repair = capsys.readouterr().out.splitlines()
    assert guard.startswith('note: checkpoint.layout_guard is false: ')
    assert repair.startswith('note: checkpoint.repair_fully_reshardable is never: ')


def test_validate_checks_all_and_returns_2(capsys, bad):
    assert cli.main(['validate', 'nope', bad, 'upstream']) == 2
    out, err = capsys.readouterr()
    assert out.startswith('upstream: OK')
    assert "no config named 'nope' comes with the package" in err
    assert f"{bad}: 1 problem in this config\n  line 2: pading: unknown key. Did you mean" in err


def test_validate_json(capsys, bad):
    assert cli.main(['validate', '--json', 'recommended', bad]) == 2
    report = json.loads(capsys.readouterr().out)
    good, wrong = report['configs']
    assert report['ok'] is False
    assert good['ok'] is True
    assert good['hash'] == config_hash(load_config('recommended'))
    assert good['config'] == to_dict(load_config('recommended'))
    assert good['notes'] == []
    assert wrong['ok'] is False
    assert wrong['yaml_path'] == 'pading'
    assert 'line 2' in wrong['error']
    assert wrong['source'] == bad


def test_exit_codes_and_streams_of_the_process(bad):
    good = shell('validate', 'configs/upstream.yaml')
    assert (good.returncode, good.stderr) == (0, '')
    wrong = shell('validate', bad)
    assert (wrong.returncode, wrong.stdout) == (2, '')
    assert 'Traceback' not in wrong.stderr
    assert shell('validate').returncode == 2
    assert shell('nonsense').returncode == 2
    assert shell().returncode == 2
    assert shell('validate', '/dev/stdin', stdin='schema_version: 1\n').returncode == 0


def test_help_and_version(capsys):
    for arguments, words in {
        ('--version',): [f'megatron-buffer {megatron_buffer.__version__}'],
        ('--help',): ['validate', 'schema', 'strategies', 'doctor', 'run', 'Exit codes'],
        ('validate', '--help'): ['CONFIG', '--json', 'recommended, upstream'],
    }.items():
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        out = ' '.join(capsys.readouterr().out.split())
        for word in words:
            assert word in out


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.run(
        f'{sys.executable} -m megatron_buffer strategies --json | head -1; echo ${{PIPESTATUS[0]}}',
        shell=True,
        executable='/bin/bash',
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.stdout == '{\n0\n'
    assert process.stderr == ''


@pytest.mark.parametrize('command', ['schema', 'strategies --json', 'validate upstream nope'])
def test_a_process_that_frees_nothing_has_said_all_and_ends_with_its_code(command, capsys):
    code = cli.main(command.split())
    said = capsys.readouterr()
    process = subprocess.run(
        [sys.executable, '-m', 'megatron_buffer', *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stdout, process.stderr) == (code, said.out, said.err)


@pytest.mark.parametrize('command', ['validate upstream --json', 'schema', 'strategies'])
def test_torch_and_megatron_stay_unimported(command):
    code = (
        'import sys; from megatron_buffer.cli import main; code = main(sys.argv[1:]); '
        'heavy = {"torch", "megatron", "numpy"} & set(sys.modules); sys.exit(str(heavy) if heavy else code)'
    )
    process = subprocess.run(
        [sys.executable, '-c', code, *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert (process.returncode, process.stderr) == (0, '')


# schema -------------------------------------------------------------------------------------------


def test_schema_prints_json(capsys):
    assert cli.main(['schema']) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_json_schema_has_one_choice_per_axis():
    schema = json_schema()
    assert list(schema['properties']) == ['schema_version', *AXES, 'checkpoint', 'checks']
    padding = schema['properties']['padding']
    assert padding['default'] == 'megatron'
    assert [form.get('type', form.get('const')) for form in padding['oneOf']] == [
        'null',
        'megatron',
        'object',
        'byte_aligned',
        'object',
        'minimal',
        'object',
    ]
    form = padding['oneOf'][2]
    assert form['required'] == ['name']
    assert form['additionalProperties'] is False
    assert form['properties']['param_start_elems']['minimum'] == 1
    assert (
        'multiple of this many elements' in form['properties']['param_start_elems']['description']
    )
    json.dumps(schema)


def test_json_schema_accepts_what_we_ship_and_refuses_what_we_refuse():
    jsonschema = pytest.importorskip('jsonschema')
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in shipped_configs().values():
        validator.validate(yaml.safe_load(path.read_text()))
    validator.validate({'schema_version': 1, 'padding': 'megatron', 'checks': None})
    rules = [{'pattern': 'a', 'grad_dtype': 'fp32'}]
    validator.validate(
        {'schema_version': 1, 'buffer_grouping': {'name': 'grad_dtype_rules', 'rules': rules}}
    )
    validator.validate(
        {'schema_version': 1, 'finalize': ['finish_grad_sync', {'name': 'non_tp_grads', 'x': 4}]}
    )
    for wrong in (
        {},
        {'schema_version': 2},
        {'schema_version': 1, 'pading': 'megatron'},
        {'schema_version': 1, 'bucketing': 'time_optimum'},
        {'schema_version': 1, 'finalize': [3]},
        {'schema_version': 1, 'finalize': [{'chunk_bytes': 4}]},
        {
            'schema_version': 1,
            'buffer_grouping': {'name': 'grad_dtype_rules', 'rules': [{'pattern': 'a'}]},
        },
        {'schema_version': 1, 'buffer_grouping': {'name': 'grad_dtype_rules', 'rules': []}},
        {'schema_version': 1, 'bucket_isolation': {'name': 'patterns', 'patterns': ['']}},
        {'schema_version': 1, 'padding': {'param_start_elems': 3}},
        {'schema_version': 1, 'padding': {'name': 'megatron', 'param_start_elems': 0}},
        {'schema_version': 1, 'padding': {'name': 'megatron', 'other': 0}},
        {'schema_version': 1, 'checks': {'rank_agreement': 1}},
    ):
        assert not validator.is_valid(wrong), wrong


# strategies ---------------------------------------------------------------------------------------


def test_strategies_lists_everything(capsys):
    assert cli.main(['strategies']) == 0
    out = capsys.readouterr().out
    for key, axis in AXES.items():
        assert f' {key} ' in out
        assert f'{axis.default} (default)' in out
        for name in axis.planned:
            assert any(
                line.split()[:1] == [name] and 'not built yet' in line for line in out.splitlines()
            )
    assert 'bucket_end_elems = 128 (an integer >= 1)' in out
    assert 'num_buckets required (an integer >= 1)' in out
    assert ' non_tp_grads ' in out
    assert 'chunk_bytes = null (an integer >= 1 or null)' in out
    for rule in INCOMPATIBLE:
        assert f' {rule.names[0]} ' in out
        assert f' with {rule.names[1]} ' in out
        assert f'{rule.reason}. {rule.way_out}' in ' '.join(out.split())
    assert 'megatron/core/distributed/finalize_model_grads.py' in out


def test_strategies_json(capsys):
    assert cli.main(['strategies', '--json']) == 0
    listing = json.loads(capsys.readouterr().out)
    axes = listing['axes']
    assert [axis['key'] for axis in axes] == list(AXES)
    planned = {axis['key']: [item['name'] for item in axis['planned']] for axis in axes}
    assert {key: names for key, names in planned.items() if names} == {}
    (padding,) = (axis for axis in axes if axis['key'] == 'padding')
    assert padding['default'] == 'megatron'
    megatron, byte_aligned, minimal = padding['strategies']
    assert (byte_aligned['name'], minimal['name']) == ('byte_aligned', 'minimal')
    assert megatron['origin'] == 'built-in'
    assert megatron['upstream_symbol'].endswith('pad_param_start, pad_bucket_end')
    assert megatron['params'][0] == {
        'name': 'param_start_elems',
        'expected': 'an integer >= 1',
        'required': False,
        'default': 64,
        'description': 'Each parameter starts at a multiple of this many elements.',
    }
    steps = {axis['key']: [step['name'] for step in axis['steps']] for axis in axes}
    assert steps == {**{key: [] for key in AXES}, 'finalize': list(STEPS)}
    assert [pair['paths'] for pair in listing['incompatible']] == [
        list(rule.paths) for rule in INCOMPATIBLE
    ]
    assert listing['incompatible'][0] == {
        'paths': ['grad_reduce', 'bucket_groups'],
        'strategies': ['a2a_fp32_sum', 'single'],
        'reason': INCOMPATIBLE[0].reason,
        'way_out': INCOMPATIBLE[0].way_out,
    }


def test_strategies_shows_a_third_party_without_importing_it(capsys, tmp_path, monkeypatch):
    info = tmp_path / 'vendor-1.2.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: vendor\nVersion: 1.2\n')
    (info / 'entry_points.txt').write_text(
        '[megatron_buffer.strategies]\npadding.tight = no_such_module:Tight\n'
        'finalize_step.shout = no_such_module:Shout\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(['strategies', '--json']) == 0
    axes = json.loads(capsys.readouterr().out)['axes']
    (padding,) = (axis for axis in axes if axis['key'] == 'padding')
    assert [(item['name'], item['origin']) for item in padding['strategies']] == [
        ('megatron', 'built-in'),
        ('byte_aligned', 'built-in'),
        ('minimal', 'built-in'),
        ('tight', 'vendor 1.2'),
    ]
    assert padding['strategies'][-1]['params'] is None
    (finalize,) = (axis for axis in axes if axis['key'] == 'finalize')
    assert [finalize['steps'][-1][key] for key in ('name', 'origin')] == ['shout', 'vendor 1.2']
    assert cli.main(['strategies']) == 0
    out = capsys.readouterr().out
    for name in ('tight', 'shout'):
        (line,) = (line for line in out.splitlines() if f' {name} ' in line)
        assert 'imported only when a config names it' in line
        assert 'vendor 1.2' in line


def test_an_unusable_registry_is_one_sentence_and_2(capsys, monkeypatch):
    def clash() -> None:
        raise RegistryError('two strategies are named x')

    monkeypatch.setattr(cli_config, 'third_party_strategies', clash)
    assert cli.main(['strategies']) == 2
    assert capsys.readouterr().err == 'megatron-buffer: error: two strategies are named x\n'


# doctor and run -----------------------------------------------------------------------------------


@pytest.fixture
def doctor_says(monkeypatch):
    """Puts a report in the place of the real doctor, which imports Megatron."""

    def say(report: dict[str, object]) -> None:
        def doctor_report() -> dict[str, object]:
            print('greetings from a library')
            return report

        module = types.ModuleType('megatron_buffer.patching.doctor')
        module.doctor_report = doctor_report
        module.render = lambda report, console: console.print(f'state: {report["state"]}')
        package = types.ModuleType('megatron_buffer.patching')
        monkeypatch.setitem(sys.modules, 'megatron_buffer.patching', package)
        monkeypatch.setitem(sys.modules, 'megatron_buffer.patching.doctor', module)

    return say


@pytest.mark.parametrize(('ok', 'code'), [(True, 0), (False, 1)])
def test_doctor(ok, code, doctor_says, capsys):
    report = {'ok': ok, 'state': 'fine' if ok else 'ill'}
    doctor_says(report)
    assert cli.main(['doctor', '--json']) == code
    out, err = capsys.readouterr()
    assert json.loads(out) == report, 'what libraries print must not get between'
    assert 'greetings' in err
    assert cli.main(['doctor']) == code
    assert capsys.readouterr().out == f'state: {report["state"]}\n'


@pytest.mark.parametrize(
    'rest',
    [
        ['train.py', '--json', '--use-custom-buffer', '--version', '--', '-h'],
        ['-m', 'module'],
        ['--help'],
        [],
    ],
)
def test_run_passes_everything_on_untouched(rest, monkeypatch):
    seen: list[list[str]] = []
    launch = types.ModuleType('megatron_buffer.launch')
    launch.run = lambda argv: seen.append(argv) or 7
    monkeypatch.setitem(sys.modules, 'megatron_buffer.launch', launch)
    monkeypatch.setattr(megatron_buffer, 'launch', launch, raising=False)
    assert cli.main(['run', *rest]) == 7
    assert seen == [rest]

"""Sweeps that run: real processes of a small script that writes statistics, without torch."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_buffer import cli
from megatron_buffer.ablation.machine import Machine, check_room, share_of
from megatron_buffer.ablation.read_sweep import load_sweep
from megatron_buffer.ablation.store import Store, finished_runs
from megatron_buffer.config import BufferConfig, config_hash, load_config, to_dict
from megatron_buffer.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
HEAD = f"""
schema_version: 1
workload:
  script: {ROOT}/tests/ablation_script.py
  device: cpu
  steps: 5
  flags: {{ranks: '{{ranks}}', started: STARTED}}
launcher: '{{python}} {{script}} {{arguments}}'
"""
LIMIT_S = 60


def wait_until(condition, what: str):
    """Waits for something that other processes do."""
    until = time.monotonic() + LIMIT_S
    pause = threading.Event()
    while not (result := condition()):
        assert time.monotonic() < until, f'not within {LIMIT_S} s: {what}'
        pause.wait(0.02)
    return result


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / 'results.jsonl').read_text().splitlines()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


def _hear_interrupts() -> None:
    """A job in the background of a shell ignores SIGINT, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Case:
    """A sweep file, its folder, and the runs that have started."""

    def __init__(self, tmp_path: Path) -> None:
        self.file, self.folder = tmp_path / 'case.yaml', tmp_path / 'out'
        self.started = tmp_path / 'started'

    def write(self, text: str) -> None:
        self.file.write_text(HEAD.replace('STARTED', str(self.started)) + text)

    def run(self, *arguments: str) -> int:
        return cli.main(['ablate', str(self.file), '-o', str(self.folder), *arguments])

    def starts(self) -> list[str]:
        """Names of the runs that have started so far, again and again ones too."""
        lines = self.started.read_text().splitlines() if self.started.exists() else []
        return [line.removeprefix('.unfinished-') for line in lines]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Runs the sweep in a process of its own."""
        command = [sys.executable, '-m', 'megatron_buffer', 'ablate', str(self.file)]
        return subprocess.Popen(
            [*command, '-o', str(self.folder), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_hear_interrupts,
        )

    def orphan(self) -> int:
        """The process that a waiting run has started in a session of its own."""
        pids = list(self.folder.glob('runs/.unfinished-*/pids'))
        return int(pids[0].read_text() or 0) if pids else 0


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


@pytest.fixture(scope='module')
def swept(tmp_path_factory):
    """A sweep with arms that fail in every way, and what it returned."""
    found = Case(tmp_path_factory.mktemp('sweep'))
    found.write("""
repeats: 1
max_jobs: 2
arms:
  stock: stock
  two: {bucketing: {name: count, num_buckets: 2}}
  raises: {config: stock, flags: {behave: raise}}
  asserts: {config: stock, flags: {behave: assert}}
  refused: {config: stock, flags: {behave: refuse}}
  dies: {config: stock, flags: {behave: die}}
  short: {config: stock, flags: {behave: short}}
  no_end: {config: stock, flags: {behave: no end}}
  nan: {config: stock, flags: {behave: nan}}
  not_ours: {flags: {behave: ignores our flags}}
expect:
  refused: fails
""")
    return found, found.run('--jobs', '2')


def test_a_sweep_records_every_run_and_goes_on_after_those_that_fail(swept):
    case, code = swept
    assert code == 1
    rows = rows_of(case.folder)
    assert [row['arm'] for row in rows] == list(load_sweep(str(case.file)).arms)
    assert len({row['run'] for row in rows}) == len(rows) == 10
    assert sorted(case.starts()) == sorted(row['run'] for row in rows)
    assert not list(case.folder.glob('runs/.unfinished-*'))
    assert {row['arm']: row['status'] for row in rows} == {
        **dict.fromkeys(('stock', 'two', 'nan'), 'ok'),
        **dict.fromkeys(
            ('raises', 'asserts', 'refused', 'dies', 'short', 'no_end', 'not_ours'), 'failed'
        ),
    }


def test_a_result_has_what_the_ranks_measured(swept):
    case, _ = swept
    row = next(row for row in rows_of(case.folder) if row['arm'] == 'two')
    config = load_config({'bucketing': {'name': 'count', 'num_buckets': 2}})
    assert row['config_hash'] == config_hash(config)
    assert row['config'] == to_dict(config)
    assert (row['buffer'], row['ranks'], row['steps'], row['seed']) == (
        'megatron_buffer',
        2,
        5,
        1234,
    )
    assert row['versions']['megatron_core'] == '0.19.2'
    assert len(row['loss']['lm loss']) == 5
    assert row['grad_norm'] == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert row['collectives']['all_gather'] == {
        'count': [2] * 5,
        'bytes': [2048] * 5,
        'payload_bytes': [4096] * 5,
    }
    assert row['peak_memory_bytes'] == 10_000_001  # of rank 1
    assert row['step_time_s'][0] is None
    assert all(0.0099 < seconds < 0.0103 for seconds in row['step_time_s'][1:])
    assert row['exposed_s'] == [0.0015] * 5
    sums = {
        key: row['layout'][key] for key in ('elems', 'padding_elems', 'buckets', 'bucket_groups')
    }
    assert sums == {'elems': 1024, 'padding_elems': 24, 'buckets': 2, 'bucket_groups': 2}
    folder = case.folder / 'runs' / row['run']
    assert load_config(str(folder / 'config.yaml')) == config
    assert (folder / 'command.txt').is_file()


@pytest.mark.parametrize(
    ('arm', 'kind', 'message'),
    [
        ('raises', 'ValueError', 'the loss is NaN'),
        ('asserts', 'AssertionError', 'raised by: assert options.seed < 0'),
        ('refused', 'ConfigError', 'padding.high_busbw: contradicts a flag'),
        ('dies', '', 'ended by signal 11, without a word'),
        ('short', 'StatsProblem', 'the run ended well, but after 3 of 5 steps'),
        ('no_end', 'StatsProblem', 'rank 0 wrote no last line, so it did not end well'),
        (
            'not_ours',
            'StatsProblem',
            'used the buffer of stock, and the arm asks for megatron_buffer',
        ),
    ],
)
def test_a_failure_is_recorded_with_its_error(swept, arm, kind, message):
    row = next(row for row in rows_of(swept[0].folder) if row['arm'] == arm)
    assert row['error']['class'] == kind
    assert message in row['error']['message']
    if arm == 'raises':
        assert row['error']['log_tail'][-1] == 'ValueError: the loss is NaN'
        assert row['error']['exit_code'] == 1


def test_every_key_of_a_result_is_documented(swept):
    text = (ROOT / 'docs' / 'ablations.md').read_text().partition('## results.jsonl')[2]
    names = re.findall(r'^\| (`[^|]+`) \|', text.partition('\n## ')[0], re.M)
    documented = {key for cell in names for key in re.findall(r'`(\w+)`', cell)}
    rows = [row for row in rows_of(swept[0].folder) if row['arm'] in ('two', 'raises')]
    assert {*rows[0]} == documented
    assert {*rows[1]} < documented


def test_not_finite_values_are_null_in_valid_json(swept):
    text = (swept[0].folder / 'results.jsonl').read_text()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert next(row for row in rows if row['arm'] == 'nan')['grad_norm'] == [None] * 5


def test_nothing_runs_twice_and_what_failed_only_when_asked(swept, capsys):
    case, _ = swept
    before = case.starts()
    assert case.run() == 1
    assert case.starts() == before
    assert '10 of 10 runs have finished before' in capsys.readouterr().err
    assert case.run('--dry-run', '--retry-failed', '--json') == 0
    plan = json.loads(capsys.readouterr().out)
    again = {run['arm'] for run in plan['runs'] if not run['finished']}
    assert again == {'raises', 'asserts', 'refused', 'dies', 'short', 'no_end', 'not_ours'}


def test_only_a_changed_arm_runs_again_and_another_workload_is_refused(case, capsys):
    arms = 'arms: {stock: stock, other: {config: stock, flags: {shift: 1}}}\n'
    case.write(f'{arms}repeats: 1\n')
    assert case.run() == 0
    case.write(f'{arms.replace("1", "2")}repeats: 1\n')
    assert case.run() == 0
    assert ['-other-' in name for name in case.starts()] == [False, True, True]
    assert (
        '1 finished runs there are of arms that have changed, or are not asked for'
        in capsys.readouterr().err
    )
    shifts = [row['flags'].get('shift') for row in rows_of(case.folder)]
    assert shifts == [None, 2]
    case.write(f'{arms}repeats: 1\nenv: {{A: 1}}\n')
    assert case.run() == 2
    assert 'none of them is one of this sweep as it is now' in capsys.readouterr().err
    assert len(case.starts()) == 3


def test_a_killed_sweep_leaves_no_process_and_goes_on(case, tmp_path):
    """Killed without a chance to clean up, while a run is under way in processes of their own."""
    gate = tmp_path / 'gate'
    case.write(f"""
repeats: 1
arms:
  first: stock
  waits: {{config: stock, flags: {{wait-for: {gate}}}}}
  last: {{config: stock, flags: {{shift: 1}}}}
""")
    process = case.start()
    orphan = wait_until(case.orphan, 'the second run waits')
    process.kill()
    process.communicate(timeout=LIMIT_S)
    wait_until(lambda: not is_alive(orphan), 'the run is gone, with its orphan')
    assert [row['arm'] for row in rows_of(case.folder)] == ['first']
    assert len(finished_runs(case.folder)) == 1
    gate.touch()
    assert case.run() == 0
    assert [name.split('-')[2] for name in case.starts()] == ['first', 'waits', 'waits', 'last']
    assert [row['arm'] for row in rows_of(case.folder)] == ['first', 'waits', 'last']
    assert not list(case.folder.glob('runs/.unfinished-*'))


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_ends_its_runs_and_says_how_to_go_on(case, number):
    case.write('repeats: 1\narms: {hangs: {config: stock, flags: {behave: hang}}}')
    process = case.start()
    orphan = wait_until(case.orphan, 'the run hangs')
    process.send_signal(number)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert 'Stopped with 0 of 1 runs finished. The same command goes on' in said
    assert not is_alive(orphan)
    assert rows_of(case.folder) == []


def test_a_run_beyond_its_time_is_ended_with_all_its_processes(case):
    case.write('repeats: 1\ntime_limit_s: 1\narms: {hangs: {config: stock, flags: {behave: hang}}}')
    assert case.run() == 1
    (row,) = rows_of(case.folder)
    assert row['error']['class'] == 'TimeLimit'
    assert row['error']['message'] == 'stopped after 1 s, the time limit of a run'
    pids = case.folder / 'runs' / row['run'] / 'pids'
    assert not pids.exists() or not is_alive(int(pids.read_text()))


def test_two_sweeps_cannot_share_a_folder(case, capsys):
    case.write('arms: {stock: stock}')
    store = Store(case.folder)
    try:
        assert case.run() == 2
    finally:
        store.close()
    said = capsys.readouterr().err
    assert f'a sweep runs there already (process {os.getpid()})' in said


def test_a_folder_of_something_else_is_left_alone(case, capsys):
    case.write('arms: {stock: stock}')
    case.folder.mkdir()
    (case.folder / 'thesis.tex').touch()
    assert case.run() == 2
    assert 'holds other things (thesis.tex) and no sweep' in capsys.readouterr().err


# how many at a time --------------------------------------------------------------------------------


def local(write, text: str = ''):
    return load_sweep(write(f'schema_version: 1\narms: {{a: {{}}}}\n{text}', 'x.yaml'))


@pytest.mark.parametrize(
    ('machine', 'text', 'jobs', 'said'),
    [
        (Machine(tuple(range(4)), ()), '', 2, ''),
        (Machine(tuple(range(4)), ()), '', 3, '3 runs of 2 ranks need 6 CPUs, and there are 4'),
        (
            Machine(tuple(range(4)), ()),
            'env: {OMP_NUM_THREADS: 2}',
            2,
            'need 8 CPUs, and there are 4',
        ),
        (
            Machine(tuple(range(64)), ('0', '1')),
            '',
            2,
            '2 runs of 2 ranks need 4 GPUs, and there are 2',
        ),
        (Machine((0,), ('0',)), '', 1, 'a run needs 2 GPUs, and 1 is visible here'),
        (
            Machine((0,), ()),
            'workload: {device: gpu}',
            1,
            'a run needs 2 GPUs, and none is visible',
        ),
        (Machine((0, 1), ()), '', 0, '--jobs is 0; it must be at least 1'),
    ],
)
def test_more_runs_at_a_time_than_there_is_room_for_are_refused(write, machine, text, jobs, said):
    sweep = local(write, text)
    is_cpu = not machine.gpus and sweep.workload.device != 'gpu'
    if not said:
        assert check_room(sweep, machine, jobs, is_cpu=is_cpu) == ''
        return
    with pytest.raises(ConfigError) as error:
        check_room(sweep, machine, jobs, is_cpu=is_cpu)
    assert said in str(error.value)


def test_one_run_on_too_few_cpus_is_warned_about(write):
    warning = check_room(local(write), Machine((0,), ()), 1, is_cpu=True)
    assert warning == 'a run has 2 ranks on 1 CPU: step times will mean little'


def test_runs_at_a_time_have_cpus_and_gpus_of_their_own():
    machine = Machine((0, 1, 2, 3, 4), ('4', '5', '6', '7'))
    assert [share_of(machine, slot, 2, 2, is_cpu=True) for slot in (0, 1)] == [
        ('0', '1'),
        ('2', '3'),
    ]
    assert [share_of(machine, slot, 2, 2, is_cpu=False) for slot in (0, 1)] == [
        ('4', '5'),
        ('6', '7'),
    ]
    assert share_of(machine, 0, 1, 2, is_cpu=True) == ()


def test_what_an_own_launcher_may_start_is_said_by_the_sweep(case, capsys):
    case.write('arms: {stock: stock}\nmax_jobs: 3')
    assert case.run('--jobs', '4') == 2
    assert 'may start 3 at a time' in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_script_runs_for_stock_and_ours(tmp_path):
    """One step more than is not timed, on two ranks: that the default workload and the statistics fit."""
    path = tmp_path / 'real.yaml'
    path.write_text(
        'schema_version: 1\narms: {stock: stock, ours: {}}\nrepeats: 1\n'
        'workload: {steps: 2, warmup_steps: 1, device: cpu}\nexpect: {ours: bit_equal}\n'
    )
    assert cli.main(['ablate', str(path), '-o', str(tmp_path / 'out')]) == 0
    stock, ours = rows_of(tmp_path / 'out')
    assert (stock['buffer'], ours['buffer']) == ('stock', 'megatron_buffer')
    assert ours['config_hash'] == config_hash(BufferConfig())
    assert stock['loss'] == ours['loss']
    assert stock['grad_norm'] == ours['grad_norm']
    assert stock['layout'] == ours['layout']
    assert cli.main(['report', str(tmp_path / 'out')]) == 0

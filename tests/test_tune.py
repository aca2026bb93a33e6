"""`megatron-buffer simulate` and `tune` as commands, `plan`'s figures and its page."""

from __future__ import annotations

import contextlib
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_buffer import cli
from megatron_buffer.config import load_config
from megatron_buffer.config_layout import ExplicitBucketing, TimeOptimalBucketing
from megatron_buffer.profile import dump_profile
from tests.harness import run_ranks
from tests.test_time_optimal import BACKWARD, profile_of

SLOW = ['--net', 'inter_gbit_per_s=0.4', '--net', 'intra_gbyte_per_s=0.05', '--net', 'tflops=0.01']
TINY = ['--model', 'gpt_tiny', '--dp', '8', '--fp32']

FLAGS = (
    '--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 '
    '--max-position-embeddings 64 --micro-batch-size 2 --use-distributed-optimizer '
    '--overlap-grad-reduce --ddp-bucket-size 20000 --lr 1'
)
PIPE = [
    *('--dp', '8', '--pp', '2', '--vpp', '2', '--megatron-args'),
    f'{FLAGS} --overlap-param-gather',
]


def _commands(rank: int, world_size: int, runs: list[list[str]]) -> list[tuple[int, str, str]]:
    found = []
    for run in runs:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(run)
            except SystemExit as error:
                code = int(error.code or 0)
        found.append((code, out.getvalue(), err.getvalue()))
    return found


def commands(*runs: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of several runs, in a process that may import Megatron."""
    (found,) = run_ranks(_commands, 1, list(runs), init=False)
    return found


def times(text: str) -> dict[str, float]:
    return json.loads(text)['times']


def test_simulate_and_tune(tmp_path: Path) -> None:
    """What is told agrees, and no fixed size of a sweep exposes less than what tune finds."""
    trace, tuned, profile = (str(tmp_path / n) for n in ('t.json', 'best.yaml', 'p.json'))
    Path(profile).write_text(dump_profile(profile_of(BACKWARD, dp=8)))
    job = [*TINY, *SLOW]
    sizes = [100, 1000, 3000, 8000, 10**6]
    sweep = [['simulate', *job, '--bucket-size', str(size), '--json'] for size in sizes]
    recorded = ['--profile', profile, '--fp32', *SLOW[:4]]
    by_profile = str(tmp_path / 'by_profile.yaml')
    shown, told, found, again, fitted, *rest = commands(
        ['simulate', *job, '--trace', trace],
        ['simulate', *job, '--json'],
        ['tune', *job, '-o', tuned, '--json'],
        ['simulate', *job, '--config', tuned, '--json'],
        ['tune', *recorded, '--network', 'h200', '-o', by_profile],
        *sweep,
    )
    for code, _, err in (shown, told, found, again, fitted, *rest):
        assert (code, err) == (0, '')
    said = json.loads(told[1])
    assert said['job']['dp'] == 8
    assert said['network']['inter_gbit_per_s'] == 0.4
    assert {'reduce_start_s', 'gather_end_s', 'last_gradient'} <= set(said['groups'][0])
    assert said['critical_path'][-1]['end_s'] == pytest.approx(said['times']['iteration_s'])
    for text in ('exposed reductions', 'exposed gathers', 'bucket 0', 'What the end waits for'):
        assert text in shown[1]
    assert max(map(len, shown[1].splitlines())) <= 120
    assert json.loads(Path(trace).read_text())['traceEvents']

    config = load_config(tuned)
    assert isinstance(config.bucketing, ExplicitBucketing)
    comment = Path(tuned).read_text().partition('\n\n')[0]
    assert all(line.startswith('#') and len(line) <= 100 for line in comment.splitlines())
    assert 'Exposed in an iteration' in comment
    ranking = json.loads(found[1])['ranking']
    exposed = [entry['times']['exposed_s'] for entry in ranking]
    assert [round(e, 6) for e in exposed] == sorted(round(e, 6) for e in exposed)
    assert times(again[1])['exposed_s'] == pytest.approx(exposed[0])
    swept = [times(text)['exposed_s'] for _, text, _ in rest]
    assert exposed[0] <= min(swept) + 1e-9
    assert exposed[0] < max(swept)
    # Not only because the fixed sizes were tried: the rule itself is as good as any of them.
    by_rule = [e['times'] for e in ranking if e['what'] == 'the cuts of time_optimal']
    assert by_rule[0]['exposed_s'] <= min(exposed) + 1e-9
    assert by_rule[0]['exposed_param_s'] > 0

    # With single values changed a config has no name for the network.
    assert load_config(by_profile).bucketing.name != TimeOptimalBucketing.name


def test_a_tuned_config_names_the_profile_and_the_network(tmp_path: Path) -> None:
    profile, network = tmp_path / 'p.json', tmp_path / 'net.yaml'
    profile.write_text(dump_profile(profile_of(BACKWARD, dp=8)))
    network.write_text('intra_gbyte_per_s: 0.01\nlaunch_us: 100\n')
    where = ['--profile', str(profile), '--network', str(network), '--fp32']
    optimal = tmp_path / 'optimal.yaml'
    optimal.write_text(
        'schema_version: 1\nbucketing: {name: time_optimal, profile: '
        f'{profile}, network: {network}}}\ndispatch_order: in_order\n'
    )
    found, told, fixed = commands(
        ['tune', *where, '--json'],
        ['simulate', *where, '--config', str(optimal), '--json'],
        ['simulate', *where, '--bucket-size', '1000000', '--json'],
    )
    assert (found[0], told[0], fixed[0]) == (0, 0, 0), (found[2], told[2], fixed[2])
    named = [e for e in json.loads(found[1])['ranking'] if e['what'].startswith('time_optimal')]
    assert named[0]['config']['bucketing'] == {
        'name': TimeOptimalBucketing.name,
        'profile': str(profile),
        'network': str(network),
    }
    best = min(e['times']['exposed_s'] for e in json.loads(found[1])['ranking'])
    assert times(told[1])['exposed_s'] <= best + 1e-9
    assert times(told[1])['exposed_s'] < times(fixed[1])['exposed_s']


def test_what_flags_and_options_say_of_an_iteration() -> None:
    """Micro-batches, their size and length; a chunk's one bucket where the schedule starts everything."""
    flags = ['--dp', '4', '--megatron-args', f'{FLAGS} --global-batch-size 32']
    long, whole = f'{FLAGS} --seq-length 64', f'{FLAGS} --overlap-param-gather'
    pipe = [*PIPE, *SLOW, '--net', 'tflops=0.001', '--microbatches', '4']
    own = [*pipe, '--no-align-grad-reduce', '--no-align-param-gather']
    told, longer, overlapped, text, grouped, aligned, free, tuned = commands(
        ['simulate', *flags, *SLOW, '--json'],
        ['simulate', '--dp', '4', '--megatron-args', long, *SLOW, '--json'],
        ['simulate', '--dp', '4', '--megatron-args', whole, *SLOW, '--json'],
        ['simulate', *flags],
        ['simulate', *pipe, '--microbatch-group-size', '4', '--json'],
        ['simulate', *pipe, '--json'],
        ['simulate', *own, '--json'],
        ['tune', *pipe, '--json'],
    )
    for code, _, err in (told, longer, overlapped, text, grouped, aligned, free, tuned):
        assert (code, err) == (0, '')
    assert json.loads(told[1])['microbatches'] == 32 // (2 * 4)
    short, other = times(told[1]), times(longer[1])
    assert other['compute_s'] == pytest.approx(
        short['compute_s'] / 4 * 2, rel=0.1
    )  # one micro-batch
    # Without --overlap-param-gather all gathers are waited for.
    assert short['exposed_param_s'] == pytest.approx(short['gather_s'])
    assert times(overlapped[1])['exposed_param_s'] < short['gather_s']
    assert 'change no buffer here: --lr\n' in text[1]
    # Two micro-batches of chunk 0, or all four, come after chunk 1 is ready.
    assert times(grouped[1])['exposed_grad_s'] <= times(aligned[1])['exposed_grad_s']
    assert times(free[1])['exposed_grad_s'] < times(aligned[1])['exposed_grad_s']
    ranking = json.loads(tuned[1])['ranking']
    (rule,) = [e for e in ranking if e['what'] == 'the cuts of time_optimal']
    assert rule['times']['exposed_s'] == pytest.approx(ranking[0]['times']['exposed_s'])


BAD: list[tuple[list[str], str]] = [
    (['simulate'], 'Give --model, --hf or --megatron-args, or a --profile'),
    (['simulate', *TINY, '--network', 'h1000'], "no network 'h1000'"),
    (['simulate', *TINY, '--net', 'inter_gbit_per_s'], 'expected KEY=VALUE'),
    (['simulate', *TINY, '--net', 'intergbit_per_s=1'], "Did you mean 'inter_gbit_per_s'"),
    (['simulate', *TINY, '--net', 'tflops=many'], "tflops: found 'many'"),
    (['simulate', *TINY, '--net', 'tflops=nan'], 'tflops: found nan'),
    (['simulate', *TINY, '--microbatches', '0'], '--microbatches 0: must be at least 1'),
    (['simulate', *TINY, '--seq-length', '-4'], '--seq-length -4: must be at least 1'),
    (['simulate', *TINY, '--rank-stage', '1'], '--rank-stage 1: with --pp 1 it is at most 0'),
    (['simulate', *TINY, '--profile', '/none.json'], '--profile: /none.json no such file'),
    (['simulate', *TINY, '--trace', '/none/x.json'], '--trace /none/x.json: there is no folder'),
    (
        ['simulate', *TINY, '--microbatch-group-size', '2'],
        '--microbatch-group-size: only the interleaved schedule',
    ),
    (
        ['simulate', *PIPE, '--microbatches', '4', '--microbatch-group-size', '5'],
        'wants at least --pp 2 and at most --microbatches 4',
    ),
    (['simulate', *PIPE, '--microbatches', '3'], 'must be 0 or at least --pp 2; it is 1'),
    (
        ['simulate', '--dp', '4', '--megatron-args', f'{FLAGS} --delay-wgrad-compute'],
        '--delay-wgrad-compute changes when gradients arrive',
    ),
    (
        ['simulate', '--dp', '4', '--megatron-args', f'{FLAGS} --global-batch-size 6'],
        '--global-batch-size 6: is not a multiple of --micro-batch-size x dp = 2 x 4 = 8',
    ),
    (['simulate', *TINY, '--plot', 'x.bmp'], 'the name must end in .svg'),
    (['simulate', '--model', 'gpt_tinny'], "Did you mean 'gpt_tiny'"),
    (['simulate', *TINY, '--tp', '3'], 'cannot be divided over --tp 3'),
    (['tune', *TINY, '--no-overlap'], 'nothing to tune'),
    (['tune', *TINY, '-o', 'x.json'], 'must end in .yaml'),
    (['tune', *TINY, '--top', '0'], '--top 0: must be at least 1'),
    (['plan', '--params', '1e9', '--html', 'x.html'], 'use --model or --hf'),
    (['plan', *TINY, '--html', '/none/x.html'], '--html /none/x.html: there is no folder'),
]


def test_bad_input_is_said_in_a_sentence() -> None:
    for (run, text), (code, out, err) in zip(BAD, commands(*(run for run, _ in BAD)), strict=True):
        assert code == 2, (run, err)
        assert text in err, run
        assert out == ''
        assert len(err.splitlines()) == 1, err


class Page(HTMLParser):
    """What a page is made of; unbalanced tags are an error."""

    VOID = ('meta', 'link', 'br', 'img', 'col')

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ''

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_figures_and_the_page(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    names = ('ledger.svg', 'timeline.png', 'sweep.svg', 'plan.html')
    ledger, timeline, sweep, page = (str(tmp_path / name) for name in names)
    runs = commands(
        ['plan', *TINY, '--pp', '2', '--plot', ledger, '--html', page],
        ['simulate', *TINY, *SLOW, '--plot', timeline],
        ['tune', *TINY, *SLOW, '--plot', sweep],
    )
    for code, _, err in runs:
        assert (code, err) == (0, '')
    assert f'wrote {page}' in runs[0][1]
    for path, words in (
        (ledger, ('grad_data', 'main parameters and optimizer state', 'GB (10^9 bytes)')),
        (sweep, ('bucket size in elements', 'exposed in an iteration', 'upstream as given')),
    ):
        text = Path(path).read_text()
        for word in words:
            assert word in text
        assert '<dc:date>' not in text
    assert Path(timeline).read_bytes().startswith(b'\x89PNG')

    parsed = Page()
    text = Path(page).read_text()
    parsed.feed(text)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        assert tag not in ('script', 'link', 'img'), 'the page needs nothing else'
        assert not {'src', 'href'} & set(attributes)
    assert 'http' not in text
    for word in ('gpt_tiny', 'stage 0', 'stage 1', 'grad_data', 'Buffers of a rank', 'resident'):
        assert word in parsed.text

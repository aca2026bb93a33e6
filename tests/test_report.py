"""What a report says: worked out by hand on made-up results, then looked for in its pages."""

import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_buffer import cli
from megatron_buffer.ablation.compare import compare
from megatron_buffer.ablation.intervals import paired_difference, paired_ratio
from megatron_buffer.ablation.judge import judge, sentence
from megatron_buffer.ablation.report import make_report
from megatron_buffer.ablation.report_html import html_page
from megatron_buffer.ablation.report_markdown import markdown_page
from megatron_buffer.ablation.sweep import KINDS
from megatron_buffer.config import BufferConfig, config_hash, to_dict

BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable', 'chrome')
STEP = 0.1


def row(arm: str, repeat: int = 1, seed: int = 1, **changes):
    """A result of five steps, of which three are timed."""
    result = {
        'run': f'r{repeat}-s{seed}-{arm}',
        'arm': arm,
        'repeat': repeat,
        'seed': seed,
        'status': 'ok',
        'error': None,
        'started': f'2026-01-01T00:{repeat:02}:{seed:02}',
        'warmup_steps': 2,
        'loss': {'lm loss': [5.0, 4.0, 3.0, 2.0, 1.0 + seed / 100]},
        'grad_norm': [1.0] * 5,
        'updates_skipped': 0,
        'step_time_s': [None, 9.0, STEP, STEP, STEP],
        'exposed_grad_s': [0.02] * 5,
        'exposed_param_s': [0.01] * 5,
        'exposed_s': [0.03] * 5,
        'collectives': {
            'reduce_scatter': {'count': [4] * 5, 'bytes': [800] * 5, 'payload_bytes': [1600] * 5},
            'all_gather': {
                'count': [0, 4, 4, 4, 4],
                'bytes': [400] * 5,
                'payload_bytes': [800] * 5,
            },
        },
        'peak_memory_bytes': 2**30,
        'layout': {
            'elems': 1000,
            'padding_elems': 24,
            'buckets': 4,
            'bucket_groups': 4,
            'chunks': {},
        },
        'versions': {'torch': '2.13.0', 'megatron_core': '0.19.2'},
        'device': 'cpu',
    }
    return result | changes


def times(factor: float) -> dict:
    return {'step_time_s': [None, 9.0, *[STEP * factor] * 3]}


# figures -------------------------------------------------------------------------------------------


def test_the_interval_of_paired_ratios_is_students_on_logarithms():
    ratio = paired_ratio([1.1, 1.2, 1.3], [1.0, 1.0, 1.0])
    logs = [math.log(value) for value in (1.1, 1.2, 1.3)]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in logs) / 2)
    half = 4.303 * deviation / math.sqrt(3)  # two degrees of freedom
    assert ratio is not None
    assert ratio.value == pytest.approx(math.exp(mean))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(mean - half), math.exp(mean + half)))
    assert ratio.side_of(1.0) == (1 if mean > half else 0)


def test_a_shared_drift_cancels_in_pairs():
    """The machine grows twice as slow from round to round, and the arm is always 10 % slower."""
    base = [1.0, 2.0, 4.0]
    ratio = paired_ratio([1.1 * value for value in base], base)
    assert ratio is not None
    assert ratio.low == pytest.approx(1.1)
    assert ratio.high == pytest.approx(1.1)
    assert ratio.side_of(1.0) == 1


def test_one_pair_says_nothing_about_spread():
    assert paired_ratio([2.0], [1.0]) == (2.0, None, None, 1)
    assert paired_ratio([], []) is None
    assert paired_ratio([1.0], [0.0]) is None
    assert paired_difference([3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0, 2.0, 2)


def test_runs_are_paired_by_repeat_and_seed_and_first_steps_are_not_timed():
    rows = [
        *(row('stock', repeat, seed) for repeat in (1, 2) for seed in (1, 2)),
        row('a', 1, 1, **times(2)),
        row('a', 2, 2, **times(2)),
        row('a', 2, 1, status='failed'),
    ]
    found = compare('a', 'stock', rows)
    assert found.pairs == 2
    assert found.time == (pytest.approx(2), pytest.approx(2), pytest.approx(2), 2)
    assert found.counts['collectives'] == (8, 8)
    assert found.counts['bytes'] == (1200, 1200)
    assert found.loss is not None
    assert found.loss.is_bit_equal
    assert found.loss.repeats_differ == 0
    # 1.01 and 1.02: their deviation over their mean.
    assert found.loss.seeds_differ == pytest.approx(0.01 / math.sqrt(2) / 1.015)


def test_losses_that_differ_are_found_where_they_do():
    other = row('a', loss={'lm loss': [5.0, 4.0, 3.3, 2.0, 1.01]})
    loss = compare('a', 'stock', [row('stock'), other]).loss
    assert loss is not None
    assert (loss.is_bit_equal, loss.at_step, loss.last) == (False, 3, (0.0, None, None, 1))
    assert loss.largest == pytest.approx(0.1)
    assert loss.curve == pytest.approx([0, 0, 0.3, 0, 0])


def test_without_repeats_no_difference_of_losses_is_called_real():
    said = sentence(compare('a', 'stock', [row('stock'), row('a', **NEAR)]))
    assert 'Without repeats nothing says whether that is more than noise.' in said


@pytest.mark.parametrize(
    'change',
    [
        {'loss': {'lm loss': [5.0, 4.0, 3.0, 2.0, math.nextafter(1.01, 2)]}},
        {'grad_norm': [1.0, 1.0, 1.0, 1.0, math.nextafter(1.0, 2)]},
        {'loss': {'lm loss': [5.0, 4.0, 3.0, 2.0, None]}},
        {'loss': {}},
    ],
)
def test_bit_equal_is_said_of_nothing_less(change):
    loss = compare('a', 'stock', [row('stock'), row('a', **change)]).loss
    assert loss is not None
    assert not loss.is_bit_equal


# sentences -----------------------------------------------------------------------------------------


def three(arm: str, *changes: dict) -> list[dict]:
    return [row(arm, repeat, **change) for repeat, change in enumerate(changes, start=1)]


PLAIN = three('stock', {}, {}, {})


@pytest.mark.parametrize(
    ('rows', 'said'),
    [
        (three('a', {}, {}, {}), 'equals that of stock, bit for bit, in 3 pairs of runs.'),
        (
            three('a', times(0.9), times(0.91), times(0.9)),
            'Its steps are 9.7 % shorter, more than noise',
        ),
        (
            three('a', times(0.9), times(1.1), times(1.0)),
            'cannot be told from noise: ratio 0.997 (',
        ),
        (three('a', times(1.2)), 'took 1.200 times as long, once: one pair of runs cannot tell'),
        ([], 'Nothing can be said'),
        (
            three('a', *[{'loss': {'lm loss': [5.0, 4.0, 3.0, 2.0, 2.02]}}] * 3),
            'differ from stock by up to 1 (relative, step 5), a real difference: repeats of one arm are',
        ),
        (
            three(
                'a', *[{'loss': {'lm loss': [5.0, 4.0, 3.0, 2.0, 1.01 + n]}} for n in (0.1, 0.2, 0)]
            ),
            '; repeats of one arm by 0.2. In the last step the difference is no more than noise: +0.099 (',
        ),
        (
            three('a', {'grad_norm': [2.0] * 5}),
            'losses equal those of stock, but gradient norms differ',
        ),
        (three('a', {'loss': {}}), 'reported no losses'),
        (three('b'), 'Nothing can be said'),
    ],
)
def test_a_sentence_says_whether_a_difference_is_more_than_noise(rows, said):
    assert said in sentence(compare('a', 'stock', [*PLAIN, *rows]))


BETTER, WORSE = [times(f) for f in (0.90, 0.91, 0.9)], [times(f) for f in (1.1, 1.11, 1.1)]
UNCLEAR = [times(f) for f in (0.9, 1.1, 1.0)]


def layout(**changes) -> dict:
    return {'layout': row('x')['layout'] | changes}


def traffic(count: int, size: int) -> dict:
    series = {'count': [count] * 5, 'bytes': [size] * 5, 'payload_bytes': [size] * 5}
    return {'collectives': {'all_reduce': series}}


NEAR = {'loss': {'lm loss': [5.0, 4.0, 3.0, 2.001, 1.01]}}
FAILED = {'status': 'failed', 'error': {'class': 'ConflictError', 'message': 'no', 'exit_code': 2}}


@pytest.mark.parametrize(
    ('kind', 'yes', 'no', 'unclear'),
    [
        ('bit_equal', [{}] * 3, [NEAR] * 3, [{'loss': {}}] * 3),
        ('loss_close', [NEAR] * 3, [{'loss': {'lm loss': [5.0, 4.0, 3.0, 2.0, 1.02]}}] * 3, []),
        ('loss_differs', [{'loss': {'lm loss': [5.0, 4.0, 3.0, 2.0, 1.02]}}] * 3, [NEAR] * 3, []),
        ('faster', BETTER, WORSE, UNCLEAR),
        ('slower', WORSE, BETTER, UNCLEAR),
        ('same_time', [times(f) for f in (1.0, 1.01, 1.0)], WORSE, UNCLEAR),
        ('less_exposed', [{'exposed_s': [0.01] * 5}] * 3, [{'exposed_s': [0.1] * 5}] * 3, [{}] * 3),
        ('more_exposed', [{'exposed_s': [0.1] * 5}] * 3, [{'exposed_s': [0.01] * 5}] * 3, [{}] * 3),
        ('fewer_collectives', [traffic(7, 1200)], [{}], []),
        ('more_collectives', [traffic(9, 1200)], [{}], []),
        ('same_collectives', [{}], [traffic(9, 1200)], []),
        ('fewer_bytes', [traffic(8, 1199)], [{}], []),
        ('more_bytes', [traffic(8, 1201)], [{}], []),
        ('same_bytes', [{}], [traffic(8, 1201)], []),
        ('fewer_buckets', [layout(buckets=3)], [{}], []),
        ('more_buckets', [layout(buckets=5)], [{}], []),
        ('same_buckets', [{}], [layout(buckets=5)], []),
        ('less_padding', [layout(padding_elems=0)], [{}], []),
        ('more_padding', [layout(padding_elems=25)], [{}], []),
        ('same_padding', [{}], [layout(padding_elems=25)], []),
        (
            'less_memory',
            [{'peak_memory_bytes': 2**29}] * 3,
            [{'peak_memory_bytes': 2**31}] * 3,
            [{}] * 3,
        ),
        (
            'more_memory',
            [{'peak_memory_bytes': 2**31}] * 3,
            [{'peak_memory_bytes': 2**29}] * 3,
            [{}] * 3,
        ),
        ('runs', [{}] * 2, [{}, FAILED], []),
        ('fails', [FAILED] * 2, [{}, FAILED], []),
    ],
)
def test_every_kind_of_expectation_is_confirmed_refuted_and_left_open(kind, yes, no, unclear):
    def outcome(changes: list[dict]) -> str:
        rows = [*PLAIN, *three('a', *changes)]
        expected = {'kind': kind, 'than': '', 'tolerance': KINDS[kind].tolerance, 'error': ''}
        return judge(expected, 'a', 'stock', rows, lambda a, b: compare(a, b, rows)).outcome

    assert outcome(yes) == 'confirmed'
    assert outcome(no) == 'not confirmed'
    assert outcome(unclear) == 'undecided'


def test_every_kind_is_tested():
    marks = test_every_kind_of_expectation_is_confirmed_refuted_and_left_open.pytestmark
    assert {case[0] for mark in marks for case in mark.args[1]} == {*KINDS}


def test_a_failure_must_be_the_expected_one():
    rows = [*PLAIN, *three('a', FAILED)]
    for error, outcome in (('ConflictError', 'confirmed'), ('LayoutError', 'not confirmed')):
        expected = {'kind': 'fails', 'than': '', 'tolerance': None, 'error': error}
        verdict = judge(expected, 'a', 'stock', rows, lambda a, b: compare(a, b, rows))
        assert verdict.outcome == outcome
        assert verdict.why == '1 of 1 runs failed with ConflictError'


# pages ---------------------------------------------------------------------------------------------

NASTY = 'a <b> & "c" | d'


def sweep(*arms: str, repeats: int = 3) -> dict:
    base = to_dict(BufferConfig())
    changed = [base['bucketing'], base['bucketing'] | {'bucket_size_elems': 5}]
    return {
        'name': 'test',
        'source': 'test.yaml',
        'question': 'Is <it> so?',
        'base': 'upstream',
        'base_hash': '0',
        'baseline': 'stock',
        'arms': {
            name: {
                'config_hash': None if name == 'stock' else config_hash(BufferConfig()),
                'short': 'upstream',
                'changes': {} if name == 'stock' else {'bucketing': changed, 'flags.lr': [1, 2]},
                'about': 'says *something*',
                'against': 'stock',
            }
            for name in arms
        },
        'expect': {
            name: [{'kind': 'bit_equal', 'than': '', 'tolerance': None, 'error': ''}]
            for name in arms
            if name != 'stock'
        },
        'workload': {
            'script': 'x.py',
            'is_tiny': True,
            'flags': {},
            'ranks': 2,
            'nodes': 1,
            'steps': 5,
            'warmup_steps': 2,
            'device': 'cpu',
        },
        'env': {'A': '1'},
        'launcher': ['{python}', '{command}'],
        'seeds': [1],
        'repeats': repeats,
        'runs': [
            {'name': f'r{r}-s1-{name}', 'arm': name, 'seed': 1, 'repeat': r}
            for r in range(1, repeats + 1)
            for name in arms
        ],
    }


LOG = {
    'class': 'ValueError',
    'message': '<no>',
    'exit_code': 1,
    'log_tail': ['Traceback', '<no> | &'],
}


@pytest.fixture
def found():
    """A report with an arm that is equal, one that differs, one that fails, and runs that are missing."""
    rows = [
        *PLAIN,
        *three('equal', {}, {}, {}),
        *three(NASTY, *[NEAR | change for change in WORSE]),
        *three('fails', *[{'status': 'failed', 'error': LOG}] * 2),
    ]
    return make_report(sweep('stock', 'equal', NASTY, 'fails', 'missing'), rows)


class Page(HTMLParser):
    """The tags of a page: refuses one that is not closed, and whatever would be fetched from elsewhere."""

    VOID = frozenset({'meta', 'br', 'line', 'path', 'rect', 'circle', 'polyline'})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.cells: dict[str, list[list[str]]] = {}
        self.svg_texts: list[list[str]] = []
        self._table = ''
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert not {'src', 'srcset', 'data', 'background'} & {*given}
        assert tag not in ('script', 'link', 'iframe', 'object', 'img')
        assert not any(key.startswith('on') for key in given)
        self.tags.append(tag)
        if 'id' in given:
            self.ids.append(given['id'])
        if tag == 'a':
            self.links.append(given['href'])
        if tag == 'table':
            self._table = given['id']
            self.cells[self._table] = []
        if tag == 'tr':
            self.cells[self._table].append([])
        if tag in ('td', 'th'):
            self.cells[self._table][-1].append('')
        if tag == 'svg':
            self.svg_texts.append([])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ('td', 'th', 'pre'):
            self.cells[self._table][-1][-1] += data
        if 'svg' in self.open and self.open[-1] == 'text':
            self.svg_texts[-1].append(data)


def test_the_page_needs_nothing_else_and_has_its_tables_and_figures(found):
    text = html_page(found)
    page = Page(text)
    assert 'http' not in text.replace('http://www.w3.org/2000/svg', '').replace('http-equiv', '')
    assert len(page.ids) == len({*page.ids})
    assert {link.removeprefix('#') for link in page.links} <= {*page.ids}
    figures = [name for name in page.ids if name.startswith('figure-')]
    assert figures == [
        'figure-times',
        'figure-losses',
        'figure-differences',
        'figure-order',
        'figure-waiting',
        'figure-bytes',
    ]
    assert page.tags.count('svg') == len(figures) == len(page.svg_texts)
    assert [*page.cells] == [
        *('summary', 'expected', 'changes', 'collectives', 'layout', 'failed', 'provenance')
    ]
    for rows in page.cells.values():
        assert {len(cells) for cells in rows} == {len(rows[0])}


def test_the_page_says_what_was_found(found):
    page = Page(html_page(found))
    arms = {cells[0]: cells for cells in page.cells['summary'][1:]}
    assert arms['equal'][1] == 'bit-equal'
    assert arms[NASTY][1] == 'differs by 0.0005'
    assert arms[NASTY][3].startswith('1.103 (')
    assert arms['fails'][-1] == '0, 2 failed'
    outcomes = {cells[0]: cells[2] for cells in page.cells['expected'][1:]}
    assert outcomes['equal'] == '✓ confirmed'
    assert outcomes[NASTY] == '✗ not confirmed'
    assert outcomes['missing'] == '? undecided'
    changed = [cells for cells in page.cells['changes'] if cells[0] == 'equal']
    assert changed == [
        ['equal', 'bucketing.bucket_size_elems', 'null', '5'],
        ['equal', 'flags.lr', '1', '2'],
    ]
    assert page.cells['failed'][1][1:3] == ['ValueError', '<no>']
    assert '<no> | &' in page.cells['failed'][1][4]
    assert page.cells['collectives'][1][1:] == ['4 × 200 = 800', '4 × 100 = 400', '8 × 150 = 1,200']
    assert 'equal' in page.svg_texts[0]
    assert 'stock and 1 equal to it' in page.svg_texts[1]


def test_a_part_of_a_sweep_is_called_one(found):
    assert not found.is_complete
    text = html_page(found)
    assert '4 of 15 runs have not ended: this is a report of a part of the sweep.' in text
    assert 'fails: 2 runs failed; their errors are below.' in text
    assert 'It failed, 2 of 3 times: ValueError: &lt;no&gt;' in text
    assert 'It has not run yet.' in text


def test_a_report_of_nothing_yet(tmp_path):
    report = make_report(sweep('stock', 'a'), [])
    Page(html_page(report))
    assert '6 of 6 runs have not ended' in markdown_page(report)


def test_the_markdown_twin_has_the_same_tables(found):
    text = markdown_page(found)
    page = Page(html_page(found))
    tables = re.findall(r'^\|.*\n\|[-:|]+\|\n(?:\|.*\n)+', text, re.M)
    assert len(tables) == len(page.cells)
    for table, rows in zip(tables, page.cells.values(), strict=True):
        lines = table.splitlines()
        assert len(lines) == len(rows) + 1
        columns = {len(re.findall(r'(?<!\\)\|', line)) for line in lines}
        assert columns == {len(rows[0]) + 1}
    assert 'a \\<b\\> & "c" \\| d' in text


def test_runs_of_different_software_are_not_compared_in_silence():
    rows = [*PLAIN, *three('a', {'versions': {'torch': '2.12.0'}})]
    notes = make_report(sweep('stock', 'a'), rows).notes
    assert any(note.startswith('Runs are of 2 sets of software') for note in notes)


def folder_with(path: Path, plan: dict, rows: list[dict]) -> str:
    path.mkdir()
    (path / 'sweep.json').write_text(json.dumps(plan))
    (path / 'results.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(path)


def test_the_command_writes_both_pages_and_says_the_same(tmp_path, capsys):
    rows = [*PLAIN, *three('a', *BETTER)]
    folder = folder_with(tmp_path / 'runs', sweep('stock', 'a'), rows)
    assert cli.main(['report', folder, '-o', str(tmp_path / 'x.html')]) == 0
    said = capsys.readouterr().out
    assert 'a: Every loss and gradient norm equals that of stock, bit for bit' in said
    assert f'wrote {tmp_path}/x.html and {tmp_path}/x.md' in said
    Page((tmp_path / 'x.html').read_text())
    assert (tmp_path / 'x.md').read_text().startswith('# Ablation: test')
    assert cli.main(['report', folder, '--json']) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain['arms'][1]['comparison']['step_time_ratio']['value'] == pytest.approx(
        0.9033, abs=1e-4
    )
    assert plain['is_complete']
    assert (tmp_path / 'runs' / 'report.html').is_file()


def test_the_exit_code_says_that_something_is_wrong(tmp_path):
    refuted = folder_with(tmp_path / 'a', sweep('stock', 'a'), [*PLAIN, *three('a', *[NEAR] * 3)])
    partial = folder_with(tmp_path / 'b', sweep('stock', 'a'), [*PLAIN, *three('a', {})])
    assert cli.main(['report', refuted]) == 1
    assert cli.main(['report', partial]) == 1


def test_a_folder_without_a_sweep_is_refused_in_a_sentence(tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    for name, said in (('nowhere', 'no such folder'), ('empty', 'it holds no sweep.json')):
        assert cli.main(['report', str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
    folder = folder_with(tmp_path / 'runs', sweep('stock'), PLAIN)
    assert cli.main(['report', folder, '-o', str(tmp_path / 'x.pdf')]) == 2
    assert 'expected the name of a file that ends in .html' in capsys.readouterr().err
    assert cli.main(['report', folder, '-o', str(tmp_path / 'no' / 'x.html')]) == 2
    assert 'cannot be written: No such file or directory' in capsys.readouterr().err


# in a browser --------------------------------------------------------------------------------------

MEASURE = """
<script>
const box = (e) => { const b = e.getBoundingClientRect(); return [b.width, b.height]; };
const all = (what) => [...document.querySelectorAll(what)];
const clipped = all('svg text').filter((t) => {
  const b = t.getBoundingClientRect(), s = t.closest('svg').getBoundingClientRect();
  return b.left < s.left - 1 || b.right > s.right + 1 || b.top < s.top - 1 || b.bottom > s.bottom + 1;
});
document.body.innerHTML = '<pre id="measured">' + JSON.stringify({
  tables: all('table').map((t) => [t.id, t.rows.length, ...box(t)]),
  figures: all('figure').map((f) => [f.id, ...box(f.querySelector('svg'))]),
  clipped: clipped.map((t) => t.textContent),
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  font: getComputedStyle(document.querySelector('h1')).fontWeight,
}).replaceAll('<', '&lt;') + '</pre>';
</script>
"""


def test_a_browser_shows_tables_and_figures(found, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f'no browser here: none of {", ".join(BROWSERS)}')
    text = html_page(found)
    path = tmp_path / 'page.html'
    path.write_text(text.replace('</body>', MEASURE + '</body>'))
    sandbox = ['--no-sandbox'] if os.geteuid() == 0 else []
    done = subprocess.run(
        [
            *(browser, '--headless', '--disable-gpu', '--no-first-run', *sandbox),
            *('--disable-dev-shm-usage', f'--user-data-dir={tmp_path / "profile"}'),
            *(
                '--host-resolver-rules=MAP * ~NOTFOUND',
                '--window-size=1200,900',
                '--dump-dom',
                path.as_uri(),
            ),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    measured = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.S)
    assert measured, done.stderr[-2000:]
    seen = json.loads(measured[1].replace('&lt;', '<').replace('&gt;', '>').replace('&amp;', '&'))
    page = Page(text)
    assert [(name, rows) for name, rows, _, _ in seen['tables']] == [
        (name, len(rows)) for name, rows in page.cells.items()
    ]
    assert len(seen['figures']) == 6
    assert all(
        width > 300 and height > 80 for *_, width, height in [*seen['figures'], *seen['tables']]
    )
    assert seen['clipped'] == []
    assert seen['overflow'] <= 0
    assert seen['font'] == '700'  # the styles have been read

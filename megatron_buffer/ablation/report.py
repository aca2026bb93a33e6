"""What a sweep found, ready to be shown: arms compared, sentences, verdicts, figures' data, what is missing.

Upstream has no counterpart.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_buffer.ablation import compare
from megatron_buffer.ablation.compare import Comparison, Row, mean_per_step
from megatron_buffer.ablation.judge import NOT_CONFIRMED, Verdict, judge, sentence
from megatron_buffer.ablation.store import RESULTS, SWEEP
from megatron_buffer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ArmReport:
    """One arm.

    Attributes:
        name: Its name.
        short: Its config in short.
        about: What the sweep file says about it.
        changes: What it has unlike the base config and the workload, by path: from, to.
        than: The arm that it is compared with; its own name for the one that others are compared with.
        comparison: Beside that arm; None for the arm itself.
        sentence: What is different, and whether that is more than noise.
        verdicts: What was expected, and whether it came true.
        rows: Its runs that ended well.
        failed: Its runs that failed.
        missing: How many of its runs have not ended yet.
        loss: Mean loss per step.
        time_s: Median over its runs of their median step time.
        exposed_s: The same of waiting for reductions and for gathers.
        waiting_s: The same of both together.
        memory_bytes: Highest peak.
        collectives: Count and bytes per step, by kind.
        layout: Elements, padding, buckets and groups.
    """

    name: str
    short: str
    about: str
    changes: Mapping[str, Any]
    than: str
    comparison: Comparison | None
    sentence: str
    verdicts: Sequence[Verdict]
    rows: Sequence[Row]
    failed: Sequence[Row]
    missing: int
    loss: Sequence[float | None]
    time_s: float | None
    exposed_s: tuple[float | None, float | None]
    waiting_s: float | None
    memory_bytes: int | None
    collectives: Mapping[str, tuple[float, float]]
    layout: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole sweep.

    Attributes:
        sweep: ``sweep.json``.
        arms: In the order of the sweep file.
        rows: All results, in the order in which runs started.
        notes: What a reader has to know before believing the rest, in sentences.
        is_complete: Every run has ended as it should.
        refuted: How many expectations did not come true.
    """

    sweep: Mapping[str, Any]
    arms: Sequence[ArmReport]
    rows: Sequence[Row]
    notes: Sequence[str]
    is_complete: bool
    refuted: int


def load_report(folder: Path) -> Report:
    """Reads a sweep's folder.

    Args:
        folder: What ``megatron-buffer ablate`` has filled, or is filling.

    Raises:
        ConfigError: If it holds no sweep.
    """
    try:
        sweep = json.loads((folder / SWEEP).read_text(encoding='utf-8'))
        lines = (folder / RESULTS).read_text(encoding='utf-8').splitlines()
        rows = [json.loads(line) for line in lines]
    except FileNotFoundError as error:
        what = (
            'no such folder' if not folder.is_dir() else f'it holds no {Path(error.filename).name}'
        )
        raise ConfigError(
            f'{folder}: {what}; give the folder that `megatron-buffer ablate` wrote its results to',
            source=str(folder),
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'{folder} cannot be read as a sweep: {error}', source=str(folder)
        ) from None
    return make_report(sweep, rows)


def make_report(sweep: Mapping[str, Any], rows: Sequence[Row]) -> Report:
    """Compares all arms.

    Args:
        sweep: ``sweep.json``.
        rows: ``results.jsonl``.
    """

    @functools.cache
    def comparison(arm: str, than: str) -> Comparison:
        return compare.compare(arm, than, rows)

    arms = [_arm(name, sweep, rows, comparison) for name in sweep['arms']]
    return Report(
        sweep=sweep,
        arms=arms,
        rows=sorted(rows, key=lambda row: row['started']),
        notes=_notes(sweep, arms, rows),
        is_complete=all(not arm.missing and _failed_as_expected(arm) for arm in arms),
        refuted=sum(v.outcome == NOT_CONFIRMED for arm in arms for v in arm.verdicts),
    )


def _arm(name: str, sweep: Mapping[str, Any], rows: Sequence[Row], comparison: Any) -> ArmReport:
    said = sweep['arms'][name]
    own = [row for row in rows if row['arm'] == name]
    good = [row for row in own if row['status'] == 'ok']
    failed = [row for row in own if row['status'] != 'ok']
    than = said['against']
    found = None if than == name else comparison(name, than)
    planned = sum(run['arm'] == name for run in sweep['runs'])
    return ArmReport(
        name=name,
        short=said['short'],
        about=said['about'],
        changes=said['changes'],
        than=than,
        comparison=found,
        sentence=_sentence(found, good, failed, planned),
        verdicts=[
            judge(expected, name, than, rows, comparison)
            for expected in sweep['expect'].get(name, ())
        ],
        rows=good,
        failed=failed,
        missing=planned - len(own),
        loss=mean_per_step([next(iter(row['loss'].values())) for row in good if row['loss']]),
        time_s=_median([compare.step_time_s(row) for row in good]),
        exposed_s=(
            _median([compare.median_of(row, 'exposed_grad_s') for row in good]),
            _median([compare.median_of(row, 'exposed_param_s') for row in good]),
        ),
        waiting_s=_median([compare.exposed_s(row) for row in good]),
        memory_bytes=max((row['peak_memory_bytes'] for row in good), default=None),
        collectives=_collectives(good[0]) if good else {},
        layout=good[0]['layout'] if good else {},
    )


def _sentence(
    found: Comparison | None, good: Sequence[Row], failed: Sequence[Row], planned: int
) -> str:
    if failed and not good:
        error = failed[0]['error']
        kind = f'{error["class"]}: ' if error['class'] else ''
        return f'It failed, {len(failed)} of {planned} times: {kind}{error["message"]}'
    if not good:
        return 'It has not run yet.'
    text = 'The arm that others are compared with.' if found is None else sentence(found)
    if failed:
        text += f' {len(failed)} of its {planned} runs failed.'
    return text


def _failed_as_expected(arm: ArmReport) -> bool:
    return not arm.failed or any(v.kind == 'fails' for v in arm.verdicts)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _collectives(row: Row) -> dict[str, tuple[float, float]]:
    first = row['warmup_steps']
    return {
        kind: (
            statistics.median(figures['count'][first:] or [0]),
            statistics.median(figures['bytes'][first:] or [0]),
        )
        for kind, figures in row['collectives'].items()
    }


def _notes(sweep: Mapping[str, Any], arms: Sequence[ArmReport], rows: Sequence[Row]) -> list[str]:
    notes: list[str] = []
    missing = sum(arm.missing for arm in arms)
    if missing:
        notes.append(
            f'{missing} of {len(sweep["runs"])} runs have not ended: this is a report of a part of the sweep.'
        )
    for arm in arms:
        if arm.failed and not _failed_as_expected(arm):
            notes.append(f'{arm.name}: {len(arm.failed)} runs failed; their errors are below.')
        skipped = sum(row['updates_skipped'] for row in arm.rows)
        if skipped:
            notes.append(
                f'{arm.name}: {skipped} updates were skipped (loss scaling, or NaN and Inf).'
            )
    good = [row for row in rows if row['status'] == 'ok']
    for key, what in (('versions', 'of software'), ('device', 'of devices')):
        seen = {json.dumps(row[key], sort_keys=True) for row in good}
        if len(seen) > 1:
            notes.append(
                f'Runs are of {len(seen)} sets {what}, so they do not compare: {", ".join(sorted(seen))}'
            )
    baseline = next((arm for arm in arms if arm.name == sweep['baseline']), None)
    if baseline is not None and not baseline.rows:
        notes.append(f'{baseline.name}, which arms are compared with, has no run that ended well.')
    compared = sum(arm.comparison is not None and bool(arm.comparison.pairs) for arm in arms)
    if compared > 1:
        notes.append(
            f'{compared} arms are compared at 95 %: by chance alone one in twenty would seem faster or slower.'
        )
    if good and sweep['repeats'] * len(sweep['seeds']) < 3:
        notes.append(
            'With fewer than three repeats hardly any difference in time can be told from noise.'
        )
    return notes


def report_as_dict(report: Report) -> dict[str, Any]:
    """The report as plain data, for ``--json``."""
    return {
        'name': report.sweep['name'],
        'question': report.sweep['question'],
        'is_complete': report.is_complete,
        'refuted': report.refuted,
        'notes': list(report.notes),
        'arms': [
            {
                'name': arm.name,
                'config': arm.short,
                'changes': arm.changes,
                'compared_with': arm.than,
                'sentence': arm.sentence,
                'expected': [verdict._asdict() for verdict in arm.verdicts],
                'runs': {'ok': len(arm.rows), 'failed': len(arm.failed), 'missing': arm.missing},
                'step_time_s': arm.time_s,
                'exposed_s': {
                    'grad': arm.exposed_s[0],
                    'param': arm.exposed_s[1],
                    'both': arm.waiting_s,
                },
                'peak_memory_bytes': arm.memory_bytes,
                'collectives': {
                    kind: {'count': count, 'bytes': size}
                    for kind, (count, size) in arm.collectives.items()
                },
                'comparison': (
                    None if arm.comparison is None else _comparison_as_dict(arm.comparison)
                ),
            }
            for arm in report.arms
        ],
    }


def _comparison_as_dict(found: Comparison) -> dict[str, Any]:
    plain = {'pairs': found.pairs, 'loss': _loss_as_dict(found.loss)}
    for key, interval in (
        ('step_time_ratio', found.time),
        ('exposed_difference_s', found.exposed),
        ('peak_memory_ratio', found.memory),
    ):
        plain[key] = None if interval is None else interval._asdict()
    return plain | {'counts': {k: {'own': a, 'other': b} for k, (a, b) in found.counts.items()}}


def _loss_as_dict(loss: compare.LossDifference | None) -> dict[str, Any] | None:
    if loss is None:
        return None
    return asdict(loss) | {'last': None if loss.last is None else loss.last._asdict()}

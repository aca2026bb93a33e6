"""``check_runtime_strategy``: does a model train right under these strategies, on real processes?

Upstream has no counterpart; see :mod:`megatron_buffer.testing.runtime_cases` for the oracles.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from megatron_buffer.config import AXES, BufferConfig
from megatron_buffer.testing.choice import Choice
from megatron_buffer.testing.harness import RanksFailed, run_ranks
from megatron_buffer.testing.report import Report

FP32_RTOL = 1e-6
GPT_RANKS = 4


def check_runtime_strategy(
    strategy: Any,
    implementation: Any = None,
    *,
    config: Any = None,
    world_sizes: Sequence[int] = (2,),
    cases: Sequence[Any] | None = None,
    parallel: bool = True,
    rtol: float | None = None,
    timeout_s: float = 300.0,
) -> Report:
    """Trains with the strategies on real processes, and compares with oracles that have no buffer.

    Small model: with and without the distributed optimizer and each overlap, with an averaging
    collective, with parameters of two dtypes; three steps of three micro-batches. Gradients equal an
    unwrapped model's, which takes every rank's data itself; parameters follow torch's own optimizer and
    are the same on all ranks; each bucket is reduced exactly once per window; nothing is left in flight.
    Then a tiny GPT on 4 ranks, with a tied embedding over two pipeline stages and with experts on two
    ranks, against stock Megatron-Core in the same processes.

    Args:
        strategy: A config (shipped name, path, mapping or ``BufferConfig``), or the key of an axis.
        implementation: The strategy object, if ``strategy`` is the key of an axis; a class of a module.
        config: With a strategy object: the config of the other axes; None is ``upstream``.
        world_sizes: Numbers of ranks for the small model.
        cases: ``RuntimeCase`` objects for the small model; None takes the usual ones.
        parallel: Also train the tiny GPT.
        rtol: Tolerance of gradients, relative to the largest of each parameter; None takes 1e-6, or what
            the narrowest dtype allows that the config sends or keeps gradients in.
        timeout_s: Limit for each set of processes.

    Returns:
        The report. A config error, or a layout error, raised while a model is wrapped counts as refused;
        if every case is refused, that is a problem.

    Raises:
        ConfigError: If the config is wrong.
        RegistryError: If a strategy that it names cannot be made.
    """
    from megatron_buffer.testing.runtime_cases import run_cases, run_gpt_cases

    choice = Choice.of(strategy, implementation, config)
    for axis in AXES:  # an error here is the caller's, not a finding
        choice.strategy(axis)
    report = Report(f'training with {choice}')
    try:
        pickle.dumps(choice)
    except Exception as error:
        report.add(
            'a strategy object travels to other processes',
            f'{type(error).__name__}: {error}. Define its class at the top of a module',
        )
        return report
    rtol = tolerance(choice.config) if rtol is None else rtol
    total = refused = 0
    for world_size in world_sizes:
        tried = usual_cases() if cases is None else list(cases)
        refused += _check(report, run_cases, world_size, choice, tried, rtol, timeout_s)
        total += len(tried)
    if parallel:
        tried = gpt_cases(choice.config)
        refused += _check(report, run_gpt_cases, GPT_RANKS, choice, tried, rtol, timeout_s)
        total += len(tried)
    if total and refused == total:
        report.add(
            'some setting is accepted', f'all {total} cases are refused: {report.refused[0]}'
        )
    return report


def usual_cases() -> list[Any]:
    """The cases of the small model."""
    from megatron_buffer.testing.runtime_cases import RuntimeCase

    sharded = {'use_distributed_optimizer': True}
    grads = {'overlap_grad_reduce': True}
    both = {**grads, 'overlap_param_gather': True}
    return [
        RuntimeCase(),
        RuntimeCase(**grads),
        RuntimeCase(**sharded),
        RuntimeCase(**sharded, **grads),
        RuntimeCase(**sharded, **both),
        RuntimeCase(**sharded, **both, average_in_collective=True),
        RuntimeCase(**sharded, **both, mixed=True),
        RuntimeCase(**grads, mixed=True, bucket_size=1),
    ]


def gpt_cases(config: BufferConfig) -> list[Any]:
    """A tied embedding over two pipeline stages, and experts on two ranks."""
    from megatron_buffer.testing.tiny_model import TrainCase

    sized = getattr(config.bucketing, 'bucket_size_elems', None) is not None
    everything = {
        'dist_opt': True,
        'overlap_grad_reduce': True,
        'overlap_param_gather': True,
        'bucket_size': None if sized else 2000,
        'steps': 3,
    }
    return [
        TrainCase(pp=2, tied=True, **everything),
        TrainCase(moe=True, ep=2, tied=False, **everything),
    ]


def tolerance(config: BufferConfig) -> float:
    """What the narrowest dtype that gradients are kept in, or sent in, allows."""
    rules = getattr(config.buffer_grouping, 'rules', ())
    dtypes = {getattr(config.grad_reduce, 'wire_dtype', None)}
    dtypes |= {rule.grad_dtype for rule in rules}
    if 'bf16' in dtypes:
        return 2.0**-6
    return 2.0**-9 if 'fp16' in dtypes else FP32_RTOL


def _check(
    report: Report,
    run: Callable[..., Any],
    world_size: int,
    choice: Choice,
    cases: Sequence[Any],
    rtol: float,
    timeout_s: float,
) -> int:
    """Runs all cases in one set of processes, or each in its own if that fails; how many are refused."""
    try:
        results = list(zip(*_ranks(run, world_size, choice, cases, rtol, timeout_s), strict=True))
    except RanksFailed as whole:
        results = []
        if len(cases) == 1:
            report.add('a model can be trained', f'{world_size} ranks, {cases[0]}: {whole}')
            return 0
        for case in cases:
            try:
                [result] = zip(
                    *_ranks(run, world_size, choice, [case], rtol, timeout_s), strict=True
                )
            except RanksFailed as error:
                report.add('a model can be trained', f'{world_size} ranks, {case}: {error}')
                result = ()
            results.append(result)
    refused = 0
    for case, of_ranks in zip(cases, results, strict=True):
        where = f'{world_size} ranks, {case}'
        for rank, outcome in enumerate(of_ranks):
            for what, detail in outcome.problems:
                if not any(p.what == what and where in p.detail for p in report.problems):
                    report.add(what, f'{where}, rank {rank}: {detail}')
        reasons = {outcome.refused for outcome in of_ranks}
        if reasons and reasons != {''}:
            refused += 1
            report.refused.append(f'{where}: {sorted(reasons)[-1]}')
    report.checked.append(f'{world_size} ranks: ' + '; '.join(map(str, cases)))
    return refused


def _ranks(
    run: Callable[..., Any],
    world_size: int,
    choice: Choice,
    cases: Sequence[Any],
    rtol: float,
    timeout_s: float,
) -> list[Any]:
    return run_ranks(run, world_size, choice, cases, rtol, timeout_s=timeout_s)

"""Interleaved measurement of two or more arms, and what can be said of their ratio.

A machine that is shared slows down and speeds up while one measures. So the arms take turns, each turn gives
one ratio, and the median of the ratios is reported with its 95 % interval from the order statistics of the
sample (the sign test's; it assumes nothing of the distribution).
"""

from __future__ import annotations

import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Arm = Callable[[], float]


class CannotRun(Exception):
    """A benchmark needs what is not here; says what, in one sentence."""


def quiet() -> None:
    """What the models say when they are wrapped would bury the table."""
    logging.disable(logging.WARNING)


def timed(body: Callable[[], Any]) -> Arm:
    """An arm that measures how long ``body`` takes, in seconds."""

    def arm() -> float:
        begin = time.perf_counter()
        body()
        return time.perf_counter() - begin

    return arm


def cpu_timed(body: Callable[[], Any]) -> Arm:
    """As :func:`timed`, but in seconds of this process's CPU: what others do meanwhile does not count."""

    def arm() -> float:
        begin = time.process_time()
        body()
        return time.process_time() - begin

    return arm


def interleave(arms: Mapping[str, Arm], reps: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Runs the arms in turn, in the other direction every other time; returns the times of each."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for rep in range(warm_up + reps):
        for name in names if rep % 2 == 0 else reversed(names):
            seconds = arms[name]()
            if rep >= warm_up:
                times[name].append(seconds)
    return times


def ratio_case(ours: list[float], stock: list[float], **more: Any) -> dict[str, Any]:
    """A case of the JSON: the ratio ours / stock, its interval, and what it means in words."""
    ratios = [a / b for a, b in zip(ours, stock, strict=True)]
    low, high = median_interval(ratios)
    if low <= 1.0 <= high:
        verdict = 'no difference'
    else:
        verdict = 'faster' if high < 1.0 else 'slower'
    return {
        'ratio': statistics.median(ratios),
        'interval95': [low, high],
        'verdict': verdict,
        'ours_s': statistics.median(ours),
        'stock_s': statistics.median(stock),
        'reps': len(ratios),
        **more,
    }


def per_param_case(what: str, size: int, ours: list[float], stock: list[float]) -> dict[str, Any]:
    """:func:`ratio_case` of a model of ``size`` parameters, with the microseconds of each."""
    return ratio_case(
        ours,
        stock,
        what=what,
        params=size,
        ours_us_per_param=1e6 * statistics.median(ours) / size,
        stock_us_per_param=1e6 * statistics.median(stock) / size,
    )


def median_interval(sample: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median; the whole range where the sample is too small for one."""
    ordered, n = sorted(sample), len(sample)
    tail, k = 0.5**n, 0
    # The widest k with P(fewer than k+1 below the median) <= 2.5 %.
    while k + 1 < n / 2 and tail + math.comb(n, k + 1) * 0.5**n <= 0.025:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return ordered[k], ordered[n - 1 - k]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    from importlib.metadata import version

    import torch

    return {
        'machine': platform.machine(),
        'cpu': _cpu_name(),
        'cores': os.cpu_count(),
        'load_before': os.getloadavg()[0],
        'gpu': torch.cuda.get_device_name(0) if torch.cuda.device_count() else None,
        'python': platform.python_version(),
        'torch': torch.__version__,
        'megatron_core': version('megatron-core'),
        'threads_per_rank': 1,
    }


def _cpu_name() -> str:
    try:
        with open('/proc/cpuinfo') as file:
            lines = [line for line in file if line.startswith('model name')]
    except OSError:
        lines = []
    return lines[0].partition(':')[2].strip() if lines else platform.processor()

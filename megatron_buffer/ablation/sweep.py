"""What a sweep is: arms, the workload that each of them runs, and what is expected to come out.

Plain frozen data; :mod:`megatron_buffer.ablation.read_sweep` makes it from YAML. Upstream has no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_buffer.config import BufferConfig

Flags = Mapping[str, Any]
"""Flags of a script without ``--``: text, number, true (given), false or null (left out), or a list."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One thing that an expectation can say about an arm.

    Attributes:
        text: What an arm does that fulfils it, for a sentence.
        needs: ``loss``, ``time``, ``count`` or ``fate``: which comparison it looks at.
        tolerance: Default of the number that may be given with it; None if none may be.
    """

    text: str
    needs: str
    tolerance: float | None = None


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        'bit_equal': Kind(
            text='same loss and gradient norm in every step, bit for bit', needs='loss'
        ),
        'loss_close': Kind(
            text='loss within a relative tolerance in every step', needs='loss', tolerance=1e-3
        ),
        'loss_differs': Kind(text='loss beyond a tolerance', needs='loss', tolerance=1e-3),
        'faster': Kind(text='shorter steps', needs='time'),
        'slower': Kind(text='longer steps', needs='time'),
        'same_time': Kind(
            text='steps as long, within a relative tolerance', needs='time', tolerance=0.05
        ),
        'less_exposed': Kind(text='less time spent waiting for collectives', needs='time'),
        'more_exposed': Kind(text='more time spent waiting for collectives', needs='time'),
        'fewer_collectives': Kind(text='fewer collectives per step', needs='count'),
        'more_collectives': Kind(text='more collectives per step', needs='count'),
        'same_collectives': Kind(text='as many collectives per step', needs='count'),
        'fewer_bytes': Kind(text='fewer bytes on the wire per step', needs='count'),
        'more_bytes': Kind(text='more bytes on the wire per step', needs='count'),
        'same_bytes': Kind(text='as many bytes on the wire per step', needs='count', tolerance=0.0),
        'fewer_buckets': Kind(text='fewer buckets', needs='count'),
        'more_buckets': Kind(text='more buckets', needs='count'),
        'same_buckets': Kind(text='as many buckets', needs='count'),
        'less_padding': Kind(text='less padding', needs='count'),
        'more_padding': Kind(text='more padding', needs='count'),
        'same_padding': Kind(text='as much padding', needs='count'),
        'less_memory': Kind(text='a lower peak of memory', needs='time'),
        'more_memory': Kind(text='a higher peak of memory', needs='time'),
        'runs': Kind(text='runs to its end', needs='fate'),
        'fails': Kind(text='stops with an error', needs='fate'),
    }
)
"""What ``expect`` in a sweep file can say."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What an arm is expected to do, compared with another.

    Attributes:
        kind: A key of :data:`KINDS`.
        than: The arm to compare with; '' for the one that the arm is compared with anyway.
        tolerance: Relative; None where the kind knows none.
        error: With ``fails``: the error's class; '' for any.
    """

    kind: str
    than: str = ''
    tolerance: float | None = None
    error: str = ''


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant that is run.

    Attributes:
        name: As in the sweep file, or made of the values of a grid.
        config: What our buffer does; None for stock Megatron-Core.
        flags: Of the script, over the workload's.
        env: Environment variables, over the sweep's.
        about: A sentence for the report.
        against: The arm that it is compared with; '' for the arm that others are compared with.
    """

    name: str
    config: BufferConfig | None
    flags: Flags
    env: Mapping[str, str]
    about: str = ''
    against: str = ''


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What each run does.

    Attributes:
        script: Absolute path of the training script.
        is_tiny: It is the one that comes with the package, with its small GPT.
        flags: Of the script; text may hold ``{seed}``, ``{steps}``, ``{ranks}``.
        ranks: Processes.
        nodes: Machines that they are spread over evenly.
        steps: Training steps; a run with fewer has failed.
        warmup_steps: First steps that no time is taken of.
        device: ``cpu``, ``gpu``, or ``auto`` for the GPU where there is one.
        cwd: Folder that runs start in; None for the run's own.
    """

    script: Path
    is_tiny: bool
    flags: Flags
    ranks: int
    nodes: int
    steps: int
    warmup_steps: int
    device: str
    cwd: Path | None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A whole sweep, resolved and checked.

    Attributes:
        name: Of the file, without suffix.
        source: The file as it was asked for.
        text: What is in the file.
        question: What the sweep is to answer.
        base: Name or path of the config that arms are laid over.
        base_config: That config.
        arms: By name, in the order of the file, grid last.
        baseline: The arm that others are compared with.
        workload: What each run does.
        seeds: Each arm runs with each of them, in every repeat.
        repeats: Rounds over all arms.
        time_limit_s: Of one run.
        env: Environment variables of every run.
        launcher: Words of the command that starts a run, with placeholders.
        max_jobs: Runs at a time that an own launcher may start; None with the default launcher, where the
            machine's CPUs and GPUs decide.
        expect: What is expected of arms.
    """

    name: str
    source: str
    text: str
    question: str
    base: str
    base_config: BufferConfig
    arms: Mapping[str, Arm]
    baseline: str
    workload: Workload
    seeds: tuple[int, ...]
    repeats: int
    time_limit_s: int
    env: Mapping[str, str]
    launcher: tuple[str, ...]
    max_jobs: int | None
    expect: Mapping[str, tuple[Expectation, ...]]

    def against(self, arm: str) -> str:
        """The arm that ``arm`` is compared with."""
        return self.arms[arm].against or self.baseline

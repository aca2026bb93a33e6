"""Metrics reach the writers that Megatron has made, and nothing else happens."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.test_recording import _messages

STEPS = 4


class Scalars:
    """A writer with the methods of TensorBoard's and of Weights & Biases' that Megatron calls."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.written += [(name, value, step) for name, value in values.items()]


def _train(rank: int, world_size: int, has_writers: bool, tensorboard: Path | None = None) -> Any:
    """As megatron.training does: its arguments count iterations, writers are on the last rank."""
    from megatron_buffer.observe import session
    from tests import tiny_gpt

    global_vars = importlib.import_module('megatron.training.global_vars')
    args = SimpleNamespace(tensorboard_log_interval=2, curr_iteration=10)
    writers = Scalars(), Scalars()
    global_vars.set_args(args)
    if has_writers and rank == world_size - 1:
        real = tensorboard and importlib.import_module('torch.utils.tensorboard')
        vars(global_vars).update(
            _GLOBAL_TENSORBOARD_WRITER=real.SummaryWriter(str(tensorboard)) if real else writers[0],
            _GLOBAL_WANDB_WRITER=writers[1],
        )
    os.environ['MEGATRON_BUFFER_METRICS'] = '1'
    session.observe_stock()
    case = tiny_gpt.TrainCase(
        dist_opt=True, overlap_grad_reduce=True, steps=STEPS, layers=1, micro_batches=1
    )
    with _messages() as messages:
        tiny_gpt.init_parallel(case)
        run = tiny_gpt.wrap(case)
        for step in range(STEPS):
            args.curr_iteration = 10 + step
            tiny_gpt.run_backward(case, run, step)
            run.optimizer.step()
        session.finish()
    if tensorboard and global_vars.get_tensorboard_writer():
        global_vars.get_tensorboard_writer().close()
    sizes = [
        bucket.grad_data.nbytes for buffer in run.chunks[0].buffers for bucket in buffer.buckets
    ]
    warnings = [text for text in messages if 'custom-buffer-metrics' in text]
    return [writer.written for writer in writers], sizes, warnings


def test_scalars_by_iteration_on_the_rank_with_the_writers() -> None:
    (none, sizes, _), (both, _, warnings) = run_ranks(_train, 2, True)
    assert none == [[], []]
    assert not warnings
    for written in both:
        values = {(name, step): value for name, value, step in written}
        assert {step for _, step in values} == {12, 14}  # iterations 11 to 14, every second one
        assert {name.removeprefix('megatron_buffer/') for name, _ in values} == {
            *('step_time_s', 'exposed_grad_s', 'exposed_param_s', 'unused_params', 'late_params'),
            *('reduce_scatter_count', 'reduce_scatter_bytes'),
            *('all_gather_count', 'all_gather_bytes'),
        }
        for step in (12, 14):
            assert values['megatron_buffer/reduce_scatter_count', step] == len(sizes)
            assert values['megatron_buffer/reduce_scatter_bytes', step] == sum(sizes) // 2
            assert values['megatron_buffer/unused_params', step] == 0
            assert values['megatron_buffer/step_time_s', step] > 0


def test_without_a_writer_it_is_said_once() -> None:
    first, last = run_ranks(_train, 2, False)
    assert first[2] == []
    assert len(last[2]) == 1
    assert 'Megatron has made no writer. Give --tensorboard-dir' in last[2][0]


@pytest.mark.slow
def test_a_real_tensorboard_writer(tmp_path: Path) -> None:
    """Where tensorboard is installed."""
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(_train, 2, True, tmp_path)
    events: Any = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Scalars('megatron_buffer/reduce_scatter_count')
    assert [scalar.step for scalar in scalars] == [12, 14]

"""The buffer's metrics in TensorBoard and Weights & Biases, through the writers that Megatron has made.

Stands for what ``training_log`` (``megatron/training/training.py``) writes of other things: at the same
iterations, on the rank that has the writers. Upstream has no counterpart for the buffer.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch.distributed as dist

from megatron_buffer.observe.marks import Clock
from megatron_buffer.observe.stats import EndedStep, Tallying
from megatron_buffer.observe.watch import StepEnd

logger = logging.getLogger(__name__)

PREFIX = 'megatron_buffer/'


class MetricsWriter(Tallying):
    """Writes scalars to Megatron's writers, every ``--tensorboard-log-interval`` iterations.

    On a GPU the host waits for the end of such an iteration.

    Args:
        clock: Makes marks.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._warned = False

    def step_ended(self, step: StepEnd) -> None:
        """Writes the iteration, if it is one to write and this rank has a writer."""
        ended = self.take(step)
        global_vars: Any = sys.modules.get('megatron.training.global_vars')
        tensorboard = global_vars and global_vars.get_tensorboard_writer()
        wandb = global_vars and global_vars.get_wandb_writer()
        if tensorboard is None and wandb is None:
            self._warn()
            return
        args = global_vars.get_args()
        iteration = getattr(args, 'curr_iteration', step.number - 1) + 1
        if iteration % args.tensorboard_log_interval:
            return
        if not ended.is_past(self.clock):
            step.end.synchronize()
        values = {PREFIX + name: value for name, value in metrics_of(ended, self.clock).items()}
        if tensorboard is not None:
            for name, value in values.items():
                tensorboard.add_scalar(name, value, iteration)
        if wandb is not None:
            wandb.log(values, iteration)

    def _warn(self) -> None:
        """Once, on the rank that Megatron gives the writers to."""
        if not self._warned and dist.get_rank() == dist.get_world_size() - 1:
            logger.warning(
                '--custom-buffer-metrics has no effect: Megatron has made no writer. Give '
                '--tensorboard-dir (tensorboard has to be installed) or --wandb-project; a loop of your '
                'own has none, use --custom-buffer-stats there'
            )
        self._warned = True


def metrics_of(ended: EndedStep, clock: Clock) -> dict[str, float]:
    """The scalars of an iteration that is past, by name."""
    tally, time_s = ended.tally, ended.time_s(clock)
    values: dict[str, float] = {} if time_s is None else {'step_time_s': time_s}
    values['exposed_grad_s'] = tally.exposed_s('grad', clock)
    values['exposed_param_s'] = tally.exposed_s('param', clock)
    for kind, counts in tally.collectives.items():
        values[f'{kind}_count'] = counts['count']
        values[f'{kind}_bytes'] = counts['bytes']
    if tally.unused_params is not None:
        values['unused_params'] = tally.unused_params
    values['late_params'] = tally.late_params
    return values

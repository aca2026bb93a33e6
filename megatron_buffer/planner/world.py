"""A job's process groups in one process, for as long as its model is built.

torch's ``fake`` backend makes groups of any size that communicate nothing; Megatron's own
``initialize_model_parallel`` builds its groups on it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_buffer import cpu
from megatron_buffer.errors import MegatronBufferError
from megatron_buffer.planner.job import Job


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Megatron's and torch's remarks about a machine without a GPU to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def fake_world(job: Job) -> Iterator[None]:
    """Makes this process rank 0 of ``job``'s stage ``pp_rank``, as far as building a model is concerned.

    Context parallelism and data parallelism do not change a rank's parameters, so the world has no more
    of them than its experts need: any job is made in milliseconds.

    Raises:
        MegatronBufferError: If a real process group exists.
    """
    if dist.is_initialized():
        raise MegatronBufferError(
            'the planner makes a process group of its own, but this process has one already; plan in '
            'a process that is not part of a job'
        )
    if not torch.cuda.is_available() and 'megatron.core' not in sys.modules:
        cpu.enable()  # parts of a model ask for the current device
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook  # torch puts the rank before every line of a traceback
    stage_size = math.lcm(job.tp, job.expert_model_size)
    dist.init_process_group(
        backend='fake',
        store=FakeStore(),
        rank=job.pp_rank * stage_size,
        world_size=stage_size * job.pp,
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=job.tp,
            pipeline_model_parallel_size=job.pp,
            virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
            expert_model_parallel_size=job.ep,
            expert_tensor_parallel_size=job.expert_tp,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = excepthook

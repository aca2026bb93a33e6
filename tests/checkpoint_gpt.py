"""The tiny GPT of `tests.tiny_gpt`, saved and loaded in the middle of training."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.tiny_gpt import TrainCase, init_parallel, run_backward, wrap
from tests.tiny_results import copied, named_params, optimizer_state, owned_grads

SAVED_AT, ENDS_AT = 2, 4


def train(case: TrainCase, format_name: str, *, loads: str = '', saves: str = '') -> dict[str, Any]:
    """Train from the start or from what was loaded, save on the way, and return the result.

    Returns:
        As `tests.tiny_gpt.train`, from where it was saved.
    """
    parallel_state = importlib.import_module('megatron.core.parallel_state')
    init_parallel(case)
    result = _train(case, format_name, loads, saves)
    parallel_state.destroy_model_parallel()
    gc.collect()
    return result


def _train(case: TrainCase, format_name: str, loads: str, saves: str) -> dict[str, Any]:
    checkpointing = importlib.import_module('megatron.core.dist_checkpointing')
    run = wrap(case)
    losses, norms = [], []
    if loads:
        state = checkpointing.load(_sharded(run, format_name, loading=True), loads)
        for i, chunk in enumerate(run.chunks):
            chunk.module.load_state_dict(state[f'model{i}'])
        run.optimizer.load_state_dict(state['optimizer'])
    for step in range(SAVED_AT if loads else 0, ENDS_AT):
        if step == SAVED_AT and saves:
            if case.overlap_param_gather:  # as megatron.training does before it saves
                for chunk in run.chunks:
                    chunk.disable_forward_pre_hook()
            state = _sharded(run, format_name, loading=False)
            if dist.get_rank() == 0:
                Path(saves).mkdir(parents=True)
            dist.barrier()
            # Megatron's writer forks, which the harness's ranks may not do, being daemons.
            multiprocessing.current_process()._config['daemon'] = False  # type: ignore[attr-defined]
            checkpointing.save(state, saves)
            dist.barrier()
            if case.overlap_param_gather:
                for chunk in run.chunks:
                    chunk.enable_forward_pre_hook()
        loss = run_backward(case, run, step)
        grads, ranges = owned_grads(run.chunks)
        _, norm, _ = run.optimizer.step()
        if step >= SAVED_AT:
            losses.append(loss)
            norms.append(float('nan') if norm is None else float(norm))
    return {
        'losses': losses,
        'grad_norms': norms,
        'params': {name: copied(param) for name, param in named_params(run.chunks)},
        'grads': grads,
        'grad_ranges': ranges,
        'state': optimizer_state(run),
    }


def _sharded(run: Any, format_name: str, loading: bool) -> dict[str, Any]:
    metadata = {'distrib_optim_sharding_type': format_name, 'chained_optim_avoid_prefix': True}
    models = {
        f'model{i}': chunk.module.sharded_state_dict(metadata=dict(metadata))
        for i, chunk in enumerate(run.chunks)
    }
    optimizer = run.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)
    return {**models, 'optimizer': optimizer}

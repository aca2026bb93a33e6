"""Training cases of the conformance kit, as they run in one rank.

Each trains a small model with Megatron-Core's own optimizer and compares with an unwrapped twin
(:mod:`megatron_buffer.testing.blocks`), or, where the model is spread over ranks, the tiny GPT with stock
Megatron-Core in the same processes (:mod:`megatron_buffer.testing.tiny_gpt`). Upstream has no counterpart.
"""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_buffer.errors import ConfigError, LayoutError, RegistryError
from megatron_buffer.testing import blocks
from megatron_buffer.testing.choice import Choice
from megatron_buffer.testing.tiny_model import TrainCase
from megatron_buffer.testing.traffic import Traffic, reductions_of, sent_copies_of

PARAMS_RTOL = 1e-4
"""Parameters after some steps: Adam magnifies differences of rounding."""
GPT_PARAMS_RTOL = 1e-3
BF16_RTOL = 2.0**-7
MAX_EXACT_RTOL = 1e-4
"""What is more than this allows for gradients of a narrow dtype."""


@dataclass(frozen=True, kw_only=True)
class RuntimeCase:
    """What a run of the small model is made of; the names are ddp_config's where it has one."""

    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    average_in_collective: bool = False
    bucket_size: int | None = 300
    mixed: bool = False
    """Half of the parameters are bf16: several buffers."""
    micro_batches: int = 3
    steps: int = 3

    def __str__(self) -> str:
        """The fields that differ from the default."""
        default = type(self)()
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        words = [k if v is True else f'{k}={v}' for k, v in changed.items()]
        return ', '.join(words) or 'plain data parallelism'


class Outcome(NamedTuple):
    """What came of a case on one rank.

    Attributes:
        problems: Rule and detail of each.
        refused: Why the config refuses this case when a model is wrapped; '' if it does not.
    """

    problems: list[tuple[str, str]]
    refused: str = ''


def run_cases(
    rank: int, world_size: int, choice: Choice, cases: Sequence[RuntimeCase], rtol: float
) -> list[Outcome]:
    """Trains each case in this process, one after the other."""
    from megatron_buffer.testing import small_model

    logging.getLogger('megatron_buffer').setLevel(logging.ERROR)
    outcomes: list[Outcome] = []
    small_model.init_parallel()
    for case in cases:
        with choice.installed():
            outcomes.append(_run(rank, world_size, choice, case, rtol))
            gc.collect()  # activated() refuses to end while a model of ours lives
    return outcomes


def _run(rank: int, world_size: int, choice: Choice, case: RuntimeCase, rtol: float) -> Outcome:
    from megatron_buffer.testing import small_model

    dtype = torch.bfloat16 if case.mixed else torch.float32
    flags = {k: v for k, v in vars(case).items() if k not in ('mixed', 'micro_batches', 'steps')}
    if getattr(choice.config.bucketing, 'bucket_size_elems', None) is not None:
        del flags['bucket_size']  # the config's own size counts; another one would be a conflict
    try:
        model = small_model.wrap(blocks.make_blocks(dtype), grad_reduce_in_fp32=True, **flags)
    except (ConfigError, LayoutError, RegistryError) as error:
        return Outcome([], f'{type(error).__name__}: {error}')
    optimizer = blocks.optimizer_for(
        [model],
        dist_opt=case.use_distributed_optimizer,
        overlap=case.overlap_param_gather,
        mixed=case.mixed,
    )
    twin = blocks.Twin(dtype, world_size, case.micro_batches)
    finalize = importlib.import_module('megatron.core.distributed').finalize_model_grads
    problems: list[tuple[str, str]] = []
    for step in range(case.steps):
        traffic = Traffic()
        with traffic:
            _window(model, optimizer, rank, step, case)
            finalize([model])
        problems += _sync_problems(model, traffic, step)
        params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
        problems += _rank_problems(params, step)
        expected = twin.grads(step, params)
        problems += grad_problems(small_model.owned_main_grads(model), expected, step, rtol)
        if not small_model.covered(model, small_model.owned_main_grads(model)):
            problems.append(('every gradient has one owner', f'step {step}: not so'))
        optimizer.step()
        wanted = twin.step(step)
        if case.overlap_param_gather and step == case.steps - 1:
            model.start_param_sync(force_sync=True)
        if not case.overlap_param_gather or step == case.steps - 1:
            problems += _param_problems(dict(model.module.named_parameters()), wanted, step, rtol)
    return Outcome(problems)


def _window(model: Any, optimizer: Any, rank: int, step: int, case: RuntimeCase) -> None:
    """Zeroes, and runs all micro-batches, the last one synchronised."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    with model.no_sync():
        for micro_batch in range(case.micro_batches - 1):
            blocks.loss_of(model(blocks.batch(rank, step, micro_batch))).backward()
    last = case.micro_batches - 1
    blocks.loss_of(model(blocks.batch(rank, step, last))).backward()


def _sync_problems(model: Any, traffic: Traffic, step: int) -> Iterator[tuple[str, str]]:
    """Each bucket is reduced exactly once per window, and nothing is left in flight."""
    names = {param: name for name, param in model.module.named_parameters()}
    for number, group in enumerate(model.bucket_groups):
        if group.grad_reduce_handle is not None:
            yield 'every group is finished', f'step {step}: group {number} is still in flight'
        for bucket in group.buckets:
            times = reductions_of(bucket.grad_data, traffic)
            if not times:
                times = min(1, sent_copies_of(bucket.grad_data, traffic))
            if times != 1:
                held = ', '.join(names[param] for param in bucket.params_list)
                yield (
                    'each bucket is reduced exactly once',
                    f'step {step}: {times} times the one of group {number} that holds {held}',
                )


def _rank_problems(params: dict[str, torch.Tensor], step: int) -> Iterator[tuple[str, str]]:
    """After the gather all ranks have the same parameters."""
    for name, param in params.items():
        first = param.clone()
        dist.broadcast(first, src=0)
        if not torch.equal(first, param):
            error = (first.float() - param.float()).abs().max().item()
            yield (
                'all ranks have the same parameters',
                f'step {step}: {name} differs from rank 0 by up to {error:.3g}',
            )


def grad_problems(
    owned: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], step: int, rtol: float
) -> Iterator[tuple[str, str]]:
    """Gradients against the oracle's, element by element where this rank owns them.

    Args:
        owned: Flat gradients; NaN where another rank owns the element.
        expected: Flat gradients of the oracle.
        step: For the message.
        rtol: Tolerance, relative to the largest element of the parameter (or, for one whose gradients
            are tiny, of the model).
    """
    floor = max(grad.abs().max().item() for grad in expected.values()) * 1e-3
    wrong: list[str] = []
    ratios: list[torch.Tensor] = []
    for name, reference in expected.items():
        mask = ~owned[name].isnan()
        if not mask.any():
            continue
        mine, wanted = owned[name][mask], reference[mask]
        scale = max(reference.abs().max().item(), floor)
        error = (mine - wanted).abs().max().item()
        if error > rtol * scale:
            wrong.append(f'{name} by {error:.3g} of {scale:.3g}')
        large = wanted.abs() > 0.1 * scale
        ratios.append(mine[large] / wanted[large])
    if not wrong:
        return
    told = ', '.join(wrong[:4]) + (f' and {len(wrong) - 4} more' if len(wrong) > 4 else '')
    ratio = torch.cat(ratios)
    if ratio.numel() and (ratio - ratio.mean()).abs().max() < 0.01 * ratio.mean().abs():
        told = f'all are {ratio.mean().item():.4g} times what they should be ({told})'
    yield 'gradients are right', f'step {step}: off: {told}'


def _param_problems(
    params: dict[str, Any], wanted: dict[str, torch.Tensor], step: int, rtol: float
) -> Iterator[tuple[str, str]]:
    """Parameters against the twin's own training."""
    for name, reference in wanted.items():
        error = (params[name].detach().float() - reference.float()).abs().max().item()
        allowed = BF16_RTOL if reference.dtype == torch.bfloat16 else max(PARAMS_RTOL, rtol)
        if error > allowed * max(1.0, reference.abs().max().item()):
            yield 'parameters are right', f'after step {step}: {name} off by {error:.3g}'
            return


# ------------------------------------------------------------------ models spread over ranks


def run_gpt_cases(
    rank: int, world_size: int, choice: Choice, cases: Sequence[TrainCase], rtol: float
) -> list[Outcome]:
    """Trains each case as stock and as the choice has it, and compares."""
    from megatron.core import parallel_state

    from megatron_buffer.testing.tiny_gpt import train

    logging.getLogger('megatron_buffer').setLevel(logging.ERROR)
    outcomes: list[Outcome] = []
    for case in cases:
        stock = train(case, whole_grads=True)
        gc.collect()
        try:
            ours = train(case, choice, whole_grads=True)
        except (ConfigError, LayoutError, RegistryError) as error:
            outcomes.append(Outcome([], f'{type(error).__name__}: {error}'))
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
            continue
        outcomes.append(Outcome(list(gpt_problems(ours, stock, rtol))))
    return outcomes


def gpt_problems(
    ours: dict[str, Any], stock: dict[str, Any], rtol: float
) -> Iterator[tuple[str, str]]:
    """Two results of ``train(..., whole_grads=True)``, up to the order of summation.

    From the second step on parameters differ by rounding, and gradients then differ by more. Where
    gradients are rounded to a narrow dtype, ``rtol`` says so, and only the first step's are compared:
    Adam makes steps of the smallest differences, and experts are chosen by comparing.
    """
    narrow = rtol > MAX_EXACT_RTOL
    pairs = list(zip(ours['whole_grads'], stock['whole_grads'], strict=True))
    for step, (mine, reference) in enumerate(pairs[:1] if narrow else pairs):
        yield from grad_problems(mine, reference, step, rtol if step == 0 else max(rtol, 1e-3))
    allowed = {'losses': max(1e-4, rtol), 'grad_norms': max(1e-4, 4 * rtol)}
    for key, what in (('losses', 'losses'), ('grad_norms', 'gradient norms')):
        mine, reference = torch.tensor(ours[key]), torch.tensor(stock[key])
        if not torch.allclose(mine, reference, rtol=allowed[key], atol=0.0, equal_nan=True):
            yield f'{what} are right', f'{ours[key]} instead of {stock[key]}'
    if narrow:
        return
    for name, reference in stock['params'].items():
        error = (ours['params'][name] - reference).abs().max().item()
        if error > GPT_PARAMS_RTOL * max(1.0, reference.abs().max().item()):
            yield 'parameters are right', f'{name} off by {error:.3g}'
            return

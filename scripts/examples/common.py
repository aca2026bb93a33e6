"""What both examples share and what is not about the buffer: flags, process groups, data, the comparison.

Turns CPU mode on where there is no GPU, so it has to be imported before Megatron is.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import megatron_buffer
from megatron_buffer import cpu
from megatron_buffer.errors import ConfigError

if not torch.cuda.is_available():
    cpu.enable()

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

VOCAB, SEQUENCE, SAMPLES, MICRO_BATCHES = 128, 32, 2, 2
Batch = dict[str, torch.Tensor]


def main(description: str, train: Callable[[int], list[float]]) -> int:
    """Trains with stock Megatron and then through our buffer, in one process, and prints both.

    Args:
        description: For ``--help``.
        train: Builds a model and trains it for so many steps; returns the losses.

    Returns:
        Exit code: 0, or 1 if the config is ``upstream`` and a loss differs, or 2 for a wrong config.
    """
    options = _options(description)
    try:
        config = megatron_buffer.load_config(options.config)
    except ConfigError as error:
        sys.stderr.write(f'error: {error}\n')
        return 2
    is_own_job = not dist.is_initialized()
    _start()
    stock = _run(train, options.steps)
    if options.stock:
        _say('stock:', *(f'{loss:.6f}' for loss in stock))
        _stop(is_own_job)
        return 0
    with megatron_buffer.activated(config):  # install() now, uninstall() behind the block
        ours = _run(train, options.steps)
    _say(f'{"step":>4} {"stock":>12} {"ours":>12}')
    for step, (a, b) in enumerate(zip(stock, ours, strict=True), start=1):
        _say(f'{step:>4} {a:>12.6f} {b:>12.6f} {"equal" if a == b else "differ"}')
    same = stock == ours
    is_upstream = config == megatron_buffer.load_config('upstream')
    _say(f'{options.config}: losses are {"equal" if same else "not equal"}, bit for bit')
    _stop(is_own_job)
    return 1 if is_upstream and not same else 0


def _options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument('--config', default='upstream', help='shipped name or YAML file (upstream)')
    parser.add_argument('--steps', type=int, default=4, help='training steps (4)')
    parser.add_argument('--stock', action='store_true', help='only stock Megatron, nothing of ours')
    return parser.parse_args()


def _start() -> None:
    """Process groups: data parallel over all ranks that torchrun has started."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger('megatron').setLevel(logging.ERROR)  # it warns of this small model's class
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', '0')))
    if not dist.is_initialized():
        dist.init_process_group('gloo' if cpu.is_enabled() else 'nccl')
    parallel_state.initialize_model_parallel()


def _stop(is_own_job: bool) -> None:
    parallel_state.destroy_model_parallel()
    if is_own_job:
        dist.destroy_process_group()


def _run(train: Callable[[int], list[float]], steps: int) -> list[float]:
    """The same weights for every run; the model is gone behind it."""
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    losses = train(steps)
    gc.collect()
    return losses


def _say(*words: str) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def batches(step: int) -> Iterator[Batch]:
    """The micro-batches of a step on this rank: numbers that count in steps of 1, 2 or 3."""
    rank = parallel_state.get_data_parallel_rank()
    device = 'cpu' if cpu.is_enabled() else 'cuda'
    for micro_batch in range(MICRO_BATCHES):
        seed = (step * MICRO_BATCHES + micro_batch) * dist.get_world_size() + rank
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCAB, (SAMPLES, 1), generator=generator)
        stride = torch.randint(1, 4, (SAMPLES, 1), generator=generator)
        text = ((first + stride * torch.arange(SEQUENCE + 1)) % VOCAB).to(device)
        yield {'tokens': text[:, :-1].contiguous(), 'labels': text[:, 1:].contiguous()}


def token_losses(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of every token of a micro-batch."""
    tokens = batch['tokens']
    positions = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, future, labels=batch['labels'])

"""A bag of parameters that trains, saves and loads: what the checkpoint tests run on each rank.

The global batch does not depend on the number of ranks, so a run that goes on at another one has the
same losses and states, up to the order of summation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

SAMPLES = 12
WIDEST = 4096
LR = 0.05
STATES = ('param', 'exp_avg', 'exp_avg_sq')
SAVED_AT, ENDS_AT = 3, 6


@dataclass(frozen=True, kw_only=True)
class Bag:
    """Sizes of the parameters, in registration order, and how they are wrapped.

    Attributes:
        shared: Index of a parameter that is marked as a tied embedding.
        prefix: Of the parameters' names.
    """

    sizes: tuple[int, ...] = (200, 100)
    bucket_size: int | None = 50
    dtype: torch.dtype = torch.float32
    shared: int | None = None
    prefix: str = 'p'
    high_busbw: bool = False


@dataclass(frozen=True, kw_only=True)
class Hop:
    """A run: the bag, what it runs under ('stock' or a config) and the format that it saves in."""

    bag: Bag = Bag()
    arm: Any = 'upstream'
    format: str = 'dp_reshardable'
    mem_efficient: bool = False


@dataclass
class Ended:
    """How a run ended on one rank.

    Attributes:
        error: Message of the exception, '' if there was none.
        layout: Per bucket: offset, size with pads, size without the pad at the end; in elements.
        state: Whole state right after loading (or when it was saved, for the first of a chain).
        end: Whole state after :data:`ENDS_AT` steps.
        log: Warnings, and what the guard and the repair said.
    """

    error_type: str = ''
    error: str = ''
    layout: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    state: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    end: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    log: list[str] = dataclasses.field(default_factory=list)


def chains(
    rank: int, world_size: int, folder: str, named: dict[str, Sequence[Hop]]
) -> dict[str, list[Ended]]:
    """Runs that follow each other: the first trains and saves, the next loads that, and saves, and so on.

    Several such chains in one process group; runs under the same config come together, since installing
    it takes longer than they do.
    """
    ended: dict[str, list[Ended]] = {name: [] for name in named}
    with _Arms() as arms:
        for level in range(max(map(len, named.values()))):
            todo = [name for name, hops in named.items() if len(hops) > level]
            for name in sorted(todo, key=lambda name: repr(named[name][level].arm)):
                hops, place = named[name], Path(folder, name)
                source = (hops[level - 1], place / str(level - 1)) if level else None
                ended[name].append(arms.run(place / str(level), hops[level], source))
    return ended


def load_saved(rank: int, world_size: int, folder: str, named: dict[str, Hop]) -> dict[str, Ended]:
    """Loads what :func:`chains` saved (its first runs), here on another number of ranks."""
    with _Arms() as arms:
        return {
            name: arms.run(
                Path(folder, name, f'at {world_size}'), hop, (hop, Path(folder, name, '0'))
            )
            for name, hop in named.items()
        }


class _Arms(contextlib.ExitStack):
    """Runs things under stock or under a config, and changes that only when another one is wanted."""

    current: Any = None

    def run(self, target: Path, hop: Hop, source: tuple[Hop, Path] | None) -> Ended:
        """One run: train or load, save, train on."""
        if hop.arm != self.current:
            self.close()
            self.enter_context(arm(hop.arm))
            self.current = hop.arm
        ended = Ended()
        with _recorded(ended.log):
            try:
                _run(ended, target, hop, source)
            except (Exception, CheckpointException) as error:
                ended.error_type, ended.error = type(error).__name__, str(error)
        return ended


def _run(ended: Ended, target: Path, hop: Hop, source: tuple[Hop, Path] | None) -> None:
    run = Run(hop.bag)
    buckets = run.model.buffers[0].buckets
    ended.layout = [(b.offset, b.grad_data.numel(), b.numel_unpadded) for b in buckets]
    if source is None:
        run.train(0, SAVED_AT)
    else:
        run.load(*source)
    ended.state = run.state()
    run.save(target, hop)
    ended.losses = run.train(SAVED_AT, ENDS_AT)
    ended.end = run.state()


class Run:
    """One model, wrapped, with its optimizer."""

    def __init__(self, bag: Bag) -> None:
        distributed = importlib.import_module('megatron.core.distributed')
        optimizer = importlib.import_module('megatron.core.optimizer')
        parallel_state = importlib.import_module('megatron.core.parallel_state')
        transformer = importlib.import_module('megatron.core.transformer')
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
        bf16 = bag.dtype == torch.bfloat16
        config = transformer.TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16, params_dtype=bag.dtype
        )
        ddp_config = distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            grad_reduce_in_fp32=True,
            bucket_size=bag.bucket_size,
            pad_buckets_for_high_nccl_busbw=bag.high_busbw,
        )
        self.model = distributed.DistributedDataParallel(config, ddp_config, _net(config, bag))
        self.chained = optimizer.get_megatron_optimizer(
            optimizer.OptimizerConfig(
                optimizer='adam',
                lr=LR,
                min_lr=LR,
                weight_decay=0.01,
                adam_eps=1e-5,
                clip_grad=0.0,
                bf16=bf16,
                params_dtype=bag.dtype,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )
        (self.optimizer,) = self.chained.chained_optimizers
        for group in self.chained.param_groups:
            group['weight_decay'] = 0.01 * group['wd_mult']

    def train(self, first: int, last: int) -> list[float]:
        """Runs steps ``first`` to ``last - 1`` and returns their losses."""
        losses = []
        rank, size = dist.get_rank(), dist.get_world_size()
        for step in range(first, last):
            self.model.zero_grad_buffer()
            self.chained.zero_grad()
            rows = batch(step)[rank * SAMPLES // size : (rank + 1) * SAMPLES // size]
            loss = self.model(rows) * size / SAMPLES
            loss.backward()
            self.model.finish_grad_sync()
            self.chained.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / size)
        return losses

    def sharded(self, hop: Hop, loading: bool) -> dict[str, Any]:
        """The sharded state dict of model and optimizer."""
        metadata = {
            'distrib_optim_sharding_type': hop.format,
            'distrib_optim_fully_reshardable_mem_efficient': hop.mem_efficient,
        }
        model = self.model.module.sharded_state_dict(metadata=dict(metadata))
        optimizer = self.chained.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {'model': model, 'optimizer': optimizer}

    def save(self, target: Path, hop: Hop) -> None:
        """Saves in the hop's format."""
        checkpointing = importlib.import_module('megatron.core.dist_checkpointing')
        state = self.sharded(hop, loading=False)
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
        dist.barrier()
        # Megatron's writer forks, which the harness's ranks may not do, being daemons.
        multiprocessing.current_process()._config['daemon'] = False  # type: ignore[attr-defined]
        checkpointing.save(state, str(target))
        dist.barrier()

    def load(self, saved: Hop, source: Path) -> None:
        """Loads what a run of ``saved`` left."""
        checkpointing = importlib.import_module('megatron.core.dist_checkpointing')
        loaded = checkpointing.load(self.sharded(saved, loading=True), str(source))
        self.model.load_state_dict(loaded['model'])
        self.chained.load_state_dict(loaded['optimizer'])

    def state(self) -> dict[str, torch.Tensor]:
        """Whole optimizer state, gathered from its owners: ``name/key`` to a flat tensor."""
        result = {}
        for name, param in self.model.module.named_parameters():
            owned = param in self.optimizer.model_param_gbuf_map
            for key in STATES:
                whole = torch.zeros(param.numel(), dtype=torch.float64)
                if owned:
                    span = self.optimizer._get_model_param_range_map(param)['param']
                    state = self.optimizer._get_main_param_and_optimizer_states(param)
                    whole[span.start : span.end] = state[key].double()
                dist.all_reduce(whole)
                result[f'{name}/{key}'] = whole
        return result


def _net(config: Any, bag: Bag) -> Any:
    module = importlib.import_module('megatron.core.transformer.module')

    class Net(module.MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            generator = torch.Generator().manual_seed(5)
            for index, size in enumerate(bag.sizes):
                value = torch.randn(size, generator=generator).to(bag.dtype)
                param = torch.nn.Parameter(value)
                if index == bag.shared:
                    param.shared_embedding = True  # type: ignore[attr-defined]
                self.register_parameter(f'{bag.prefix}{index}', param)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            """Sum over rows and parameters of a bounded loss; ``rows`` is ``[rows, WIDEST]``."""
            total = rows.new_zeros(())
            for param in self.parameters():
                x = rows[:, : param.numel()]
                total = total + (torch.tanh(param.float() * x) - 0.3 * x).square().mean(1).sum()
            return total

    return Net()


def batch(step: int) -> torch.Tensor:
    """``[SAMPLES, WIDEST]``, the same on every rank."""
    return torch.randn(SAMPLES, WIDEST, generator=torch.Generator().manual_seed(100 + step))


@contextlib.contextmanager
def arm(config: Any) -> Iterator[None]:
    """Stock for ``'stock'``, else ours under this config."""
    import megatron_buffer

    gc.collect()
    with contextlib.nullcontext() if config == 'stock' else megatron_buffer.activated(config):
        yield
        gc.collect()  # activated() refuses to end while a model of ours lives


@contextlib.contextmanager
def _recorded(lines: list[str]) -> Iterator[None]:
    """Collects what is logged meanwhile, on all ranks."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING or 'checkpoint' in record.name:
                lines.append(record.getMessage())

    handler = Collect()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of states that are not bit-equal."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float = 1e-4) -> list[str]:
    """Names of states that differ by more than the order of summation explains."""
    assert a.keys() == b.keys()
    return [name for name in a if (a[name] - b[name]).abs().max() > atol]

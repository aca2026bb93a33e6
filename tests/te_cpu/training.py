"""Training of the quantized model: through DDP and the distributed optimizer, and by one process alone."""

from __future__ import annotations

import contextlib
import gc
import importlib
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import megatron_buffer
from megatron_buffer.testing.tiny_results import optimizer_state, owned_grads, same_bits
from tests.te_cpu.model import QuantCase, batch, make_chunks, stored

LR, BETAS, EPS = 1e-2, (0.9, 0.999), 1e-5


@dataclass(frozen=True)
class Installed:
    """A config that is installed for the run; else ours wraps the model directly, which is faster."""

    config: Any


def build(case: QuantCase, arm: Any) -> SimpleNamespace:
    """The wrapped chunks and the optimizer.

    Args:
        case: What to train.
        arm: 'stock' or `Installed` for whatever Megatron's names stand for now; else a config for our DDP.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    ddp_class = importlib.import_module('megatron.core.distributed').DistributedDataParallel
    if arm != 'stock' and not isinstance(arm, Installed):
        ddp_class = partial(megatron_buffer.DistributedDataParallel, buffer_config=arm)
    is_fp4 = case.recipe == 'nvfp4'
    is_fp8 = not is_fp4 and case.recipe != 'bf16'
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap,
        grad_reduce_in_fp32=case.grad_reduce_in_fp32,
        bucket_size=case.bucket_size,
        fp8_param_gather=is_fp8,
        fp4_param_gather=is_fp4,
        reuse_grad_buf_for_mxfp8_param_ag=case.reuse,
        pad_buckets_for_high_nccl_busbw=case.high_busbw,
        param_name_patterns_for_fp32_local_accumulation=case.fp32_patterns,
    )
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
    chunks = []
    for i, module in enumerate(make_chunks(case)):
        module.config = config  # type: ignore[assignment]
        chunks.append(ddp_class(config, ddp_config, module, disable_bucketing=i > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer='adam',
            lr=LR,
            min_lr=LR,
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            clip_grad=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=case.overlap,
            fp8_recipe=case.recipe if is_fp8 else None,
            reuse_grad_buf_for_mxfp8_param_ag=case.reuse,
        ),
        chunks,
    )
    return SimpleNamespace(chunks=chunks, optimizer=optimizer)


def run_step(case: QuantCase, run: SimpleNamespace, rank: int, step: int) -> list[float]:
    """Forward and backward passes of one step up to the reduced gradients; returns the losses."""
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    if case.reuse and case.overlap and run.chunks[0].remove_forward_pre_hook_handles:
        # As train_step does: the gradients' buffer is zero, and lent to the gather for a while.
        for part in getattr(run.optimizer, 'chained_optimizers', [run.optimizer]):
            part._copy_main_params_to_param_buffer()
    losses = []
    for micro_batch in range(case.micro_batches):
        last = micro_batch == case.micro_batches - 1
        with contextlib.ExitStack() as scopes:
            for chunk in run.chunks:
                if not last:
                    scopes.enter_context(chunk.no_sync())
            x = batch(case, rank, step, micro_batch)
            for chunk in run.chunks:
                x = chunk(x)
            loss = x.float().square().mean()
            loss.backward()
            losses.append(loss.item())
    for chunk in run.chunks:
        chunk.finish_grad_sync()
    return losses


def gather(case: QuantCase, run: SimpleNamespace) -> None:
    """Brings the last step's parameters home, as before a checkpoint."""
    if not case.overlap:
        return
    if case.reuse:
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        for part in getattr(run.optimizer, 'chained_optimizers', [run.optimizer]):
            part._copy_main_params_to_param_buffer()
    for chunk in run.chunks:
        chunk.start_param_sync(force_sync=True)


def result_of(run: SimpleNamespace) -> dict[str, torch.Tensor]:
    """All bytes of the parameters under `param/name/part`."""
    return {
        f'param/{name}/{part}': value
        for name, param in named(run.chunks)
        for part, value in stored(param).items()
    }


def named(chunks: list[Any]) -> list[tuple[str, Any]]:
    """Parameters under `chunk.layer.name`."""
    found = []
    for i, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            found.append((f'{i}.{name.removeprefix("module.")}', param))
    return found


def train(rank: int, case: QuantCase, arm: Any) -> dict[str, torch.Tensor]:
    """Train as stock or as ours.

    Args:
        rank: This rank.
        case: What to train.
        arm: 'stock', `Installed`, or a config for our DDP.

    Returns:
        Bytes of the parameters, owned gradients of the last step, optimizer state, and losses, by name.
    """
    with contextlib.ExitStack() as scopes:
        if isinstance(arm, Installed):
            scopes.enter_context(megatron_buffer.activated(arm.config))
        result = _train_in_scope(rank, case, arm)
        gc.collect()  # activated() refuses to end while a model of ours lives
    return result


def _train_in_scope(rank: int, case: QuantCase, arm: Any) -> dict[str, torch.Tensor]:
    run = build(case, arm)
    losses: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    for step in range(case.steps):
        if case.overlap and step < 2:
            # As train() does: there is nothing to gather before the first step.
            for chunk in run.chunks:
                if step == 0:
                    chunk.disable_forward_pre_hook(param_sync=False)
                else:
                    chunk.enable_forward_pre_hook()
        losses += run_step(case, run, rank, step)
        grads, _ = owned_grads(run.chunks)
        run.optimizer.step()
    gather(case, run)
    result = result_of(run)
    result.update({f'grad/{name}': value for name, value in grads.items()})
    result.update({f'state/{name}': value for name, value in optimizer_state(run).items()})
    quantized = [b for c in run.chunks for b in c.buffers if b.param_dtype == torch.uint8]
    result['quantized_buffers'] = torch.tensor(len(quantized))
    result['losses'] = torch.tensor(losses, dtype=torch.float64)
    return result


def alone(case: QuantCase, world_size: int) -> dict[str, torch.Tensor]:
    """Train in this process: no buffer, no shard, every rank's data; bytes as `result_of` names them.

    Gradients are added up per rank, scaled and summed as a reduction over two ranks does. Master weights
    are quantized as a whole by TE's quantizer.
    """
    chunks = make_chunks(case)
    params = named(chunks)
    mains = {}
    for name, param in params:
        value = getattr(param, 'get_high_precision_init_val', param.detach)()
        mains[name] = torch.nn.Parameter(value.float())
    optimizer = torch.optim.AdamW(mains.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    for step in range(case.steps):
        sums: list[dict[str, torch.Tensor]] = []
        for rank in range(world_size):
            sums.append({})
            for micro_batch in range(case.micro_batches):
                x = batch(case, rank, step, micro_batch)
                for chunk in chunks:
                    x = chunk(x)
                x.float().square().mean().backward()
                for name, param in params:
                    bare = name.split('.', 1)[1]
                    in_fp32 = any(fnmatch(bare, pattern) for pattern in case.fp32_grads)
                    in_fp32 |= case.grad_reduce_in_fp32
                    dtype = torch.float32 if in_fp32 else param.grad.dtype
                    total = sums[rank].setdefault(name, torch.zeros(param.shape, dtype=dtype))
                    total.add_(param.grad)
                    param.grad = None
        for name, main in mains.items():
            scaled = [of_rank[name] * (1 / world_size) for of_rank in sums]
            main.grad = sum(scaled[1:], scaled[0]).float()
        optimizer.step()
        with torch.no_grad():
            for name, param in params:
                value = mains[name].to(param.dtype)
                if hasattr(param, 'rowwise_data') and param.quantizer is not None:
                    for member, matrix in zip(param.quantized_tensors, value, strict=True):
                        param.quantizer.update_quantized(matrix, member)
                elif hasattr(param, 'rowwise_data'):
                    param.rowwise_data.copy_(value.reshape(-1))
                else:
                    param.detach().copy_(value)
    return result_of(SimpleNamespace(chunks=chunks))


def differences(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], kind: str = ''
) -> list[str]:
    """Names under `kind` whose bytes differ, or that only one has."""
    names = sorted(name for name in {*a, *b} if name.startswith(kind))
    return [n for n in names if n not in a or n not in b or not same_bits(a[n], b[n])]


def parity(rank: int, world_size: int, case: QuantCase, arms: list[Any]) -> dict[str, list[str]]:
    """What differs: each arm of ours from stock in everything, stock from one process alone in bytes."""
    stock = train(rank, case, 'stock')
    found = {'alone': differences(alone(case, world_size), stock, 'param/')}
    dist.barrier()
    for arm in arms:
        found[str(arm)] = differences(train(rank, case, arm), stock)
    return found

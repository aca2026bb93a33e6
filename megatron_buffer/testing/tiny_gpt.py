"""A tiny GPT on the real megatron.core: one training run as stock or as ours, and an independent oracle.

    def parity(rank, world_size, case):
        return compare(train(case), train(case, 'upstream'))

    assert run_ranks(parity, 2, TrainCase(dist_opt=True)) == [[], []]

Runs in a rank of `megatron_buffer.testing.harness` (CPU mode on, torch.distributed initialized). Names that
`install()` rebinds are looked up when `train` runs, never bound at import.
"""

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import megatron_buffer
from megatron_buffer.testing.choice import Choice
from megatron_buffer.testing.oracle import OracleResult, oracle
from megatron_buffer.testing.tiny_model import (
    BETAS,
    DTYPES,
    EPS,
    LR,
    MOMENTUM,
    SAMPLES,
    SEQUENCE,
    WEIGHT_DECAY,
    TrainCase,
    batch,
    build_model,
    call_model,
    init_parallel,
    seed_everything,
)
from megatron_buffer.testing.tiny_results import (
    compare,
    copied,
    flat_tensors,
    layout,
    named_buffers,
    named_params,
    optimizer_state,
    owned_grads,
    same_bits,
    whole_grads,
)

__all__ = [
    'OracleResult',
    'TrainCase',
    'compare',
    'flat_tensors',
    'init_parallel',
    'oracle',
    'run_backward',
    'same_bits',
    'seed_everything',
    'train',
    'train_in_scope',
    'wrap',
]


def train(
    case: TrainCase,
    arm: Any = 'stock',
    *,
    whole_grads: bool = False,
    alter: Callable[[torch.nn.Module], None] | None = None,
    observe: Callable[[SimpleNamespace], Any] | None = None,
) -> dict[str, Any]:
    """Train and return this rank's view of the result.

    Args:
        case: What to train.
        arm: `'stock'`, a config for `megatron_buffer.activated`, or a `Choice` of the conformance kit.
        whole_grads: Also return `whole_grads`: of each step every main_grad as a whole, flat in fp32.
        alter: Called with each bare model chunk, before it is wrapped.
        observe: Called with the run after its last step; what it returns is `observed`.

    Returns:
        `losses`, `grad_norms` (lists of floats), `updated` (which steps were made, not skipped for an
        overflow), `params`, `buffers` (of the modules), `grads` (the owned part of each main_grad just before
        the last optimizer step), `state` (optimizer state, and the fp32 master where there is one), `saved`
        (whole main_grads of the steps that save them), `grad_ranges`
        (which part of the flat gradient is owned), `layout` (the buckets of each buffer).
        All tensors are copies; names are those of the bare model, `<chunk>:` first where there are several.
    """
    from megatron.core import parallel_state

    with contextlib.ExitStack() as scopes:
        if isinstance(arm, Choice):
            scopes.enter_context(arm.installed())
        elif arm != 'stock':
            scopes.enter_context(megatron_buffer.activated(arm))
        init_parallel(case)
        result = train_in_scope(case, whole_grads, alter=alter, observe=observe)
        gc.collect()  # activated() refuses to end while a model of ours lives
    parallel_state.destroy_model_parallel()
    return result


def train_in_scope(
    case: TrainCase,
    whole: bool = False,
    *,
    alter: Callable[[torch.nn.Module], None] | None = None,
    observe: Callable[[SimpleNamespace], Any] | None = None,
) -> dict[str, Any]:
    """The training of `train`, under whatever is installed, with the groups and seeds that are there."""
    run = wrap(case, alter)
    losses, grad_norms, updated, wholes = [], [], [], []
    saved: dict[str, torch.Tensor] = {}
    for step in range(case.steps):
        losses.append(run_backward(case, run, step))
        grads, grad_ranges = owned_grads(run.chunks)
        if whole:
            wholes.append(whole_grads(run.chunks))
        if _saves_grads(case, step):
            mains = ((n, getattr(p, 'main_grad', None)) for n, p in named_params(run.chunks))
            saved.update({f'{step}/{n}': copied(grad) for n, grad in mains if grad is not None})
        done, norm, _ = run.optimizer.step()
        updated.append(bool(done))
        grad_norms.append(float('nan') if norm is None else float(norm))
        if case.offload:
            for chunk in run.chunks:
                chunk.offload_grad_buffers()
    if case.overlap_param_gather:
        # The gather of the last step is started by the next forward, which does not come.
        for chunk in run.chunks:
            chunk.start_param_sync(force_sync=True)
    return {
        'losses': losses,
        'grad_norms': grad_norms,
        'updated': updated,
        'params': {name: copied(param) for name, param in named_params(run.chunks)},
        'buffers': {
            name: copied(buffer) for name, buffer in named_buffers(run.chunks) if buffer is not None
        },
        'grads': grads,
        'grad_ranges': grad_ranges,
        'state': optimizer_state(run),
        'saved': saved,
        'layout': layout(run.chunks),
        **({'whole_grads': wholes} if whole else {}),
        **({'observed': observe(run)} if observe else {}),
    }


def wrap(
    case: TrainCase, alter: Callable[[torch.nn.Module], None] | None = None
) -> SimpleNamespace:
    """Build the model chunks, wrap them in the DDP of the moment, and make the optimizer."""
    from megatron.core import distributed

    ddp_config = distributed.DistributedDataParallelConfig(
        **{
            'use_distributed_optimizer': case.dist_opt,
            'num_distributed_optimizer_instances': case.instances,
            'overlap_grad_reduce': case.overlap_grad_reduce,
            'overlap_param_gather': case.overlap_param_gather,
            'align_param_gather': case.align and case.pp > 1 and case.overlap_param_gather,
            'grad_reduce_in_fp32': case.grad_reduce_in_fp32,
            'average_in_collective': case.average_in_collective,
            'reduce_scatter_with_fp32_accumulation': case.rs_fp32_accum,
            'check_for_nan_in_grad': case.check_for_nan,
            'bucket_size': case.bucket_size,
            'pad_buckets_for_high_nccl_busbw': case.high_busbw,
            **case.ddp,
        }
    )
    wrap_chunks = _wrapped_by_training if case.wrapped_by == 'training' else _wrapped_by_ddp
    wrapped = wrap_chunks(case, ddp_config, alter or (lambda model: None))
    if case.random_init:
        for chunk in wrapped:
            chunk.broadcast_params()
    optimizer = _make_optimizer(case, wrapped)
    _set_schedule_functions(case, wrapped, optimizer)
    return SimpleNamespace(chunks=wrapped, optimizer=optimizer)


def _bare_chunk(case: TrainCase, index: int, alter: Callable[[torch.nn.Module], None]) -> Any:
    from megatron.core.transformer.module import Float16Module

    model = build_model(case, index if case.vpp else None).cuda()
    alter(model)
    config: Any = model.config
    return model if case.dtype == 'fp32' else Float16Module(config, model)


def _wrapped_by_ddp(case: TrainCase, ddp_config: Any, alter: Any) -> list[Any]:
    """Builds and wraps one by one, unlike get_model.

    A constructor that waits for another pipeline stage would hang here, since stages meet while they
    build the next chunk's embedding.
    """
    from megatron.core import distributed

    chunks = []
    for i in range(case.vpp or 1):
        model = _bare_chunk(case, i, alter)
        chunks.append(
            distributed.DistributedDataParallel(
                model.config, ddp_config, model, disable_bucketing=(i > 0) or _gathers_in_step(case)
            )
        )
    return chunks


def _wrapped_by_training(case: TrainCase, ddp_config: Any, alter: Any) -> list[Any]:
    """As Megatron's training script does it: the size of buckets, then layouts, then DDP."""
    from megatron.core import parallel_state

    training = importlib.import_module('megatron.training.training')
    models = [_bare_chunk(case, i, alter) for i in range(case.vpp or 1)]
    layer_wise = bool(case.optim.get('use_layer_wise_distributed_optimizer'))
    # From core_v0.19 on there is a function for it; before it stood in get_model, the same.
    if ddp_config.num_buckets is not None:
        params = sum(p.numel() for model in models for p in model.parameters())
        ddp_config.bucket_size = params // ddp_config.num_buckets
    if not ddp_config.overlap_grad_reduce:
        ddp_config.bucket_size = None
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    off = [i > 0 or not first or _gathers_in_step(case) for i in range(len(models))]
    return training.wrap_model_chunks_with_ddp(
        models,
        models[0].config,
        ddp_config,
        use_layer_wise_distributed_optimizer=layer_wise,
        use_layer_wise_param_layout=layer_wise and case.dist_opt,
        bucket_sizes=[None if no else ddp_config.bucket_size for no in off],
        disable_bucketing_per_chunk=[i > 0 or _gathers_in_step(case) for i in range(len(models))],
    )


def _gathers_in_step(case: TrainCase) -> bool:
    return bool(case.optim.get('overlap_param_gather_with_optimizer_step'))


def _make_optimizer(case: TrainCase, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    fields: dict[str, Any] = {
        'optimizer': case.optimizer,
        'lr': LR,
        'min_lr': LR,
        'weight_decay': WEIGHT_DECAY,
        'adam_beta1': BETAS[0],
        'adam_beta2': BETAS[1],
        'adam_eps': EPS,
        'sgd_momentum': MOMENTUM,
        'clip_grad': case.clip,
        'bf16': case.dtype == 'bf16',
        'fp16': case.dtype == 'fp16',
        'params_dtype': DTYPES[case.dtype],
        'use_distributed_optimizer': case.dist_opt,
        'overlap_param_gather': case.overlap_param_gather,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**fields, **case.optim}), chunks)
    # What Megatron's scheduler does at every step; the learning rate stays as it is.
    for group in optimizer.param_groups:
        group['weight_decay'] = WEIGHT_DECAY * group['wd_mult']
    return optimizer


def _set_schedule_functions(case: TrainCase, chunks: list[Any], optimizer: Any) -> None:
    """What megatron.training's `train` sets before the first step."""
    from megatron.core import distributed
    from megatron.core.utils import get_model_config

    aligned = case.align and case.pp > 1
    for chunk in chunks:
        config = get_model_config(chunk)
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = distributed.finalize_model_grads
        if case.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([c.no_sync for c in chunks])
            if aligned:
                config.grad_sync_func = _one_or_all([c.start_grad_sync for c in chunks])
        if case.overlap_param_gather and aligned:
            config.param_sync_func = _one_or_all([c.start_param_sync for c in chunks])


def run_backward(case: TrainCase, run: SimpleNamespace, step: int) -> float:
    """Zero the gradients and run all micro-batches of a step; return the mean loss (NaN off the last stage)."""
    from megatron.core import parallel_state

    for chunk in run.chunks:
        if case.offload and step:
            chunk.restore_grad_buffers()
        chunk.zero_grad_buffer()
        chunk.force_all_reduce = _saves_grads(case, step)
    run.optimizer.zero_grad()
    reports = run_schedule(case, run, step)
    if not reports:
        return float('nan')
    mean = torch.stack([r['loss'].float() for r in reports]).mean()
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(mean, group=group)
    return mean.item() / group.size()


def run_schedule(
    case: TrainCase, run: SimpleNamespace, step: int, forward_only: bool = False
) -> list[dict[str, torch.Tensor]]:
    """All micro-batches of a step by Megatron's schedule; the losses' reports (none off the last stage)."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    # Weight-remat peers have data of their own.
    dp_rank = dist.get_rank() if case.gtp > 1 else parallel_state.get_data_parallel_rank()
    cp_rank = parallel_state.get_context_parallel_rank()

    def batches() -> Iterator[tuple[torch.Tensor, ...]]:
        return (batch(case, step, m, dp_rank, cp_rank) for m in range(case.micro_batches))

    return get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[batches() for _ in run.chunks] if case.vpp else batches(),
        model=_one_or_all(run.chunks),
        num_microbatches=case.micro_batches,
        seq_length=SEQUENCE,
        micro_batch_size=SAMPLES,
        forward_only=forward_only,
        force_all_reduce=_saves_grads(case, step),
    )


def _saves_grads(case: TrainCase, step: int) -> bool:
    """What save_wgrads_interval=2 does: step 1, 3, 5 are saved."""
    return case.force_all_reduce and step % 2 == 1


def _forward_step(
    batches: Iterator[tuple[torch.Tensor, ...]], model: torch.nn.Module, **_: Any
) -> Any:
    """One micro-batch, in the shape that Megatron's schedules expect."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    tokens, labels, counted = next(batches)
    per_token = get_model_config(model).calculate_per_token_loss

    def loss(output: torch.Tensor) -> Any:
        total = (output.float() * counted).sum()
        count = counted.sum()
        report = {'loss': (total / count).detach().clone()}
        return (total, count.int(), report) if per_token else (total / count, report)

    return call_model(model, tokens, labels, parallel_state.get_context_parallel_rank()), loss


def _one_or_all(items: list[Any]) -> Any:
    return items if len(items) > 1 else items[0]

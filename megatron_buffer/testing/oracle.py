"""An oracle that shares nothing with a data-parallel buffer: one process, the bare model, all ranks' data."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_buffer.testing.tiny_model import (
    BETAS,
    EPS,
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    TrainCase,
    batch,
    build_model,
    call_model,
    init_parallel,
)
from megatron_buffer.testing.tiny_results import copied


@dataclass
class OracleResult:
    """What `oracle` found: whole gradients after the first step's backward, parameters after all steps."""

    grads: dict[str, torch.Tensor]
    params: dict[str, torch.Tensor]
    losses: list[float]
    grad_norms: list[float]


def oracle(case: TrainCase, dp: int | None = None) -> OracleResult:
    """Train the bare model in this process alone, on the data of all `dp` ranks; no buffer, no collective.

    Every rank's and micro-batch's loss goes into one sum, the mean that data parallelism stands for, and
    torch's own optimizer makes the step. In fp32 and for data parallelism only; equal to `train` up to
    the order of summation. Call it after `init_parallel` or `train`; each rank computes all of it.

    Args:
        case: A case without model parallelism, experts and low precision.
        dp: Number of data-parallel ranks to stand for; default is the world size.
    """
    from megatron.core import parallel_state

    if case.moe or case.dtype != 'fp32' or (case.tp, case.pp, case.vpp, case.cp) != (1, 1, 0, 1):
        raise ValueError(
            f'the oracle is for dense fp32 models without model parallelism, not {case}'
        )
    dp = dp or dist.get_world_size()
    mine = not parallel_state.model_parallel_is_initialized()
    if mine:
        init_parallel(case)
    torch.manual_seed(case.seed)
    model = build_model(case, whole=True).cuda()
    params = dict(model.named_parameters())
    flat = [p for n, p in params.items() if n.endswith('bias') or p.ndim == 1]
    decayed = [p for p in params.values() if all(p is not q for q in flat)]
    groups = [
        {'params': decayed, 'weight_decay': WEIGHT_DECAY},
        {'params': flat, 'weight_decay': 0.0},
    ]
    if case.optimizer == 'adam':
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    else:
        optimizer = torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)
    result = OracleResult({}, {}, [], [])
    for step in range(case.steps):
        optimizer.zero_grad(set_to_none=True)
        pieces = [batch(case, step, m, r) for r in range(dp) for m in range(case.micro_batches)]
        tokens_of_step = sum(counted.sum() for _, _, counted in pieces)
        mean = 0.0
        for tokens, labels, counted in pieces:
            total = (call_model(model, tokens, labels) * counted).sum()
            own_mean = total / counted.sum()
            loss = total / tokens_of_step if case.per_token_loss else own_mean / len(pieces)
            loss.backward()
            mean += own_mean.item() / len(pieces)
        if step == 0:
            result.grads = {n: copied(p.grad) for n, p in params.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or float('inf'))
        optimizer.step()
        result.losses.append(mean)
        result.grad_norms.append(norm.item())
    result.params = {n: copied(p) for n, p in params.items()}
    if mine:
        parallel_state.destroy_model_parallel()
    return result

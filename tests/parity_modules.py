"""What Megatron's layers do with a buffer where Transformer Engine, or a GPU, is there: stand-ins for the CPU.

Each function changes a bare tiny GPT before it is wrapped, so that stock and ours meet the same.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch


def second_copies(model: Any) -> None:
    """Modules with a `weight_tensor` beside their weight, as those of older Transformer Engines."""
    for module in model.modules():
        weight = getattr(module, 'weight', None)
        if weight is not None and weight.ndim == 2:
            module.weight_tensor = weight.detach().clone()


def fused_wgrad(model: Any) -> None:
    """Megatron's own fused weight gradients: written to main_grad, and a dummy for autograd.

    The kernel is NVIDIA apex's; here it is two lines of torch.
    """
    layers = importlib.import_module('megatron.core.tensor_parallel.layers')

    def accumulate(inputs: torch.Tensor, grads: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grads.t().float() @ inputs.float())

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    for module in model.modules():
        if hasattr(module, 'gradient_accumulation_fusion'):
            module.gradient_accumulation_fusion = True


class DelayedLinear(torch.nn.Module):
    """A linear layer that computes the gradient of its weight after the rest of backward.

    As Transformer Engine's with `delay_wgrad_compute`; who calls `backward_dw` there is the schedule.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(0.1 * torch.eye(size))
        self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
        self.delayed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.hooks: list[Any] = []
        self.computed = 0

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """Where DDP leaves its hook."""
        self.hooks.append(hook)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[..., size]` to the same."""
        return _Delayed.apply(inputs, self.weight, self)

    def backward_dw(self) -> None:
        """Computes the gradient that was left out, and says so."""
        inputs, grads = self.delayed.pop()
        self.weight.grad = grads.flatten(0, -2).t() @ inputs.flatten(0, -2)
        self.computed += 1
        for hook in self.hooks:
            hook()


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer = layer
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        inputs, weight = ctx.saved_tensors
        ctx.layer.delayed.append((inputs, grads))
        torch.autograd.Variable._execution_engine.queue_callback(ctx.layer.backward_dw)
        return grads @ weight, None, None


def delayed_wgrad(model: Any) -> None:
    """A branch around the decoder whose weight gradient comes late."""
    _branch(model, DelayedLinear(model.config.hidden_size))


def conditional_embedder(model: Any) -> None:
    """A replica on every pipeline stage, as diffusion models have, which finalize sums over stages."""
    _branch(model, _replica(model, 'pipeline_parallel'))
    model.config.has_cond_embedder = True


def flextron_router(model: Any) -> None:
    """A router on every pipeline stage, which finalize sums over stages."""
    _branch(model, _replica(model, 'flextron_router_pp_sync'))
    model.config.flextron = True


def _replica(model: Any, mark: str) -> torch.nn.Linear:
    size = model.config.hidden_size
    replica = torch.nn.Linear(size, size)
    with torch.no_grad():
        replica.weight.copy_(0.1 * torch.eye(size))
        replica.bias.zero_()
    for param in replica.parameters():
        setattr(param, mark, True)
    return replica


def _branch(model: Any, branch: torch.nn.Module) -> None:
    """Adds `branch(output)` to the decoder's output."""
    from megatron.core import tensor_parallel

    model.branch = branch
    for param in branch.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    model.decoder.register_forward_hook(lambda _, inputs, output: output + model.branch(output))


class GatheredAttention(torch.nn.Module):
    """Causal attention under context parallelism, which Megatron leaves to Transformer Engine.

    Keys and values come from all ranks; queries are this rank's part of the sequence.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any, **more: Any
    ) -> torch.Tensor:
        """`[sequence, batch, heads, size]` each, to `[sequence, batch, heads * size]`."""
        from megatron.core import parallel_state

        key, value = _AllGather.apply(key), _AllGather.apply(value)
        scores = torch.einsum('qbhd,kbhd->bhqk', query, key) / query.shape[-1] ** 0.5
        start = parallel_state.get_context_parallel_rank() * query.shape[0]
        at = torch.arange(start, start + query.shape[0])
        scores = scores.masked_fill(torch.arange(key.shape[0]) > at[:, None], -1e4)
        return torch.einsum('bhqk,kbhd->qbhd', scores.softmax(-1), value).flatten(2)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        from megatron.core import parallel_state

        group: Any = parallel_state.get_context_parallel_group()
        ctx.group, ctx.length = group, tensor.shape[0]
        whole = tensor.new_empty(group.size() * ctx.length, *tensor.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> torch.Tensor:
        grads = grads.contiguous()
        torch.distributed.all_reduce(grads, group=ctx.group)
        return grads[ctx.group.rank() * ctx.length :][: ctx.length]


def context_parallel_attention(model: Any) -> None:
    """Attention over sequences that are cut over ranks."""
    for layer in model.decoder.layers:
        layer.self_attention.core_attention = GatheredAttention()


def replicate_over_weight_remat_peers() -> None:
    """Leaves layers whole where their weights would be cut over peers, which Transformer Engine does."""
    api: Any = importlib.import_module('megatron.core.tensor_parallel.gtp_api')
    api.wrap_module_params_gtp = lambda *unused, **more: None


def weight_remat_peers(model: Any) -> None:
    """Every parameter is a replica on peers that have data of their own; finalize waits, and averages."""
    for module in model.modules():
        if hasattr(module, 'gtp_remat_size'):
            module.gtp_remat_size = 1
    model.config.gtp_weight_remat_size = 2


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's, as far as Megatron's precision-aware optimizer asks for it, in plain torch.

    Gradients are read from `decoupled_grad`; the fp32 master and both moments are its own.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ) -> None:
        assert master_weights
        assert use_decoupled_grad
        defaults = {'lr': lr, 'betas': betas, 'eps': eps, 'weight_decay': weight_decay}
        super().__init__(params, defaults)
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.dtypes = {'exp_avg': exp_avg_dtype, 'exp_avg_sq': exp_avg_sq_dtype}

    def initialize_state(self, param: torch.Tensor, *unused: Any) -> None:
        """Moments of zero, and the master."""
        state = self.state[param]
        for name, dtype in self.dtypes.items():
            state[name] = torch.zeros_like(param, dtype=dtype)
        state['master_param'] = param.detach().float().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Adam with decoupled weight decay, in fp32."""
        for group in self.param_groups:
            group['step'] = group.get('step', 0) + 1
            first, second = group['betas']
            for param in group['params']:
                grad = getattr(param, 'decoupled_grad', None)
                if grad is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param)
                state, grad = self.state[param], grad.float()
                mean = state['exp_avg'].float().lerp(grad, 1 - first)
                square = state['exp_avg_sq'].float().lerp(grad * grad, 1 - second)
                state['exp_avg'].copy_(mean)
                state['exp_avg_sq'].copy_(square)
                mean = mean / (1 - first ** group['step'])
                square = square / (1 - second ** group['step'])
                master = state['master_param']
                master.mul_(1 - group['lr'] * group['weight_decay'])
                master.sub_(group['lr'] * mean / (square.sqrt() + group['eps']))
                param.copy_(master)


def use_fused_adam() -> None:
    """Makes Megatron find :class:`FusedAdam` where it looks for Transformer Engine's; for a whole process."""
    import sys
    from types import ModuleType

    engine, pytorch = ModuleType('transformer_engine'), ModuleType('transformer_engine.pytorch')
    optimizers: Any = ModuleType('transformer_engine.pytorch.optimizers')
    optimizers.FusedAdam = FusedAdam
    for module in (engine, pytorch, optimizers):
        sys.modules[module.__name__] = module
    for name in ('megatron.core.optimizer', 'megatron.core.optimizer.distrib_optimizer'):
        module = importlib.import_module(name)
        vars(module)['Adam'] = FusedAdam
    importlib.import_module('megatron.core.optimizer').USING_PYTORCH_OPTIMIZER = False
    distrib: Any = importlib.import_module('megatron.core.optimizer.distrib_optimizer')
    distrib.HAVE_APEX_OR_TE = distrib.USING_TE_OPTIMIZER = True

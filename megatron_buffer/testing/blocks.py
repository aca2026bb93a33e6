"""A small residual network that any rank can also train alone, and that unwrapped twin.

Two dtypes, norms and biases, modules in a list named ``layers``: several buffers, and names to match. The
twin knows no buffer and no collective: it takes the mean over every rank's and micro-batch's gradients of a
bare copy, added up in fp32, and torch's own AdamW.
"""

from __future__ import annotations

from typing import Any

import torch

WIDTH, SAMPLES, LAYERS = 16, 4, 3
LR, BETAS, EPS = 1e-2, (0.9, 0.999), 1e-5


class Block(torch.nn.Module):
    """Adds ``tanh(linear(norm(x)))`` to its input, ``[batch, WIDTH]`` in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.linear = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return x + torch.tanh(self.linear(self.norm(x).to(self.linear.weight.dtype))).float()


class Blocks(torch.nn.Module):
    """A linear layer, blocks, a linear layer; ``dtype`` is that of the blocks' linear layers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, WIDTH)
        self.layers = torch.nn.ModuleList(Block(dtype) for _ in range(LAYERS))
        self.last = torch.nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, 8]`` to ``[batch, 8]``."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def make_blocks(dtype: torch.dtype) -> Blocks:
    """The same weights on every rank."""
    torch.manual_seed(7)
    return Blocks(dtype)


def batch(rank: int, step: int, micro_batch: int) -> torch.Tensor:
    """``[SAMPLES, 8]``, other numbers on every rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro_batch + rank + 1)
    return torch.randn(SAMPLES, 8, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """The mean of squares."""
    return output.square().mean()


class Twin:
    """The same training without any buffer.

    Args:
        dtype: As for :func:`make_blocks`.
        dp_size: Ranks whose data it takes.
        micro_batches: Micro-batches of each rank and step.
    """

    def __init__(self, dtype: torch.dtype, dp_size: int, micro_batches: int) -> None:
        self._net = make_blocks(dtype)
        self._dp_size, self._micro_batches = dp_size, micro_batches
        self._master = {
            name: torch.nn.Parameter(param.detach().float().clone())
            for name, param in self._net.named_parameters()
        }
        self._optimizer = torch.optim.AdamW(
            self._master.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0
        )

    def grads(self, step: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Mean gradients at ``weights``: the sum over micro-batches, the mean over ranks, flat fp32."""
        params = dict(self._net.named_parameters())
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(weights[name])
        total = {name: torch.zeros(param.numel()) for name, param in params.items()}
        for rank in range(self._dp_size):
            for micro_batch in range(self._micro_batches):
                loss = loss_of(self._net(batch(rank, step, micro_batch)))
                found = torch.autograd.grad(loss, list(params.values()))
                for name, grad in zip(params, found, strict=True):
                    total[name] += grad.float().flatten() / self._dp_size
        return total

    def step(self, step: int) -> dict[str, torch.Tensor]:
        """One step of the twin's own training; returns its parameters afterwards, in the model's dtypes."""
        dtypes = {name: param.dtype for name, param in self._net.named_parameters()}
        weights = {name: param.detach().to(dtypes[name]) for name, param in self._master.items()}
        for name, grad in self.grads(step, weights).items():
            self._master[name].grad = grad.view_as(self._master[name])
        self._optimizer.step()
        return {name: param.detach().to(dtypes[name]) for name, param in self._master.items()}


def optimizer_for(chunks: list[Any], *, dist_opt: bool, overlap: bool, mixed: bool) -> Any:
    """Megatron-Core's optimizer with the twin's settings."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer='adam',
            lr=LR,
            min_lr=LR,
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            clip_grad=0.0,
            bf16=mixed,
            params_dtype=torch.bfloat16 if mixed else torch.float32,
            use_distributed_optimizer=dist_opt,
            overlap_param_gather=overlap,
        ),
        chunks,
    )

"""Finalize steps."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_buffer.finalize import FinalizeContext


@dataclass(frozen=True, kw_only=True)
class ScaleMatchingOptions:
    """Which gradients are multiplied, and by what."""

    patterns: tuple[str, ...]
    factor: float = 0.5


class ScaleMatching:
    """Multiplies the gradients of some parameters: another learning rate for them."""

    Params = ScaleMatchingOptions
    timer = 'scale-matching-grads'

    def __init__(self, params: ScaleMatchingOptions) -> None:
        self.params = params

    def run(self, ctx: FinalizeContext) -> None:
        for chunk in ctx.model:
            for name, param in chunk.module.named_parameters():
                if param.requires_grad and any(fnmatchcase(name, p) for p in self.params.patterns):
                    param.main_grad.mul_(self.params.factor)


@dataclass(frozen=True)
class NoOptions:
    """No options."""


class GradReport:
    """Counts the iterations; needs no gradients, so it may come before they are reduced."""

    Params = NoOptions
    before_grad_sync = True

    def __init__(self, params: NoOptions) -> None:
        self.iterations = torch.zeros(1)

    def run(self, ctx: FinalizeContext) -> None:
        self.iterations += 1

"""Gradients to main parameters, and main parameters back into the buffers, by slices that are looked up once.

Stands for the loops of ``DistributedOptimizer._copy_model_grads_to_main_grads`` and
``_copy_main_params_to_model_params`` (``megatron/core/optimizer/distrib_optimizer.py``), which look up the
range, buffer and bucket of each parameter in each step, and copy one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

_MAIN_GRAD = attrgetter('main_grad')
_PARAM_DATA = attrgetter('param_data')


class ShardCopies:
    """Which slice of which buffer each main parameter of this rank belongs to.

    Args:
        optimizer: A distributed optimizer, for which :func:`copies_plainly` holds.
    """

    def __init__(self, optimizer: Any) -> None:
        pairs = list(_pairs(optimizer))
        self._models = [model for model, _ in pairs]
        self._mains = [main for _, main in pairs]
        self._main_grads = list(map(_MAIN_GRAD, self._models))
        buckets = [_bucket(optimizer, model) for model in self._models]
        self._buckets = list({id(bucket): bucket for bucket in buckets}.values())
        self._param_data = list(map(_PARAM_DATA, self._buckets))
        self._grads: list[tuple[Any, torch.Tensor]] = []
        self._writes: dict[torch.dtype, tuple[list[torch.Tensor], list[Any]]] = {}
        for model, main, bucket in zip(self._models, self._mains, buckets, strict=True):
            ranges = optimizer._get_model_param_range_map(model)
            grad = _slice(model.main_grad, ranges['param'])
            # With a version counter of its own, as upstream's: a step must not look like an in-place
            # change to a graph that was kept.
            param = _slice(bucket.param_data, ranges['gbuf_world_in_bucket']).data
            assert main.numel() == grad.numel() == param.numel(), 'a main parameter is one shard'
            self._grads.append((main, grad))
            shards, mains = self._writes.setdefault(param.dtype, ([], []))
            shards.append(param)
            mains.append(main)

    def hold(self, optimizer: Any) -> bool:
        """Whether gradients, buckets and main parameters are still those that were looked up."""
        mains = chain.from_iterable(_main_groups(optimizer))
        return (
            _same(self._mains, list(mains))
            and _same(self._main_grads, list(map(_MAIN_GRAD, self._models)))
            and _same(self._param_data, list(map(_PARAM_DATA, self._buckets)))
        )

    def hand_over_grads(self) -> None:
        """Gives every main parameter its gradient in fp32: the slice itself, or a copy from another dtype."""
        for main, shard in self._grads:
            main.grad = shard.detach() if shard.dtype == torch.float32 else shard.float()

    def write_params(self) -> None:
        """Writes every main parameter into its slice of the parameter buffer, in the buffer's dtype."""
        for shards, mains in self._writes.values():
            torch._foreach_copy_(shards, mains)


def copies_plainly(optimizer: Any) -> bool:
    """Whether a step copies and does nothing else: no quantized weights, main parameters of its own."""
    config = optimizer.ddp_config
    return not (
        optimizer.is_stub_optimizer
        or config.use_megatron_fsdp
        or config.fp8_param_gather
        or getattr(config, 'fp4_param_gather', False)
        or optimizer.config.use_precision_aware_optimizer
        or any(buffer.param_dtype == torch.uint8 for buffer in optimizer.buffers)
    )


def _main_groups(optimizer: Any) -> Iterator[Any]:
    return chain(optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups)


def _pairs(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Model parameters of this rank and their main parameters, those in half precision first."""
    models = chain(optimizer.model_float16_groups, optimizer.model_fp32_groups)
    for of_models, of_mains in zip(models, _main_groups(optimizer), strict=True):
        yield from zip(of_models, of_mains, strict=True)


def _bucket(optimizer: Any, model: Any) -> Any:
    buffer, _, bucket = optimizer.model_param_gbuf_map[model]
    return optimizer.buffers[buffer].buckets[bucket]


def _slice(whole: torch.Tensor, part: Any) -> torch.Tensor:
    return whole.view(-1)[part.start : part.end]


def _same(known: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(known) == len(now) and all(map(is_, known, now))

"""What a training run left behind, under the names of the bare model, and the comparison of two runs."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch


def named_params(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters under the names they have in the bare model."""
    for i, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            yield _bare_name(name, i, len(chunks)), param


def named_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the modules' buffers (a router's expert bias, say), named as `named_params` does."""
    for i, chunk in enumerate(chunks):
        for name, buffer in chunk.named_buffers():
            yield _bare_name(name, i, len(chunks)), buffer


def _bare_name(name: str, chunk: int, chunks: int) -> str:
    while name.startswith('module.'):
        name = name.removeprefix('module.')
    return f'{chunk}:{name}' if chunks > 1 else name


def owned_grads(
    chunks: Sequence[Any],
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, int]]]:
    """Return the part of each main_grad that this rank owns after the reduction, and which part that is.

    Worked out from the bucket's size and the rank alone, without the optimizer's own range maps.
    """
    names = {param: name for name, param in named_params(chunks)}
    grads, ranges = {}, {}
    for group in (g for c in chunks for g in c.bucket_groups + c.expert_parallel_bucket_groups):
        for bucket in group.buckets:
            low, high = 0, bucket.grad_data.numel()
            if group.ddp_config.use_distributed_optimizer:
                size = high // group.intra_distributed_optimizer_instance_size
                low = size * group.intra_distributed_optimizer_instance_rank
                high = low + size
            for param in bucket.params_list:
                start, end = bucket.param_to_index[param]
                first, last = max(low, start) - start, min(high, end) - start
                if first < last:
                    grads[names[param]] = copied(param.main_grad.view(-1)[first:last])
                    ranges[names[param]] = (first, last)
    return grads, ranges


def whole_grads(chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return every reduced main_grad as a whole, flat in fp32, by adding up what each owner holds.

    A collective over the data-parallel groups: all ranks call it.
    """
    owned, ranges = owned_grads(chunks)
    names = {param: name for name, param in named_params(chunks)}
    whole: dict[str, torch.Tensor] = {}
    for group in (g for c in chunks for g in c.bucket_groups + c.expert_parallel_bucket_groups):
        sharded = group.ddp_config.use_distributed_optimizer
        for bucket in group.buckets:
            for param in bucket.params_list:
                name = names[param]
                grad = torch.zeros(param.numel(), device=param.device)
                if name in ranges:
                    first, last = ranges[name]
                    grad[first:last] = owned[name].float()
                if sharded:
                    torch.distributed.all_reduce(
                        grad, group=group.intra_distributed_optimizer_instance_group
                    )
                whole[name] = grad
    return dict(sorted(whole.items()))


def optimizer_state(run: SimpleNamespace) -> dict[str, torch.Tensor]:
    """Return every tensor of the optimizer's state as `<parameter>/<key>`; key `master` is the fp32 copy."""
    state = {}
    for part in getattr(run.optimizer, 'chained_optimizers', [run.optimizer]):
        places = getattr(part, 'model_param_group_index_map', None)
        known = {id(p) for group in part.optimizer.param_groups for p in group['params']}
        for name, param in named_params(run.chunks):
            if places is None:
                main = getattr(param, 'main_param', None)
                main = param if main is None else main
            elif param in places:
                group, position = places[param]
                main = part.optimizer.param_groups[group]['params'][position]
            else:
                continue
            if id(main) not in known:
                continue
            if main is not param:
                state[f'{name}/master'] = copied(main)
            for key, value in part.optimizer.state[main].items():
                state[f'{name}/{key}'] = copied(torch.as_tensor(value))
    return state


def layout(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the buckets of every buffer: offset, elements with and without padding, parameters in order."""
    names = {param: name for name, param in named_params(chunks)}
    return [
        {
            'chunk': i,
            'param_dtype': str(buffer.param_dtype),
            'grad_dtype': str(buffer.grad_dtype),
            'buckets': [
                (b.offset, b.grad_data.numel(), b.numel_unpadded, [names[p] for p in b.params_list])
                for b in buffer.buckets
            ],
        }
        for i, chunk in enumerate(chunks)
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that owns its storage and no more than that."""
    return tensor.detach().clone()


def compare(a: Any, b: Any) -> list[str]:
    """Return the names of what differs between two results of `train` (of one rank, or lists of all ranks).

    Tensors are compared as bytes: a NaN equals itself, and 0.0 is not -0.0. The layouts are not compared.
    """
    if isinstance(a, list):
        pairs = zip(a, b, strict=True)
        return [f'rank {r}: {name}' for r, (x, y) in enumerate(pairs) for name in compare(x, y)]
    ours, theirs = flat_tensors(a), flat_tensors(b)
    return [
        name
        for name in sorted({*ours, *theirs})
        if name not in ours or name not in theirs or not same_bits(ours[name], theirs[name])
    ]


def flat_tensors(result: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return all that `compare` looks at, by name; its length says how many tensors are compared."""
    flat = {k: torch.tensor(result[k], dtype=torch.float64) for k in ('losses', 'grad_norms')}
    for kind in ('params', 'buffers', 'grads', 'state', 'saved'):
        flat.update({f'{kind}/{name}': tensor for name, tensor in result.get(kind, {}).items()})
    return flat


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have the same type, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))

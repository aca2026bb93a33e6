"""Layouts taken to where upstream asserts: real parameters in real buffers, on every shard's rank.

Runs in two ranks of the harness. Each builds our ``DistributedDataParallel`` over stand-ins for process
groups, so that upstream's constructors (``DistributedDataParallel``, ``_ParamAndGradBuffer``,
``_ParamAndGradBucketGroup``) check the layout for any number of shards, and asks upstream's
``DistributedOptimizer`` (``megatron/core/optimizer/distrib_optimizer.py``) for the shards of every rank.
"""

from __future__ import annotations

import importlib
import logging
import random
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron_buffer.errors import MegatronBufferError
from megatron_buffer.strategies.specs import BufferTraits, ParamSpec
from megatron_buffer.testing.choice import Choice
from megatron_buffer.testing.examples import Example, transformer
from megatron_buffer.testing.layout_checks import Fault, Plain, replay

Description = list[str]


class Mounted(NamedTuple):
    """What came of one example on one rank.

    Attributes:
        faults: What is wrong.
        refused: Why it was refused; '' if it was not.
        description: The layout and the groups, a line each, for comparing ranks.
    """

    faults: list[Fault]
    refused: str
    description: Description


class StandInGroup:
    """A process group as far as constructors look at it: a size and a rank."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size = size
        self.as_rank = rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """The rank that is asked for at the moment."""
        return self.as_rank


def examples_to_mount(count: int, seed: int) -> list[Example]:
    """Small models: dense and expert parameters of two dtypes, with and without tied embeddings."""
    rng = random.Random(seed)
    made: list[Example] = []
    for number in range(count):
        tied_at = ('start', 'end', 'none')[number % 3]
        params = transformer(rng.randint(1, 3), rng.choice((1, 3, 4, 8)), tied_at=tied_at)
        if number % 4 == 3:
            params = [*params, *_experts(rng)]
        made.append(
            Example(
                params=tuple(params),
                bucket_size_elems=rng.choice((None, 1, 200, 500)),
                dist_opt=number % 5 != 4,
                traits=BufferTraits(
                    dp_size=(1, 2, 3, 4, 8)[number % 5 if number < 10 else rng.randrange(5)],
                    pp_rank=1 if tied_at == 'end' else 0,
                ),
            )
        )
    return made


def _experts(rng: random.Random) -> list[ParamSpec]:
    return [
        ParamSpec(
            numel_elems=rng.choice((16, 33, 64)),
            name=f'decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight',
        )
        for i in range(2)
    ]


def lay_out_and_mount(
    rank: int, world_size: int, choice: Choice, tried: Sequence[Example], models: Sequence[Example]
) -> tuple[list[Plain | str], list[Mounted]]:
    """Lays ``tried`` out on paper, and mounts ``models``."""
    logging.getLogger('megatron_buffer').setLevel(logging.ERROR)
    return replay(choice.layout_strategies(), tried), _mount_all(rank, choice, models)


def _mount_all(rank: int, choice: Choice, examples: Sequence[Example]) -> list[Mounted]:
    """Rank 0 as the first data-parallel rank, the other one as the last."""
    mounted: list[Mounted] = []
    for example in examples:
        try:
            mounted.append(_mount(rank, choice, example))
        except MegatronBufferError as error:
            mounted.append(Mounted([], f'{type(error).__name__}: {error}', []))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            detail = (
                f'{type(error).__name__} in {frame.name} ({frame.filename}:{frame.lineno}, '
                f'`{frame.line}`){": " if str(error) else ""}{error}'
            )
            mounted.append(Mounted([Fault("upstream's own assertions hold", detail)], '', []))
    return mounted


def _mount(rank: int, choice: Choice, example: Example) -> Mounted:
    from megatron_buffer import runtime as runtime_module
    from megatron_buffer.ddp import DistributedDataParallel

    dp_size = example.traits.dp_size
    dp = StandInGroup(dp_size, rank=dp_size - 1 if rank else 0)
    ddp_config, config, groups = _surroundings(example, dp)
    model = _model(example)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with runtime_module.scope(choice.runtime()):
        ddp = DistributedDataParallel(config, ddp_config, model, pg_collection=groups)
    faults = list(_storage_faults(model, before))
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    if example.dist_opt:
        for buffer in buffers:
            faults += _shard_faults(buffer)
    return Mounted(faults, '', _description(ddp, buffers))


def _surroundings(example: Example, dp: StandInGroup) -> tuple[Any, Any, Any]:
    """DDP config, transformer config and groups."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    one = StandInGroup(1)
    groups = ProcessGroupCollection(
        dp=dp, dp_cp=dp, expt_dp=dp, tp=one, ep=one, pp=StandInGroup(4, example.traits.pp_rank)
    )
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=example.dist_opt,
        overlap_grad_reduce=example.bucket_size_elems is not None,
        bucket_size=example.bucket_size_elems,
        grad_reduce_in_fp32=True,
    )
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    return ddp_config, config, groups


def _model(example: Example) -> Any:
    """A module tree with the example's parameters; norms are fp32, the rest is bf16."""
    import torch

    root = torch.nn.Module()
    for index, spec in enumerate(example.params):
        *path, leaf = (spec.name or f'p{index}').split('.')
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        dtype = torch.float32 if 'norm' in spec.name else torch.bfloat16
        values = torch.full((spec.numel_elems,), float(index + 1), dtype=dtype)
        param: Any = torch.nn.Parameter(values)
        if spec.shared_embedding:
            param.shared_embedding = True
        if '.experts.' in spec.name:
            param.allreduce = False
        module.register_parameter(leaf, param)
    return root


def _storage_faults(model: Any, before: dict[str, Any]) -> Iterator[Fault]:
    """Values survive the move, and no gradient's storage is another's."""
    import torch

    params = dict(model.named_parameters())
    for name, param in params.items():
        if not torch.equal(param.data, before[name]):
            yield Fault('values survive', f'{name} has other values after it was wrapped')
    for number, param in enumerate(params.values()):
        param.main_grad.fill_(number + 1)
    for number, (name, param) in enumerate(params.items()):
        if not bool((param.main_grad == number + 1).all()):
            yield Fault(
                'gradients do not overlap', f'{name} and another share storage of main_grad'
            )


def _shard_faults(buffer: Any) -> Iterator[Fault]:
    """By upstream's own maps, all ranks together own each element of each parameter exactly once."""
    upstream: Any = importlib.import_module('megatron.core.optimizer.distrib_optimizer')
    group = buffer.data_parallel_group
    here = group.as_rank
    owned: dict[Any, list[tuple[int, int]]] = {}
    for rank in range(group.size()):
        group.as_rank = rank
        for maps in upstream.DistributedOptimizer._build_gbuf_range_map(buffer).values():
            for of_bucket in maps:
                for param, ranges in of_bucket['param_map'].items():
                    owned.setdefault(param, []).append((ranges['param'].start, ranges['param'].end))
    group.as_rank = here
    for param in buffer.params:
        cursor = 0
        for start, end in sorted(owned.get(param, [])):
            if start != cursor:
                break
            cursor = end
        if cursor != param.nelement():
            yield Fault(
                'all ranks together own every element once',
                f"by upstream's shard maps the ranks own {sorted(owned.get(param, []))} of the "
                f'{param.nelement()} elements of {buffer.param_to_name[param]}',
            )


def _description(ddp: Any, buffers: Sequence[Any]) -> Description:
    lines: list[str] = []
    names: dict[int, str] = {}
    for number, buffer in enumerate(buffers):
        for bucket in buffer.buckets:
            names[id(bucket)] = f'buffer {number} bucket {bucket.bucket_id}'
            for param in bucket.params_list:
                start, end, _ = buffer.param_index_map[param]
                name = buffer.param_to_name[param]
                lines.append(f'{name} at [{start}, {end}) of {names[id(bucket)]}')
            end = bucket.offset + bucket.grad_data.numel()
            lines.append(
                f'the end of {names[id(bucket)]} at {end}, {bucket.numel_unpadded} unpadded'
            )
    for number, group in enumerate([*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]):
        told = ', '.join(names[id(bucket)] for bucket in group.buckets)
        lines.append(f'bucket group {number} with {told}')
    return lines

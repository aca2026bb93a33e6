"""Pretrains a GPT on generated tokens through the real Megatron training loop.

For machines without a Megatron checkout: megatron-core's wheel has the model, the training loop and
the argument parser, but no pretrain script. Stock Megatron:

    torchrun ... -m megatron_buffer run scripts/pretrain_gpt.py <Megatron's flags> --custom-buffer-cpu

and with ``--use-custom-buffer --custom-buffer-config CONFIG`` through our buffer. ``--dump-state DIR``
writes what a comparison of two runs needs: ``rank<N>.pt`` with every parameter, the gradient shards
this rank owns after the last step, the optimizer's tensors, and the losses and gradient norms; and
``layout-rank<N>.json`` with the buckets. It keeps copies of all gradients: for small models.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import argument_utils, get_args, pretrain, training
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

Tensors = dict[str, torch.Tensor]


class CountingTokens(torch.utils.data.Dataset):
    """Sequences that count in steps of 1, 2 or 3: the same on every rank, and easy to learn.

    Args:
        length: Number of sequences.
        seq_length: Tokens per sequence.
        vocab_size: Tokens are below this.
    """

    def __init__(self, length: int, seq_length: int, vocab_size: int) -> None:
        self.length = length
        self.seq_length = seq_length
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensors:
        first, stride = 7919 * index, 1 + index % 3
        tokens = (first + stride * torch.arange(self.seq_length + 1)) % self.vocab_size
        return {'tokens': tokens[:-1], 'labels': tokens[1:]}


def datasets_provider(num_samples: list[int | None], vp_stage: int | None = None) -> list[Any]:
    """The train, validation and test sets; a number of samples of None or 0 gives no set."""
    args = get_args()
    return [CountingTokens(n, args.seq_length, args.vocab_size) if n else None for n in num_samples]


# Every rank builds its own copy, also those that do not have tensor-parallel rank 0.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Builds a pipeline stage, for megatron.training up to 0.18; later ones have a builder."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == 'transformer_engine',
        normalization=args.normalization,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def forward_step(data_iterator: Iterator[Tensors], model: torch.nn.Module) -> tuple[Any, Any]:
    """One micro-batch: the output of this pipeline stage, and how to make a loss of it."""
    batch = next(data_iterator)
    tokens, labels = batch['tokens'].cuda(), batch['labels'].cuda()
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, future, labels=labels), loss_func


def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """The summed loss, the number of tokens in it, and what the training log shows."""
    loss = output.float().sum()
    num_tokens = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
    report = torch.stack([loss.detach(), num_tokens.to(loss.dtype)])
    return loss, num_tokens, {'lm loss': report}


class Recorder:
    """Remembers what each training step did, and dumps the state at the end.

    ``megatron.training`` gives a script neither the optimizer nor the gradients, so the recorder
    wraps ``train_step``: when that returns, the gradients of the step are still in the buffers.

    Args:
        folder: Where to write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.main_grads: Tensors = {}

    def watch(self) -> None:
        """Puts itself between the training loop and its step."""
        train_step = training.train_step
        signature = inspect.signature(train_step)

        @functools.wraps(train_step)
        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            result = train_step(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            self.after_step(arguments['model'], arguments['optimizer'], result)
            return result

        training.train_step = recorded_step

    def after_step(self, model: list[Any], optimizer: Any, result: tuple[Any, ...]) -> None:
        self.model, self.optimizer = model, optimizer
        losses, grad_norm = result[0], result[5]
        if 'lm loss' in losses:  # only the last pipeline stage has it
            self.losses.append(float(losses['lm loss']))
        if grad_norm is not None:
            self.grad_norms.append(float(grad_norm))
        self.main_grads = copies(owned_main_grads(model))
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            values = [(name, series[-1:]) for name, series in self.series()]
            text = ', '.join(f'{name} {value[0]:.9g}' for name, value in values if value)
            print(f'recorded step {len(self.losses)}/{get_args().train_iters}: {text}', flush=True)

    def series(self) -> list[tuple[str, list[float]]]:
        return [('loss', self.losses), ('grad norm', self.grad_norms)]

    def save(self) -> None:
        """Writes this rank's files."""
        rank = torch.distributed.get_rank()
        self.folder.mkdir(parents=True, exist_ok=True)
        optimizer = copies(optimizer_tensors(self.optimizer, param_names(self.model)))
        state = {
            'losses': self.losses,
            'grad_norms': self.grad_norms,
            'params': copies((name, param.data) for param, name in param_names(self.model).items()),
            'main_grads': self.main_grads,
            'optimizer': optimizer,
        }
        torch.save(state, self.folder / f'rank{rank}.pt')
        layout = {
            'buffers': [describe_buffer(*item) for item in ddp_buffers(self.model)],
            'optimizer_bytes': sum(tensor.nbytes for tensor in optimizer.values()),
        }
        (self.folder / f'layout-rank{rank}.json').write_text(json.dumps(layout, indent=1))


def copies(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """Copies that later steps do not change."""
    return {name: tensor.detach().clone().cpu() for name, tensor in tensors}


def param_names(model: list[Any]) -> dict[torch.nn.Parameter, str]:
    """Every parameter of this rank with its name; model chunks are numbered if there are several."""
    return {
        param: f'chunk{index}.{name}' if len(model) > 1 else name
        for index, chunk in enumerate(model)
        for name, param in chunk.module.named_parameters()
    }


def ddp_buffers(model: list[Any]) -> Iterator[tuple[Any, dict[torch.nn.Parameter, str], bool]]:
    """Every buffer of the wrapped chunks, the names of parameters, and whether it is sharded."""
    names = param_names(model)
    for chunk in model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield buffer, names, chunk.ddp_config.use_distributed_optimizer


def owned_main_grads(model: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The reduced gradients that this rank is responsible for.

    After a reduce-scatter only this rank's shard of each bucket is reduced; the rest is local data.
    """
    for buffer, names, is_sharded in ddp_buffers(model):
        shards = buffer.data_parallel_group.size() if is_sharded else 1
        shard = buffer.data_parallel_group.rank() if is_sharded else 0
        for bucket in buffer.buckets:
            shard_elems = bucket.grad_data.numel() // shards
            shard_start, shard_end = shard * shard_elems, (shard + 1) * shard_elems
            for param, (start, end) in bucket.param_to_index.items():
                first, last = max(start, shard_start), min(end, shard_end)
                if first < last:
                    yield names[param], bucket.grad_data[first:last]


def optimizer_tensors(
    optimizer: Any, names: dict[torch.nn.Parameter, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The main parameters and their state, named after the model's parameters where possible."""
    for index, part in enumerate(getattr(optimizer, 'chained_optimizers', [optimizer])):
        inner = getattr(part, 'optimizer', None)
        if inner is None:  # a rank without parameters of this kind
            continue
        labels: dict[torch.Tensor, str] = {}
        for param, (group, order) in getattr(part, 'model_param_group_index_map', {}).items():
            labels[inner.param_groups[group]['params'][order]] = names[param]
        for group, param_group in enumerate(inner.param_groups):
            for order, main_param in enumerate(param_group['params']):
                label = labels.get(main_param, f'group{group}.param{order}')
                yield f'{index}.{label}.main_param', main_param
                for key, value in inner.state.get(main_param, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f'{index}.{label}.{key}', value


def describe_buffer(
    buffer: Any, names: dict[torch.nn.Parameter, str], is_sharded: bool
) -> dict[str, Any]:
    """Plain data about a buffer and its buckets, from what the buffer really holds."""
    return {
        'class': f'{type(buffer).__module__}.{type(buffer).__qualname__}',
        'param_dtype': dtype_name(buffer.param_dtype),
        'grad_dtype': dtype_name(buffer.grad_dtype),
        'data_parallel_size': buffer.data_parallel_group.size(),
        'is_sharded': is_sharded,
        'numel': buffer.numel,
        'param_bytes': 0 if buffer.param_data is None else buffer.param_data.nbytes,
        'grad_bytes': buffer.grad_data.nbytes,
        'buckets': [
            {
                'bucket_id': bucket.bucket_id,
                'offset': bucket.offset,
                'numel': bucket.grad_data.numel(),
                'numel_unpadded': bucket.numel_unpadded,
                'params': [
                    {'name': names[param], 'start': start, 'end': end}
                    for param, (start, end) in bucket.param_to_index.items()
                ],
            }
            for bucket in buffer.buckets
        ],
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def add_dump_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        '--dump-state',
        type=Path,
        default=None,
        metavar='DIR',
        help='Write the state after training and the layout of the buffers there, one file per rank.',
    )
    return parser


def main() -> None:
    """Parses Megatron's flags and trains."""
    args = parse_and_validate_args(
        extra_args_provider=add_dump_flag,
        # upstream divides by eval_interval even where nothing is evaluated
        args_defaults={'tokenizer_type': 'NullTokenizer', 'eval_interval': 1000},
    )
    recorder = Recorder(args.dump_state) if args.dump_state is not None else None
    if recorder is not None:
        recorder.watch()
    arguments: dict[str, Any] = {}
    if hasattr(argument_utils, 'gpt_config_from_args'):
        model_config = argument_utils.gpt_config_from_args(args)
        container = argument_utils.pretrain_cfg_container_from_args(args, model_config)
    else:
        container = argument_utils.pretrain_cfg_container_from_args(args)
        arguments['model_provider'] = model_provider
    pretrain(
        container,
        datasets_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **arguments,
    )
    if recorder is not None:
        recorder.save()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()

"""A tied embedding must lie alike in the buffers of all pipeline stages that hold a copy of it.

Upstream sums its copies' gradients over the embedding group (``_allreduce_word_embedding_grads``,
``megatron/core/distributed/finalize_model_grads.py``) as they lie in the buffers; under the distributed
optimizer only the owned shards of it count. Copies of another dtype, or sharded in another way, are summed
wrongly or hang; upstream has no such check.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_buffer.agreement import check_against_first

# How many chunks with a tied embedding this process has wrapped, per installation and embedding group: the n-th
# one of a stage belongs to the n-th one of the others, since all wrap the models of a job in the same order.
_wrapped: dict[tuple[int, str], int] = {}


def check_tied_embeddings(ddp: Any, generation: int) -> None:
    """Compares where tied embeddings lie with the other stages of the embedding group; waits for nobody.

    Args:
        ddp: The wrapped chunk.
        generation: Number of the installation, which keeps comparisons apart.

    Raises:
        RankMismatchError: On each rank that differs from the first one of its group.
    """
    group = _embedding_group(ddp.pp_group)
    lines = [line for buffer in ddp.buffers for line in _describe(buffer, ddp.ddp_config)]
    if group is None or not lines:
        return
    ranks = '-'.join(map(str, dist.get_process_group_ranks(group)))
    number = _wrapped[generation, ranks] = _wrapped.get((generation, ranks), 0) + 1
    check_against_first(
        'the tied embedding in the buffers of its pipeline stages',
        f'embedding/{generation}/{ranks}/{number}',
        '; '.join(lines),
    )


def _embedding_group(pp_group: Any) -> dist.ProcessGroup | None:
    """Megatron's, unless the model was built on groups of its own."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    if pp_group is not parallel_state.get_pipeline_model_parallel_group():
        return None
    group = parallel_state.get_embedding_group(check_initialized=False)
    return group if isinstance(group, dist.ProcessGroup) and group.size() > 1 else None


def _describe(buffer: Any, ddp_config: Any) -> list[str]:
    lines = []
    for param, (start, end, bucket_id) in buffer.param_index_map.items():
        if not getattr(param, 'shared_embedding', False):
            continue
        text = f'{end - start} elements with {buffer.grad_dtype} gradients'
        if ddp_config.use_distributed_optimizer:
            bucket = buffer.buckets[bucket_id]
            text += (
                f' at {start - bucket.offset} of a bucket of {bucket.grad_data.numel()} elements, sharded '
                f'over {buffer.data_parallel_world_size} ranks'
            )
        lines.append(text)
    return lines

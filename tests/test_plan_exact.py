"""`megatron-buffer plan` for a model: what really was allocated and sent, and large jobs."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_buffer import cli
from tests.harness import ROOT, run_ranks
from tests.tiny_model import TrainCase

TINY = (ROOT / 'configs' / 'models' / 'gpt_tiny.yaml').read_text()
TINY += 'make_vocab_size_divisible_by: 1\n'  # the tests' model takes its vocabulary as it is
TIED = 'share_embeddings_and_output_weights'
MOE = 'num_moe_experts: 4\nmoe_router_topk: 2\nadd_bias_linear: false\n'


def _plans(rank: int, world_size: int, runs: list[list[str]]) -> list[str]:
    found = []
    for run in runs:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(['plan', *run]) == 0
        found.append(out.getvalue())
    return found


def plans(*runs: list[str]) -> list[dict[str, Any]]:
    """The JSON of several runs, of a process that may import Megatron."""
    (texts,) = run_ranks(_plans, 1, [[*run, '--json'] for run in runs], init=False)
    return [json.loads(text) for text in texts]


# Against a run ------------------------------------------------------------------------------------

_REDUCED = ('allreduce', 'reduce_scatter', '_reduce_scatter_base')


def _measured(rank: int, world_size: int, case: TrainCase) -> dict[str, int]:
    """Bytes of the storages of a really wrapped model, and of one iteration's collectives."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    import megatron_buffer
    from tests.tiny_gpt import init_parallel, run_backward, wrap

    storages: dict[int, int] = {}

    class Sent(TorchDispatchMode):
        """Bytes of the whole buckets that are reduced and gathered: of each call its largest tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.reduced: list[int] = []
            self.gathered: list[int] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == 'c10d':
                flat, _ = tree_flatten((args, kwargs))
                tensors = [t for t in flat if isinstance(t, torch.Tensor)]
                ours = [t for t in tensors if t.untyped_storage().data_ptr() in storages]
                if ours:
                    most = max(t.numel() * t.element_size() for t in ours)
                    is_reduction = func.__name__.startswith(_REDUCED)
                    (self.reduced if is_reduction else self.gathered).append(most)
            return func(*args, **(kwargs or {}))

    with megatron_buffer.activated('upstream'):
        init_parallel(case)
        run = wrap(case)
        buffers = [
            buffer
            for chunk in run.chunks
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        ]
        for buffer in buffers:
            for data in (buffer.grad_data, buffer.param_data):
                if data is not None:
                    storage = data.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        run_backward(case, run, 0)
        run.optimizer.step()
        with Sent() as sent:  # the gathers of the step before, and the reductions of this one
            run_backward(case, run, 1)
        found = {
            'grad_data_bytes': sum(b.grad_data.untyped_storage().nbytes() for b in buffers),
            'param_data_bytes': sum(
                b.param_data.untyped_storage().nbytes() for b in buffers if b.param_data is not None
            ),
            'optimizer_bytes': _optimizer_bytes(run.optimizer),
            'reduced': sum(sent.reduced),
            'num_reduced': len(sent.reduced),
            'gathered': sum(sent.gathered),
            'num_gathered': len(sent.gathered),
        }
        del run, buffers, buffer, data
    return found


def _optimizer_bytes(optimizer: Any) -> int:
    """Main parameters and moments, each storage once; not what the model's parameters live in."""
    total = 0
    for part in getattr(optimizer, 'chained_optimizers', [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for main in group['params']:
                state = inner.state[main]
                total += sum(t.numel() * t.element_size() for t in map(state.get, _MOMENTS))
                # Of an fp32 parameter the optimizer has no copy: its shard is in the buffer.
                copied = main.untyped_storage().nbytes() == main.numel() * main.element_size()
                total += main.numel() * main.element_size() * copied
    return total


_MOMENTS = ('exp_avg', 'exp_avg_sq')
OVERLAP: dict[str, Any] = {'overlap_grad_reduce': True, 'overlap_param_gather': True}


def check_against_run(tmp_path: Path, case: TrainCase, ranks: int) -> None:
    """Compares what every rank has and sends with the plan's stage; of optimizer state, all ranks' sum."""
    model = tmp_path / 'model.yaml'
    text = TINY.replace('num_layers: 2', f'num_layers: {case.layers}') + MOE * case.moe
    if not case.tied:
        text = text.replace(f'{TIED}: true', f'{TIED}: false')
    model.write_text(text)
    arguments = ['--model', str(model), f'--{case.dtype}', '--world', str(ranks)]
    for option in ('tp', 'pp', 'ep', 'instances'):
        arguments += [f'--{option}', str(getattr(case, option))]
    arguments += ['--bucket-size', str(case.bucket_size)]
    arguments += [] if case.grad_reduce_in_fp32 else ['--grads', case.dtype]
    arguments += ['--no-dist-opt'] * (not case.dist_opt)
    (planned,) = plans(arguments)
    really = run_ranks(_measured, ranks, case)
    size = ranks // case.pp
    for stage in planned['stages']:
        of_stage = really[stage['pp_rank'] * size : (stage['pp_rank'] + 1) * size]
        buffers = [
            buffer
            for chunk in planned['classes'][stage['class']]['chunks']
            for buffer in chunk['buffers']
        ]
        for found in of_stage:
            assert found['grad_data_bytes'] == stage['grad_data_bytes']
            assert found['param_data_bytes'] == stage['param_data_bytes']
            assert found['num_reduced'] == stage['num_reductions_per_iter']
            assert found['num_gathered'] == stage['num_gathers_per_iter']
            # The tensors are whole buckets; over the wire goes what a ring of n ranks sends of them.
            # Nothing is launched for a single rank.
            sent = [buffer for buffer in buffers if buffer['num_ranks'] > 1]
            assert found['reduced'] == sum(b['grad_data_bytes'] for b in sent)
            assert found['gathered'] == sum(b['param_data_bytes'] for b in sent)
        assert max(f['optimizer_bytes'] for f in of_stage) == stage['optimizer_bytes']
        for buffer in buffers:
            n, whole = buffer['num_ranks'], 1 if case.dist_opt else 2
            expected = whole * buffer['grad_data_bytes'] * (n - 1) // n
            assert buffer['grad_wire_bytes_per_iter'] == expected
            assert buffer['param_wire_bytes_per_iter'] == buffer['param_data_bytes'] * (n - 1) // n
        heaviest = stage['heaviest_rank'] - stage['pp_rank'] * size
        assert of_stage[heaviest]['optimizer_bytes'] == stage['optimizer_bytes']
    spread = sum(
        f['grad_data_bytes'] + f['param_data_bytes'] + f['optimizer_bytes'] for f in really
    )
    if case.dist_opt:
        assert planned['totals']['resident_bytes'] == spread


def test_plan_is_what_a_run_allocates_and_sends_with_experts(tmp_path: Path) -> None:
    case = TrainCase(moe=True, ep=2, dist_opt=True, dtype='bf16', bucket_size=3000, **OVERLAP)
    check_against_run(tmp_path, case, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('case', 'ranks'),
    [
        (TrainCase(dist_opt=True, dtype='bf16', **OVERLAP), 2),
        (TrainCase(overlap_grad_reduce=True, dtype='bf16'), 2),
        (TrainCase(dist_opt=True, dtype='bf16', grad_reduce_in_fp32=False, **OVERLAP), 2),
        (TrainCase(dist_opt=True, dtype='bf16', bucket_size=900, **OVERLAP), 3),
    ],
    ids=str,
)
def test_plan_is_what_other_runs_allocate_and_send(
    tmp_path: Path, case: TrainCase, ranks: int
) -> None:
    check_against_run(tmp_path, case, ranks)


# Large jobs ---------------------------------------------------------------------------------------


def test_large_jobs() -> None:
    stages = ['--tp', '8', '--pp', '16', '--world', '16384']
    dense, experts, article = plans(
        ['--model', 'llama3_405b', *stages],
        ['--model', 'mixtral_8x7b', '--ep', '8', '--dp', '64', '--mxfp8', '--grads', 'bf16'],
        ['--model', 'article_7b', '--tp', '2', '--pp', '2', '--dp', '64', '--high-busbw'],
    )
    # 405B: 126 layers, and the embedding and the output count as one more each.
    assert dense['job']['dp'] == 128
    assert [c['pp_ranks'] for c in dense['classes']] == [[0], list(range(1, 15)), [15]]
    assert [c['kind'] for c in dense['classes']] == ['first', 'middle', 'last']
    layer = 16384 * (16384 + 2 * 1024) + 16384**2 + 3 * 16384 * 53248
    middle = dense['stages'][7]
    assert middle['params_elems'] == 8 * (layer // 8 + 2 * 16384)
    assert dense['heaviest']['pp_rank'] == 1
    assert dense['heaviest']['rank'] == 1024
    (buffer,) = dense['classes'][1]['chunks'][0]['buffers']
    assert buffer['num_buckets'] == 1  # behind the first stage nothing is bucketed
    assert buffer['grad_wire_bytes_per_iter'] * 128 == buffer['grad_data_bytes'] * 127

    # Mixtral: the weights of the layers are quantized, a byte for an element and one for each 32.
    (of_class,) = experts['classes']
    assert of_class['kind'] == 'only, with experts'
    buffers = {b['label']: b for b in of_class['chunks'][0]['buffers']}
    assert list(buffers) == ['bf16/bf16', 'uint8/bf16', 'uint8/bf16 expert']
    elems = 32 * 3 * 4096 * 14336
    expert = buffers['uint8/bf16 expert']
    assert (expert['params_elems'], expert['num_ranks']) == (elems, 8)
    assert expert['te_rowwise_bytes'] == expert['te_columnwise_bytes'] == elems + elems // 32
    assert (expert['param_data_bytes'], expert['shared_buffer_bytes']) == (0, 2 * elems)
    assert expert['param_wire_bytes_per_iter'] == 2 * elems // 8 * 7
    assert expert['optimizer_bytes'] == 12 * elems // 8
    assert expert['temporary_bytes'] == 4 * elems // 8  # bf16 gradients are cast for the step
    plain = buffers['bf16/bf16']
    assert plain['params_elems'] == 2 * 32000 * 4096 + 4096 + 32 * (2 * 4096 + 8 * 4096)

    # The article's model: near to its averages, and within its bound of padding.
    first, last = article['stages']
    assert first['params_elems'] + last['params_elems'] == pytest.approx(3.75e9, rel=0.03)
    buckets = article['classes'][0]['chunks'][0]['buffers'][0]['buckets']
    assert all(bucket['numel_elems'] % 2**16 == 0 for bucket in buckets)
    assert sum(bucket['padding_elems'] for bucket in buckets) <= len(buckets) * (2**16 - 1)
    for bucket in buckets:
        assert bucket['grad_wire_bytes'] * 64 == bucket['grad_bytes'] * 63
    assert any('vocab_size' in note for note in dense['notes'])


def test_tables_fit_the_screen() -> None:
    run = [
        '--model',
        'mixtral_8x7b',
        '--tp',
        '2',
        '--pp',
        '4',
        '--ep',
        '8',
        '--dp',
        '16',
        '--nvfp4',
    ]
    ((shown,),) = run_ranks(_plans, 1, [run], init=False)
    for text in ('0 first +experts', '1-2 middle +experts', 'heaviest: rank 96 (stage 3)'):
        assert text in shown
    assert '…' not in shown
    assert max(map(len, shown.splitlines())) <= 120

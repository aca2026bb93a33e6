"""Finalize as steps with options: what a config may say, chunked all-reduces, and each step's own result.

Expected values are worked out without a buffer: closed forms, or an unwrapped module that sees what all
ranks see.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_buffer.config import config_hash, dump_config, load_config, to_dict
from megatron_buffer.config_runtime import FinalizeSteps
from megatron_buffer.config_steps import STEPS, UPSTREAM_ORDER
from megatron_buffer.errors import ConfigError
from tests.harness import run_ranks

SYNC = 'finish_grad_sync'


# ---------------------------------------------------------------------------- what a config may say


def _steps(*order: str, **options: Any) -> dict[str, Any]:
    return {'finalize': {'name': 'steps', 'order': list(order) or None, 'options': options}}


@pytest.mark.parametrize(
    ('config', 'path', 'words'),
    [
        (_steps(SYNC, 'non_tp_grad'), 'finalize.order[1]', ["Did you mean 'non_tp_grads'?"]),
        (_steps(SYNC, 'x'), 'finalize.order[1]', ["step 'x'", f'Valid steps: gtp_fence, {SYNC}']),
        (_steps(SYNC, 'gtp_fence'), 'finalize.order[1]', [f'must come before {SYNC}']),
        (
            _steps(SYNC, 'non_tp_grads', SYNC),
            'finalize.order[2]',
            ['in the list twice, first at position 1'],
        ),
        (
            _steps('non_tp_grads'),
            'finalize.order',
            [f'{SYNC} is missing', 'no gradient would be reduced'],
        ),
        *[
            (
                _steps(name, SYNC),
                'finalize.order[0]',
                [f'{name} comes before {SYNC}', f'move it behind {SYNC}'],
            )
            for name in UPSTREAM_ORDER
            if name.endswith('_grads') or name == 'scale_by_num_tokens'
        ],
        *[
            (
                _steps(SYNC, 'reset_temporary_tensors', name),
                'finalize.order[2]',
                [f'{name} must come before reset_temporary_tensors'],
            )
            for name in ('router_expert_bias', 'router_quantile_bias')
        ],
        (
            _steps(non_tp_grads={'chunk_byte': 1}),
            'finalize.options.non_tp_grads.chunk_byte',
            ["Did you mean 'chunk_bytes'?"],
        ),
        (
            _steps(non_tp_grads={'chunk_bytes': 0}),
            'finalize.options.non_tp_grads.chunk_bytes',
            ['found 0, expected an integer >= 1 or null'],
        ),
        (
            _steps(word_embedding_grads={'chunk_bytes': 4}),
            'finalize.options.word_embedding_grads.chunk_bytes',
            ['It has no parameters'],
        ),
        (
            _steps(SYNC, non_tp_grads={}),
            'finalize.options.non_tp_grads',
            ['is not in finalize.order', 'add it to the order, or remove them'],
        ),
        (_steps(non_tp={}), 'finalize.options.non_tp', ["Did you mean 'non_tp_grads'?"]),
        ({'finalize': [SYNC, {'name': 'non_tp_grads', 'chunk_bytes': '8'}]}, None, ['write 8']),
    ],
)
def test_wrong_steps_are_refused(config: Any, path: str | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert path is None or caught.value.yaml_path == path
    for word in words:
        assert word in str(caught.value)


def test_steps_in_short_and_in_full() -> None:
    short = load_config({'finalize': [SYNC, {'name': 'non_tp_grads', 'chunk_bytes': 64}]})
    full = load_config(_steps(SYNC, 'non_tp_grads', non_tp_grads={'chunk_bytes': 64}))
    assert short == full
    assert config_hash(short) == config_hash(full) != config_hash(load_config(_steps(SYNC)))
    assert to_dict(full)['finalize']['options'] == {'non_tp_grads': {'chunk_bytes': 64}}
    assert 'chunk_bytes: 64' in dump_config(full)


def test_params_made_in_python_are_checked_too() -> None:
    from megatron_buffer.strategies.registry import make_strategy

    with pytest.raises(ConfigError, match=f'{SYNC} is missing'):
        make_strategy('finalize', FinalizeSteps(order=()))
    with pytest.raises(ConfigError, match='unknown parameter of step'):
        make_strategy('finalize', FinalizeSteps(options={SYNC: {'wait': True}}))


def test_the_code_has_the_steps_of_the_table() -> None:
    from megatron_buffer.finalize_steps import STEPS as CODE
    from megatron_buffer.strategies.registry import make_strategy

    assert tuple(CODE) == UPSTREAM_ORDER
    upstream = make_strategy('finalize', load_config(None).finalize)
    assert [step.name for step in upstream.steps()] == list(UPSTREAM_ORDER)
    by_default = make_strategy('finalize', FinalizeSteps())
    assert [step.name for step in by_default.steps()] == list(UPSTREAM_ORDER)


def test_steps_left_out_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    from megatron_buffer.strategies import finalize
    from megatron_buffer.strategies.registry import make_strategy

    finalize._warn_of_left_out.cache_clear()
    kept = [name for name in UPSTREAM_ORDER if name != 'word_embedding_grads']
    with caplog.at_level(logging.WARNING, 'megatron_buffer.strategies.finalize'):
        make_strategy('finalize', FinalizeSteps())
        assert not caplog.records
        for _ in range(2):
            made = make_strategy('finalize', FinalizeSteps(order=tuple(kept)))
            assert [step.name for step in made.steps()] == kept
    (record,) = caplog.records
    meaning = STEPS['word_embedding_grads'].meaning
    assert f'never run: word_embedding_grads ({meaning}).' in record.getMessage()


# --------------------------------------------------------------------------------- cutting in chunks


@settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(['fp32', 'bf16', None]))),
    st.integers(1, 200),
)
def test_chunks_are_as_large_as_allowed(params: list[tuple[int, str | None]], limit: int) -> None:
    from megatron_buffer.finalize_chunks import Named, cut

    dtypes = {'fp32': torch.float32, 'bf16': torch.bfloat16}
    named = []
    for i, (numel, dtype) in enumerate(params):
        param = torch.nn.Parameter(torch.zeros(numel))
        if dtype == 'fp32':
            param.main_grad = torch.zeros(numel)  # type: ignore[attr-defined]
        elif dtype == 'bf16':
            param.grad = torch.zeros(numel)
            param.main_grad = torch.zeros(numel, dtype=dtypes[dtype])  # type: ignore[attr-defined]
        named.append(Named(0, str(i), param))

    def size_bytes(chunk: list[Named]) -> int:
        widths = {'fp32': 4, 'bf16': 2, None: 0}
        return sum(params[int(n.name)][0] * widths[params[int(n.name)][1]] for n in chunk)

    chunks = list(cut(named, limit))
    assert [n for chunk in chunks for n in chunk] == named
    for i, chunk in enumerate(chunks):
        # Over the limit is one gradient alone, with nothing but empty ones behind it.
        assert size_bytes(chunk) <= limit or size_bytes(chunk[:1]) == size_bytes(chunk)
        if i:
            assert size_bytes(chunks[i - 1]) + size_bytes(chunk[:1]) > limit


class Flattened:
    """Counts the bytes that upstream flattens into temporaries while it is active."""

    def __init__(self) -> None:
        self.sizes_bytes: list[int] = []

    def __enter__(self) -> Flattened:
        self._module = importlib.import_module('megatron.core.distributed.finalize_model_grads')
        self._original = self._module._flatten_dense_tensors
        self._module._flatten_dense_tensors = self._flatten
        return self

    def __exit__(self, *unused: object) -> None:
        self._module._flatten_dense_tensors = self._original

    def _flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = self._original(tensors)
        if flat.data_ptr() != tensors[0].data_ptr():  # one tensor alone is not copied
            self.sizes_bytes.append(flat.numel() * flat.element_size())
        return flat


class Stage(torch.nn.Module):
    """Every kind of parameter that tensor parallelism leaves to finalize, and some that it does not."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.sharded = torch.nn.Linear(16, 16, dtype=dtype)
        self.norm = torch.nn.LayerNorm(16, dtype=dtype)
        self.q_layernorm = torch.nn.LayerNorm(8, dtype=dtype)
        self.down = torch.nn.Linear(16, 8, bias=False, dtype=dtype)
        self.k_layernorm = torch.nn.LayerNorm(8, dtype=dtype)
        self.replica = torch.nn.Linear(16, 4, dtype=dtype)
        self.frozen = torch.nn.LayerNorm(16, dtype=dtype)
        for param in [*self.norm.parameters(), *self.down.parameters()]:
            param.sequence_parallel = True  # type: ignore[attr-defined]
        for param in self.replica.parameters():
            param.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        self.frozen.requires_grad_(False)


def _wrap(module: torch.nn.Module, config: dict[str, Any], **ddp_config: Any) -> Any:
    """``module`` in our DDP, under ``upstream`` or the ``buffer_config`` given."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from megatron_buffer.ddp import DistributedDataParallel

    buffer_config = ddp_config.pop('buffer_config', 'upstream')
    sizes = {'num_layers': 4, 'hidden_size': 8, 'num_attention_heads': 2}
    return DistributedDataParallel(
        TransformerConfig(**{**sizes, **config}),
        DistributedDataParallelConfig(**ddp_config),
        module,
        buffer_config=buffer_config,
    )


TP_CONFIG = {'tensor_model_parallel_size': 2, 'sequence_parallel': True, 'qk_layernorm': True}


def _chunked_bits(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The step with chunks and upstream's function, on the same gradients of two model chunks."""
    from megatron.core import parallel_state

    from megatron_buffer.finalize_context import FinalizeContext
    from megatron_buffer.finalize_steps import STEPS as CODE

    fmg = importlib.import_module('megatron.core.distributed.finalize_model_grads')
    parallel_state.initialize_model_parallel(2)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = [
            _wrap(Stage(dtype), TP_CONFIG, use_distributed_optimizer=True, bucket_size=100)
            for _ in range(2)
        ]
        # One that upstream passes over: trainable, marked, and without any gradient.
        late = torch.nn.Parameter(torch.zeros(3))
        late.sequence_parallel = True  # type: ignore[attr-defined]
        model[1].module.register_parameter('late', late)
        ctx = FinalizeContext(model, None, None, False)

        def after(
            reduce: Callable[[], None], model: list[Any] = model
        ) -> tuple[torch.Tensor, list[int]]:
            generator = torch.Generator().manual_seed(rank)
            buffers = [buffer.grad_data for chunk in model for buffer in chunk.buffers]
            for grads in buffers:
                grads.copy_(torch.randn(grads.numel(), generator=generator))
            with Flattened() as flattened:
                reduce()
            return torch.cat(buffers), flattened.sizes_bytes

        filled, _ = after(lambda: None)
        for chunk_bytes in (1, 100, 300, 10_000, None):
            # Upstream's bucket of arguments first, then ours.
            stock, stock_bytes = after(
                lambda model=model, ctx=ctx: fmg._allreduce_non_tensor_model_parallel_grads(
                    model, ctx.config, ctx.tp_group
                )
            )
            ours, our_bytes = after(
                lambda ctx=ctx, size=chunk_bytes: CODE['non_tp_grads'].run(ctx, chunk_bytes=size)
            )
            results.append(
                {
                    'width': dtype.itemsize,
                    'chunk_bytes': chunk_bytes,
                    'changed': int((filled != stock).sum()),
                    'same': torch.equal(stock, ours),
                    'stock_bytes': stock_bytes,
                    'our_bytes': our_bytes,
                }
            )
        assert late.grad is None
    return results


# Elements that are summed: norms 32 + 16 + 16, down 128; averaged: replica 68. In each of two chunks.
SUMMED_ELEMS, AVERAGED_ELEMS = 2 * (32 + 32 + 128), 2 * 68


@pytest.mark.parametrize('world_size', [2, 4])
def test_chunks_of_tp_gradients_have_upstreams_bits(world_size: int) -> None:
    for found in [case for rank in run_ranks(_chunked_bits, world_size) for case in rank]:
        assert found['same'], found
        assert found['changed'] > 500
        limit = found['chunk_bytes'] or 10_000
        whole = [SUMMED_ELEMS * found['width'], AVERAGED_ELEMS * found['width']]
        assert found['stock_bytes'] == whole
        if limit == 10_000:
            assert found['our_bytes'] == whole
        else:
            assert max(found['our_bytes'], default=0) <= limit, found
            assert bool(found['our_bytes']) == (limit > 1)


def _gtp_chunks(rank: int, world_size: int) -> list[Any]:
    """Replicated parameters over weight-remat peers: mean by hand, whatever the size of the chunks."""
    from megatron.core import parallel_state

    from megatron_buffer.finalize_context import FinalizeContext
    from megatron_buffer.finalize_steps import STEPS as CODE

    parallel_state.initialize_model_parallel(gtp_remat_size=2)
    model = [_wrap(Stage(), {}) for _ in range(2)]
    ctx = FinalizeContext(model, None, None, False)
    results: list[Any] = []
    for chunk_bytes in (None, 1, 300):
        for i, chunk in enumerate(model):
            for buffer in chunk.buffers:
                buffer.grad_data.copy_(
                    torch.arange(buffer.grad_data.numel()) * (1 + i) * (1 + rank)
                )
        with Flattened() as flattened:
            CODE['gtp_replicated_grads'].run(ctx, chunk_bytes=chunk_bytes)
        right = all(
            torch.equal(b.grad_data, torch.arange(b.grad_data.numel()) * (1 + i) * 1.5)
            for i, chunk in enumerate(model)
            for b in chunk.buffers
        )
        results.append((chunk_bytes, right, max(flattened.sizes_bytes, default=0)))
    return results


def test_chunks_of_gradients_replicated_over_weight_remat_peers() -> None:
    fmg = importlib.import_module('megatron.core.distributed.finalize_model_grads')
    if not hasattr(fmg, '_allreduce_replicated_grads_over_gtp_remat_group'):
        pytest.skip('this Megatron-Core has no weight-remat groups')
    trainable_bytes = 4 * sum(p.numel() for p in Stage().parameters() if p.requires_grad)
    for found in run_ranks(_gtp_chunks, 2):
        (_, *whole), (_, *singly), (_, right, largest_bytes) = found
        assert whole == [True, 2 * trainable_bytes]
        assert singly == [True, 0]
        assert right
        assert 0 < largest_bytes <= 300


# ---------------------------------------------------------------------- each step's result, by itself


class SequenceNorms(torch.nn.Module):
    """Norms as tensor parallelism has them: one over this rank's tokens, one over this rank's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.q_layernorm = torch.nn.LayerNorm(4)
        for param in self.norm.parameters():
            param.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Loss of ``tokens [sequence, 8]`` and ``heads [sequence, heads, 4]``."""
        return self.norm(tokens).pow(3).sum() + self.q_layernorm(heads).pow(3).sum()


def _sequence(dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(dp_rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, 4, generator=generator)


def _sequence_norms(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    from megatron.core import parallel_state

    from megatron_buffer.finalize import finalize_model_grads
    from tests import small_model as sm

    parallel_state.initialize_model_parallel(2)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    dp_size = parallel_state.get_data_parallel_world_size()
    model = _wrap(
        SequenceNorms(),
        TP_CONFIG,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        buffer_config={'finalize': {'name': 'steps', 'options': options}},
    )
    model.zero_grad_buffer()
    tokens, heads = _sequence(parallel_state.get_data_parallel_rank())
    model(tokens.chunk(2)[tp_rank], heads.chunk(2, dim=1)[tp_rank]).backward()
    finalize_model_grads([model])

    whole = SequenceNorms()
    for dp_rank in range(dp_size):
        (whole(*_sequence(dp_rank)) / dp_size).backward()
    expected = {name: param.grad.flatten() for name, param in whole.named_parameters()}
    return sm.differences(sm.owned_main_grads(model), expected)


@pytest.mark.parametrize('world_size', [2, 4])
def test_norms_of_sequence_parallelism_see_the_whole_sequence(world_size: int) -> None:
    options = {'non_tp_grads': {'chunk_bytes': 40}}
    assert run_ranks(_sequence_norms, world_size, options) == [[]] * world_size


class Tied(torch.nn.Module):
    """A pipeline stage whose embedding the other stage has too; its loss has the gradients given."""

    share_embeddings_and_output_weights = True

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.pre_process = is_first
        self.word_embeddings = torch.nn.Parameter(torch.zeros(13, 8))
        self.word_embeddings.shared_embedding = True  # type: ignore[attr-defined]
        # The stages differ in what else they hold, so nothing lies at the same place by chance.
        self.norm = torch.nn.Parameter(torch.zeros(24 if is_first else 9))
        self.other = torch.nn.Parameter(torch.zeros(7 if is_first else 300))
        self.norm.sequence_parallel = True  # type: ignore[attr-defined]

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.word_embeddings

    def forward(self, slopes: dict[str, torch.Tensor]) -> torch.Tensor:
        """The sum of every parameter times its slope, which is its gradient then."""
        return sum((p * slopes[name]).sum() for name, p in self.named_parameters())  # type: ignore


def _slopes(is_first: bool, tp_rank: int, dp_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * is_first + 10 * tp_rank + dp_rank)
    return {
        name: torch.randn(param.shape, generator=generator)
        for name, param in Tied(is_first).named_parameters()
    }


def _tied(rank: int, world_size: int, tp: int, dist_opt: bool) -> list[str]:
    from megatron.core import parallel_state

    from megatron_buffer.finalize import finalize_model_grads
    from tests import small_model as sm

    parallel_state.initialize_model_parallel(tp, 2)
    is_first = parallel_state.is_pipeline_first_stage()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    dp_rank = parallel_state.get_data_parallel_rank()
    dp_size = parallel_state.get_data_parallel_world_size()
    config = {'pipeline_model_parallel_size': 2, 'pipeline_dtype': torch.float32}
    model = _wrap(
        Tied(is_first),
        {**config, **(TP_CONFIG if tp > 1 else {})},
        use_distributed_optimizer=dist_opt,
        overlap_grad_reduce=True,
        bucket_size=100,
        buffer_config={
            'finalize': {'name': 'steps', 'options': {'non_tp_grads': {'chunk_bytes': 50}}}
        },
    )
    model.zero_grad_buffer()
    model(_slopes(is_first, tp_rank, dp_rank)).backward()
    finalize_model_grads([model])

    def mean(name: str, first: bool, tp_rank: int) -> torch.Tensor:
        slopes = [_slopes(first, tp_rank, r)[name].flatten() / dp_size for r in range(dp_size)]
        return torch.stack(slopes).sum(0)

    expected = {
        'word_embeddings': mean('word_embeddings', True, tp_rank)
        + mean('word_embeddings', False, tp_rank),
        'norm': sum(mean('norm', is_first, r) for r in range(tp)),
        'other': mean('other', is_first, tp_rank),
    }
    owned = sm.owned_main_grads(model)
    assert owned.keys() == expected.keys()
    return sm.differences(owned, expected)


@pytest.mark.long
@pytest.mark.parametrize('dist_opt', [False, True])
@pytest.mark.parametrize('tp', [1, 2])
def test_a_tied_embedding_is_summed_over_stages(tp: int, dist_opt: bool) -> None:
    assert run_ranks(_tied, 4, tp, dist_opt) == [[]] * 4


def _tokens(rank: int, world_size: int, dist_opt: bool) -> list[float]:
    """Rank 0 has 3 tokens whose gradient is 1, rank 1 has one token whose gradient is 2."""
    from megatron_buffer.finalize import finalize_model_grads
    from tests import small_model as sm

    sm.init_parallel()
    net = torch.nn.Linear(1, 1, bias=False)
    model = _wrap(
        net,
        {'calculate_per_token_loss': True},
        use_distributed_optimizer=dist_opt,
        overlap_grad_reduce=True,
    )
    x = torch.tensor([[1.0], [1.0], [1.0]]) if rank == 0 else torch.tensor([[2.0]])
    model.zero_grad_buffer()
    model(x).sum().backward()
    finalize_model_grads([model], num_tokens=torch.tensor(len(x)))
    return [v for g in sm.owned_main_grads(model).values() for v in g.tolist() if v == v]


@pytest.mark.parametrize('dist_opt', [False, True])
def test_every_token_weighs_the_same(dist_opt: bool) -> None:
    found = run_ranks(_tokens, 2, dist_opt)
    assert found == ([[1.25], []] if dist_opt else [[1.25], [1.25]])


class Router(torch.nn.Module):
    """What finalize knows of a MoE router."""

    def __init__(self, tokens: list[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.register_buffer('expert_bias', torch.zeros(4))
        self.register_buffer('local_tokens_per_expert', torch.tensor(tokens))


def _expert_bias(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    from megatron_buffer.finalize import finalize_model_grads
    from tests import small_model as sm

    sm.init_parallel()
    router = Router([4.0, 0.0, 2.0, 2.0] if rank == 0 else [2.0, 2.0, 2.0, 2.0])
    config = {
        'num_moe_experts': 4,
        'moe_router_enable_expert_bias': True,
        'moe_router_score_function': 'sigmoid',
        'moe_router_bias_update_rate': 0.5,
        'add_bias_linear': False,
    }
    model = _wrap(router, config)
    model.zero_grad_buffer()
    router.weight.sum().backward()
    finalize_model_grads([model])
    return router.expert_bias.tolist(), router.local_tokens_per_expert.tolist()


def test_expert_bias_follows_the_tokens_of_all_ranks() -> None:
    # 6, 2, 4 and 4 tokens in all: the first expert has too many, the second too few.
    expected = ([-0.5, 0.5, 0.0, 0.0], [0.0] * 4)
    assert run_ranks(_expert_bias, 2) == [expected] * 2


def _chunked_training(rank: int, world_size: int) -> list[str]:
    from tests.tiny_gpt import TrainCase, compare, train

    case = TrainCase(
        tp=2,
        sp=True,
        dist_opt=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        dtype='bf16',
        bucket_size=2000,
    )
    ours = {'finalize': {'name': 'steps', 'options': {'non_tp_grads': {'chunk_bytes': 200}}}}
    return compare(train(case), train(case, ours))


@pytest.mark.long
def test_training_with_chunks_has_stocks_bits() -> None:
    assert run_ranks(_chunked_training, 2) == [[], []]

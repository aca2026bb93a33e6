"""CPU mode: never on by itself, undone exactly, and right where gloo alone is wrong."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_buffer import cpu
from megatron_buffer.cpu.ledger import Ledger
from megatron_buffer.errors import ConfigError
from tests.harness import ROOT, run_ranks

# What the replacements live in; `everything()` in a child process gives all that is in there.
SNAPSHOT = """
    import importlib, logging, sys
    NAMES = ('torch', 'torch.cuda', 'torch.cuda.random', 'torch.cuda.nvtx', 'torch.accelerator',
             'torch.distributed', 'torch.distributed.distributed_c10d')

    def everything(*prefixes):
        import torch
        owners = {name: importlib.import_module(name) for name in NAMES}
        for name, module in list(sys.modules.items()):
            if name.startswith(prefixes) and vars(module).get('__file__'):
                owners[name] = module
        for owner in (torch.Tensor, torch.nn.Module, torch.autocast):
            owners[owner.__name__] = owner
        for module in list(owners.values()):
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__.startswith('megatron.'):
                    owners[f'{value.__module__}.{value.__qualname__}'] = value
        found = {(name, key): value for name, owner in owners.items()
                 for key, value in vars(owner).items() if key != '__builtins__'}
        log = logging.getLogger('megatron.core.tensor_parallel.random')
        found['filters', ''] = tuple(log.filters)
        return found

    def changed(before, after):
        return [key for key, value in before.items()
                if key not in after or (after[key] is not value and key[0] != 'filters')
                or (key[0] == 'filters' and after[key] != value)]
"""


def run_python(code: str, **env: str) -> str:
    """Runs ``code`` in a fresh interpreter without a GPU and returns what it printed."""
    code = textwrap.dedent(SNAPSHOT) + textwrap.dedent(code)
    environment = {key: value for key, value in os.environ.items() if key != 'MEGATRON_BUFFER_CPU'}
    environment |= {'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
    environment['PYTHONPATH'] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get('PYTHONPATH')])
    )
    done = subprocess.run(
        [sys.executable, '-c', code],
        env=environment | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_changes_nothing() -> None:
    run_python("""
        import megatron_buffer.cpu
        assert 'torch' not in sys.modules and 'megatron' not in sys.modules
        before = everything()
        from megatron_buffer import cpu
        from megatron_buffer.cpu import cuda_surface, gloo, ledger
        assert not cpu.is_enabled() and cpu.replacements() == ()
        cpu.after_import()
        cpu.disable()
        assert 'megatron.core' not in sys.modules
        assert changed(before, everything()) == []
    """)


def test_disable_restores_every_attribute() -> None:
    run_python("""
        from megatron_buffer import cpu
        before = everything()
        cpu.enable()
        cpu.enable()
        assert cpu.is_enabled()
        replaced = {record.target for record in cpu.replacements()}
        assert {'torch.cuda.is_available', 'torch.zeros', 'torch.Tensor.type',
                'torch.distributed._coalescing_manager'} <= replaced
        assert len(changed(before, everything())) > 80
        import megatron.training.training

        cpu.disable()
        assert not cpu.is_enabled()
        assert changed(before, everything()) == []
        import torch
        assert not torch.cuda.is_available()
        assert torch.zeros(1).type() == 'torch.FloatTensor'

        # Once more, now with Megatron loaded: its modules and classes come back too.
        before = everything('megatron.')
        cpu.enable()
        during = changed(before, everything('megatron.'))
        assert ('megatron.core.parallel_state', 'destroy_model_parallel') in during
        assert ('megatron.core.distributed.param_and_grad_buffer', '_coalescing_manager') in during
        cpu.disable()
        after = everything('megatron.')
        assert changed(before, after) == [] and changed(after, before) == []
    """)


def test_names_held_by_value_follow() -> None:
    run_python("""
        import types
        import torch
        kept = {'original': torch.distributed._coalescing_manager}  # a global would follow too
        mine = types.ModuleType('mine')
        mine.manager = kept['original']
        mine.nothing = ()
        sys.modules['mine'] = mine
        from megatron_buffer import cpu
        cpu.enable()
        from megatron.core.distributed import param_and_grad_buffer as pgb
        assert mine.manager is pgb._coalescing_manager is torch.distributed._coalescing_manager
        assert mine.manager is not kept['original']
        assert mine.nothing == ()
        late = types.ModuleType('late')
        late.gather = torch.distributed.all_gather
        sys.modules['late'] = late
        cpu.disable()
        assert mine.manager is pgb._coalescing_manager is kept['original']
        assert late.gather is torch.distributed.all_gather
    """)


@pytest.mark.long
def test_too_late_is_refused() -> None:
    run_python("""
        import megatron.core
        from megatron_buffer import cpu
        from megatron_buffer.errors import ConfigError
        before = everything()
        try:
            cpu.enable()
        except ConfigError as error:
            assert 'before Megatron is imported' in str(error), error
        else:
            raise AssertionError('not refused')
        assert not cpu.is_enabled() and changed(before, everything()) == []
    """)


@pytest.mark.long
def test_install_turns_it_on_where_the_environment_asks() -> None:
    code = """
        import megatron_buffer
        from megatron_buffer import cpu
        megatron_buffer.install()
        print(cpu.is_enabled())
    """
    assert run_python(code, MEGATRON_BUFFER_CPU='1').split()[-1] == 'True'
    assert run_python(code, MEGATRON_BUFFER_CPU='0').split()[-1] == 'False'


@pytest.mark.long
@pytest.mark.parametrize('how', ['argument', 'environment'])
def test_gpu_is_refused_unless_forced(how: str) -> None:
    run_python(
        """
        import os, torch
        torch.cuda.is_available = lambda: True
        from megatron_buffer import cpu
        from megatron_buffer.errors import ConfigError
        before = everything()
        force = os.environ.pop('MEGATRON_BUFFER_CPU')
        try:
            cpu.enable()
        except ConfigError as error:
            assert 'has a GPU' in str(error), error
        else:
            raise AssertionError('not refused')
        assert not cpu.is_enabled() and changed(before, everything()) == []
        if force == 'force':
            os.environ['MEGATRON_BUFFER_CPU'] = force
            cpu.enable()
        else:
            cpu.enable(force=True)
        assert cpu.is_enabled()
        """,
        MEGATRON_BUFFER_CPU='force' if how == 'environment' else '0',
    )


def test_failed_enable_leaves_nothing() -> None:
    run_python("""
        from megatron_buffer import cpu
        before = everything()
        sys.modules['megatron.core'] = None  # makes the import fail
        cpu._megatron_was_imported_by_us = True
        try:
            cpu.enable()
        except ImportError:
            pass
        assert not cpu.is_enabled() and changed(before, everything()) == []
    """)


def test_dataset_helper_of_the_wheel_stands_in() -> None:
    run_python("""
        import importlib.util
        from megatron_buffer import cpu
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: (
            None if name.endswith('helpers_cpp') else real(name, *a))
        cpu.enable()
        importlib.util.find_spec = real
        helper = sys.modules['megatron.core.datasets.helpers_cpp']
        from megatron.core.datasets import utils
        from megatron.core.datasets.helpers import build_sample_idx_int32
        assert build_sample_idx_int32 is helper.build_sample_idx_int32
        utils.compile_helpers()
        cpu.disable()
        assert 'megatron.core.datasets.helpers_cpp' not in sys.modules
    """)


@pytest.mark.parametrize(
    ('value', 'requested', 'forced'),
    [
        (None, False, False),
        ('', False, False),
        ('0', False, False),
        ('false', False, False),
        ('1', True, False),
        ('True', True, False),
        ('force', True, True),
    ],
)
def test_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, requested: bool, forced: bool
) -> None:
    monkeypatch.delenv(cpu.ENVIRONMENT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, value)
    assert (cpu.requested(), cpu.forced()) == (requested, forced)


def test_environment_typo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.ENVIRONMENT_VARIABLE, 'yess')
    with pytest.raises(ConfigError, match="MEGATRON_BUFFER_CPU='yess'"):
        cpu.requested()


class _Base:
    @staticmethod
    def inherited() -> str:
        return 'original'


class _Owner(_Base):
    @staticmethod
    def own() -> str:
        return 'original'


def test_ledger_restores_inherited_and_static_names() -> None:
    before = dict(vars(_Owner))
    ledger = Ledger()
    ledger.replace(_Owner, 'own', staticmethod(lambda: 'first'), 'test')
    ledger.replace(_Owner, 'own', staticmethod(lambda: 'second'), 'test')
    ledger.replace(_Owner, 'inherited', staticmethod(lambda: 'replaced'), 'test')
    ledger.replace(_Owner, 'unknown_here', None, 'a name that this version lacks')
    assert (_Owner.own(), _Owner.inherited()) == ('second', 'replaced')
    assert [r.was_present for r in ledger.replacements] == [True, True, False]
    assert ledger.replacements[0].target.endswith('test_cpu._Owner.own')
    ledger.undo()
    assert dict(vars(_Owner)) == before
    assert isinstance(vars(_Owner)['own'], staticmethod)


def test_ledger_says_if_somebody_else_changed_a_name(caplog: pytest.LogCaptureFixture) -> None:
    module = types.ModuleType('a_module')
    module.name = original = object()  # type: ignore[attr-defined]
    ledger = Ledger()
    ledger.replace(module, 'name', object(), 'test')
    module.name = object()  # type: ignore[attr-defined]
    ledger.undo()
    assert module.name is original
    assert 'a_module.name was changed by somebody else' in caplog.text


# From here on the tests run in ranks of the harness, where CPU mode is on.


def _surface(rank: int, world_size: int) -> None:
    import torch

    for record in cpu.replacements():
        assert record.reason, record.target
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    for spec in ('cuda', 'cuda:0', torch.device('cuda', 0), torch.cuda.current_device()):
        assert torch.zeros(2, device=spec).device.type == 'cpu'
        assert torch.zeros(2).to(spec).device.type == 'cpu'
        assert torch.zeros(2).new_ones(3, device=spec).device.type == 'cpu'
    assert torch.empty(2, pin_memory=True).cuda(non_blocking=True).pin_memory().device.type == 'cpu'
    assert torch.zeros(2, dtype=torch.bfloat16).type() == 'torch.cuda.BFloat16Tensor'
    assert torch.zeros(2).type('torch.cuda.HalfTensor').dtype == torch.float16
    assert torch.zeros(2).to(torch.float64).dtype == torch.float64
    with torch.device('meta'):  # the planner builds models this way
        assert torch.zeros(2).device.type == torch.empty(2).device.type == 'meta'
    assert torch.nn.Linear(2, 2).cuda().to('cuda').weight.device.type == 'cpu'

    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    torch.cuda.manual_seed(5)
    first = torch.rand(3)
    torch.cuda.default_generators[0].manual_seed(5)
    assert torch.equal(first, torch.rand(3))

    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.device(0):
        start.record()
    end.record(stream)
    assert start.query()
    assert start.elapsed_time(end) >= 0
    assert torch.cuda.memory_stats()['reserved_bytes.all.current'] == 0
    assert torch.cuda.get_device_properties(0).major == torch.cuda.get_device_capability()[0]
    with torch.autocast('cuda', dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.compile(_surface) is torch.compile()(_surface) is _surface


def test_surface() -> None:
    run_ranks(_surface, 1, init=False)


def _values(dtype: Any, count: int, rank: int) -> Any:
    import torch

    return (torch.arange(count) % 11 + 3 * rank + 1).to(dtype)


def _coalesced(rank: int, world_size: int, dtypes: list[str], async_ops: bool, held: bool) -> None:
    """Coalesced collectives of tensors of several dtypes and sizes, through either reference."""
    import torch
    import torch.distributed as dist

    name = 'megatron.core.distributed.param_and_grad_buffer' if held else 'torch.distributed'
    manager = importlib.import_module(name)._coalescing_manager
    group = dist.new_group() if held else dist.group.WORLD
    parts = [(getattr(torch, dtype), 6 + 2 * i) for i, dtype in enumerate(dtypes)]

    gathered = [torch.zeros(count * world_size, dtype=dtype) for dtype, count in parts]
    shards = [whole.view(world_size, -1)[rank] for whole in gathered]
    for shard in shards:
        shard.copy_(_values(shard.dtype, len(shard), rank))
    with manager(group, async_ops=async_ops) as handle:
        for whole, shard in zip(gathered, shards, strict=True):
            dist.all_gather_into_tensor(whole, shard, group=group, async_op=async_ops)
    if async_ops:
        handle.wait()
    for whole, (dtype, count) in zip(gathered, parts, strict=True):
        expected = torch.cat([_values(dtype, count, r) for r in range(world_size)])
        assert torch.equal(whole, expected), (whole, expected)

    whole_sizes = [(dtype, count * world_size) for dtype, count in parts]
    reduced = [_values(dtype, count, rank) for dtype, count in whole_sizes]
    with manager(group, async_ops=async_ops) as handle:
        for whole in reduced:
            shard = whole.view(world_size, -1)[rank]
            dist.reduce_scatter_tensor(shard, whole, group=group, async_op=async_ops)
    if async_ops:
        handle.wait()
    for whole, (dtype, count) in zip(reduced, whole_sizes, strict=True):
        expected = sum(_values(dtype, count, r) for r in range(world_size))
        assert torch.equal(
            whole.view(world_size, -1)[rank], expected.view(world_size, -1)[rank]
        ), whole

    summed = [_values(dtype, count, rank) for dtype, count in parts]
    with manager(group, async_ops=async_ops) as handle:
        for whole in summed:
            dist.all_reduce(whole, group=group, async_op=async_ops)
    if async_ops:
        handle.wait()
    for whole, (dtype, count) in zip(summed, parts, strict=True):
        assert torch.equal(whole, sum(_values(dtype, count, r) for r in range(world_size))), whole


@pytest.mark.parametrize('async_ops', [False, True], ids=['sync', 'async'])
@pytest.mark.parametrize('held', [False, True], ids=['torch', 'megatron'])
@pytest.mark.parametrize(
    'dtypes',
    [
        ['bfloat16', 'float32'],
        ['uint8', 'bfloat16'],
        ['uint8', 'bfloat16', 'uint8', 'float32', 'bfloat16'],
        ['float32', 'float32'],
    ],
    ids='+'.join,
)
def test_coalesced_mixed_dtypes(dtypes: list[str], held: bool, async_ops: bool) -> None:
    run_ranks(_coalesced, 2, dtypes, async_ops, held, timeout_s=240)


def _coalesced_on_gloo_alone(rank: int, world_size: int) -> bool:
    cpu.disable()
    try:
        _coalesced(rank, world_size, ['uint8', 'bfloat16'], True, False)
    except AssertionError:
        return False
    return True


@pytest.mark.stock_fault
def test_gloo_alone_corrupts_mixed_dtypes() -> None:
    """Why the manager is replaced; when this fails, torch has fixed it."""
    assert run_ranks(_coalesced_on_gloo_alone, 2) == [False, False]


def _uneven(rank: int, world_size: int, async_op: bool) -> None:
    import torch
    import torch.distributed as dist

    sizes = [3, 0, 5, 2][:world_size]
    group = dist.new_group()
    gathered = [torch.zeros(size) for size in sizes]
    handle = dist.all_gather(
        gathered, torch.full((sizes[rank],), float(rank)), group=group, async_op=async_op
    )
    assert (handle is not None) == async_op
    if async_op:
        handle.wait()
    assert [part.tolist() for part in gathered] == [[float(r)] * s for r, s in enumerate(sizes)]

    output = torch.zeros(sizes[rank])
    sources = [torch.full((size,), float(10 * r + rank)) for r, size in enumerate(sizes)]
    dist.reduce_scatter(output, sources)
    total = sum(10 * rank + r for r in range(world_size))
    assert output.tolist() == [float(total)] * sizes[rank]

    splits = torch.tensor([1, 2, 1, 1][:world_size])
    source = torch.arange(int(splits.sum())) + 100 * rank
    received = torch.zeros(world_size * int(splits[rank]), dtype=source.dtype)
    dist.all_to_all_single(received, source, splits[rank].repeat(world_size), splits)
    start = int(splits[:rank].sum())
    own = torch.arange(start, start + int(splits[rank]))
    assert torch.equal(received, torch.cat([own + 100 * r for r in range(world_size)]))


@pytest.mark.parametrize('async_op', [False, True], ids=['sync', 'async'])
def test_uneven_collectives(async_op: bool) -> None:
    run_ranks(_uneven, 3, async_op, timeout_s=240)


def _nccl_means_gloo(rank: int, world_size: int, backend: str | None, store: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        device_id=torch.device('cuda', rank),
    )
    groups = [
        dist.new_group(),
        dist.new_group([0, 1], backend='nccl', pg_options=object()),
        dist.new_group([0], None, 'nccl'),
    ]
    for group in [dist.group.WORLD, *(group for group in groups if dist.get_rank(group) >= 0)]:
        assert dist.get_backend(group) == 'gloo'
    one = torch.ones(1, device='cuda')
    dist.all_reduce(one, group=groups[1])
    assert one.item() == world_size


@pytest.mark.parametrize('backend', ['nccl', 'cpu:gloo,cuda:nccl', None])
def test_nccl_means_gloo(backend: str | None, tmp_path: Path) -> None:
    run_ranks(_nccl_means_gloo, 2, backend, str(tmp_path / 'store'), init=False)


def _sequence_parallel_norm(rank: int, world_size: int) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        sequence_parallel=True,
        tensor_model_parallel_size=2,
    )
    norm = WrappedTorchNorm(config=config, hidden_size=8)
    assert config.sequence_parallel
    assert all(param.sequence_parallel for param in norm.parameters())
    config.sequence_parallel = False
    norm = WrappedTorchNorm(config, 8)
    assert not any(hasattr(param, 'sequence_parallel') for param in norm.parameters())


def test_sequence_parallel_norm() -> None:
    run_ranks(_sequence_parallel_norm, 1, init=False)


def _torch_adam(rank: int, world_size: int) -> None:
    import copy

    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        module,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer='adam', lr=1e-2, use_distributed_optimizer=True), [model]
    )
    before_first_step = copy.deepcopy(optimizer.state_dict())
    assert {group['step'] for group in before_first_step['optimizer']['param_groups']} == {0.0}

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        finalize_model_grads([model])
        optimizer.step()

    def steps() -> list[float]:
        parts = getattr(optimizer, 'chained_optimizers', [optimizer])
        return [state['step'].item() for part in parts for state in part.optimizer.state.values()]

    step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(steps()) == {1.0}
    step()
    assert set(steps()) == {2.0}, 'every parameter must advance its own count'


def test_torch_adam_state() -> None:
    run_ranks(_torch_adam, 2)


def _groups_are_freed(rank: int, world_size: int) -> list[int]:
    from megatron.core import parallel_state

    open_files = []
    for _ in range(5):
        parallel_state.initialize_model_parallel()
        open_files.append(len(os.listdir('/proc/self/fd')))
        parallel_state.destroy_model_parallel()
    return open_files


def test_gloo_groups_are_freed() -> None:
    for open_files in run_ranks(_groups_are_freed, 2):
        assert open_files[-1] <= open_files[1] + 5, open_files

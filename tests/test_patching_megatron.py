"""install() and uninstall() on the real megatron: every order of import, exact revert, refusals."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    'megatron.core.distributed.param_and_grad_buffer': (
        '_ParamAndGradBuffer',
        '_ParamAndGradBucketGroup',
        'partition_buckets',
        'group_params_for_buffers',
        '_compute_default_per_buffer_param_layout',
    ),
    'megatron.core.distributed.distributed_data_parallel': ('DistributedDataParallel',),
    'megatron.core.optimizer.distrib_optimizer': ('DistributedOptimizer',),
    'megatron.core.distributed.finalize_model_grads': ('finalize_model_grads',),
}
ORDERS = [
    # I: install, U: uninstall, C: import megatron.core's users, T: import megatron.training
    *(''.join(p) for p in itertools.permutations('IUT') if p.index('I') < p.index('U')),
    'CIUT',
    'CITU',
    'ICTU',
    'IUCIUT',
    'CIUTIU',
    'ITUIU',
]
BY_DEFAULT = ['IUT', 'CITU', 'ICTU']
CACHES = ('__warningregistry__', '._abc_impl', ':_te_version', ':_torch_version')
"""Places that Python and megatron fill in when they are first asked."""


def _places() -> Iterator[tuple[str, Any]]:
    """Raw values of all variables, class attributes and defaults of all megatron.* modules."""
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition('.')[0] != 'megatron' or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            where = f'{module_name}:{name}'
            yield where, value
            members = [(where, value)]
            if isinstance(value, type) and value.__module__ == module_name:
                yield f'{where} bases', tuple(value.__bases__)
                members = [(f'{where}.{n}', v) for n, v in list(vars(value).items())]
                yield from members
            for place, member in members:
                function = getattr(member, '__func__', member)
                if isinstance(function, types.FunctionType):
                    for i, default in enumerate(function.__defaults__ or ()):
                        yield f'{place} default {i}', default
                    for key, default in (function.__kwdefaults__ or {}).items():
                        yield f'{place} ({key}=)', default


def _snapshot() -> dict[str, Any]:
    return dict(_places())


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        where
        for where in sorted({*before, *after})
        if before.get(where, before) is not after.get(where, after)
        and not (where.endswith(' bases') and before.get(where) == after.get(where))
        and not where.endswith(CACHES)
    ]


def _ours() -> list[str]:
    """Places in megatron.* that hold something of ours, CPU mode's repairs apart."""
    found = []
    for where, value in _places():
        scope = getattr(getattr(value, '__func__', value), '__globals__', {}).get('__name__')
        origin = getattr(value, '__module__', None)
        held = value if isinstance(value, tuple) else ()
        names = [scope, origin, *(getattr(item, '__module__', None) for item in held)]
        ours = [n for n in names if isinstance(n, str) and n.startswith('megatron_buffer')]
        if any(not name.startswith('megatron_buffer.cpu') for name in ours):
            found.append(where)
    return found


def _described() -> dict[str, str]:
    """What every place holds, in words that don't depend on the process."""
    return {
        where: f'{type(value).__name__} {getattr(value, "__module__", "")} '
        f'{getattr(value, "__qualname__", "")}'
        for where, value in _places()
        if callable(value) or where.endswith(' bases')
    }


def _follow(order: str) -> list[str]:
    """Runs one order in this process; returns what is wrong."""
    from megatron_buffer import patching

    wrong = []
    before: dict[str, Any] = {}
    user = types.ModuleType('a_user')
    for step in order:
        if step in 'CT':
            importlib.import_module(
                'megatron.core.optimizer' if step == 'C' else 'megatron.training.training'
            )
            from megatron.core.distributed import DistributedDataParallel

            vars(user)['ByValue'] = DistributedDataParallel
            sys.modules['a_user'] = user
        elif step == 'I':
            before = _snapshot()
            patching.install('upstream', training='T' in order.partition('I')[0])
            for module_name, names in TARGETS.items():
                module = importlib.import_module(module_name)
                for name in names:
                    value = vars(module)[name]
                    if not value.__module__.startswith('megatron_buffer.'):
                        wrong.append(f'{step}: {module_name}.{name} is {value}')
        else:
            patching.uninstall()
            now = _snapshot()
            wrong += _changed(before, {where: now[where] for where in before if where in now})
        if step == 'T' and order[: order.index(step)].count('I') > order[: order.index(step)].count(
            'U'
        ):
            training = sys.modules['megatron.training.training']
            if not training.DDP.__module__.startswith('megatron_buffer'):
                wrong.append('T: megatron.training imported stock DDP while installed')
    importlib.import_module('megatron.training.training')
    wrong += _ours()
    by_value = vars(user).get('ByValue')
    if by_value is not None and by_value.__module__.startswith('megatron_buffer'):
        wrong.append('a_user:ByValue is ours')
    return wrong


def _in_a_fork(order: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Follows an order in a child of this process; (what is wrong, all places, loaded modules)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            answer: Any = [_follow(order), _described(), list(sys.modules)]
        except BaseException as error:
            answer = [[f'{type(error).__name__}: {error}'], {}, []]
        with os.fdopen(writer, 'w') as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.load(pipe)
    os.waitpid(pid, 0)
    return tuple(answer)


def _main(orders: list[str]) -> None:
    """One child per order, from a process that has loaded everything but megatron; prints JSON."""
    import torch

    torch.set_num_threads(1)
    wrong, reference, modules = _in_a_fork('')
    found = {'': wrong}
    for name in modules:  # what takes the time is what megatron imports of others
        if name.partition('.')[0] not in ('megatron', 'megatron_buffer', '__main__'):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    for order in orders:
        wrong, described, _ = _in_a_fork(order)
        places = {*reference, *described}
        wrong += sorted(p for p in places if reference.get(p) != described.get(p))[:20]
        found[order] = wrong
    sys.stdout.write(json.dumps(found))


def _run_script(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code],
        cwd=ROOT,
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1', **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    'orders',
    [pytest.param(BY_DEFAULT, id='some'), pytest.param(ORDERS, id='every', marks=pytest.mark.slow)],
)
def test_orders_of_import_install_and_uninstall(orders: list[str]) -> None:
    answer = _run_script(f'from tests import test_patching_megatron as t; t._main({orders!r})')
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found == {order: [] for order in ['', *orders]}


def _install_and_revert(rank: int, world_size: int) -> list[str]:
    from megatron_buffer import patching

    modules = set(sys.modules)
    before = _snapshot()
    wrong = []
    for training in (False, True):
        patching.install('upstream', training=training)
        from megatron.training import arguments
        from megatron.training import training as loop
        from megatron.training.models import dist_utils

        ours = importlib.import_module('megatron_buffer.ddp').DistributedDataParallel
        held = [loop.DDP, dist_utils.DistributedDataParallel]
        held.append(loop.wrap_model_chunks_with_ddp.__kwdefaults__['DP'])
        if any(value is not ours for value in held):
            wrong.append(f'not all holders are exchanged: {held}')
        if arguments.parse_args.__code__.co_filename.endswith('launch.py') is not training:
            wrong.append(f'parse_args with training={training}: {arguments.parse_args}')
        patching.uninstall()
        wrong += _changed(before, {k: v for k, v in _snapshot().items() if k in before})
        wrong += _ours()
    new = {name for name in set(sys.modules) - modules if name.startswith('megatron.')}
    return wrong + sorted(new)


def test_revert_restores_every_name_and_method() -> None:
    assert run_ranks(_install_and_revert, 1) == [[]]


def _same_and_other_configs(rank: int, world_size: int) -> list[str]:
    from megatron_buffer import errors, patching

    told = []
    first = patching.install()
    before = _snapshot()
    second = patching.install('upstream')
    told += ['install again changed something'] * bool(_changed(before, _snapshot()))
    told += ['another object'] * (second is not first or patching.installed_config() is not first)
    other = {'schema_version': 1, 'bucketing': {'name': 'fixed_size', 'bucket_size_elems': 7}}
    try:
        patching.install(other)
        told.append('another config was accepted')
    except errors.PatchError as error:
        if 'upstream' not in str(error) or 'uninstall()' not in str(error):
            told.append(str(error))
    patching.install(training=True)
    patching.uninstall()
    patching.uninstall()
    told += ['still installed'] * (patching.installed_config() is not None)
    told += _ours()
    with patching.activated(other) as outer:
        with patching.activated(other) as inner:
            told += ['nesting made another config'] * (inner is not outer)
        told += ['the inner block uninstalled'] * (patching.installed_config() is not outer)
        try:
            with patching.activated('upstream'):
                told.append('another config was accepted inside')
        except errors.PatchError:
            pass
        told += ['the failing block uninstalled'] * (patching.installed_config() is not outer)
    told += ['activated() stays'] * (patching.installed_config() is not None)
    return told + _ours()


def test_idempotent_and_one_config_at_a_time() -> None:
    assert run_ranks(_same_and_other_configs, 1) == [[]]


def _living_models(rank: int, world_size: int) -> list[str]:
    from megatron_buffer import errors, patching
    from tests import small_model

    told = []
    stock = small_model.wrap(small_model.make_net())
    patching.install('upstream')
    model = small_model.wrap(small_model.make_net())
    told += [f'wrapped by {type(model)}'] * (type(model).__module__ != 'megatron_buffer.ddp')
    cycle: list[Any] = [model]
    cycle.append(cycle)
    try:
        patching.uninstall()
        told.append('uninstalled under a living model')
    except errors.LiveModelsError as error:
        told += [str(error)] * ('1 model' not in str(error) or 'Net' not in str(error))
    told += ['the refusal changed something'] * (small_model.ddp_class() is not type(model))
    del model, cycle
    patching.uninstall()
    told += ['stock model changed class'] * (type(stock) is not small_model.ddp_class())
    try:
        with patching.activated('upstream'):
            model = small_model.wrap(small_model.make_net())
            raise KeyError(type(model).__name__)
    except KeyError:
        pass
    told += ['stays installed after an error'] * (patching.installed_config() is not None)
    return told + _ours()


def test_living_models_are_named_and_keep_it_installed() -> None:
    assert run_ranks(_living_models, 1) == [[]]


def _changed_since(rank: int, world_size: int) -> list[str]:
    from megatron_buffer import errors, patching

    told = []
    patching.install('upstream', training=True)
    module = importlib.import_module('megatron.core.distributed.param_and_grad_buffer')
    ours = module.partition_buckets
    module.partition_buckets = threading.Thread
    installed = _snapshot()
    try:
        patching.uninstall()
        told.append('uninstalled')
    except errors.PatchError as error:
        told += [str(error)] * (
            'param_and_grad_buffer:partition_buckets is threading.Thread' not in str(error)
        )
    told += ['the refusal changed something'] * bool(_changed(installed, _snapshot()))
    module.partition_buckets = ours
    patching.uninstall()
    return told + _ours()


def test_somebody_elses_change_keeps_it_installed() -> None:
    assert run_ranks(_changed_since, 1) == [[]]


def _conflict_halfway(rank: int, world_size: int) -> list[str]:
    from megatron_buffer import errors, patching

    told = []
    finalize = importlib.import_module('megatron.core.distributed.finalize_model_grads')
    stock = finalize.finalize_model_grads
    finalize.finalize_model_grads = gc.collect
    ddp = importlib.import_module('megatron.core.distributed.distributed_data_parallel')
    cases = [(errors.PatchError, 'finalize_model_grads is gc.collect')]
    hook = ddp.DistributedDataParallel._make_backward_post_hook
    for kind, text in cases:
        before = _snapshot()
        try:
            patching.install('upstream')
            told.append('installed')
        except kind as error:
            told += [str(error)] * (text not in str(error))
        told += _changed(before, {k: v for k, v in _snapshot().items() if k in before})
    finalize.finalize_model_grads = stock
    ddp.DistributedDataParallel._make_backward_post_hook = lambda self, param: None
    before = _snapshot()
    try:
        patching.install('upstream')
        told.append('installed over a method that somebody replaced')
    except errors.FingerprintError as error:
        text = 'DistributedDataParallel._make_backward_post_hook is '
        told += [str(error)] * (text not in str(error) or 'compat' not in str(error))
    told += _changed(before, {k: v for k, v in _snapshot().items() if k in before})
    patching.install('upstream', compat='warn')
    patching.uninstall()
    ddp.DistributedDataParallel._make_backward_post_hook = lambda self, param: hook(self, param)
    patching.install('upstream')  # a wrapper that calls the original is no conflict
    patching.uninstall()
    ddp.DistributedDataParallel._make_backward_post_hook = hook
    told += ['something is installed'] * (patching.installed_config() is not None)
    return told + _ours()


def test_a_conflict_halfway_leaves_nothing_changed() -> None:
    assert run_ranks(_conflict_halfway, 1) == [[]]


def _threads(rank: int, world_size: int) -> list[str]:
    from megatron_buffer import patching

    told: list[str] = []

    def work() -> None:
        try:
            for _ in range(3):
                patching.install('upstream')
                patching.uninstall()
        except Exception as error:
            told.append(f'{type(error).__name__}: {error}')

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    patching.uninstall()
    return told + _ours()


@pytest.mark.long
def test_threads_take_turns() -> None:
    assert run_ranks(_threads, 1) == [[]]


def _measure(rank: int, world_size: int) -> list[Any]:
    from megatron_buffer import patching
    from megatron_buffer.patching import lifecycle

    patching.install('upstream')
    (transaction,) = lifecycle.installed_transactions()
    result = [transaction.sweep_seconds, len(transaction.edits), len(sys.modules)]
    patching.uninstall()
    return result


def test_the_sweep_is_quick() -> None:
    ((seconds, holders, modules),) = run_ranks(_measure, 1)
    assert modules > 2000
    assert holders >= 25
    assert seconds < 2.0, 'about 0.15 s when the machine is idle'


def _overridden(rank: int, world_size: int) -> list[str]:
    from megatron_buffer.patching.engine import Transaction
    from megatron_buffer.patching.sources import collect
    from megatron_buffer.patching.targets import CORE
    from megatron_buffer.patching.targets import TARGETS as TABLE

    transaction = Transaction([t for t in TABLE if t.group == CORE])
    transaction.prepare()
    known = collect()
    return [
        f'{one.target.symbol}.{name}'
        for one in transaction.resolved
        if isinstance(one.original, type)
        for name, value in vars(one.replacement).items()
        if callable(getattr(value, '__func__', value))
        and name in vars(one.original)
        and not (name.startswith('__') and name != '__init__')
        and f'{one.target.symbol}.{name}' not in known
    ]


def test_every_method_that_we_override_is_fingerprinted() -> None:
    assert run_ranks(_overridden, 1) == [[]]


@pytest.mark.parametrize('config', ['no_such_config', {'schema_version': 1, 'bucketting': 'x'}])
def test_a_wrong_config_is_refused_before_anything_is_imported(config: Any) -> None:
    code = (
        'import sys, megatron_buffer\n'
        'from megatron_buffer.errors import ConfigError\n'
        f'try: megatron_buffer.install({config!r})\n'
        'except ConfigError: print("refused", "torch" in sys.modules)\n'
    )
    assert _run_script(code).stdout.split() == ['refused', 'False']

"""The examples of other front ends: they train alike with stock Megatron and through our buffer."""

from __future__ import annotations

import contextlib
import importlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks

EXAMPLES = Path(__file__).resolve().parent.parent / 'scripts' / 'examples'

USER_MODULE = '''
from megatron.core.distributed import DistributedDataParallel as Wrapper, finalize_model_grads

REGISTRY = {'ddp': Wrapper}


def wrap(config, ddp_config, module, cls=Wrapper):
    return cls(config, ddp_config, module)
'''


def _example(rank: int, world_size: int, name: str, flags: list[str]) -> tuple[Any, str]:
    """Runs a script as torchrun would, in this process; its exit code and what it printed."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *flags]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(str(EXAMPLES / name), run_name='__main__')
        except SystemExit as end:
            return end.code, said.getvalue()
    return 0, said.getvalue()


@pytest.mark.parametrize(
    ('name', 'config'),
    [
        ('simple_loop.py', 'recommended'),
        ('builder.py', 'upstream'),
        pytest.param('simple_loop.py', 'upstream', marks=pytest.mark.slow),
        pytest.param('builder.py', 'recommended', marks=pytest.mark.slow),
    ],
)
def test_an_example_trains_as_with_stock(name: str, config: str) -> None:
    (code, said), (_, other) = run_ranks(_example, 2, name, ['--config', config, '--steps', '3'])
    assert code == 0, said
    assert other.strip() == '' or 'step' not in other, 'rank 0 alone prints'
    rows = [line.split() for line in said.splitlines() if line[:4].strip().isdigit()]
    assert [row[0] for row in rows] == ['1', '2', '3']
    assert [row[-1] for row in rows] == ['equal'] * 3
    losses = [float(row[1]) for row in rows]
    assert losses[-1] < losses[0], 'it learns'
    assert 4 < losses[0] < 6, 'near log(vocabulary size): the mean over tokens'
    assert said.rstrip().endswith(f'{config}: losses are equal, bit for bit')


def test_an_example_without_ours() -> None:
    (code, said), _ = run_ranks(_example, 2, 'simple_loop.py', ['--stock', '--steps', '2'])
    assert code == 0
    assert len(said.split('stock:')[1].split()) == 2


def test_an_example_refuses_a_wrong_config() -> None:
    results = run_ranks(_example, 1, 'simple_loop.py', ['--config', 'recomended'])
    assert results[0][0] == 2


def _imported_before(rank: int, world_size: int, folder: str) -> list[Any]:
    sys.path.insert(0, folder)
    user: Any = importlib.import_module('user_code_of_this_test')
    import megatron_buffer

    def seen() -> list[str]:
        held = [user.Wrapper, user.REGISTRY['ddp'], user.wrap.__defaults__[0]]
        return [f'{one.__module__}' for one in [*held, user.finalize_model_grads]]

    stock = seen()
    megatron_buffer.install('upstream')
    ours = seen()
    megatron_buffer.uninstall()
    return [stock, ours, seen()]


def test_names_that_user_code_imported_before_install(tmp_path: Path) -> None:
    """By value, under another name, in a dictionary and as a default argument."""
    (tmp_path / 'user_code_of_this_test.py').write_text(USER_MODULE)
    ((stock, ours, after),) = run_ranks(_imported_before, 1, str(tmp_path))
    assert stock == ['megatron.core.distributed.distributed_data_parallel'] * 3 + [
        'megatron.core.distributed.finalize_model_grads'
    ]
    assert ours == ['megatron_buffer.ddp'] * 3 + ['megatron_buffer.finalize']
    assert after == stock

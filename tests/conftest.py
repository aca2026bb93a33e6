"""Markers, the choice of what runs by default, and the reasons for what is skipped."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.te_cpu import location

settings.register_profile('shared machines', deadline=None)
settings.load_profile('shared machines')

MARKERS = {
    'long': 'too long for the default suite; runs with --long, or with --slow',
    'slow': 'part of the slow matrix; runs with --slow',
    'gpu': 'needs a CUDA GPU; skipped where there is none',
    'te': 'needs Transformer Engine (scripts/setup.sh --te); runs with -m te, skipped where it is missing',
    'stock_fault': "shows a fault of stock Megatron-Core, so that we notice when upstream's behaviour changes",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--long', action='store_true', help='run the tests marked long too')
    parser.addoption(
        '--slow', action='store_true', help='run the tests marked long, slow and te too'
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line('markers', f'{name}: {meaning}')


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker('gpu') for item in items) and not _has_gpu():
        for item in items:
            if item.get_closest_marker('gpu'):
                item.add_marker(pytest.mark.skip(reason='needs a CUDA GPU; none is visible here'))
    missing = location.missing()
    for item in items:
        if missing and item.get_closest_marker('te'):
            item.add_marker(pytest.mark.skip(reason=missing))
    # An expression (-m slow) or a test named in full (path::test) says itself what is wanted.
    if any('::' in str(argument) for argument in config.args):
        return
    wanted = set(re.findall(r'\w+', config.option.markexpr))
    wanted |= {'long'} if config.getoption('--long') else set()
    wanted |= {'long', 'slow', 'te'} if config.getoption('--slow') else set()
    wanted |= {'te'} if missing else set()  # to be listed as skipped, with the reason
    left_out = [
        item
        for item in items
        if any(item.get_closest_marker(name) for name in {'long', 'slow', 'te'} - wanted)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_report_header(config: pytest.Config) -> str:
    from importlib.metadata import version

    return f'torch {version("torch")}, megatron-core {version("megatron-core")}'


def _has_gpu() -> bool:
    """True if the driver shows a GPU; asks no torch.cuda function, which the CPU mode may have replaced."""
    return Path('/dev/nvidiactl').exists() and any(Path('/dev').glob('nvidia[0-9]*'))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a YAML file and returns its path as a string."""

    def write_file(text: str | bytes, name: str = 'x.yaml') -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_file

"""The collector is paused in a block, and as it was after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from megatron_buffer.collector import paused_collector


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_paused_within() -> None:
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_on_again_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), paused_collector():
        _ = 1 / 0
    assert gc.isenabled()


def test_whoever_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()

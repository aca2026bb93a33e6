"""What upstream's unit tests take from elsewhere, so that they run without it: test data, fused optimizers, TE.

For :mod:`megatron_buffer.testing.upstream_plugin`, in both arms alike. Upstream has no counterpart.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from pathlib import Path
from typing import Any

_DOWNLOADER = 'tests.test_utils.python_scripts.download_unit_tests_dataset'
_SPECS = 'megatron.core.models.gpt.gpt_layer_specs'
_RANDOM = 'megatron.core.tensor_parallel.random'


def skip_downloads() -> None:
    """Upstream's conftest downloads test data into /opt; the tests that we run need none."""

    def download_and_extract_asset(assets_dir: Path) -> bool:
        raise ImportError('test data are not downloaded')

    module = types.ModuleType(_DOWNLOADER)
    vars(module)['download_and_extract_asset'] = download_and_extract_asset
    sys.modules[_DOWNLOADER] = module


def accept_adam_without_lr() -> None:
    """``OptimizerConfig.lr`` is None in many tests: fused optimizers take that, torch's Adam does not.

    The learning rate is then set per parameter group, or no step is made.
    """
    import torch

    init = torch.optim.Adam.__init__  # AdamW's too

    @functools.wraps(init)
    def init_with_lr(self: Any, params: Any, lr: Any = 1e-3, *args: Any, **kwargs: Any) -> None:
        init(self, params, 0.0 if lr is None else lr, *args, **kwargs)

    torch.optim.Adam.__init__ = init_with_lr


def use_local_layers() -> None:
    """``get_gpt_layer_with_transformer_engine_submodules``: Megatron's own layers where TE is not installed.

    Options that only TE's layers have are left out.
    """
    specs: Any = importlib.import_module(_SPECS)
    if specs.HAVE_TE:
        return
    fused = specs.get_gpt_layer_with_transformer_engine_submodules
    local = specs.get_gpt_layer_local_submodules
    known = inspect.signature(local).parameters
    signature = inspect.signature(fused)

    @functools.wraps(fused)
    def local_instead(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return local(**{name: value for name, value in given.items() if name in known})

    specs.get_gpt_layer_with_transformer_engine_submodules = local_instead
    _allow_unseeded_weights()


def _allow_unseeded_weights() -> None:
    """``CudaRNGStatesTracker.fork``: tests that build TE's layers need not seed the tracker first."""
    tracker: Any = importlib.import_module(_RANDOM).CudaRNGStatesTracker
    fork = tracker.fork

    @functools.wraps(fork)
    def fork_if_seeded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return fork(self, *args, **kwargs) if self.states_ else contextlib.nullcontext()

    tracker.fork = fork_if_seeded

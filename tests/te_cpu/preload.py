"""What the fork server of the tests marked ``te`` imports: TE on its CPU stand-in, then all that others import."""

import importlib
import os
import sys
import traceback
from typing import Any

from tests.te_cpu import extension, location

_failure: str | None = None


def _load() -> None:
    sys.path.insert(0, str(location.folder()))
    extension.install()
    # TE compiles what it can at import time: there is no compiler for it here.
    os.environ['NVTE_TORCH_COMPILE'] = '0'
    importlib.import_module('megatron_buffer.testing.preload').check()
    _dequantize_on_cpu()
    _use_torch_optimizers()


def _dequantize_on_cpu() -> None:
    """TE moves these two to a GPU and back around its kernel."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import _FromMXFP8Func
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import _FromNVFP4Func

    from tests.te_cpu.kernels import dequantize

    def forward(ctx: Any, tensor: Any, dtype: Any) -> Any:
        return dequantize(tensor, TE_DType[dtype])

    for function in (_FromMXFP8Func, _FromNVFP4Func):
        function.forward = staticmethod(forward)


def _use_torch_optimizers() -> None:
    """Where TE can be imported Megatron takes its FusedAdam, which runs on GPUs only."""
    optimizers: Any = importlib.import_module('megatron.core.optimizer')
    optimizers.USING_PYTORCH_OPTIMIZER = True
    distributed: Any = importlib.import_module('megatron.core.optimizer.distrib_optimizer')
    distributed.HAVE_APEX_OR_TE = False
    distributed.USING_TE_OPTIMIZER = False


def check() -> None:
    """Raise what went wrong while the fork server loaded this module, if anything did."""
    if _failure is not None:
        raise RuntimeError(f'tests.te_cpu.preload failed in the fork server:\n{_failure}')


try:
    _load()
except BaseException:
    _failure = traceback.format_exc()

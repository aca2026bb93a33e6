"""A stand-in for the compiled module ``transformer_engine_torch``: its enums, and kernels in pure torch."""

from __future__ import annotations

import enum
import importlib.machinery
import os
import sys
import types
from typing import Any

from tests.te_cpu import kernels, nvfp4

# Values of transformer_engine.h; TE's Python part asserts that its own enum has the same members.
DTYPES = {
    'kByte': 0,
    'kInt32': 2,
    'kFloat32': 4,
    'kFloat16': 5,
    'kBFloat16': 6,
    'kFloat8E4M3': 7,
    'kFloat8E5M2': 8,
    'kFloat4E2M1': 10,
}
_GEMMS = (1, 2, 3)
_FORWARD = [f'GEMM{i}_{name}' for i in _GEMMS for name in ('INPUT', 'WEIGHT', 'OUTPUT')]
_BACKWARD = [f'GRAD_{name}{i}' for i in _GEMMS for name in ('OUTPUT', 'INPUT')]
# Named at import time of TE's attention and communication modules; no test calls what they stand for.
_OTHER_ENUMS = (
    *('NVTE_QKV_Layout', 'NVTE_QKV_Format', 'NVTE_Bias_Type', 'NVTE_Mask_Type'),
    *('NVTE_Softmax_Type', 'NVTE_Activation_Type', 'CommOverlapType', 'CommOverlapAlgo'),
)
_OTHER_CLASSES = ('CommOverlap', 'CommOverlapP2P', 'CommOverlapHelper', 'CommOverlapBase')


class _MissingKernel:
    """A function of the compiled module that has no reference version here."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> int:
        if name.startswith('_') or not name[0].isupper():
            raise AttributeError(name)
        return sum(map(ord, name))  # a member of an enum that is only named

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f'transformer_engine_torch.{self.__name__} has no reference kernel in tests/te_cpu; it needs '
            'the compiled extension and a GPU'
        )


class _Extension(types.ModuleType):
    """The module; what it lacks can be imported, and says so when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        made = _MissingKernel(name)
        setattr(self, name, made)
        return made


class _EnumOfAnything(type):
    """An enum whose members are only compared with each other."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith('__'):
            raise AttributeError(name)
        return sum(ord(c) << (i % 16) for i, c in enumerate(name))


class FP8TensorMeta:
    """Scale and amax history of a module, for delayed scaling."""

    def __init__(self) -> None:
        self.scale = None
        self.amax_history = None


def install() -> types.ModuleType:
    """Puts the stand-in where ``import transformer_engine_torch`` finds it; before TE is imported.

    Returns:
        The module.
    """
    module: Any = _Extension('transformer_engine_torch')
    module.DType = enum.IntEnum('DType', DTYPES)
    module.FP8FwdTensors = enum.IntEnum('FP8FwdTensors', _FORWARD, start=0)
    module.FP8BwdTensors = enum.IntEnum('FP8BwdTensors', _BACKWARD, start=0)
    module.FP8TensorMeta = FP8TensorMeta
    module.NVTE_Fused_Attn_Backend = enum.IntEnum(
        'NVTE_Fused_Attn_Backend',
        {'NVTE_No_Backend': -1, 'NVTE_F16_arbitrary_seqlen': 1, 'NVTE_FP8': 2},
    )
    for name in _OTHER_ENUMS:
        setattr(module, name, _EnumOfAnything(name, (), {'__module__': module.__name__}))
    for name in _OTHER_CLASSES:
        setattr(module, name, type(name, (), {}))
    for kernel in (*kernels.KERNELS, *nvfp4.KERNELS):
        setattr(module, kernel.__name__, kernel)
    module.__all__ = [name for name in vars(module) if not name.startswith('_')]
    sys.modules[module.__name__] = module
    # TE's own switch, for its build: it keeps it from loading the CUDA libraries.
    os.environ['NVTE_PROJECT_BUILDING'] = '1'
    sys.meta_path.insert(0, _CommonFinder())
    return module


class _CommonLoader(importlib.machinery.SourceFileLoader):
    """Loads ``transformer_engine.common``, which then does not look for the compiled module's file."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        vars(module)['load_framework_extension'] = lambda framework: None


class _CommonFinder:
    """Finds ``transformer_engine.common`` for that loader."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != 'transformer_engine.common':
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _CommonLoader(spec.loader.name, spec.loader.path)
        return spec

"""Compares the stand-in's names and enums with the compiled module's; for ``scripts/build_te.sh``."""

from __future__ import annotations

import sys

from tests.te_cpu import extension, kernels, nvfp4

_ENUMS = ('DType', 'FP8FwdTensors', 'FP8BwdTensors')


def main() -> int:
    """Prints what differs; returns the exit code."""
    import transformer_engine.pytorch  # noqa: F401  # loads the compiled module
    import transformer_engine_torch as compiled

    if not getattr(compiled, '__file__', None):
        print('compare_compiled: transformer_engine_torch is not the compiled module')
        return 2
    ours = extension.install()
    wrong = []
    for name in _ENUMS:
        theirs = {k: int(v) for k, v in getattr(compiled, name).__members__.items()}
        mine = {k: int(v) for k, v in getattr(ours, name).__members__.items()}
        if mine != theirs:
            wrong.append(f'{name}: {sorted(mine.items() ^ theirs.items())}')
    for kernel in (*kernels.KERNELS, *nvfp4.KERNELS):
        if not callable(getattr(compiled, kernel.__name__, None)):
            wrong.append(f'no function {kernel.__name__}')
    print('\n'.join(wrong) or f'{compiled.__file__}: enums and functions are as in tests/te_cpu')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())

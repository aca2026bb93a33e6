#!/usr/bin/env bash
# Compiles Transformer Engine 2.18.0 into .venv/te-compiled and compares it with the stand-in of tests/te_cpu.
# Needs a CUDA 13 toolkit with nvcc (CUDA_HOME) and a C++ compiler, but no GPU. Some 15 minutes on 2 cores.
#
# usage: CUDA_HOME=/usr/local/cuda scripts/build_te.sh
#   MAX_JOBS=N   compile N files at a time (default 2; each takes up to 3 GB of memory)
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"

die() {
    printf 'build_te: %s\n' "$1" >&2
    exit 2
}
[ $# -eq 0 ] || die "takes no arguments; found: $*"
[ -n "${CUDA_HOME:-}" ] || die "CUDA_HOME is not set: expected the folder of a CUDA 13 toolkit"
[ -x "$CUDA_HOME/bin/nvcc" ] || die "CUDA_HOME is $CUDA_HOME, which has no bin/nvcc"
command -v c++ >/dev/null || die "there is no C++ compiler: apt-get install build-essential"

"$root/scripts/setup.sh" --te
python=$root/.venv/bin/python
target=$root/.venv/te-compiled
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$(sed -n 's/^transformer_engine==//p' constraints-te.txt)
tools=$(mktemp -d)
trap 'rm -rf -- "$tools"' EXIT

"$python" -m pip install --quiet --target "$tools" wheel pybind11 ninja
rm -rf -- "$target"
PATH=$tools/bin:$PATH PYTHONPATH=$tools \
    NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-2} \
    CPATH=$site/nvidia/cudnn/include:$site/nvidia/nccl/include:$site/nvidia/cu13/include \
    "$python" -m pip install --no-build-isolation --no-deps --target "$target" \
    "transformer_engine==$version" "transformer_engine_cu13==$version" "transformer_engine_torch==$version"

# Without a driver the libraries still ask for one: an empty one will do for importing.
if ! "$python" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then
    echo '' | c++ -x c++ -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$target/libcuda.so.1" -
fi
LD_LIBRARY_PATH=$target:${LD_LIBRARY_PATH:-} PYTHONPATH=$target:$root/.venv/te:$root \
    "$python" -m tests.te_cpu.compare_compiled

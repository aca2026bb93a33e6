#!/usr/bin/env bash
# Runs upstream's own unit tests, unmodified, first on stock Megatron-Core and then through our buffer, and
# compares them test by test. Needs a checkout of Megatron-LM at the tag of the installed megatron-core.
#
# usage: scripts/run_upstream_tests.sh --megatron-lm PATH [--config x.yaml] [--nproc N] [--only PATTERN]
#                                      [--timeout S] [--out DIR] [--json FILE] [--list] [--python PATH]
#   --python PATH  the interpreter to use, with the megatron-core to test (default: .venv)
# --help explains the others. Example, for megatron-core 0.19.x:
#   git clone --depth 1 --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM ../Megatron-LM
#   scripts/run_upstream_tests.sh --megatron-lm ../Megatron-LM
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=''
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --python)
            [ $# -ge 2 ] || { echo 'run_upstream_tests.sh: error: --python needs the path of an interpreter' >&2; exit 2; }
            python=$2
            shift
            ;;
        --python=*) python=${1#--python=} ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
if [ -z "$python" ]; then
    "$root/scripts/setup.sh" >&2
    python=$root/.venv/bin/python
elif ! command -v -- "$python" >/dev/null; then
    echo "run_upstream_tests.sh: error: --python $python cannot be run" >&2
    exit 2
fi
# -P: the current folder may be a checkout, and is not to be imported from.
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m megatron_buffer.testing.upstream_suite "${arguments[@]}"

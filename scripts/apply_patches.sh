#!/usr/bin/env bash
# Adds --use-custom-buffer to a checkout of Megatron-LM, so that its scripts need no launcher; see patches/README.md.
#
# usage: scripts/apply_patches.sh --megatron-lm PATH [--check | --revert]
#   --check   say whether the tree can be patched or is patched; change nothing
#   --revert  restore the exact bytes of upstream
#
# Needs Python 3.9 or newer and nothing else. A tree with unknown files is left as it is (exit code 2).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$root/scripts/apply_patches.py" "$@"

#!/usr/bin/env bash
# Runs the default test suite; does the set-up first where that is needed.
#
# usage: scripts/test.sh [--slow] [any pytest argument]
#   --slow   add the slow matrix
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd -- "$root"
exec .venv/bin/python -m pytest "$@"

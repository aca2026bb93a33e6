#!/usr/bin/env bash
# Runs the default test suite; does the set-up first where that is needed.
#
# usage: scripts/test.sh [--long] [--slow] [any pytest argument]
#   --long   add what takes too long for every run; .ci/run adds it
#   --slow   add the slow matrix, and the tests with Transformer Engine, too
#
# Tests are spread over the cores, up to 8 at a time, each of which may start up to 4 processes of its own;
# -n 0 runs them one after the other.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd -- "$root"
cores=$(nproc)
exec .venv/bin/python -m pytest --durations 25 -n $((cores < 8 ? cores : 8)) --dist worksteal "$@"

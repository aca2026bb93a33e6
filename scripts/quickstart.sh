#!/usr/bin/env bash
# Trains a small GPT twice on 2 processes, with stock Megatron and with our buffer, and compares every bit.
# Does the set-up first where that is needed.
#
# usage: scripts/quickstart.sh [arguments of scripts/quickstart.py; --help lists them]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
cd -- "$root"
exec .venv/bin/python scripts/quickstart.py "$@"

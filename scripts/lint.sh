#!/usr/bin/env bash
# Formatter, linters and type checker, as CI runs them; installs the developers' tools where they are missing.
#
# usage: scripts/lint.sh [--fix]
#   --fix   let black and ruff change the files
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh" --dev
cd -- "$root"
bin=.venv/bin
failed=0

check() {
    printf '== %s\n' "$*"
    "$bin/$1" "${@:2}" || failed=1
}

if [ "${1:-}" = --fix ]; then
    check ruff check --fix .
    check black --quiet .
else
    check ruff check .
    check black --check --quiet --diff .
fi
check shellcheck scripts/*.sh .ci/run
check pyright
exit $failed

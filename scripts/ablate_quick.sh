#!/usr/bin/env bash
# Runs a small sweep on 2 gloo ranks and writes its report; some 3 minutes on 2 idle cores. A sweep that is named
# runs as a whole.
# Does the set-up first where that is needed. Stopped, it goes on where it was.
#
# usage: scripts/ablate_quick.sh [SWEEP] [any argument of megatron-buffer ablate]
#   SWEEP  name of a shipped sweep or a YAML file (default: three arms of order); results go to ablation-SWEEP, or to -o RUN_DIR
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
command=$root/.venv/bin/megatron-buffer

sweep=order
arms=(--arm stock --arm reverse --arm random)
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    sweep=$1
    arms=()
    shift
fi
name=$(basename -- "$sweep")
folder=ablation-${name%.*}
arguments=("${arms[@]}" "$@")
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) exec "$command" ablate --help ;;
        --dry-run) exec "$command" ablate "$sweep" "${arguments[@]}" ;;
        -o | --output) folder=${2:-} ;;
        --output=*) folder=${1#*=} ;;
        -o?*) folder=${1#-o} ;;
    esac
    shift
done

code=0
"$command" ablate "$sweep" "${arguments[@]}" || code=$?
# Also of a sweep in which a run has failed (1), but not of bad input or a sweep that was stopped.
[ "$code" -le 1 ] || exit "$code"
"$command" report "$folder" || [ $? -eq 1 ] || exit 2
exit "$code"

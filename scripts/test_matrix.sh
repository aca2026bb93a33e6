#!/usr/bin/env bash
# Runs the test suite once per version of megatron-core, each in an environment of its own under .venvs/.
#
# usage: scripts/test_matrix.sh [VERSION ...] [-- any pytest argument]
#   VERSION  of megatron-core, exactly as the package registry has it (default: 0.18.2 0.19.2)
#
# An environment holds megatron-core only and takes everything else, torch too, from .venv (made by
# scripts/setup.sh where it is missing); so each costs some 20 MB. They are kept, and used again. Tests are
# spread over the cores as scripts/test.sh does it.
# Exit code: 0 if the suite passes with every version, 1 if not, 2 for bad input.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
unset PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say_error() { printf 'test_matrix: error: %s\n' "$1" >&2; }

versions=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        [0-9]*.[0-9]*.[0-9]*) versions+=("$1") ;;
        *)
            say_error "$1 is not a version such as 0.19.2; arguments of pytest come after --"
            exit 2
            ;;
    esac
    shift
done
[ ${#versions[@]} -gt 0 ] || versions=(0.18.2 0.19.2)

# The megatron-core that an environment would import.
installed() {
    "$1/bin/python" -c 'import importlib.metadata as m; print(m.version("megatron-core"))' 2>/dev/null || true
}

# .venvs/VERSION: a bare environment with megatron-core in core/, which comes before .venv's packages.
make_environment() {
    local version=$1 venv=.venvs/$1 site
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if [ "$(cat -- "$venv/.complete" 2>/dev/null)" = "$site" ] && [ "$(installed "$venv")" = "$version" ]; then
        return 0
    fi
    rm -rf -- "$venv"
    mkdir -p -- "$venv"
    .venv/bin/python -m venv --without-pip "$venv" || return 1
    if ! .venv/bin/python -m pip install --quiet --progress-bar off --no-deps --target "$venv/core" \
        "megatron-core==$version" >"$venv.log" 2>&1; then
        rm -rf -- "$venv"
        if grep -q 'No matching distribution' -- "$venv.log"; then
            say_error "the package registry has no megatron-core $version for this Python"
        else
            tail -n 5 -- "$venv.log" >&2
            say_error "megatron-core $version could not be installed; pip's last lines are above"
        fi
        return 1
    fi
    # A folder named in a .pth file does not have its own .pth files read: the last line is for those of .venv,
    # where an editable installation is one.
    {
        printf '%s\n' "$root/$venv/core" "$site" "$root"
    } >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megatron_buffer_matrix.pth"
    if [ "$(installed "$venv")" != "$version" ]; then
        say_error "$venv has megatron-core $(installed "$venv") instead of $version; remove it and try again"
        return 1
    fi
    printf '%s\n' "$site" >"$venv/.complete"
}

scripts/setup.sh
for version in "${versions[@]}"; do
    make_environment "$version" || exit 2
done
cores=$(nproc)
spread=(-n $((cores < 8 ? cores : 8)) --dist worksteal)
rows=()
failed=0
for version in "${versions[@]}"; do
    printf '\n==== megatron-core %s\n' "$version"
    begin=$SECONDS
    log=.venvs/$version.log
    if .venvs/"$version"/bin/python -m pytest "${spread[@]}" "$@" 2>&1 | tee -- "$log"; then
        result=passed
    else
        result=FAILED
        failed=1
    fi
    last=$(grep -E '(passed|failed|error|skipped|no tests ran).* in [0-9.]+' -- "$log" | tail -n 1 | tr -d '=' || true)
    rows+=("$version|$result|${last:-no summary} ($((SECONDS - begin)) s)")
done

printf '\n%-16s %-16s %s\n' megatron-core result tests
for row in "${rows[@]}"; do
    IFS='|' read -r version result last <<<"$row"
    printf '%-16s %-16s %s\n' "$version" "$result" "$last"
done
exit $failed

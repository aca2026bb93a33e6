#!/usr/bin/env bash
# Makes .venv and installs megatron-buffer in it, editable, with the versions of constraints.txt.
#
# usage: scripts/setup.sh [--dev] [--te] [--force] [--python PATH]
#   --dev          install the developers' tools too (black, ruff, pyright, build, pre-commit)
#   --te           put Transformer Engine's Python part in .venv/te, for the tests marked "te"; compiles nothing
#   --force        remove .venv and make it anew
#   --python PATH  use this interpreter instead of looking for one
#
# Safe to run again: where nothing has changed it returns at once. What a killed run left is repaired.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
unset PYTHONPATH PYTHONHOME
# "pip install --user" as a personal default would fail inside an environment.
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

venv=.venv
owned=$venv/.made-by-setup   # we made this environment, so we may remove it
stamp=$venv/.setup-complete  # what it was installed from; written last
log=$venv/setup.log
oldest=12                    # Python 3.x; megatron-core has wheels for these two
newest=13

extras='test'
te=no
force=no
wanted=""

say() { printf '%s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '%s\n' "${@:2}" >&2
    exit 1
}
usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }

while [ $# -gt 0 ]; do
    case $1 in
        --dev) extras='test,dev' ;;
        --te) te=yes ;;
        --force) force=yes ;;
        --python)
            [ $# -ge 2 ] || die "--python needs the path of an interpreter"
            wanted=$2
            shift
            ;;
        --python=*) wanted=${1#--python=} ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            die "unknown argument: $1"
            ;;
    esac
    shift
done

# ---------------------------------------------------------------- which interpreter

rejected="" # one line for each candidate that won't do, for the message at the end
found=""
found_maker=""

# Sets found and found_maker if $1 runs, is new enough and can make an environment. pyenv puts a
# python3.12 on PATH that exists but fails, hence running each candidate instead of trusting its name.
consider() {
    local python=$1 version
    [ -n "$python" ] || return 1
    if ! version=$("$python" -c 'import sys; print("%d %d" % sys.version_info[:2])' 2>/dev/null); then
        rejected+="  $python: does not run"$'\n'
        return 1
    fi
    if [ "${version% *}" != 3 ] || [ "${version#* }" -lt $oldest ] || [ "${version#* }" -gt $newest ]; then
        rejected+="  $python: is Python ${version/ /.}"$'\n'
        return 1
    fi
    if ! "$python" -c 'import ssl, ctypes' >/dev/null 2>&1; then
        rejected+="  $python: was built without ssl or ctypes"$'\n'
        return 1
    fi
    if "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        found_maker=venv
    elif command -v uv >/dev/null 2>&1; then
        found_maker=uv
    else
        rejected+="  $python: can't make environments; on Debian and Ubuntu: apt-get install python${version/ /.}-venv"$'\n'
        return 1
    fi
    found=$python
}

find_python() {
    local minor name path dir
    if [ -n "$wanted" ]; then
        consider "$wanted" && return 0
        die "--python $wanted can't be used:" "$rejected"
    fi
    for ((minor = oldest; minor <= newest; minor++)); do
        while IFS= read -r path; do
            consider "$path" && return 0
        done < <(type -ap "python3.$minor" 2>/dev/null | awk '!seen[$0]++')
    done
    for name in python3 python; do
        while IFS= read -r path; do
            consider "$path" && return 0
        done < <(type -ap "$name" 2>/dev/null | awk '!seen[$0]++')
    done
    for dir in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        [ -n "$dir" ] && [ -d "$dir/versions" ] || continue
        for ((minor = oldest; minor <= newest; minor++)); do
            for path in "$dir/versions/3.$minor"*/bin/python; do
                [ -x "$path" ] && consider "$path" && return 0
            done
        done
    done
    if command -v uv >/dev/null 2>&1; then
        path=$(UV_PYTHON_DOWNLOADS=never uv python find --no-project ">=3.$oldest,<3.$((newest + 1))" 2>/dev/null || true)
        consider "$path" && return 0
    fi
    printf 'setup: no usable Python 3.%s to 3.%s was found. Looked at:\n%s' $oldest $newest "$rejected" >&2
    die "install one and run this again, for instance:" \
        "  Ubuntu 24.04:       apt-get install python3.12 python3.12-venv" \
        "  Debian 13:          apt-get install python3 python3-venv" \
        "  with pyenv:         pyenv install 3.12" \
        "  with uv:            uv python install 3.12" \
        "or name one:  scripts/setup.sh --python PATH"
}

# ---------------------------------------------------------------- is there anything to do

# All that the environment's content follows from, the extras aside. The folder is part of it since
# scripts in an environment hold absolute paths.
fingerprint() {
    printf '%s\n' "$root"
    "$venv/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null
    cat -- pyproject.toml constraints.txt
}
digest() { fingerprint | sha256sum | cut -d ' ' -f 1; }

is_complete() {
    [ -f "$stamp" ] && [ -x "$venv/bin/python" ] || return 1
    local have_digest have_extras extra
    { read -r have_digest && read -r have_extras; } <"$stamp" || return 1
    [ "$have_digest" = "$(digest)" ] || return 1
    for extra in ${extras//,/ }; do
        case ",$have_extras," in *",$extra,"*) ;; *) return 1 ;; esac
    done
    extras=$have_extras
    [ -z "$wanted" ] || same_interpreter
}

# ---------------------------------------------------------------- making it

# True if the .venv that is there can be kept and brought up to date by pip.
fits() {
    "$venv/bin/python" - "$oldest" "$newest" >/dev/null 2>&1 <<'PY' || return 1
import sys, pip
major, minor = sys.version_info[:2]
sys.exit(not (major == 3 and int(sys.argv[1]) <= minor <= int(sys.argv[2])))
PY
    [ -z "$wanted" ] || same_interpreter
}
same_interpreter() {
    local ask='import sys; print(sys._base_executable)'
    [ "$("$venv/bin/python" -c "$ask")" -ef "$("$wanted" -c "$ask")" ]
}

# What to do with a .venv that is there but not complete.
clear_away() {
    if [ ! -e "$venv" ] && [ ! -L "$venv" ]; then return 0; fi
    if [ "$force" = yes ]; then
        say "removing .venv (--force)"
    elif [ ! -e "$owned" ]; then
        fits || die ".venv exists, was not made by this script, and has no Python 3.$oldest to 3.$newest with pip." \
            "Remove it, or let this script do so:  scripts/setup.sh --force"
        say "using the .venv that is there; this script did not make it"
        return 0
    elif [ ! -f "$stamp" ]; then
        say "removing a .venv that an earlier set-up left unfinished"
    elif [ "$(cat -- "$owned")" != "$root" ] || ! fits; then
        say "removing a .venv that was made in another folder or by another interpreter"
    else
        return 0 # ours and whole, only out of date
    fi
    rm -rf -- "$venv"
}

make_venv() {
    [ ! -e "$venv" ] || return 0
    local free_kb
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    if [ "${free_kb:-0}" -lt 9000000 ]; then
        say "note: $((free_kb / 1000000)) GB are free here; .venv takes 6 GB and its downloads 3 GB for a while"
    fi
    find_python
    say "[1/3] $("$found" --version) at $found"
    say "[2/3] making .venv with ${found_maker/venv/python -m venv}"
    mkdir -- "$venv"
    printf '%s\n' "$root" >"$owned"
    if [ "$found_maker" = venv ]; then
        "$found" -m venv "$venv" || die "'$found -m venv' failed; see above"
    else
        uv venv --quiet --allow-existing --seed --python "$found" "$venv" || die "'uv venv' failed; see above"
    fi
}

# pip's output cut down to one line for each package, with the seconds since the start.
progress() {
    local line count
    SECONDS=0
    while IFS= read -r line; do
        case $line in
            *Downloading*.metadata*) ;;
            *Downloading\ *) printf '      %4ds  %s\n' $SECONDS "${line#*Downloading }" ;;
            Installing\ collected\ packages:*)
                count=${line//[^,]/}
                count=$((${#count} + 1))
                printf '      %4ds  unpacking: %d new%s\n' $SECONDS $count "$([ $count -lt 20 ] || echo ' (the longest step, a minute or more)')"
                ;;
        esac
    done
}

explain_failure() {
    printf 'setup: pip failed. Its last lines (all of it: %s):\n' "$root/$log" >&2
    tail -n 25 -- "$log" | sed 's/^/    /' >&2
    if grep -qi 'no space left' "$log"; then
        die "the disk is full: .venv needs 6 GB here, and pip as much again for a moment in ${TMPDIR:-/tmp}"
    elif grep -qiE 'connection (refused|reset|error|broken)|newconnectionerror|timed out|temporary failure|sslerror' "$log"; then
        die "the package registry could not be reached." \
            "Behind a proxy set https_proxy; for a mirror: pip config set global.index-url URL"
    elif grep -qiE 'could not find a version|no matching distribution|resolutionimpossible' "$log"; then
        die "the package registry does not have what constraints.txt asks for, or pip is held to other versions." \
            "'pip config list' shows the registry in use and any constraint of this machine"
    elif grep -qiE "error: command '[^']*(gcc|cc|c\+\+)|python\.h" "$log"; then
        die "a package had to be compiled: install a C compiler and the Python headers (apt-get install build-essential python3-dev)"
    fi
    die "run scripts/setup.sh again; if it fails the same way, scripts/setup.sh --force"
}

run_pip() {
    local pins=()
    # keep the extras that are there already
    if [ -f "$stamp" ] && [ "$(sed -n 2p -- "$stamp")" = test,dev ]; then extras='test,dev'; fi
    rm -f -- "$stamp"
    if [ -s constraints.txt ]; then pins=(-c constraints.txt); fi
    say "[3/3] installing megatron-buffer[$extras] with torch and megatron-core (some 3 GB of downloads the first time)"
    if ! "$venv/bin/python" -m pip install --progress-bar off "${pins[@]}" -e ".[$extras]" 2>&1 |
        tee -- "$log" | progress; then
        explain_failure
    fi
    { digest && printf '%s\n' "$extras"; } >"$stamp.new"
    mv -- "$stamp.new" "$stamp"
}

# A folder of its own, on no path: with Transformer Engine importable Megatron-Core imports other code.
install_te() {
    local want
    want=$({ "$venv/bin/python" -c 'import sys; print(sys.version)' && cat -- constraints-te.txt; } | sha256sum)
    if [ -f "$venv/te/.complete" ] && [ "$(cat -- "$venv/te/.complete")" = "$want" ]; then
        say "set-up: Transformer Engine in .venv/te is up to date"
        return 0
    fi
    say "installing Transformer Engine's Python part in .venv/te (some 15 MB of downloads)"
    rm -rf -- "$venv/te" "$venv/te.new"
    if ! "$venv/bin/python" -m pip install --progress-bar off --no-deps --target "$venv/te.new" \
        -r constraints-te.txt 2>&1 | tee -- "$log" | progress; then
        explain_failure
    fi
    printf '%s\n' "$want" >"$venv/te.new/.complete"
    mv -- "$venv/te.new" "$venv/te"
}
finish() {
    if [ "$te" = yes ]; then install_te; fi
    exit 0
}

# Two set-ups at a time would trip over each other; the second one waits and then finds it done.
if command -v flock >/dev/null 2>&1; then
    exec 9<"${BASH_SOURCE[0]}"
    if ! flock -n 9; then
        say "another set-up is running here; waiting for it"
        flock 9
    fi
fi

start=$(date +%s)
if [ "$force" = no ] && is_complete; then
    say "set-up: .venv is up to date"
    finish
fi
clear_away
make_venv
run_pip
say "set-up: done in $(($(date +%s) - start)) s; .venv has $("$venv/bin/python" --version), extras: $extras"
finish

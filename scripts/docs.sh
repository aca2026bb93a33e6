#!/usr/bin/env bash
# Builds the documentation site in .venv/site; a broken link is an error. Does the set-up first where that is needed.
#
# usage: scripts/docs.sh [--serve] [--out DIR]
#   --serve     show the site at http://127.0.0.1:8000 instead, built anew whenever a page is saved
#   --out DIR   build it in this folder
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }

serve=no
out=$root/.venv/site
while [ $# -gt 0 ]; do
    case $1 in
        --serve) serve=yes ;;
        --out)
            [ $# -ge 2 ] || { echo 'docs: --out needs a folder' >&2 && exit 2; }
            out=$(realpath -m -- "$2")
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            usage >&2
            echo "docs: unknown argument: $1" >&2
            exit 2
            ;;
    esac
    shift
done

"$root/scripts/setup.sh"
cd -- "$root"
python=.venv/bin/python
stamp=.venv/.docs-complete # what the tools were installed from
want=$(cat -- pyproject.toml constraints.txt | sha256sum)
if [ "$(cat -- "$stamp" 2>/dev/null)" != "$want" ] || ! "$python" -c 'import material, mkdocstrings' 2>/dev/null; then
    echo 'installing the tools that build the site (some 15 MB of downloads)'
    "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
    printf '%s\n' "$want" >"$stamp"
fi

# The theme's remark about another program's next version is of no use here.
export NO_MKDOCS_2_WARNING=1
if [ "$serve" = yes ]; then
    exec "$python" -m mkdocs serve --config-file scripts/mkdocs.yml --watch megatron_buffer
fi
"$python" -m mkdocs build --quiet --strict --config-file scripts/mkdocs.yml --site-dir "$out"
echo "docs: open $out/index.html"

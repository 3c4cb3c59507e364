#!/usr/bin/env bash
# Checks on a GPU what the other tests cannot run without one, in under 6 minutes on one H100 or H200.
#
#   scripts/gpu_check.sh [--budget SECONDS]
#
#   SECONDS        for all of it (default: 360)
#   OUT            where the results go: a file, or a folder, which is there or has a name that ends in a slash (default:
#                  build/gpu_check.json)
#   OASIS_PYTHON   the Python to use (default: that of the environment, else python3; it needs a CUDA build of torch)
#   OASIS_WHEELS   a folder with wheels that the machine lacks, such as apache-tvm-ffi (default: build/wheels)
#
# Exit code 0: everything that could run passed; 1: something failed; 2: nothing was checked, as without a GPU.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${OASIS_VENV:-$repo/.venv}
wheels=${OASIS_WHEELS:-$repo/build/wheels}
cd "$repo"

die() {
    printf '[gpu] Nothing was checked: %s\n' "$*" >&2
    exit 2
}

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

(($# == 0)) || case $1 in
-h | --help)
    usage
    exit
    ;;
--budget)
    [[ $# == 2 && $2 =~ ^[0-9]+(\.[0-9]+)?$ && $2 =~ [1-9] ]] ||
        die "--budget takes a positive number of seconds, not '${*:2}'."
    ;;
*) die "there is no argument '$1'; --help lists them." ;;
esac

has_torch() { "$1" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; }

# The first Python with a CUDA build of torch; a new environment where there is none and packages can be had.
find_python() {
    local candidate
    for candidate in "${OASIS_PYTHON:-}" "$venv/bin/python" python3 python; do
        [[ -n $candidate ]] && command -v "$candidate" >/dev/null || continue
        if has_torch "$candidate"; then
            command -v "$candidate"
            return
        fi
        [[ $candidate != "${OASIS_PYTHON:-}" ]] || return 1
    done
    timeout 20 python3 -m pip download --quiet --no-deps --dest "$(mktemp -d)" iniconfig >/dev/null 2>&1 || return 1
    printf '[gpu] No Python here has a CUDA build of torch; making an environment first, which takes many minutes.\n' >&2
    OASIS_VENV=$venv OASIS_PROFILE=cuda bash scripts/setup_env.sh --test >&2 || return 1
    printf '%s\n' "$venv/bin/python"
}

command -v nvidia-smi >/dev/null || die "this machine has no NVIDIA driver (nvidia-smi is not on PATH)."
timeout 60 nvidia-smi -L 2>/dev/null | grep -q '^GPU' || die "nvidia-smi lists no GPU."
python=$(find_python) || die "no Python here has a CUDA build of torch, and none can be installed; set OASIS_PYTHON to one that has."

site=
if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl ||
        die "the wheels in $wheels cannot be installed; remove those for another Python."
fi
export PYTHONPATH=$repo/python${site:+:$site}${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
[[ -n ${OASIS_CACHE:-} ]] || export OASIS_CACHE=$repo/build/cache
"$python" -m test.gpu.check "$@"

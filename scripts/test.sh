#!/usr/bin/env bash
# Static checks, then unit tests, then end-to-end tests. With arguments: only pytest, with these arguments.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OASIS_VENV=$(realpath -m "${OASIS_VENV:-$repo/.venv}")
export OASIS_VENV
cd "$repo"
bash scripts/setup_env.sh --test

export PATH=$OASIS_VENV/bin:$PATH
export PYTHONPATH=$repo/python # a shared environment may meanwhile be linked to another checkout
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads of two processes starve each other

run() {
    printf '\n[test] %s\n' "$*"
    "$@"
}

if (($# > 0)); then
    run exec pytest "$@"
fi

run ruff check .
run ruff format --check .
run mypy
run pytest test/unit
run python -m sglang_oasis.ops.compile_report # registers, shared memory and spills of the kernels for GPUs
if command -v nvcc >/dev/null; then run python -m sglang_oasis.ops.cuda_report; fi
run scripts/sanitize.sh
run python -m sglang_oasis.reference_model # here and not in a test, whose time is limited
run pytest test/e2e
printf '\n[test] everything passed\n'

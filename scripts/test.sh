#!/usr/bin/env bash
# Static checks, unit tests, compile reports, sanitizers, end-to-end tests; prints how long each took, also when one fails.
# With arguments: only pytest, with these arguments.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OASIS_VENV=$(realpath -m "${OASIS_VENV:-$repo/.venv}")
export OASIS_VENV
cd "$repo"

parts=() # NAME SECONDS OUTCOME, one string each

run() { # NAME COMMAND...
    local name=$1 begin=$SECONDS status=0
    shift
    printf '\n[test] %s\n' "$*"
    "$@" || status=$?
    parts+=("$(printf '%-12s %5d s   %s' "$name" $((SECONDS - begin)) "$( ((status == 0)) && echo passed || echo failed)")")
    return "$status"
}

report() {
    local status=$? part
    ((${#parts[@]} > 0)) || exit "$status"
    printf '\n[test] seconds of each part\n'
    for part in "${parts[@]}"; do printf '[test]   %s\n' "$part"; done
    printf '[test]   %-12s %5d s   %s\n' total "$SECONDS" "$( ((status == 0)) && echo passed || echo failed)"
    exit "$status"
}

if (($# > 0)); then
    bash scripts/setup_env.sh --test
else
    trap report EXIT
    run environment bash scripts/setup_env.sh --test
fi

export PATH=$OASIS_VENV/bin:$PATH
export PYTHONPATH=$repo/python # a shared environment may meanwhile be linked to another checkout
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads of two processes starve each other

if (($# > 0)); then
    printf '\n[test] pytest %s\n' "$*"
    exec pytest "$@"
fi

compile_reports() { # registers, shared memory and spills of the kernels for GPUs
    python -m scripts.kernel_reports.compile_report || return
    if command -v nvcc >/dev/null; then python -m scripts.kernel_reports.cuda_report; fi
}

run static ruff check .
run format ruff format --check .
run types mypy
run imports lint-imports --no-cache
run model python -m sglang_oasis.reference_model # here and not in a test, whose time is limited
run unit env OMP_NUM_THREADS=1 pytest --numprocesses 2 test/unit benchmark/micro benchmark/studies benchmark/quality/test_quality.py
run compile compile_reports
run sanitizers scripts/sanitize.sh
run e2e pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder test/e2e benchmark/serving benchmark/quality/test_answers.py
printf '\n[test] everything passed\n'

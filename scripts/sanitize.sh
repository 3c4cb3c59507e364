#!/usr/bin/env bash
# Runs the tests of the CPU kernels, and with "address" of the CUDA kernels on a CPU, with the kernels built under GCC's
# sanitizers; fails when one reports something.
#
#   scripts/sanitize.sh [address] [thread]    default: both
#
#   OASIS_KERNEL_EXAMPLES   random cases per test (default: few)
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
[[ -z ${OASIS_VENV:-} ]] || export PATH=$OASIS_VENV/bin:$PATH
export PYTHONPATH=$repo/python CXX=${CXX:-g++}
export OASIS_KERNEL_EXAMPLES=${OASIS_KERNEL_EXAMPLES:-20}
export OMP_NUM_THREADS=1 # torch's threads are not what is tested, and ThreadSanitizer cannot see them synchronise
tests=(test/unit/kernels/test_cpu_kernels.py test/unit/lookahead/test_cpu_pipeline.py)
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT

# Builds the kernels, then runs the tests with the sanitizer's runtime loaded before everything else.
check() { # NAME RUNTIME FLAGS PYTEST_ARGUMENTS...
    local status=0 fixed_addresses=() runtime report
    runtime=$("$CXX" -print-file-name="$2")
    if [[ $runtime != /* ]]; then
        printf '[sanitize] %s comes without %s; install it, or set CXX to a compiler that has it.\n' "$CXX" "$2" >&2
        exit 2
    fi
    export SGLANG_OASIS_CPU_CFLAGS="$3 -O1 -g1 -fno-omit-frame-pointer"
    printf '\n[sanitize] %s\n' "$1"
    python -c 'from sglang_oasis.kernels.cpu import native; native.build()'
    # Where the kernel randomises many bits of an address, it may choose one that the sanitizer keeps for itself.
    if setarch -R true 2>/dev/null; then fixed_addresses=(setarch -R); fi
    # Reports go to files: pytest shows the standard error of failed tests only.
    # The C++ library comes along, or its exceptions are not found when the sanitizer starts.
    "${fixed_addresses[@]}" env \
        LD_PRELOAD="$runtime $("$CXX" -print-file-name=libstdc++.so.6)" \
        ASAN_OPTIONS="detect_leaks=0:log_path=$reports/$1" \
        UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/$1" \
        TSAN_OPTIONS="ignore_noninstrumented_modules=1:log_path=$reports/$1" \
        python -m pytest -q -p no:cacheprovider "${@:4}" || status=$?
    for report in "$reports/$1".*; do # the CUDA kernels run as fibers, which AddressSanitizer greets with a warning
        [[ ! -e $report ]] || grep -qv "ASan doesn't fully support makecontext" "$report" || rm "$report"
    done
    if compgen -G "$reports/$1.*" >/dev/null; then
        sed '/ \(Include\|Modules\|Objects\|Python\)\//d' "$reports/$1".* # without the interpreter's frames
        status=1
    fi
    if ((status != 0)); then printf '[sanitize] %s: failed\n' "$1"; fi
    return "$status"
}

sanitizers=("$@")
(($# > 0)) || sanitizers=(address thread)
for sanitizer in "${sanitizers[@]}"; do
    case $sanitizer in
        address)
            check address libasan.so "-fsanitize=address,undefined -fno-sanitize-recover=undefined" \
                "${tests[@]}" test/unit/kernels/test_cuda_kernels.py -k "not architecture"
            ;;
        thread)
            check thread libtsan.so "-fsanitize=thread" "${tests[@]}" -k "not instruction_sets"
            ;;
        *)
            printf 'Unknown sanitizer %s; usage: scripts/sanitize.sh [address] [thread]\n' "$sanitizer" >&2
            exit 2
            ;;
    esac
done
printf '\n[sanitize] nothing found\n'

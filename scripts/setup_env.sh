#!/usr/bin/env bash
# Creates the project's Python environment, or brings it up to date: scripts/setup_env.sh [--test]
#
#   --test          also install what the tests and static checks need
#   OASIS_VENV      where the environment lives (default: .venv in the checkout)
#   OASIS_PYTHON    the interpreter to make it from (default: the first fit of python3.11, python3.12, python3)
#   OASIS_PROFILE   cpu or cuda (default: cuda where nvidia-smi lists a GPU)
#
# Packages come from wherever pip is configured to find them (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf). What pip says is
# in setup.log in the environment; the terminal gets one line per stage.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$(realpath -m "${OASIS_VENV:-$repo/.venv}")
log=$venv/setup.log
job=
pip=("$venv/bin/python" -m pip)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '[setup] %s\n' "$*"; }
die() {
    printf '[setup] %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidates=(python3.11 python3.12 python3) candidate
    [[ -z ${OASIS_PYTHON:-} ]] || candidates=("$OASIS_PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "SGLang 0.5.23 needs Python 3.11 or 3.12, which is not what ${candidates[*]} gives; set OASIS_PYTHON to one."
}

find_profile() {
    if timeout 60 nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo cuda; else echo cpu; fi
}

need_disk() { # GIGABYTES
    local folder=$venv free
    while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
    free=$("$python" -c 'import shutil, sys; print(shutil.disk_usage(sys.argv[1]).free // 10**9)' "$folder")
    ((free >= $1)) || die "The $profile environment needs $1 GB, and $folder has $free GB free; set OASIS_VENV to a folder with more."
}

# Ends what a stage has started; it does not hear the terminal's Ctrl-C.
end_job() {
    [[ -n $job ]] || return 0
    kill "$job" 2>/dev/null && wait "$job" 2>/dev/null || true
}
trap end_job EXIT
trap 'printf "\n"; say "Interrupted; the same command begins again"; exit 130' INT
trap 'exit 143' TERM

# Runs a command with its output in the log, and one line on the terminal that counts the seconds; false if it fails.
attempt() { # TITLE COMMAND...
    local title=$1 began=$SECONDS told=0 status=0 now
    printf '\n## %s\n' "$title" >>"$log"
    "${@:2}" >>"$log" 2>&1 </dev/null &
    job=$!
    while kill -0 "$job" 2>/dev/null; do
        if [[ -t 1 ]]; then
            now="[setup] $title: $((SECONDS - began)) s  $(tail -n 1 "$log" | tr -cd '[:print:]')"
            printf '\r%.79s\e[K' "$now"
        elif ((SECONDS - began >= told + 30)); then
            told=$((SECONDS - began))
            say "$title: $told s so far"
        fi
        sleep 0.3
    done
    wait "$job" || status=$?
    job=
    [[ ! -t 1 ]] || printf '\r\e[K'
    ((status == 0)) || return "$status"
    say "$title: $((SECONDS - began)) s"
}

# The same; if it fails, that is the end.
stage() { # TITLE COMMAND...
    attempt "$@" && return
    printf '%s\n' '...' "$(tail -n 12 "$log")" >&2
    die "$1: failed, see the end of its output above and all of it in $log"
}

# Runs a command that changes the environment.
guarded() { # COMMAND...
    touch "$venv/.unfinished"
    "$@"
    rm "$venv/.unfinished"
}

# The same, unless it succeeded before with the same key.
guarded_once() { # NAME KEY COMMAND...
    local stamp=$venv/.stamp-$1
    [[ -e $stamp && $(<"$stamp") == "$2" ]] && return
    guarded "${@:3}"
    printf '%s\n' "$2" >"$stamp"
}

# The environment is rebuilt, not repaired, after an interruption: pip takes a half-copied package for an installed one.
ensure_venv() {
    local identity reason
    identity="$profile, $("$python" -c 'import sys; print(sys.version, sys.base_prefix)')"
    if [[ ! -e $venv || -z $(ls -A "$venv") ]]; then
        reason="there is none yet"
    elif [[ ! -e $venv/.sglang-oasis ]]; then
        die "$venv was not made by this script; remove it, or set OASIS_VENV to another folder."
    elif [[ -e $venv/.unfinished ]]; then
        reason="the last attempt was interrupted"
    elif [[ $(<"$venv/.sglang-oasis") != "$identity" ]]; then
        reason="the profile or the Python interpreter has changed"
    elif ! "${pip[@]}" --version >/dev/null 2>&1; then
        reason="its pip does not work"
    else
        return 0
    fi

    say "The $profile environment in $venv has to be made: $reason. What pip says is in $log"
    rm -rf "$venv.old"
    [[ ! -e $venv ]] || mv "$venv" "$venv.old"
    rm -rf "$venv.old"
    need_disk "$disk_gb"
    mkdir -p "$venv"
    printf '%s\n' "$identity" >"$venv/.sglang-oasis"
    guarded stage "Creating it" "$python" -m venv "$venv"
}

install_cpu() {
    stage "Installing SGLang's lean CPU requirements, about 100 packages" "${pip[@]}" install --no-deps -r requirements/cpu.txt
    stage "Installing torch" "${pip[@]}" install --no-warn-conflicts -r requirements/torch.txt
    if ! "$venv/bin/python" -c 'import torchvision' 2>/dev/null; then
        stage "Installing an import stub in place of torchvision" \
            "${pip[@]}" install --no-deps --no-build-isolation ./third_party/torchvision_stub
    fi
}

install_cuda() {
    stage "Installing SGLang with its CUDA packages, several GB" "${pip[@]}" install "setuptools>=77.0.3" -e ".[cuda,examples]"
}

install_test() {
    stage "Installing the test requirements" "${pip[@]}" install --no-deps -r requirements/test.txt
}

# A cached environment may have been linked to another checkout.
is_linked() {
    local origin
    origin=$("$venv/bin/python" -I -c 'import importlib.util as u; print(u.find_spec("sglang_oasis").origin)' 2>/dev/null) || return
    [[ $(realpath -m "$origin") == "$repo/python/sglang_oasis/__init__.py" ]]
}

link_checkout() {
    stage "Linking $repo into it" "${pip[@]}" install --no-deps --no-build-isolation -e .
}

with_tests=false
for argument in "$@"; do
    case $argument in
        --test) with_tests=true ;;
        *) die "Unknown argument $argument; usage: scripts/setup_env.sh [--test]" ;;
    esac
done

cd "$repo"
command -v flock >/dev/null || die "flock is missing; install the util-linux package."
python=$(find_python)
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot create environments; install its venv package (on Debian: apt-get install python3-venv)."
profile=${OASIS_PROFILE:-$(find_profile)}
case $profile in
    cpu) disk_gb=5 ;;
    cuda) disk_gb=20 ;;
    *) die "OASIS_PROFILE is '$profile'; it must be cpu or cuda." ;;
esac

{ mkdir -p "$(dirname "$venv")" && : >>"$venv.lock"; } 2>/dev/null ||
    die "Nothing can be written beside $venv; set OASIS_VENV to another folder."
exec 9>"$venv.lock"
flock --nonblock 9 || { say "Waiting for another setup of $venv to finish" && flock 9; }

ensure_venv
: >"$log"
key=$profile-$(cat requirements/*.txt pyproject.toml scripts/setup_env.sh | sha256sum | cut -d' ' -f1)
guarded_once base "$key" "install_$profile"
if $with_tests; then guarded_once test "$key" install_test; fi
is_linked || rm -f "$venv/.stamp-link"
guarded_once link "$key" link_checkout
if [[ $profile == cpu ]]; then
    attempt "Building the CPU kernels, unless they are cached" \
        env PYTHONPATH="$repo/python" "$venv/bin/python" -m sglang_oasis.kernels.cpu.native ||
        say "$(tail -n 1 "$log") Everything runs without them."
fi
say "The $profile environment in $venv is ready"

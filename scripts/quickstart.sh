#!/usr/bin/env bash
# Sets up the environment and runs examples/quickstart.py with these arguments.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
if [[ -z ${HOME:-} ]]; then # not set under cron, nor in containers with users without an account
    HOME=$(getent passwd "$(id -u)" | cut -d: -f6) || true
    export HOME=${HOME:-/}
fi
OASIS_VENV=$(realpath -m "${OASIS_VENV:-$repo/.venv}")
export OASIS_VENV HF_HUB_OFFLINE=1
bash "$repo/scripts/setup_env.sh"
exec "$OASIS_VENV/bin/python" "$repo/examples/quickstart.py" "$@"

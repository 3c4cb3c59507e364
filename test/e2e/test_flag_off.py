"""With the flag off an installed package changes nothing: no hook, no backend, no platform where SGLang has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing import processes

pytestmark = pytest.mark.e2e

PROLOGUE = """
import json, sys
import torch
cuda = sys.argv[1] == "cuda"
from sglang_oasis.plugin import activate_platform
from unittest.mock import patch
with patch("torch.cuda.is_available", lambda: cuda):
    print("platform", activate_platform())
"""

PLUGINS = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
"""

STATE = """
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
print("hooks", sorted(HookRegistry._patched))
print("steps", sorted(resolution_hooks._HOOKS))
print("backend", "lookahead_kv" in ATTENTION_BACKEND_CHOICES)
print("excepthook", sys.excepthook is sys.__excepthook__)
"""


SPAWNING = """
import multiprocessing, sys
def child(arguments):
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from sglang_oasis.seams import catalogue
    catalogue.verify()
    print("verified", flush=True)
if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins
    load_plugins()
    import sglang.srt.server_args as s
    arguments = s.ServerArgs(model_path=sys.argv[1], enable_lookahead_kv=True)
    process = multiprocessing.get_context("spawn").Process(target=child, args=(arguments,))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
TIMEOUT = 180.0


def run(script: str, machine: str) -> dict[str, str]:
    """Run a script in a fresh interpreter; its output lines are `key value`."""
    result = subprocess.run(
        [sys.executable, "-c", script, machine, str(truncated_model_path(4))],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT,
    )
    return dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)


def run_forked(folder: Path, script: str, *arguments: str) -> str:
    """Run a script in a process that has imported SGLang; what it printed."""
    file = folder / "script.py"
    file.write_text(script)
    exit_code, output = processes.run([str(file), *arguments], environment=os.environ, timeout=TIMEOUT)
    assert exit_code == 0, output
    return output


@pytest.mark.parametrize(
    ("machine", "platform"), [("cuda", "None"), ("cpu", "sglang_oasis.serving.cpu_platform.cpu.OasisCpuPlatform")]
)
def test_without_the_flag_only_the_flags_are_there(machine: str, platform: str) -> None:
    arguments = (
        "import sglang.srt.server_args as s; a = s.ServerArgs(model_path=sys.argv[2]); assert not a.enable_lookahead_kv"
    )
    state = run(PROLOGUE + PLUGINS + arguments + STATE, machine)
    assert state == {
        "platform": platform,
        "hooks": "['sglang.srt.server_args.ServerArgs']",
        "steps": "[]",
        "backend": "False",
        "excepthook": "True",
    }


def test_with_the_flag_every_hook_takes_also_in_a_process_that_unpickles_the_arguments(tmp_path: Path) -> None:
    """A scheduler gets its ServerArgs before its plugins are loaded."""
    output = run_forked(tmp_path, SPAWNING, str(truncated_model_path(4)))
    assert "verified" in output


def test_a_flag_that_would_have_no_effect_is_refused(tmp_path: Path) -> None:
    script = (
        PLUGINS
        + """
import sglang.srt.server_args as s
from sglang_oasis.errors import LookaheadKVError
try:
    s.ServerArgs(model_path=sys.argv[1], lookahead_kv_budget_tokens=512).resolve_once()
except LookaheadKVError as error:
    print("refused", error)
"""
    )
    output = run_forked(tmp_path, script, str(truncated_model_path(4)))
    assert "refused --lookahead-kv-budget-tokens has no effect without" in output


def test_a_hook_that_did_not_take_stops_the_start(tmp_path: Path) -> None:
    script = (
        PLUGINS
        + """
import sglang.srt.server_args as s
s.ServerArgs(model_path=sys.argv[1], enable_lookahead_kv=True)
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.seams import catalogue
catalogue.verify()
HookRegistry._patched.discard("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new")
try:
    catalogue.verify()
except LookaheadKVError as error:
    print("refused", error)
"""
    )
    assert "ForwardBatch.init_new could not be installed" in run_forked(tmp_path, script, str(truncated_model_path(4)))


def test_help_shows_every_flag_under_its_own_heading(tmp_path: Path) -> None:
    from sglang_oasis.config import KNOBS

    script = PLUGINS + "import sglang.srt.server_args as s; s.prepare_server_args(['--help'])"
    output = run_forked(tmp_path, script)
    heading = output.index("lookahead KV (sglang-oasis)")
    for flag in ("--enable-lookahead-kv", *(knob.flag for knob in KNOBS)):
        assert flag in output[heading:]

"""Runs a function in a process forked from this process, which has already imported everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ForkError(RuntimeError):
    """The process ended without a result; the message is the line of its output that gives the reason."""


def forked(function: Callable[[], Any], log: Path, timeout: float = 120.0) -> Any:
    """Return the function's result, passed as JSON; its output goes to `log`, and its child processes are ended.

    Raises:
        ForkError: the function raised, the process died, or it took longer than `timeout` seconds.
    """
    result = log.with_suffix(".json")
    result.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(function, log, result)
    try:
        in_time = _wait(pid, time.monotonic() + timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    if not in_time:
        os.waitpid(pid, 0)
        raise ForkError(f"no result after {timeout:.0f} s")
    if not result.exists():
        raise ForkError(reason(log.read_text(errors="replace")))
    return json.loads(result.read_text())


def reason(text: str) -> str:
    """Return the first exception in a log, because later ones follow from it."""
    lines = text.splitlines()
    traced = False
    for line in lines:
        if line.startswith("Traceback (most recent call last)") or "Traceback (most recent call last):" in line:
            traced = True
        elif traced and line and not line[0].isspace():
            return line
    return lines[-1] if lines else "it printed nothing"


def _child(function: Callable[[], Any], log: Path, result: Path) -> None:
    status = 1
    try:
        os.setsid()
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        outcome = json.dumps(function())
        partial = result.with_suffix(".partial")
        partial.write_text(outcome)
        partial.rename(result)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait(pid: int, deadline: float) -> bool:
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    return False

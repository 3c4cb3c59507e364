"""What a server spawns ends with the server, from its first moment on; what else a program spawns does not."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from sglang_oasis.seams import parent_death

TIMEOUT = 30.0
CHILD = """
import pickle, sys, time
pickle.loads(bytes.fromhex(sys.argv[1]))
print("armed", flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys, time
from sglang_oasis.seams import parent_death
preparation = parent_death._launch(lambda: parent_death._arm_child({}))
import pickle
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], pickle.dumps(preparation).hex()], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"armed\\n"
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait(TIMEOUT)


def test_a_child_ends_when_its_parent_is_killed(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    deadline = time.monotonic() + TIMEOUT
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:  # which stays where process 1 reaps nobody
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_child_whose_parent_has_ended_already_ends() -> None:
    preparation = pickle.dumps(parent_death._Parent(os.getppid())).hex()  # not its parent
    child = subprocess.run([sys.executable, "-c", CHILD, preparation], capture_output=True, timeout=TIMEOUT)
    assert child.returncode == -signal.SIGKILL
    assert child.stdout == b""


def test_only_what_a_launch_spawns_is_armed() -> None:
    assert parent_death._arm_child({"name": "a"}) == {"name": "a"}
    during = parent_death._launch(lambda: parent_death._arm_child({}))
    assert [type(value) for value in during.values()] == [parent_death._Parent]
    with pytest.raises(ZeroDivisionError):
        parent_death._launch(lambda: 1 // 0)
    assert parent_death._arm_child({}) == {}

"""Starts Python processes under test: forked from a template inside `forked_starts()`, else in the ordinary way."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from sglang_oasis.testing.template import Request, Spawner, environment_key

REPOSITORY = Path(__file__).parents[3]
STOP_TIMEOUT = 5.0
_MOST_TEMPLATES = 3
_TEMPLATE_TIMEOUT = 240.0
"""Longest time in seconds for a template to import everything."""


class Process(Protocol):
    """The part of the interface of `subprocess.Popen` that tests use."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class ForkedProcess:
    """A child of this process that a template has forked.

    Args:
        pid: its process id.
        argv: its command line.
    """

    def __init__(self, pid: int, argv: Sequence[str]) -> None:
        self.pid = pid
        self.argv = argv
        self.returncode: int | None = None
        self._file = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._file], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.argv), timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._file)
        return self.returncode


class Templates:
    """The templates of the most recent environments, one for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spawners: OrderedDict[frozenset[tuple[str, str]], Spawner] = OrderedDict()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, argv: Sequence[str], environment: Mapping[str, str], folder: Path, output: IO[Any]) -> Process:
        request = Request(os.getpid(), list(argv), dict(environment), str(folder), [0, 1, 2], new_session=True)
        with self._lock, open(os.devnull) as nothing:
            spawner = self._spawner(environment)
            return ForkedProcess(spawner.spawn(request, [nothing.fileno(), output.fileno(), output.fileno()]), argv)

    def close(self) -> None:
        for spawner in self._spawners.values():
            spawner.close()
        for process in self._processes:
            process.wait(_TEMPLATE_TIMEOUT)

    def _spawner(self, environment: Mapping[str, str]) -> Spawner:
        key = environment_key(environment)
        if key not in self._spawners:
            if len(self._spawners) == _MOST_TEMPLATES:
                self._spawners.popitem(last=False)[1].close()
            self._spawners[key] = self._template(dict(key))
        self._spawners.move_to_end(key)
        return self._spawners[key]

    def _template(self, environment: dict[str, str]) -> Spawner:
        ours, theirs = socket.socketpair()
        ours.settimeout(_TEMPLATE_TIMEOUT)
        command = [sys.executable, "-m", "sglang_oasis.testing.template", str(theirs.fileno())]
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    command, env=environment, cwd=REPOSITORY, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            )
        return Spawner(ours)


_templates: Templates | None = None


@contextlib.contextmanager
def forked_starts() -> Iterator[None]:
    """Let `start` fork processes, which saves the imports; `OASIS_ORDINARY_STARTS=1` turns this off."""
    global _templates
    if os.environ.get("OASIS_ORDINARY_STARTS") == "1":
        yield
        return
    _templates = Templates()
    try:
        yield
    finally:
        _templates.close()
        _templates = None


def start(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: IO[Any],
    folder: Path = REPOSITORY,
    ordinary: bool = False,
) -> Process:
    """Start a Python process that leads a process group of its own.

    Args:
        argv: the interpreter's arguments, `-m module ...` or `script ...`.
        environment: all environment variables of the process.
        output: a file for its output.
        folder: its working directory.
        ordinary: never fork it from a template.
    """
    if _templates is None or ordinary:
        return subprocess.Popen(
            [sys.executable, *argv],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            start_new_session=True,
        )
    return _templates.start(argv, environment, folder, output)


def run(argv: Sequence[str], *, environment: Mapping[str, str], timeout: float, **how: Any) -> tuple[int, str]:
    """Run a Python process to its end, and wait until its whole process group has ended.

    Args:
        argv: as for `start`.
        environment: as for `start`.
        timeout: longest run time in seconds.
        how: other arguments of `start`.

    Returns:
        The exit code and the output.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = start(argv, environment=environment, output=output, **how)
        try:
            process.wait(timeout)
            wait_until_gone(process.pid)
        finally:
            stop_group(process)
        output.seek(0)
        return process.wait(0), output.read()


def wait_until_gone(leader: int, timeout: float = 5.0) -> None:
    """Wait until no process of a group is left.

    Raises:
        AssertionError: processes are left after the timeout.
    """
    deadline = time.monotonic() + timeout
    while members := group_members(leader):
        assert time.monotonic() < deadline, f"processes {members} of group {leader} are left"
        time.sleep(0.05)


def group_members(leader: int) -> list[str]:
    """Return the names and pids of the processes of a group, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            state, _, group = fields.split()[:3]
            if int(group) == leader and state not in "ZX":
                found.append(f"{name})")
    return found


def stop_group(process: Process) -> None:
    """End a process with SIGINT, to which a server reacts immediately, and then the rest of its process group."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

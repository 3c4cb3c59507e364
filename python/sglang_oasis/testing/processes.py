"""Python processes under test: forked from a template inside `forked_starts()`, else started the ordinary way."""

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
"""Seconds until a template has imported everything."""


class Process(Protocol):
    """What tests use of a `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class ForkedProcess:
    """A child of ours that a template has forked.

    Args:
        pid: its process id.
        argv: what it runs.
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
    """A template for each environment, the latest few of them."""

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
    """Fork what `start` starts, which saves it the imports; `OASIS_ORDINARY_STARTS=1` turns this off."""
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
        environment: all of it.
        output: a file for what it prints.
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
    """Run a Python process to its end; nothing of its process group is left then.

    Args:
        argv: as for `start`.
        environment: as for `start`.
        timeout: seconds that it may take.
        how: other arguments of `start`.

    Returns:
        The exit code, and what it printed.
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
    """Return when no process of a group is left.

    Raises:
        AssertionError: some are still there.
    """
    deadline = time.monotonic() + timeout
    while members := group_members(leader):
        assert time.monotonic() < deadline, f"of the process group {leader} {members} are left"
        time.sleep(0.05)


def group_members(leader: int) -> list[str]:
    """Names and pids of the processes of a group, but of those that have ended and wait for their parent to notice."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            state, _, group = fields.split()[:3]
            if int(group) == leader and state not in "ZX":
                found.append(f"{name})")
    return found


def stop_group(process: Process) -> None:
    """End a process as Ctrl-C does, which a server obeys at once, and whatever is left of its group."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

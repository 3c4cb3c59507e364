"""A template process that has imported the modules of a server; servers and their child processes are forked from it.

Importing SGLang takes most of a server's start-up time. A template imports the modules that an SGLang process imports
before it loads its plugins, and third-party packages. Everything else happens in the forked process as in any other
process: entry points are called, a ServerArgs is made or unpickled, hooks are installed.

A forked process has everything that a started process has: command line, environment, working directory, files, process
group and parent. Its parent is the process that asked for it (see `Spawner`), so signals, exit codes and the death of a
parent work as in production. Processes that multiprocessing spawns are forked, too, from a copy of the server's process
before it has done anything.

Libraries read some variables when they are loaded. So each environment has a template of its own (`environment_key`),
and processes that are spawned with other settings of native libraries are started in the ordinary way.

Run as a module: `python -m sglang_oasis.testing.template FD`, with a connected Unix socket.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import setproctitle

LAUNCHER = "sglang.launch_server"
IMPORTED = (
    LAUNCHER,
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)
NOT_IMPORTED = ("prometheus_client", "sglang_oasis.seams", "sglang_oasis.config")
"""Modules that inspect the process in which they are imported, so that a template must not import them."""

Job = Callable[[], object]
"""The function that a forked process must run."""

_PR_SET_CHILD_SUBREAPER = 36
_MOST_FILES = 32
_NATIVE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "LD_", "MALLOC_")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Request:
    """The properties of a process to fork.

    Attributes:
        parent: pid of its parent.
        argv: arguments of the Python interpreter: `-m module ...`, `-c code ...` or `script ...`.
        environment: all environment variables of the process.
        folder: its working directory.
        files: the numbers that the file descriptors sent with the request get in the process, in their order.
        new_session: whether the process leads a session and a process group of its own.
    """

    parent: int
    argv: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    new_session: bool = False


def environment_key(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return the variables that a template may have read: all except those of our own package and of pytest."""
    later = ("SGLANG_OASIS_", "PYTEST_")
    return frozenset((name, value) for name, value in environment.items() if not name.startswith(later))


class Spawner:
    """Asks a template for processes that become children of the asking process.

    A process cannot give its child to another process, but the kernel gives orphans to the nearest ancestor that is a
    subreaper: the template, a descendant of ours, forks a process that forks the wanted process and ends.

    Args:
        connection: socket to the template.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def spawn(self, request: Request, files: list[int]) -> int:
        """Fork a new child, and return its pid.

        Args:
            request: the properties of the child.
            files: our file descriptors that belong to `request.files`.

        Raises:
            RuntimeError: the template has ended.
        """
        message = json.dumps(asdict(request)).encode()
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._connection, [len(message).to_bytes(8, "little")], files)
                self._connection.sendall(message)
                answer = _receive(self._connection, 8)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            finally:
                _adopt_orphans(False)
        if not answer:
            raise RuntimeError("the template of the servers under test has ended.")
        return int.from_bytes(answer, "little")

    def close(self) -> None:
        """Close the connection; the template ends when all connections are closed."""
        self._connection.close()


def serve(connection: socket.socket) -> Job | None:
    """Fork the requested processes, until all connections are closed.

    Returns:
        None in the template; the job to run in a forked process.
    """
    while True:
        head, files, *_ = socket.recv_fds(connection, 8, _MOST_FILES)
        if not head:
            return None
        request = Request(**json.loads(_receive(connection, int.from_bytes(head, "little"))))
        pid = _fork_for(request.parent)
        if pid == 0:
            return _become(request, files)
        for file in files:
            os.close(file)
        connection.sendall(pid.to_bytes(8, "little"))


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def _adopt_orphans(wanted: bool) -> None:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _fork_for(parent: int) -> int:
    """Fork a process that becomes a child of our ancestor `parent`; returns 0 in the child, else its pid."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle != 0:
        os.close(writer)
        os.waitpid(middle, 0)
        pid = int.from_bytes(os.read(reader, 8), "little")
        os.close(reader)
        return pid
    middle = os.getpid()
    pid = os.fork()
    if pid != 0:
        os.write(writer, pid.to_bytes(8, "little"))
        os._exit(0)
    while os.getppid() == middle:  # which is about to end
        time.sleep(0.0005)
    if os.getppid() != parent:
        raise RuntimeError(f"a forked process has the parent {os.getppid()} instead of {parent}.")
    return 0


def _become(request: Request, files: list[int]) -> Job:
    """Give this copy of the template the properties of the requested process; returns its job."""
    if request.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # First move the descriptors to numbers that are neither in use nor requested.
    above = max([*request.files, *files], default=2) + 1
    for place, file in enumerate(files):
        os.dup2(file, above + place)
    for place, number in enumerate(request.files):
        os.dup2(above + place, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in request.files:
            _close(int(name))
    settings = _native_settings()
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    flag, *rest = request.argv
    if flag == "-c":
        sys.argv = ["-c", *rest[1:]]
        return lambda: exec(rest[0], {"__name__": "__main__"})
    _spawn_from_a_copy(settings)
    setproctitle.setproctitle(" ".join([sys.executable, *request.argv]))
    if flag == "-m":
        sys.argv, sys.path[0] = rest, request.folder
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    sys.argv, sys.path[0] = [flag, *rest], os.path.dirname(os.path.abspath(flag))
    return lambda: runpy.run_path(flag, run_name="__main__")


def _close(file: int) -> None:
    try:
        os.close(file)
    except OSError:  # it was the descriptor of the directory listing
        return


def _native_settings() -> dict[str, str]:
    """Return the variables that native libraries read once, when they are loaded."""
    return {name: value for name, value in os.environ.items() if name.startswith(_NATIVE)}


def _spawn_from_a_copy(settings: dict[str, str]) -> None:
    """Keep a copy of this process in its present state, and let multiprocessing fork its processes from the copy.

    Args:
        settings: the settings with which the native libraries were loaded.
    """
    ours, copys = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the copy without a traceback
        job = serve(copys)
        if job is None:
            os._exit(0)
        job()
        sys.exit()
    copys.close()
    spawner, owner = Spawner(ours), os.getpid()
    ordinary = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(path: Any, args: list[Any], passfds: Any) -> int:
        argv = [os.fsdecode(word) for word in args]
        python = "--multiprocessing-fork" in argv and os.fsdecode(path) == sys.executable
        if not python or os.getpid() != owner or _native_settings() != settings:
            return ordinary(path, args, passfds)
        files = sorted(passfds)
        code = argv[argv.index("-c") :]
        return spawner.spawn(Request(owner, code, dict(os.environ), os.getcwd(), files), files)

    multiprocessing.util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]


def main() -> None:
    """Import modules, then serve requests on the socket whose file descriptor is the argument."""
    setproctitle.getproctitle()  # finds the title's memory, while the environment is still the original one
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in IMPORTED:
        importlib.import_module(module)
    del sys.modules[LAUNCHER]  # it must run as __main__
    early = [name for name in NOT_IMPORTED if name in sys.modules]
    if early:
        raise RuntimeError(f"the template must not import {', '.join(early)}.")
    gc.collect()
    gc.freeze()  # else the first garbage collection in each forked process copies all memory
    job = serve(connection)
    if job is not None:
        job()


if __name__ == "__main__":
    main()

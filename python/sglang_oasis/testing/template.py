"""A process that has imported what a server needs; servers, and what they spawn, are forked from it.

Importing SGLang takes most of a server's start. A template imports what an SGLang process imports before it loads its
plugins, and third-party packages; all else happens in the forked process as in any other: its entry points are called,
its ServerArgs made or unpickled, its hooks installed.

A forked process has what a started one has: its command line, environment, working directory, files, process group,
and its parent, too. Who asks for it is its parent (see `Spawner`), so signals, exit codes and the death of a parent are
what they are in production. Processes that multiprocessing spawns are forked likewise, from a copy of the server in
which nothing has happened yet.

Libraries read some variables when they are loaded. So each environment has a template of its own (`environment_key`),
and what is spawned with other settings of native libraries is started the ordinary way.

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
"""What looks at the process that it is imported in."""

Job = Callable[[], object]
"""What a forked process has to do."""

_PR_SET_CHILD_SUBREAPER = 36
_MOST_FILES = 32
_NATIVE = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "ATEN_", "LD_", "MALLOC_")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Request:
    """What a forked process is to be.

    Attributes:
        parent: pid of its parent.
        argv: of a Python interpreter, behind the interpreter: `-m module ...`, `-c code ...` or `script ...`.
        environment: all of it.
        folder: its working directory.
        files: the numbers that it gives to the file descriptors sent along, in their order.
        new_session: whether it leads a session and a process group of its own.
    """

    parent: int
    argv: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    new_session: bool = False


def environment_key(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """What of an environment a template may have read: all but the variables of our own package, and of pytest."""
    later = ("SGLANG_OASIS_", "PYTEST_")
    return frozenset((name, value) for name, value in environment.items() if not name.startswith(later))


class Spawner:
    """Asks a template for processes that are children of the asking process.

    A process cannot give its child away, but the kernel gives orphans to the nearest ancestor that wants them: the
    template, which descends from us, forks a process that forks the wanted one and ends.

    Args:
        connection: to the template.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def spawn(self, request: Request, files: list[int]) -> int:
        """The pid of a new child.

        Args:
            request: what it is to be.
            files: our file descriptors behind `request.files`.

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
        """The template ends when nobody is left to ask it."""
        self._connection.close()


def serve(connection: socket.socket) -> Job | None:
    """Fork what is asked for, until nobody is left to ask.

    Returns:
        None in the template; its job in a forked process.
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
    """Fork a child of our ancestor `parent`; 0 in the child, else its pid."""
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
    while os.getppid() == middle:  # which has nothing left to do but to end
        time.sleep(0.0005)
    if os.getppid() != parent:
        raise RuntimeError(f"a forked process has the parent {os.getppid()} instead of {parent}.")
    return 0


def _become(request: Request, files: list[int]) -> Job:
    """Make this copy of the template the process that was asked for."""
    if request.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # By way of numbers that are neither taken nor to be given.
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
    except OSError:  # it was the listing's own
        return


def _native_settings() -> dict[str, str]:
    """The variables that native libraries read once, when they are loaded."""
    return {name: value for name, value in os.environ.items() if name.startswith(_NATIVE)}


def _spawn_from_a_copy(settings: dict[str, str]) -> None:
    """Keep a copy of this process as it is now, and let multiprocessing spawn from it.

    Args:
        settings: those with which the native libraries were loaded.
    """
    ours, copys = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C ends it without a traceback
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
    """Import, then fork what is asked for over the socket whose file descriptor is the argument."""
    setproctitle.getproctitle()  # which finds its place in memory as long as the environment is the first one
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in IMPORTED:
        importlib.import_module(module)
    del sys.modules[LAUNCHER]  # it is to run as __main__
    early = [name for name in NOT_IMPORTED if name in sys.modules]
    if early:
        raise RuntimeError(f"the template must not import {', '.join(early)}.")
    gc.collect()
    gc.freeze()  # else the first collection of each forked process copies it all
    job = serve(connection)
    if job is not None:
        job()


if __name__ == "__main__":
    main()

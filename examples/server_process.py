"""Runs an SGLang server for a program: says what it does while it starts, waits as long as it works, and ends it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

STAGES = {
    "Building the": "compiling the CPU kernels, once",
    "server_args=": "starting its processes",
    "Load weight begin": "loading the model",
    "Load weight end": "making the KV pools",
    "Application startup complete": "answering a first request",
}
"""What a line of the server's log says about how far it is."""
STALL_S = 120
"""A server that has used no CPU for so long does not work, it hangs."""
WORK_S = 0.02 * STALL_S
"""CPU seconds that an idle server uses in that time, and more."""
QUIET_S = 20
"""Where the output is no terminal, a line at least this often."""
STOP_GRACE_S = 15
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

console = Console(highlight=False)


class ServerError(Exception):
    """One sentence for the user."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: base address.
        process: the launcher, leader of the process group.
        log: file with everything that it prints.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, timeout: float = 60) -> Any:
        """What the server answers, as JSON."""
        response = httpx.get(f"{self.url}{path}", timeout=timeout, trust_env=False)
        response.raise_for_status()
        return response.json()

    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        return False

    def prefill(self) -> int:
        """Tokens that prefill has computed since the start: the number grows with every chunk of a prompt."""
        loads = self.get("/v1/loads?include=core", timeout=5)["loads"]  # one per data-parallel rank
        return sum(load["total_prefill_uncached_tokens"] for load in loads)

    def telling_line(self) -> str:
        """The line of the log that most likely says what went wrong, and where the log is."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error: " in line.lower() or "Exception: " in line]
        return f"{self.log} says: {(errors or lines or ['nothing'])[-1]}"


@contextlib.contextmanager
def running_server(flags: list[str], log: Path) -> Iterator[Server]:
    """Run a server with these flags until it is ready; stop it at the end, whatever happens.

    Raises:
        ServerError: it ended, or it hangs.
    """
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            server = Server(f"http://127.0.0.1:{port}", process, log)
            _wait_until_ready(server)
            yield server
        except httpx.HTTPError as error:
            raise ServerError(f"The server failed ({error}); {server.telling_line()}") from error
        finally:
            _stop(process)


def free_port() -> int:
    """A port that nothing uses, outside the range from which the system serves outgoing connections."""
    try:
        low, high = (int(bound) for bound in PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    ports = [port for port in range(10000, 65536) if not low <= port <= high]
    for port in random.sample(ports, len(ports)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"No port from 10000 on outside {low} to {high} is free; end what uses them.")


class Watch:
    """Tells work from hanging, by the CPU time of a server's processes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._since, self._cpu_s = time.monotonic(), self._used()

    def check(self) -> None:
        """Look at the server, now and then.

        Raises:
            ServerError: it has ended, or has not worked for a long time.
        """
        if self._server.process.poll() is not None:
            raise ServerError(f"The server has ended; {self._server.telling_line()}")
        used, now = self._used(), time.monotonic()
        if used - self._cpu_s >= WORK_S or used < self._cpu_s:  # less: a process has ended
            self._since, self._cpu_s = now, used
        elif now - self._since > STALL_S:
            raise ServerError(f"The server has done nothing for {STALL_S} s; {self._server.telling_line()}")

    def _used(self) -> float:
        total = 0.0
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self._server.process.pid)
            for process in (launcher, *launcher.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += sum(process.cpu_times()[:2])
        return total


class Teller:
    """A line that says how far something is and for how long; where the output is no terminal, one now and then.

    Args:
        title: what it is about.
        columns: of rich.progress, between the title and the text.
        total: steps until it is done, None where nobody knows.
    """

    def __init__(self, title: str, *columns: ProgressColumn, total: int | None = None) -> None:
        shown = (TextColumn("{task.description}"), *columns, TextColumn("{task.fields[text]}"), TimeElapsedColumn())
        self._progress = Progress(
            SpinnerColumn("line"), *shown, console=console, transient=True, speed_estimate_period=600
        )
        self._task = self._progress.add_task(title, total=total, text="")
        self._title = title
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Teller:
        if console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if console.is_terminal:
            self._progress.stop()

    def tell(self, text: str, completed: int | None = None) -> None:
        """Say how far it is."""
        self._progress.update(self._task, text=text, completed=completed)
        now = time.monotonic()
        if not console.is_terminal and now - self._told >= QUIET_S:
            self._told = now
            console.print(f"{self._title}: {text}, {now - self._began:.0f} s so far", markup=False, soft_wrap=True)


@contextlib.contextmanager
def watched(server: Server, look: Callable[[], object]) -> Iterator[None]:
    """See to it that the server works while the body waits for it, and call `look` every half second.

    Raises:
        ServerError: it has ended or hung; it is ended then, so that the body does not wait any longer.
    """
    done, found, watch = threading.Event(), [], Watch(server)

    def follow() -> None:
        while not done.wait(0.5):
            try:
                watch.check()
                look()
            except httpx.HTTPError:
                continue  # the next look may succeed
            except ServerError as error:
                found.append(error)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.process.pid, signal.SIGKILL)
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        thread.join(1)  # an end that the body has noticed first
        if found:
            raise found[0] from error
        raise
    finally:
        done.set()


def _wait_until_ready(server: Server) -> None:
    console.print(f"Starting SGLang; its log is {server.log}", markup=False, soft_wrap=True)
    began, watch = time.monotonic(), Watch(server)
    with Teller("Starting SGLang") as teller:
        while not server.is_healthy():
            watch.check()
            teller.tell(_stage(server.log))
            time.sleep(0.5)
    console.print(f"It is ready after {time.monotonic() - began:.0f} s")


def _stage(log: Path) -> str:
    text = log.read_text(errors="replace")
    found = {text.rfind(mark): stage for mark, stage in STAGES.items()}
    return found[max(found)] if max(found) >= 0 else "importing it, which takes longer the first time"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server's whole process group: politely first, then by force."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave it running
    console.print("\nStopping the server")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

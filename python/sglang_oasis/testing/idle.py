"""What the processes of a server take of the CPU while it has nothing to do."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from sglang_oasis.testing.server import Server

SETTLE_SECONDS = 2
MOST_OF_A_CORE = 0.06
"""Twice what is promised; a server that polls takes all of it."""


def processes(server: Server) -> list[psutil.Process]:
    launcher = psutil.Process(server.pid)
    return [launcher, *launcher.children(recursive=True)]


def idle_share(server: Server, seconds: float) -> float:
    """CPU seconds per second, of all its processes together; no request may be under way."""
    time.sleep(SETTLE_SECONDS)
    observed = processes(server)

    def spent() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in observed))

    before, start = spent(), time.monotonic()
    time.sleep(seconds)
    return (spent() - before) / (time.monotonic() - start)


def polling_threads(server: Server) -> int:
    """Gloo's threads: each looks a hundred times a second whether there is something to do."""
    tasks = (task for process in processes(server) for task in Path(f"/proc/{process.pid}/task").glob("*/comm"))
    return [task.read_text().strip() for task in tasks].count("gloo_tcp_loop")

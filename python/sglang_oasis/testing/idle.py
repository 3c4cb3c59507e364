"""Measures the CPU time of a server's processes while the server is idle."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from sglang_oasis.testing.server import Server

SETTLE_SECONDS = 2
MOST_OF_A_CORE = 0.06
"""The largest share of a core that tests allow: twice what we promise. A server that polls takes a whole core."""


def processes(server: Server) -> list[psutil.Process]:
    launcher = psutil.Process(server.pid)
    return [launcher, *launcher.children(recursive=True)]


def idle_share(server: Server, seconds: float) -> float:
    """Return the CPU seconds per second of all the server's processes together; no request may be running."""
    time.sleep(SETTLE_SECONDS)
    observed = processes(server)

    def spent() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in observed))

    before, start = spent(), time.monotonic()
    time.sleep(seconds)
    return (spent() - before) / (time.monotonic() - start)


def polling_threads(server: Server) -> int:
    """Return the number of gloo's threads, each of which wakes up a hundred times a second."""
    tasks = (task for process in processes(server) for task in Path(f"/proc/{process.pid}/task").glob("*/comm"))
    return [task.read_text().strip() for task in tasks].count("gloo_tcp_loop")

"""A server with nothing to do leaves the cores to others, without being asked to."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from test.e2e.server import Server
from test.e2e.small_pool import text

pytestmark = pytest.mark.e2e

SETTLE_SECONDS, SECONDS = 2, 10
MOST_OF_A_CORE = 0.06
"""Twice what is promised; one that polls takes all of it."""


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def test_an_idle_server_takes_next_to_nothing_of_a_core(small_pool_server: Server) -> None:
    """All its processes together, with text in the prefix cache and with metrics on."""
    small_pool_server.generate(text(12_000, 700), max_new_tokens=8)
    small_pool_server.wait_until_idle()
    launcher = psutil.Process(small_pool_server.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) >= 3, "launcher, scheduler, detokenizer"
    names = [task.read_text().strip() for each in processes for task in Path(f"/proc/{each.pid}/task").glob("*/comm")]
    assert names.count("gloo_tcp_loop") == 1, "threads that look a hundred times a second whether there is something"
    time.sleep(SETTLE_SECONDS)
    before, start = cpu_seconds(processes), time.monotonic()
    time.sleep(SECONDS)
    share = (cpu_seconds(processes) - before) / (time.monotonic() - start)
    assert share < MOST_OF_A_CORE
    assert small_pool_server.get("/server_info").json()["sleep_on_idle"] is True

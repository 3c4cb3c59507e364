"""A server with nothing to do leaves the cores to others, without being asked to."""

from __future__ import annotations

import pytest

from sglang_oasis.testing.idle import MOST_OF_A_CORE, idle_share, polling_threads, processes
from sglang_oasis.testing.server import Server
from test.e2e.small_pool import text

pytestmark = pytest.mark.e2e

SECONDS = 10


def test_an_idle_server_takes_next_to_nothing_of_a_core(small_pool_server: Server) -> None:
    """With text in the prefix cache and with metrics on."""
    small_pool_server.generate(text(12_000, 700), max_new_tokens=8)
    small_pool_server.wait_until_idle()
    assert len(processes(small_pool_server)) >= 3, "launcher, scheduler, detokenizer"
    assert polling_threads(small_pool_server) == 1
    share = idle_share(small_pool_server, SECONDS)
    print(f"an idle server takes {share:.4f} of a core")
    assert share < MOST_OF_A_CORE
    assert small_pool_server.get("/server_info").json()["sleep_on_idle"] is True

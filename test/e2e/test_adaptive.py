"""What adapts: the fetch cap to link and need, misses to the audited recall; with every invariant checked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_oasis.lookahead.audit import POOR_MASS
from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import launch_server
from test.e2e.small_pool import BUDGET, ENVIRONMENT, FLAGS, LAYERS, assert_baseline, finish_type, text

pytestmark = pytest.mark.e2e

ADAPTIVE = (
    *("--lookahead-kv-fetch-ratio", "auto", "--lookahead-kv-miss-policy", "auto"),
    *("--lookahead-kv-audit-interval", "1"),
)


def test_the_cap_follows_the_need_and_poor_layers_fetch_what_they_miss() -> None:
    model = truncated_model_path(LAYERS)
    # One of the servers that are started as users start them, and not forked.
    with launch_server(*FLAGS, *ADAPTIVE, env=ENVIRONMENT, model=model, ordinary=True) as server:
        start = server.stats()
        assert (start["config"]["fetch_ratio"], start["config"]["miss_policy"]) == (None, "auto")
        caps = set()
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(server.generate, text(2000 * i, 700), max_new_tokens=80) for i in range(3)]
            while not all(answer.done() for answer in running):
                caps.add(server.stats()["fetch_cap"])
            answers = [answer.result() for answer in running]
        assert {finish_type(answer) for answer in answers} == {"length"}
        stats = server.stats()
        counters, recall = stats["counters"], stats["recall"]
        assert start["fetch_cap"] == 1
        assert 1 < max(caps) <= BUDGET // 16, "blocks are missing, and the cap does not grow"
        assert counters["blocks_fetched"] > counters["blocks_urgent"], "lookahead goes on beside urgent fetches"
        poor = [mass for mass in recall["layer_mass"] if mass is not None and mass < POOR_MASS]
        assert poor, "with so small a budget some layer's recall is low"
        assert counters["blocks_urgent"] > 0
        assert_baseline(server)

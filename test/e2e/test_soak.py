"""500 requests of random lengths on a small pool, many of them aborted or dropped: no error, no leak, right answers."""

from __future__ import annotations

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import Server, launch_server
from test.e2e.small_pool import (
    BUDGET,
    ENVIRONMENT,
    FLAGS,
    LAYERS,
    MOST_REQUESTS,
    POOL_TOKENS,
)
from test.e2e.soaking import plans, soak

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_500_requests_with_aborts_and_disconnects(small_pool_server: Server) -> None:
    requests = plans()
    wanted = MOST_REQUESTS * sum(len(plan.prompt) for plan in requests) / len(requests)
    assert wanted > 1.2 * POOL_TOKENS, "the pool is not small"
    soak(small_pool_server, requests, comparable=lambda plan: True)


def test_the_background_pipeline_survives_aborts_and_disconnects() -> None:
    """Policy drop: rows end while transfers are under way. Past the budget, answers depend on the prefill's chunks."""
    flags = (*FLAGS, "--lookahead-kv-miss-policy", "drop", "--lookahead-kv-fetch-ratio", "0.2")
    with launch_server(*flags, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as server:
        soak(server, plans()[:120], comparable=lambda plan: len(plan.prompt) + plan.tokens <= BUDGET)
        stats = server.stats()
        assert stats["counters"]["blocks_fetched"] > 0
        assert stats["counters"]["blocks_urgent"] == 0
        assert stats["seconds"]["predict"] > 0

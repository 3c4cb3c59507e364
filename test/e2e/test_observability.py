"""Statistics, Prometheus and server info tell the same, true story."""

from __future__ import annotations

import re

import pytest

from sglang_oasis.testing.server import Server
from test.e2e.small_pool import BUDGET, MOST_REQUESTS, POOL_TOKENS, text

pytestmark = pytest.mark.e2e


def metrics(server: Server) -> dict[str, float]:
    """Our Prometheus metrics by name, without prefix and labels."""
    pattern = r'^sglang:lookahead_kv_(\w+)\{[^}]*model_name="[^"]+"[^}]*\} (\S+)$'
    return {name: float(value) for name, value in re.findall(pattern, server.get("/metrics").text, re.MULTILINE)}


@pytest.fixture
def served(small_pool_server: Server) -> Server:
    small_pool_server.generate(text(3000, 700), max_new_tokens=24)
    small_pool_server.wait_until_idle()
    return small_pool_server


def test_a_request_past_its_budget_shows_in_the_counters(served: Server) -> None:
    before = served.stats()["counters"]
    served.generate(text(9000, 700), max_new_tokens=24)
    after = served.stats()["counters"]
    assert after["decode_steps"] - before["decode_steps"] >= 23
    assert after["blocks_built"] - before["blocks_built"] == 4 * 3 * (BUDGET // 16)
    assert after["blocks_urgent"] > before["blocks_urgent"]
    assert after["bytes_fetched"] == after["blocks_fetched"] * 2 * 16 * 64 * 4


def test_statistics_describe_the_pools(served: Server) -> None:
    stats = served.stats()
    assert stats["config"]["budget_tokens"] == BUDGET
    assert stats["rows"] == {"capacity": MOST_REQUESTS, "active": 0}
    assert stats["host_tokens"]["capacity"] == POOL_TOKENS
    assert stats["host_tokens"]["used"] >= 700 // 16 * 16, "the prefix cache holds the prompt"
    assert stats["bytes"]["resident"] == stats["bytes"]["summaries"] == 0


def test_prometheus_agrees_with_the_statistics(served: Server) -> None:
    stats, shown = served.stats(), metrics(served)
    for name, value in stats["counters"].items():
        assert shown[f"{name}_total"] == value, name
    assert shown["rows_active"] == 0
    assert shown["rows_capacity"] == MOST_REQUESTS
    assert shown["device_capacity_bytes"] == stats["bytes"]["device_capacity"]


def test_the_audit_finds_that_the_working_set_covers_most_of_the_attention(served: Server) -> None:
    recall = served.stats()["recall"]
    assert recall["audits"] > 0, "how many depends on the cores that are idle"
    assert 0.3 < recall["worst_mass"] <= recall["mass"] < 1
    assert 0.3 < recall["agreement"] <= 1
    assert len(recall["layer_mass"]) == len(recall["layer_agreement"]) == 4
    assert 0 < metrics(served)["recall_audits"] <= recall["audits"]


def test_a_flush_shows_at_once(served: Server) -> None:
    served.post("/flush_cache").raise_for_status()
    assert served.stats()["host_tokens"]["used"] == 0
    assert metrics(served)["host_tokens_used"] == 0


def test_server_info_holds_the_same_statistics(served: Server) -> None:
    info = served.get("/server_info").json()
    assert info["lookahead_kv_budget_tokens"] == BUDGET
    assert info["internal_states"][0]["lookahead_kv"]["counters"] == served.stats()["counters"]

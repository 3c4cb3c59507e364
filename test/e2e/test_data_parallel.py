"""Two data-parallel replicas on one host divide its memory, and each answers as one replica alone does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import Server, launch_server
from test.e2e.small_pool import BUDGET, CONTEXT, ENVIRONMENT, LAYERS, assert_same_answer, text

pytestmark = pytest.mark.e2e

PROMPTS = [(0, 20), (500, 300), (4000, 700), (8000, 420)]
FLAGS = (
    *("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(BUDGET), "--lookahead-kv-miss-policy", "fetch"),
    *("--lookahead-kv-host-gb", "0.1", "--lookahead-kv-device-gb", "0.1"),
    *("--dtype", "float32", "--context-length", str(CONTEXT), "--max-running-requests", "4"),
    *("--dp", "2", "--load-balance-method", "round_robin", "--enable-metrics"),
)


@pytest.fixture(scope="module")
def replicas() -> Iterator[Server]:
    with launch_server(*FLAGS, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as server:
        yield server


def ranks(server: Server) -> list[dict[str, Any]]:
    return server.get("/lookahead_kv/stats").json()["ranks"]


def ask(server: Server, prompt: tuple[int, int]) -> dict[str, Any]:
    return server.generate(text(*prompt), max_new_tokens=20, return_logprob=True)


def test_both_replicas_answer_and_both_are_counted(replicas: Server, small_pool_server: Server) -> None:
    expected = [ask(small_pool_server, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(2) as clients:
        answers = list(clients.map(lambda prompt: ask(replicas, prompt), 2 * PROMPTS))
    for ours, theirs in zip(answers, 2 * expected, strict=True):
        assert_same_answer(ours, theirs)
    steps = [rank["counters"]["decode_steps"] for rank in ranks(replicas)]
    assert len(steps) == 2
    assert min(steps) >= 20, "one replica did all the work"
    shown = re.findall(
        r'^sglang:lookahead_kv_decode_steps_total\{[^}]*dp_rank="(\d)"', replicas.get("/metrics").text, re.MULTILINE
    )
    assert sorted(shown) == ["0", "1"]


def test_each_replica_has_what_the_flags_give_a_rank(replicas: Server) -> None:
    for rank in ranks(replicas):
        assert 0.099e9 < rank["bytes"]["host_capacity"] < 0.101e9  # a page more absorbs padding
        assert 0 < rank["bytes"]["device_capacity"] < 0.101e9

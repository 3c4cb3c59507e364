"""The way a CUDA device serves, on a CPU: its plans, tables, staging and pipeline, with the ops' references as kernels.

`SGLANG_OASIS_DEVICE_PATH=1` chooses it; everything but kernels, streams and graphs is what runs on a GPU. Requests are
aborted, dropped and retracted, every step is preceded by a check of all invariants, and answers are those of the CPU's
own way. `test_sparse_against_reference.py` compares it with Hugging Face.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import Server, launch_server
from test.e2e.prompts import PROMPTS, ask
from test.e2e.small_pool import BUDGET, ENVIRONMENT, FLAGS, LAYERS, assert_same_answer
from test.e2e.soaking import plans, soak
from test.e2e.sources import SOURCES

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WAYS = {
    "fetch": (),
    "drop": ("--lookahead-kv-miss-policy", "drop", "--lookahead-kv-fetch-ratio", "0.2"),
    "ngram": SOURCES["ngram"],
}
REQUESTS = 80


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(way: str) -> Iterator[Server]:
    flags = (*FLAGS, "--lookahead-kv-audit-interval", "0", *WAYS[way])
    environment = {**ENVIRONMENT, "SGLANG_OASIS_DEVICE_PATH": "1"}
    with launch_server(*flags, env=environment, model=truncated_model_path(LAYERS)) as running:
        yield running


@pytest.fixture(scope="module")
def expected(small_pool_server: Server) -> list[dict[str, Any]]:
    """What the CPU's own way answers."""
    return [ask(small_pool_server, prompt) for prompt in PROMPTS]


def test_answers_are_those_of_the_host_driven_way(server: Server, expected: list[dict[str, Any]], way: str) -> None:
    comparable = [i for i, (_, length) in enumerate(PROMPTS) if way != "drop" or length + 40 <= BUDGET]
    for i in comparable:
        assert_same_answer(ask(server, PROMPTS[i]), expected[i])
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: ask(server, prompt), PROMPTS))
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 0
    undisturbed = [i for i in comparable if not answers[i]["meta_info"]["num_retractions"]]
    assert undisturbed
    for i in undisturbed:
        assert_same_answer(answers[i], expected[i])
    stats = server.stats()
    assert stats["bytes"]["staging"] > 0
    counters = stats["counters"]
    assert counters["blocks_fetched"] > 0
    assert counters["blocks_urgent"] == (0 if way == "drop" else counters["blocks_fetched"])


def test_aborts_disconnects_and_retractions(server: Server, way: str) -> None:
    within = BUDGET if way == "drop" else 10_000
    soak(server, plans()[:REQUESTS], comparable=lambda plan: len(plan.prompt) + plan.tokens <= within)

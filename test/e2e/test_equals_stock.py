"""Lookahead KV with a budget that covers the context, and the dense backend, answer exactly as stock SGLang does.

Everything is float32; stock runs torch_native.

The stock server runs with this package installed and the flag off, and is itself compared with Hugging Face, so that
the two sides cannot be wrong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_oasis.config import KNOBS
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server, launch_server

pytestmark = pytest.mark.e2e

LOGPROB_TOLERANCE = 1e-4
COMMON_FLAGS = ("--dtype", "float32", "--random-seed", "7", "--context-length", "7200")
# The package must answer alike however its own prefill is chunked; the stock prefill is whole, which is its fastest.
STOCK_FLAGS = (*COMMON_FLAGS, "--chunked-prefill-size", "8192", "--max-total-tokens", "40000")
OUR_FLAGS = {
    "dense": ("--attention-backend", "oasis_cpu", "--max-total-tokens", "40000"),
    "lookahead": (
        *("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", "7200"),
        *("--lookahead-kv-host-gb", "2.2", "--lookahead-kv-device-gb", "4.2"),
    ),
}
# (first token, length) in the corpus; several share a prefix, some end on a page, a page and a token, a token short.
PROMPTS = (
    *((0, 4), (100, 17), (300, 33), (600, 64), (800, 100), (1000, 255), (1300, 513), (1900, 777)),
    *((0, 1024), (0, 1500), (0, 3600), (0, 7000)),
)


class Answer(NamedTuple):
    """What a server said to one request."""

    ids: list[int]
    logprobs: list[float]
    text: str
    finish: str
    cached: int

    @classmethod
    def of(cls, response: dict[str, Any]) -> Answer:
        meta = response["meta_info"]
        return cls(
            response["output_ids"],
            [logprob for logprob, _, _ in meta["output_token_logprobs"]],
            response["text"],
            meta["finish_reason"]["type"],
            meta["cached_tokens"],
        )


@dataclasses.dataclass(frozen=True)
class Answers:
    """Every answer of one server, in request order."""

    sampled: list[Answer]
    cold: list[Answer]
    stopped: list[Answer]
    info: dict[str, Any]
    stats_status: int


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    corpus = real_text_tokens(AutoTokenizer.from_pretrained(reference_model_path()), 7000)
    return [corpus[start : start + length] for start, length in PROMPTS]


def ask(server: Server, prompt: list[int], **sampling: Any) -> Answer:
    return Answer.of(server.generate(prompt, max_new_tokens=12, sampling=sampling, return_logprob=True))


def interview(server: Server, prompts: list[list[int]]) -> Answers:
    """The same requests in the same order: sampling draws from the server's seeded generator."""
    sampled = [ask(server, prompt, temperature=0.8, top_p=0.95) for prompt in prompts[:6]]
    server.post("/flush_cache").raise_for_status()
    cold = [ask(server, prompt) for prompt in prompts]
    words = [answer.text.split() for answer in cold]
    stopped = [ask(server, prompts[i], stop=[words[i][1]]) for i in range(6) if len(words[i]) > 2]
    info = server.get("/server_info").json()
    return Answers(sampled, cold, stopped, info, server.get("/lookahead_kv/stats").status_code)


@pytest.fixture(scope="module")
def stock(prompts: list[list[int]]) -> Answers:
    with launch_server(*STOCK_FLAGS, ordinary=True) as server:
        return interview(server, prompts)


@pytest.fixture(scope="module", params=OUR_FLAGS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(stock: Answers, backend: str) -> Iterator[Server]:
    """Started after the stock server has ended: two servers would starve each other."""
    flags = (*COMMON_FLAGS, "--chunked-prefill-size", "512", *OUR_FLAGS[backend])
    with launch_server(*flags, env={"SGLANG_OASIS_CHECK_INTEGRITY": "8"}) as running:
        yield running


@pytest.fixture(scope="module")
def ours(server: Server, prompts: list[list[int]]) -> Answers:
    return interview(server, prompts)


def assert_same(ours: list[Answer], stock: list[Answer]) -> None:
    assert [answer.ids for answer in ours] == [answer.ids for answer in stock]
    assert [answer.text for answer in ours] == [answer.text for answer in stock]
    assert [answer.finish for answer in ours] == [answer.finish for answer in stock]
    differences = [
        abs(a - b)
        for one, other in zip(ours, stock, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    ]
    assert max(differences) < LOGPROB_TOLERANCE


def test_the_stock_server_equals_hugging_face(stock: Answers, prompts: list[list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(reference_model_path(), dtype=torch.float32)
    for index in (1, 5, 7):
        ids = torch.tensor([prompts[index] + stock.cold[index].ids])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0, len(prompts[index]) - 1 : -1].float(), -1)
        assert logprobs.argmax(-1).tolist() == stock.cold[index].ids
        expected = logprobs.gather(1, ids[0, len(prompts[index]) :, None]).squeeze(1)
        assert (expected - torch.tensor(stock.cold[index].logprobs)).abs().max() < 1e-3


def test_with_the_flag_off_the_server_reports_the_feature_off(stock: Answers) -> None:
    assert stock.info["enable_lookahead_kv"] is False
    assert stock.info["attention_backend"] == "torch_native"
    assert stock.stats_status == 404
    assert "lookahead_kv" not in stock.info["internal_states"][0]


def test_the_server_reports_its_configuration(ours: Answers, backend: str) -> None:
    if backend == "dense":
        assert ours.info["enable_lookahead_kv"] is False
        assert ours.info["attention_backend"] == "oasis_cpu"
        assert ours.stats_status == 404
        return
    assert ours.info["enable_lookahead_kv"] is True
    assert ours.info["attention_backend"] == "lookahead_kv"
    assert ours.info["lookahead_kv_budget_tokens"] == 7200
    assert all(knob.name in ours.info for knob in KNOBS)
    assert ours.info["internal_states"][0]["lookahead_kv"]["config"]["budget_tokens"] == 7200
    assert ours.stats_status == 200


def test_cold_greedy_answers_are_equal(ours: Answers, stock: Answers) -> None:
    assert_same(ours.cold, stock.cold)


def test_seeded_sampling_is_equal(ours: Answers, stock: Answers) -> None:
    assert_same(ours.sampled, stock.sampled)
    assert [answer.ids for answer in ours.sampled] != [answer.ids for answer in ours.cold[:6]], "nothing was sampled"


def test_stop_strings_end_both_alike(ours: Answers, stock: Answers) -> None:
    assert_same(ours.stopped, stock.stopped)
    assert {answer.finish for answer in ours.stopped} == {"stop"}


def test_repeats_that_hit_the_prefix_cache_are_equal(
    server: Server, ours: Answers, stock: Answers, prompts: list[list[int]]
) -> None:
    repeated = [ask(server, prompt) for prompt in prompts]
    assert_same(repeated, stock.cold)
    # Whole pages are cached, and the last prompt token is always computed.
    assert [answer.cached for answer in repeated] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_eight_requests_at_once_that_share_prefixes_are_equal(
    server: Server, ours: Answers, stock: Answers, prompts: list[list[int]]
) -> None:
    server.post("/flush_cache").raise_for_status()
    with ThreadPoolExecutor(8) as pool:
        assert_same(list(pool.map(lambda prompt: ask(server, prompt), prompts)), stock.cold)


def test_nothing_was_fetched_because_everything_was_resident(server: Server, ours: Answers, backend: str) -> None:
    if backend == "dense":
        pytest.skip("the dense backend has no resident tier")
    counters = server.stats()["counters"]
    assert counters["blocks_built"] > 0
    assert (counters["blocks_fetched"], counters["misses"]) == (0, 0)


def test_the_pools_are_empty_in_the_end(server: Server, ours: Answers, backend: str) -> None:
    server.wait_until_idle()
    server.post("/flush_cache").raise_for_status()
    if backend == "dense":
        assert server.get("/v1/loads?include=core").json()["loads"][0]["num_used_tokens"] == 0
        return
    stats = server.stats()
    assert (stats["rows"]["active"], stats["host_tokens"]["used"], stats["bytes"]["resident"]) == (0, 0, 0)

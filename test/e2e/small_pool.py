"""The small pool of the life-cycle tests: its flags, its prompts, and what "the same answer" and "no leak" mean."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AutoTokenizer

from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server

LAYERS = 4
PAGE = 16
BUDGET = 192
CHUNK = 64
CONTEXT = 1024
POOL_TOKENS = 2560
MOST_REQUESTS = 16
CORPUS_TOKENS = 40_000
LOGPROB_TOLERANCE = 1e-3

FLAGS = (
    *("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(BUDGET)),
    # Each step attends to the true top-K: what a request answers does not depend on what is resident.
    *("--lookahead-kv-miss-policy", "fetch", "--dtype", "float32"),
    *("--context-length", str(CONTEXT), "--max-total-tokens", str(POOL_TOKENS)),
    *("--max-running-requests", str(MOST_REQUESTS), "--chunked-prefill-size", str(CHUNK)),
    # Admit requests in the hope that they end early; here they do not, and some are retracted.
    *("--schedule-conservativeness", "0.3"),
    *("--enable-priority-scheduling", "--default-priority-value", "0"),
    *("--load-snapshot-publish-interval", "1"),  # else /v1/loads tells the past
    *("--lookahead-kv-audit-interval", "4"),
    "--enable-metrics",
    *("--enable-custom-logit-processor", "--enable-return-hidden-states"),
)
ENVIRONMENT = {
    "SGLANG_OASIS_CHECK_INTEGRITY": "1",
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds until it looks whether a silent client is still there
    "OMP_NUM_THREADS": "1",  # the tensors are small, and threads that wait for each other on a busy core are slow
}


@functools.cache
def _corpus() -> list[int]:
    return real_text_tokens(AutoTokenizer.from_pretrained(reference_model_path()), CORPUS_TOKENS)


def text(start: int, tokens: int) -> list[int]:
    """Token ids of real text, `tokens` of them from `start` on."""
    assert start + tokens <= CORPUS_TOKENS
    return _corpus()[start : start + tokens]


def cached_tokens(response: dict[str, Any]) -> int:
    """Prompt tokens that came from the prefix cache."""
    return response["meta_info"]["cached_tokens"]


def finish_type(response: dict[str, Any]) -> str:
    return response["meta_info"]["finish_reason"]["type"]


def logprobs(response: dict[str, Any]) -> list[float]:
    """Log-probability of each output token."""
    return [logprob for logprob, *_ in response["meta_info"]["output_token_logprobs"]]


def assert_same_answer(response: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same tokens, with the same log-probabilities: a wrong KV token shows in the second long before the first."""
    assert response["output_ids"] == expected["output_ids"]
    assert len(logprobs(response)) == len(response["output_ids"])
    differences = [abs(a - b) for a, b in zip(logprobs(response), logprobs(expected), strict=True)]
    assert max(differences) < LOGPROB_TOLERANCE


def assert_baseline(server: Server) -> None:
    """No request is left and no row; with the prefix cache flushed no KV token either."""
    server.wait_until_idle()
    stats = server.stats()  # a flush would hide a row that was not given back
    assert stats["rows"]["active"] == 0
    assert stats["bytes"]["resident"] == 0
    assert stats["bytes"]["summaries"] == 0
    flush = server.post("/flush_cache?timeout=10")
    assert flush.ok, flush.text
    assert server.stats()["host_tokens"]["used"] == 0

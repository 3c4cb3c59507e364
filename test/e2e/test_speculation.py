"""Speculation changes how many steps an answer takes, never the answer: every source of lookahead, float32, greedy.

The small pool's policy is `fetch`, so each token attends to the true top K of its own query, drafts or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from scripts.eagle3.head import Head, HeadShape
from sglang_oasis.reference_model import truncated_model_path
from test.e2e.server import Server, launch_server
from test.e2e.small_pool import ENVIRONMENT, FLAGS, LAYERS, assert_baseline, assert_same_answer, text
from test.e2e.test_soak import plans, soak

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 40
# (first token, length) in the corpus: some within the budget and some beyond it, some with a common prefix.
PROMPTS = ((0, 30), (300, 100), (600, 190), (1000, 400), (2000, 700), (2000, 500), (2000, 720), (4000, 333))
DRAFT_VOCAB = 512


def write_untrained_head(folder: Path) -> Path:
    """An EAGLE-3 head for the truncated model; what it drafts is nearly always wrong."""
    target = AutoConfig.from_pretrained(truncated_model_path(LAYERS))
    torch.manual_seed(0)
    head = Head(HeadShape.of(target, DRAFT_VOCAB, layers=(0, 1, 2)))
    save_file(head.checkpoint(torch.arange(DRAFT_VOCAB), target.vocab_size), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.config(target)))
    return folder


@pytest.fixture(scope="module")
def untrained_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_untrained_head(tmp_path_factory.mktemp("head"))


SOURCES = {
    "dual": ("--lookahead-kv-source", "dual"),
    "ngram": (
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
        *("--speculative-ngram-max-bfs-breadth", "1"),
    ),
    "eagle3": ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
}


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(source: str, untrained_head: Path) -> Iterator[Server]:
    flags = SOURCES[source]
    if source == "eagle3":
        flags = (*flags, "--speculative-draft-model-path", str(untrained_head))
    with launch_server(*FLAGS, *flags, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as running:
        yield running


def ask(server: Server, prompt: tuple[int, int]) -> dict[str, Any]:
    return server.generate(text(*prompt), max_new_tokens=TOKENS, return_logprob=True)


@pytest.fixture(scope="module")
def expected(small_pool_server: Server) -> list[dict[str, Any]]:
    """The answers without speculation."""
    return [ask(small_pool_server, prompt) for prompt in PROMPTS]


def test_one_at_a_time(server: Server, expected: list[dict[str, Any]], source: str) -> None:
    answers = [ask(server, prompt) for prompt in PROMPTS]
    for answer, other in zip(answers, expected, strict=True):
        assert_same_answer(answer, other)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    emitted = sum(len(answer["output_ids"]) - 1 for answer in answers)  # the first comes from prefill
    if source == "dual":
        assert steps == emitted, "the second token is never accepted"
    elif source == "ngram":
        assert steps < 0.8 * emitted, "text that repeats itself is drafted well"


def test_eight_at_a_time_from_the_prefix_cache(server: Server, expected: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: ask(server, prompt), PROMPTS))
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 0
    # Who is retracted past its budget is prefilled again, densely, and may go on otherwise.
    undisturbed = [pair for pair in zip(answers, expected, strict=True) if not pair[0]["meta_info"]["num_retractions"]]
    assert len(undisturbed) > len(PROMPTS) // 2
    for answer, other in undisturbed:
        assert_same_answer(answer, other)


def test_retraction_and_aborts_in_between(server: Server) -> None:
    """The soak's answers are compared with those of the same server, alone."""
    soak(server, plans()[:80], comparable=lambda plan: True)
    assert_baseline(server)

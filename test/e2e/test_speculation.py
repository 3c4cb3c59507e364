"""Speculation changes how many steps an answer takes, never the answer: every source of lookahead, float32, greedy.

The small pool's policy is `fetch`, so each token attends to the true top K of its own query, drafts or not. With policy
`drop`, and with the dense backend, that goes for contexts that fit the budget.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import Server, launch_server
from test.e2e.prompts import PROMPTS, TOKENS, ask
from test.e2e.sampling_cases import CASES
from test.e2e.sampling_cases import ask as ask_case
from test.e2e.small_pool import (
    BUDGET,
    ENVIRONMENT,
    FLAGS,
    LAYERS,
    assert_baseline,
    assert_same_answer,
    finish_type,
    text,
)
from test.e2e.soaking import plans, soak
from test.e2e.sources import SOURCES, flags_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WITHIN_BUDGET = ((0, 30), (300, 100), (5000, 140), (7000, 61))


@pytest.fixture
def server(source_server: Server) -> Server:
    return source_server


@pytest.fixture(scope="module")
def expected(small_pool_server: Server) -> list[dict[str, Any]]:
    """The answers without speculation."""
    return [ask(small_pool_server, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected_within_budget(small_pool_server: Server) -> list[dict[str, Any]]:
    return [ask(small_pool_server, prompt) for prompt in WITHIN_BUDGET]


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


def test_output_keeps_to_its_grammar(server: Server) -> None:
    pattern = "(red|green|blue) [0-9]{4}"
    answer = server.generate(text(0, 300), max_new_tokens=24, sampling={"regex": pattern})
    assert finish_type(answer) == "stop"
    assert re.fullmatch(pattern, answer["text"])
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "large": {"type": "boolean"}},
        "required": ["colour", "large"],
        "additionalProperties": False,
    }
    answer = server.generate(text(600, 190), max_new_tokens=60, sampling={"json_schema": json.dumps(schema)})
    assert finish_type(answer) == "stop"
    found = json.loads(answer["text"])
    assert found["colour"] in ("red", "green")
    assert isinstance(found["large"], bool)


def test_sampled_tokens_are_among_the_likeliest(server: Server) -> None:
    likeliest = 5
    sampling = {"temperature": 1.5, "top_p": 0.95, "top_k": likeliest, "sampling_seed": 7}

    def sample(prompt: tuple[int, int]) -> dict[str, Any]:
        shown = {"return_logprob": True, "top_logprobs_num": likeliest}
        return server.generate(text(*prompt), max_new_tokens=TOKENS, sampling=sampling, **shown)

    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(sample, PROMPTS[:4]))
    ranks = []
    for answer in answers:
        assert len(answer["output_ids"]) == TOKENS
        for token, top in zip(answer["output_ids"], answer["meta_info"]["output_top_logprobs"], strict=True):
            ranks.append([candidate for _, candidate, *_ in top].index(token))
    assert max(ranks) > 0, "greedy answers would say nothing"


def test_retraction_and_aborts_in_between(server: Server) -> None:
    """The soak's answers are compared with those of the same server, alone."""
    soak(server, plans()[:80], comparable=lambda plan: True)
    assert_baseline(server)


def test_policy_drop_is_exact_within_the_budget_and_fetches_beyond_it(
    untrained_head: Path, expected_within_budget: list[dict[str, Any]]
) -> None:
    flags = (*FLAGS, "--lookahead-kv-miss-policy", "drop", *flags_of("eagle3", untrained_head))
    with launch_server(*flags, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as server:
        for prompt, other in zip(WITHIN_BUDGET, expected_within_budget, strict=True):
            assert prompt[1] + TOKENS <= BUDGET
            assert_same_answer(ask(server, prompt), other)
        assert server.stats()["counters"]["blocks_fetched"] == 0
        with ThreadPoolExecutor(3) as clients:
            beyond = list(clients.map(lambda prompt: ask(server, prompt), [(2000, 700), (1000, 400), (4000, 333)]))
        assert [len(answer["output_ids"]) for answer in beyond] == [TOKENS] * 3
        assert server.stats()["counters"]["blocks_fetched"] > 0
        assert_baseline(server)


def test_drafts_that_are_only_looked_at_change_nothing_but_the_steps(
    expected_within_budget: list[dict[str, Any]],
) -> None:
    """On pages of 8 tokens, one server accepts what the other only looks at."""
    flags = (*FLAGS, "--page-size", "8", *SOURCES["ngram"])
    answers, steps = [], []
    for rejects in ((), ("--lookahead-kv-reject-drafts",)):
        with launch_server(*flags, *rejects, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as server:
            found = [ask(server, prompt) for prompt in PROMPTS]
            for prompt, other in zip(WITHIN_BUDGET, expected_within_budget, strict=True):
                assert_same_answer(ask(server, prompt), other)
            assert_baseline(server)
        answers.append(found)
        steps.append(sum(answer["meta_info"]["spec_verify_ct"] for answer in found))
    for answer, other in zip(*answers, strict=True):
        assert_same_answer(answer, other)
    emitted = sum(len(answer["output_ids"]) - 1 for answer in answers[0])  # the first comes from prefill
    assert steps[1] == emitted, "one token per step"
    assert steps[0] < 0.8 * emitted


def test_the_dense_backend_answers_as_without_speculation(
    untrained_head: Path, expected_within_budget: list[dict[str, Any]], sampled_without: dict[str, dict[str, Any]]
) -> None:
    flags = ("--attention-backend", "oasis_cpu", "--dtype", "float32", "--context-length", "1024")
    small = ("--max-total-tokens", "2560", "--max-running-requests", "16", "--chunked-prefill-size", "64")
    speculates = (*flags_of("eagle3", untrained_head), "--enable-custom-logit-processor")
    with launch_server(*flags, *small, *speculates, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as server:
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda prompt: ask(server, prompt), WITHIN_BUDGET))
        for answer, other in zip(answers, expected_within_budget, strict=True):
            assert_same_answer(answer, other)
        steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        assert 0 < steps <= sum(len(answer["output_ids"]) - 1 for answer in answers)
        assert len(ask(server, (2000, 700))["output_ids"]) == TOKENS
        with ThreadPoolExecutor(8) as clients:
            sampled = dict(zip(CASES, clients.map(lambda name: ask_case(server, name), CASES), strict=True))
        for name, answer in sampled.items():
            assert answer["output_ids"] == sampled_without[name]["output_ids"], name

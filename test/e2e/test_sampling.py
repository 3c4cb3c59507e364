"""A request's sampling parameters mean the same under each source of lookahead, and what they say.

The answers without speculation are the measure: greedy ones, and sampled ones with a seed, token by token.
"""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch

from sglang_oasis.testing.server import Server
from test.e2e.sampling_cases import CASES, DISALLOWED, PROMPT, TOKENS, ask
from test.e2e.small_pool import LOGPROB_TOLERANCE, assert_baseline, assert_same_answer, finish_type, logprobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def expected(sampled_without: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return sampled_without


def test_every_case_says_something_of_its_own(expected: dict[str, dict[str, Any]]) -> None:
    assert expected["min_p of one"]["output_ids"] == expected["greedy"]["output_ids"]
    assert expected["end of text"]["output_ids"] == [2]
    assert finish_type(expected["stop_regex"]) == "stop"
    answers = [tuple(answer["output_ids"]) for answer in expected.values()]
    assert len(set(answers)) == len(answers) - 1  # min_p of one


def test_answers_are_those_without_speculation(source_server: Server, expected: dict[str, dict[str, Any]]) -> None:
    """Eight at a time, so that requests with all kinds of parameters share a batch."""
    with ThreadPoolExecutor(8) as clients:
        answers = dict(zip(CASES, clients.map(lambda name: ask(source_server, name), CASES), strict=True))
    for name, answer in answers.items():
        assert answer["output_ids"] == expected[name]["output_ids"], name
        if CASES[name][0].get("temperature", 0) == 0:  # else log-probabilities are those of a sharper distribution
            assert_same_answer(answer, expected[name])
        assert answer["text"] == expected[name]["text"], name
    assert_baseline(source_server)


def test_penalties_count_each_token_of_the_answer_once(small_pool_server: Server) -> None:
    """Every token is what a bias that is counted here by hand would give, and as probable."""
    frequency, presence, repetition = 0.7, 0.4, 1.0
    penalties = {"frequency_penalty": frequency, "presence_penalty": presence, "repetition_penalty": repetition}
    answer = small_pool_server.generate(PROMPT, max_new_tokens=TOKENS, sampling=penalties, return_logprob=True)
    said = answer["output_ids"]
    assert max(Counter(said).values()) > 1

    def alone(length: int) -> dict[str, Any]:
        bias = {str(token): -frequency * n - presence for token, n in Counter(said[:length]).items()}
        prompt = PROMPT + said[:length]
        return small_pool_server.generate(prompt, max_new_tokens=1, sampling={"logit_bias": bias}, return_logprob=True)

    for length in range(TOKENS):
        one = alone(length)
        assert one["output_ids"] == [said[length]]
        assert logprobs(one)[0] == pytest.approx(logprobs(answer)[length], abs=LOGPROB_TOLERANCE)


def test_a_stop_token_is_held_back_for_min_new_tokens(
    source_server: Server, expected: dict[str, dict[str, Any]]
) -> None:
    assert expected["end of text, later"]["output_ids"][9:] == [2]
    said = expected["greedy"]["output_ids"]
    stop = said[5]
    first = said.index(stop)
    for least in (0, first, first + 1, first + 4):
        sampling = {"stop_token_ids": [stop], "min_new_tokens": least}
        answer = source_server.generate(PROMPT, max_new_tokens=TOKENS, sampling=sampling)["output_ids"]
        assert stop not in answer[:least]
        assert answer[:first] == said[:first]
        if least <= first:
            assert answer == said[: first + 1]
        else:
            assert len(answer) > first + 1


def test_custom_logit_processors_are_obeyed(expected: dict[str, dict[str, Any]]) -> None:
    """And so they are under each source, which answers alike."""
    assert not {28, 198, 216, 260} & set(expected["disallowed tokens"]["output_ids"])
    once = Counter(PROMPT + expected["no token twice"]["output_ids"])
    assert all(once[token] == 1 for token in expected["no token twice"]["output_ids"])
    said = PROMPT + expected["no pair twice"]["output_ids"]
    pairs = Counter(pairwise(said))
    assert all(pairs[pair] == 1 for pair in pairwise(said[len(PROMPT) - 1 :]))


def test_a_custom_logit_processor_forces_a_token(source_server: Server) -> None:
    every_other = [token for token in range(49152) if token != 1234]
    answer = source_server.generate(
        PROMPT, max_new_tokens=5, sampling={"temperature": 1, "custom_params": {"token_ids": every_other}}, **DISALLOWED
    )
    assert answer["output_ids"] == [1234] * 5


@pytest.mark.parametrize("trims", [True, False])
def test_stop_strings(source_server: Server, expected: dict[str, dict[str, Any]], trims: bool) -> None:
    said = expected["greedy"]["text"]
    stop = said[len(said) // 2 : len(said) // 2 + 3]
    until = said.index(stop)
    sampling = {"stop": [stop, "never said"], "no_stop_trim": not trims}
    answer = source_server.generate(PROMPT, max_new_tokens=TOKENS, sampling=sampling)
    assert finish_type(answer) == "stop"
    assert answer["meta_info"]["finish_reason"]["matched"] == stop
    assert answer["text"] == said[:until] if trims else answer["text"].startswith(said[: until + len(stop)])


def test_a_stop_regex_ends_the_answer(expected: dict[str, dict[str, Any]]) -> None:
    assert re.search("n[a-d], ", expected["greedy"]["text"])
    assert len(expected["stop_regex"]["output_ids"]) < TOKENS


def test_hidden_states(source_server: Server, small_pool_server: Server) -> None:
    def rows(server: Server) -> list[list[float]]:
        answer = server.generate(PROMPT, max_new_tokens=TOKENS, return_hidden_states=True)
        computed, *decoded = answer["meta_info"]["hidden_states"]  # of the prompt, those that were not in the cache
        return [computed[-1], *decoded]

    states, others = rows(source_server), rows(small_pool_server)
    assert len(states) == len(others) == TOKENS
    for state, other in zip(states, others, strict=True):
        torch.testing.assert_close(torch.tensor(state), torch.tensor(other), rtol=0, atol=2e-3)


def test_log_probabilities_of_other_tokens(source_server: Server, small_pool_server: Server) -> None:
    def shown_by(server: Server) -> dict[str, Any]:
        shown = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [11, 28], "logprob_start_len": 90}
        sampling = {"presence_penalty": 1, "logit_bias": {"28": 2}}
        return server.generate(PROMPT, max_new_tokens=TOKENS, sampling=sampling, **shown)["meta_info"]

    ours, others = shown_by(source_server), shown_by(small_pool_server)
    for kind in ("input_top_logprobs", "output_top_logprobs", "input_token_ids_logprobs", "output_token_ids_logprobs"):
        assert len(ours[kind]) == len(others[kind])
        for row, other in zip(ours[kind], others[kind], strict=True):
            if other is None:
                assert row is None
                continue
            assert [token for _, token, *_ in row] == [token for _, token, *_ in other]
            assert [p for p, *_ in row] == pytest.approx([p for p, *_ in other], abs=LOGPROB_TOLERANCE)


def test_several_answers(source_server: Server, expected: dict[str, dict[str, Any]]) -> None:
    answers: Any = source_server.generate(PROMPT, max_new_tokens=TOKENS, sampling={"n": 3, "temperature": 2})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    answers = source_server.generate(PROMPT, max_new_tokens=TOKENS, sampling={"n": 2})
    assert [answer["output_ids"] for answer in answers] == [expected["greedy"]["output_ids"]] * 2


def test_a_custom_logit_processor_that_fails_ends_its_request_alone(source_server: Server) -> None:
    def fails(**request: Any) -> str:
        with pytest.raises(RuntimeError, match="answered 400") as failure:
            source_server.generate(PROMPT, max_new_tokens=4, **request)
        return str(failure.value)

    assert "custom_logit_processor cannot be loaded" in fails(custom_logit_processor="no JSON")
    for params in (None, {}, {"token_ids": [10**6]}):
        assert "LogitsProcessor failed" in fails(sampling={"custom_params": params}, **DISALLOWED)
    with ThreadPoolExecutor(2) as clients:
        beside = clients.submit(source_server.generate, PROMPT, max_new_tokens=TOKENS)
        fails(sampling={"custom_params": {}, "regex": "[a-d]+"}, **DISALLOWED)
    assert len(beside.result()["output_ids"]) == TOKENS
    assert_baseline(source_server)

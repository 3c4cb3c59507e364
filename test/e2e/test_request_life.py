"""Whatever happens to a request, the others' answers stay what they are alone, and every pool returns to its baseline.

Every decode step of the server is preceded by a check of all invariants of the tiers; a violation ends the server, and
with it the test. Answers are compared with those of the same request served alone before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_oasis.testing.server import Server
from test.e2e.in_flight import InFlight
from test.e2e.small_pool import (
    CONTEXT,
    LOGPROB_TOLERANCE,
    MOST_REQUESTS,
    PAGE,
    assert_baseline,
    assert_same_answer,
    cached_tokens,
    finish_type,
    logprobs,
    text,
)

pytestmark = pytest.mark.e2e

WAIT = 30.0
LONG = 600
"""Prompt tokens; three such requests fill the pool, a fourth has to queue."""
ENDLESS = CONTEXT - LONG
"""Output tokens that no test waits for."""


@pytest.fixture(scope="module")
def server(small_pool_server: Server) -> Server:
    return small_pool_server


@pytest.fixture(autouse=True)
def nothing_leaks(server: Server) -> Iterator[None]:
    yield
    assert_baseline(server)


def alone(server: Server, prompt: list[int], tokens: int, **request: Any) -> dict[str, Any]:
    """What the request answers with the server to itself and nothing cached."""
    assert_baseline(server)
    response = send(server, prompt, tokens, **request).result()
    assert server.post("/flush_cache?timeout=10").ok
    return response


def send(server: Server, prompt: list[int], tokens: int, **request: Any) -> InFlight:
    return InFlight(server, prompt, tokens, **{"return_logprob": not request.get("stream"), **request})


def abort(server: Server, **which: Any) -> None:
    assert server.post("/abort_request", **which).ok


def abort_all(server: Server, requests: list[InFlight]) -> None:
    """Every one of the requests, which are all there are, ends by the abort."""
    abort(server, abort_all=True)
    for request in requests:
        response = request.result()
        assert finish_type(response) == "abort"
        assert response["meta_info"]["completion_tokens"] < ENDLESS


def load(server: Server) -> dict[str, Any]:
    (rank,) = server.get("/v1/loads?include=core").json()["loads"]
    return rank


def decode_steps(server: Server) -> int:
    return server.stats()["counters"]["decode_steps"]


def agreement(one: list[float], other: list[float]) -> int:
    """How many values are the same before the first that is not."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=True)) if abs(a - b) > LOGPROB_TOLERANCE), len(one)
    )


def retractions(response: dict[str, Any]) -> int:
    return response["meta_info"]["num_retractions"]


def assert_right_after_retractions(server: Server, prompt: list[int], response: dict[str, Any]) -> None:
    """Each part of the answer is what the prompt with the parts before it answers alone.

    A retracted request loses the KV of its answer and takes it up again as a longer prompt, whose attention is dense:
    beyond the budget it goes on as that prompt would, and not as if it had not been retracted.
    """
    answer, done, parts = response["output_ids"], 0, 0
    while done < len(answer):
        assert parts <= retractions(response), f"output token {done} is not what the tokens before it lead to"
        part = alone(server, prompt + answer[:done], len(answer) - done)
        done += agreement(logprobs(response)[done:], logprobs(part))
        parts += 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "the state the test waits for did not come"
        time.sleep(0.01)


def fill_the_pool(server: Server, **request: Any) -> list[InFlight]:
    """Three long requests in decode that leave no room for a fourth."""
    blockers = [send(server, text(i * LONG, LONG), ENDLESS, rid=f"blocker-{i}", **request) for i in range(3)]
    wait_until(lambda: server.stats()["rows"]["active"] == len(blockers))
    return blockers


def prefill_in_chunks(server: Server, start: int, **request: Any) -> InFlight:
    """A request whose prompt is partly in the host pool, and that does not decode yet."""
    before = server.stats()
    assert before["rows"]["active"] == 0
    victim = send(server, text(start, CONTEXT - 24), 24, **request)
    wait_until(lambda: server.stats()["host_tokens"]["used"] > before["host_tokens"]["used"])
    assert server.stats()["rows"]["active"] == 0, "the prompt was through before it was looked at"
    return victim


# --- how a request ends by itself ---


def test_a_request_ends_at_its_length(server: Server) -> None:
    response = send(server, text(0, 300), 40).result()
    assert response["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert len(response["output_ids"]) == 40


def test_a_stop_string_ends_a_request(server: Server) -> None:
    whole = alone(server, text(0, 300), 40)
    stop = whole["text"][len(whole["text"]) // 2 :][:3]
    response = send(server, text(0, 300), 40, sampling={"stop": [stop]}).result()
    assert response["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert response["text"] == whole["text"][: whole["text"].index(stop)]


def test_a_stop_token_ends_a_request(server: Server) -> None:
    whole = alone(server, text(0, 300), 40)["output_ids"]
    stop = max(whole, key=whole.index)  # the token that appears last for the first time
    first = whole.index(stop)
    assert first > 0
    response = send(server, text(0, 300), 40, sampling={"stop_token_ids": [stop]}).result()
    assert response["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert response["output_ids"] == whole[: first + 1]


def test_a_prompt_longer_than_the_context_is_refused(server: Server) -> None:
    response = server.post("/generate", input_ids=text(0, CONTEXT + 1), sampling_params={"max_new_tokens": 1})
    assert response.status_code == 400
    assert f"longer than the model's context length ({CONTEXT} tokens)" in response.json()["error"]["message"]


def test_a_request_ends_by_length_at_the_end_of_the_context(server: Server) -> None:
    prompt = text(0, CONTEXT - 30)
    first_tokens = alone(server, prompt, 20)
    response = send(server, prompt, 0, sampling={"max_new_tokens": None}).result()
    assert finish_type(response) == "length"
    assert CONTEXT - 2 <= len(prompt) + len(response["output_ids"]) <= CONTEXT
    assert response["output_ids"][:20] == first_tokens["output_ids"]


# --- how a client ends it ---


def test_abort_in_the_queue(server: Server) -> None:
    blockers = fill_the_pool(server)
    queued = send(server, text(4000, LONG), ENDLESS, rid="queued")
    wait_until(lambda: load(server)["num_waiting_reqs"] == 1)
    abort(server, rid="queued")
    response = queued.result()
    assert finish_type(response) == "abort"
    assert response["meta_info"]["completion_tokens"] == 0
    assert server.stats()["rows"]["active"] == len(blockers)
    abort_all(server, blockers)


def test_abort_in_chunked_prefill(server: Server) -> None:
    before = decode_steps(server)
    victim = prefill_in_chunks(server, 0, rid="chunked")
    abort(server, rid="chunked")
    response = victim.result()
    assert finish_type(response) == "abort"
    assert response["meta_info"]["completion_tokens"] <= 1
    server.wait_until_idle()
    assert decode_steps(server) - before <= 1


def test_abort_in_decode(server: Server) -> None:
    bystander_alone = alone(server, text(6000, 300), 60)
    victim = send(server, text(0, LONG), ENDLESS, rid="decoding")
    bystander = send(server, text(6000, 300), 60)
    wait_until(lambda: server.stats()["rows"]["active"] == 2)
    abort(server, rid="decoding")
    response = victim.result()
    assert finish_type(response) == "abort"
    assert response["meta_info"]["completion_tokens"] < ENDLESS
    # It takes the row that the aborted request has just left.
    successor = send(server, text(6000, 300), 60)
    assert_same_answer(bystander.result(), bystander_alone)
    assert_same_answer(successor.result(), bystander_alone)


def test_abort_all_in_all_stages_at_once(server: Server) -> None:
    decoding = [send(server, text(i * 300, 300), ENDLESS) for i in range(2)]
    wait_until(lambda: server.stats()["rows"]["active"] == 2)
    # One of them is in chunked prefill, the others wait for it.
    entering = [send(server, text(4000 + i * LONG, LONG), ENDLESS) for i in range(3)]
    wait_until(lambda: load(server)["num_waiting_reqs"] >= 1)
    abort_all(server, decoding + entering)


def test_disconnect_in_the_queue(server: Server) -> None:
    blockers = fill_the_pool(server)
    queued = send(server, text(4000, LONG), ENDLESS)
    wait_until(lambda: load(server)["num_waiting_reqs"] == 1)
    queued.disconnect()
    wait_until(lambda: load(server)["num_waiting_reqs"] == 0)
    assert server.stats()["rows"]["active"] == len(blockers)
    abort_all(server, blockers)


def test_disconnect_in_chunked_prefill(server: Server) -> None:
    before = decode_steps(server)
    # The second waits behind the first.
    clients = [send(server, text(i * LONG, LONG), ENDLESS) for i in range(2)]
    wait_until(lambda: server.stats()["host_tokens"]["used"] > 0)
    assert server.stats()["rows"]["active"] == 0
    for client in clients:
        client.disconnect()
    server.wait_until_idle()
    assert decode_steps(server) - before < ENDLESS - 1


def test_disconnect_in_decode(server: Server) -> None:
    bystander_alone = alone(server, text(6000, 300), 100)
    before = decode_steps(server)
    client = send(server, text(0, LONG), ENDLESS, stream=True)
    client.wait_for_tokens(5)
    bystander = send(server, text(6000, 300), 100)
    client.disconnect()
    assert_same_answer(bystander.result(), bystander_alone)
    server.wait_until_idle()
    assert decode_steps(server) - before < ENDLESS - 1


# --- sharing the pools ---


def test_retracted_requests_within_the_budget_come_back_with_the_same_answer(server: Server) -> None:
    prompts = [text(i * 200, 150) for i in range(14)]  # they fit the pool, with their answers they do not
    responses = [request.result() for request in [send(server, prompt, 40) for prompt in prompts]]
    for prompt, response in retracted_and_some_others(prompts, responses):
        assert_same_answer(response, alone(server, prompt, 40))


def test_retracted_requests_beyond_the_budget_come_back_with_the_right_answer(server: Server) -> None:
    prompts = [text(i * 400, 300) for i in range(8)]
    responses = [request.result() for request in [send(server, prompt, 40) for prompt in prompts]]
    for prompt, response in retracted_and_some_others(prompts, responses):
        assert_right_after_retractions(server, prompt, response)


def retracted_and_some_others(
    prompts: list[list[int]], responses: list[dict[str, Any]]
) -> list[tuple[list[int], dict[str, Any]]]:
    pairs = sorted(zip(prompts, responses, strict=True), key=lambda pair: -retractions(pair[1]))
    retracted = sum(retractions(response) > 0 for response in responses)
    assert retracted > 0, "the pool was large enough"
    return pairs[: retracted + 3]


def test_the_same_prompt_twice_at_once(server: Server) -> None:
    expected = alone(server, text(0, 500), 40)
    twins = [send(server, text(0, 500), 40) for _ in range(2)]
    for twin in twins:
        assert_same_answer(twin.result(), expected)


def test_a_cached_prefix_gives_the_same_answer(server: Server) -> None:
    expected = alone(server, text(0, 500), 40)
    longer = alone(server, text(0, 650), 40)
    first, again, extended = (
        send(server, prompt, 40).result() for prompt in (text(0, 500), text(0, 500), text(0, 650))
    )
    assert cached_tokens(first) == 0
    assert cached_tokens(again) == 500 // PAGE * PAGE - (0 if 500 % PAGE else PAGE)
    assert cached_tokens(extended) >= 500 // PAGE * PAGE
    assert_same_answer(first, expected)
    assert_same_answer(again, expected)
    assert_same_answer(extended, longer)


def test_an_evicted_prefix_comes_back(server: Server) -> None:
    prompt = text(0, 600)
    expected = alone(server, prompt, 40)
    send(server, prompt, 1).result()
    for i in range(3):  # with the prompt more than the pool holds
        send(server, text(1000 + i * 1000, 900), 1).result()
    evicted, back = send(server, prompt, 40).result(), send(server, prompt, 40).result()
    assert cached_tokens(evicted) == 0
    assert cached_tokens(back) > 0
    assert_same_answer(evicted, expected)
    assert_same_answer(back, expected)


def test_a_flush_empties_the_prefix_cache(server: Server) -> None:
    expected = alone(server, text(0, 500), 40)
    send(server, text(0, 500), 1).result()
    assert server.stats()["host_tokens"]["used"] >= 500 // PAGE * PAGE
    assert server.post("/flush_cache?timeout=10").ok
    assert server.stats()["host_tokens"]["used"] == 0
    response = send(server, text(0, 500), 40).result()
    assert cached_tokens(response) == 0
    assert_same_answer(response, expected)


def test_a_flush_is_refused_while_a_request_runs(server: Server) -> None:
    expected = alone(server, text(0, 500), 100)
    running = send(server, text(0, 500), 100)
    wait_until(lambda: server.stats()["rows"]["active"] == 1)
    assert server.post("/flush_cache").status_code == 400
    assert_same_answer(running.result(), expected)


def test_a_higher_priority_leaves_the_queue_first(server: Server) -> None:
    blockers = fill_the_pool(server, priority=5)
    low = send(server, text(4000, LONG), 8, priority=0)
    wait_until(lambda: load(server)["num_waiting_reqs"] == 1)
    high = send(server, text(5000, LONG), 8, priority=5)
    wait_until(lambda: load(server)["num_waiting_reqs"] == 2)
    for i in range(len(blockers)):
        abort(server, rid=f"blocker-{i}")
    answered = [request.result()["meta_info"]["response_sent_to_client_ts"] for request in (high, low)]
    assert answered == sorted(answered)


def test_a_much_higher_priority_preempts_and_the_preempted_comes_back_with_the_same_answer(server: Server) -> None:
    prompts = [text(i * 200, 100) for i in range(MOST_REQUESTS)]
    running = [send(server, prompt, 24, priority=0) for prompt in prompts]
    wait_until(lambda: server.stats()["rows"]["active"] == MOST_REQUESTS)
    urgent = send(server, text(4000, 300), 8, priority=100).result()
    responses = [request.result() for request in running]
    assert sorted(map(retractions, responses)) == [0] * (MOST_REQUESTS - 1) + [1]
    assert_same_answer(urgent, alone(server, text(4000, 300), 8))
    for prompt, response in zip(prompts, responses, strict=True):
        if retractions(response):
            assert_same_answer(response, alone(server, prompt, 24))


# --- other ways to sample ---


def test_parallel_samples_share_a_prompt(server: Server) -> None:
    expected = alone(server, text(0, 500), 20)
    samples = send(server, text(0, 500), 20, sampling={"n": 4}).result()
    assert len(samples) == 4
    for sample in samples:
        assert_same_answer(sample, expected)


def test_beam_search_is_refused(server: Server) -> None:
    response = server.post(
        "/generate", input_ids=text(0, 300), sampling_params={"max_new_tokens": 8, "temperature": 0, "beam_width": 2}
    )
    assert response.status_code == 400
    assert "Beam search does not work with --enable-lookahead-kv" in response.json()["error"]["message"]


def test_structured_output_keeps_to_its_grammar(server: Server) -> None:
    pattern = "(red|green|blue) [0-9]{4}"
    response = send(server, text(0, 300), 24, sampling={"regex": pattern}).result()
    assert finish_type(response) == "stop"
    assert re.fullmatch(pattern, response["text"])

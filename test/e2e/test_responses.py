"""The lean environment has what OpenAI's Responses API needs."""

from __future__ import annotations

import pytest

from sglang_oasis.testing.server import Server

pytestmark = pytest.mark.e2e

QUESTION = "Name a colour."


def test_the_responses_api_answers_as_the_chat_api_does(small_pool_server: Server) -> None:
    model = small_pool_server.get("/v1/models").json()["data"][0]["id"]  # this endpoint knows no other name
    request = {"model": model, "temperature": 0}
    answer = small_pool_server.post("/v1/responses", input=QUESTION, max_output_tokens=12, **request)
    chat = small_pool_server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": QUESTION}], max_tokens=12, **request
    )
    assert answer.ok, answer.text
    (message,) = [item for item in answer.json()["output"] if item["type"] == "message"]
    text = message["content"][0]["text"]
    assert len(text.split()) > 3
    # The two endpoints do not count the last tokens alike.
    assert chat.json()["choices"][0]["message"]["content"].startswith(text)

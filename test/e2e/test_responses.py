"""The lean environment has what OpenAI's Responses API needs."""

from __future__ import annotations

import pytest

from test.e2e.server import Server

pytestmark = pytest.mark.e2e

QUESTION = "Name a colour."


def test_the_responses_api_answers_as_the_chat_api_does(small_pool_server: Server) -> None:
    request = {"model": "default", "temperature": 0}
    answer = small_pool_server.post("/v1/responses", input=QUESTION, max_output_tokens=12, **request)
    chat = small_pool_server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": QUESTION}], max_tokens=12, **request
    )
    assert answer.ok, answer.text
    (message,) = [item for item in answer.json()["output"] if item["type"] == "message"]
    assert message["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"] != ""

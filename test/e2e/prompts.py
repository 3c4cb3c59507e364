"""Prompts whose answers are compared between servers."""

from __future__ import annotations

from typing import Any

from sglang_oasis.testing.server import Server
from test.e2e.small_pool import text

TOKENS = 40
# (first token, length) in the corpus: some within the budget and some beyond it, some with a common prefix.
PROMPTS = ((0, 30), (300, 100), (600, 190), (1000, 400), (2000, 700), (2000, 500), (2000, 720), (4000, 333))


def ask(server: Server, prompt: tuple[int, int]) -> dict[str, Any]:
    return server.generate(text(*prompt), max_new_tokens=TOKENS, return_logprob=True)

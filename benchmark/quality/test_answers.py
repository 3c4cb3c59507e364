"""Equal attention gets equal answers, from real servers (four layers of the model, float32)."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmark.quality.documents import Author
from benchmark.quality.policies import dense, lookahead
from benchmark.quality.run import CHUNK, READINGS, Serving, Store, evaluate, key_of
from benchmark.quality.tasks import TASKS
from sglang_oasis.reference_model import reference_model_path, truncated_model_path
from sglang_oasis.testing.corpus import real_text_tokens

pytestmark = pytest.mark.e2e
CONTEXT = CHUNK + 1024  # a prompt has two chunks


def test_a_budget_as_large_as_the_context_answers_as_dense_attention(
    tmp_path: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference_model_path())
    author = Author(tokenizer, real_text_tokens(tokenizer, 20_000))
    items = [item for name in ("needle of many", "variable tracking") for item in author.items(TASKS[name], CONTEXT, 2)]
    asked = [(item, reading) for item in items for reading in reversed(READINGS)]  # decoded from a cold cache
    serving = Serving(truncated_model_path(4), "float32", 2)
    store = Store(tmp_path / "answers.jsonl")
    policies = dense(), lookahead("lookahead", CONTEXT)
    for policy in policies:
        evaluate(serving, tokenizer, policy, asked, store)
    # Both readings see the same tokens, so all four answers are the same.
    for item in items:
        answers = [
            store.get(key_of(policy, item, reading, serving.dtype)) for policy in policies for reading in READINGS
        ]
        assert len({answer.text for answer in answers if answer is not None}) == 1
        assert None not in answers

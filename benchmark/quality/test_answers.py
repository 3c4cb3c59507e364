"""Equal attention gets equal answers, from real servers (four layers of the model, float32)."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmark.quality.documents import Author
from benchmark.quality.policies import DENSE, dense, lookahead
from benchmark.quality.run import READINGS, Serving, Store, evaluate
from benchmark.quality.tasks import TASKS
from sglang_oasis.reference_model import reference_model_path, truncated_model_path
from sglang_oasis.testing.corpus import real_text_tokens

pytestmark = pytest.mark.e2e
CONTEXT = 2048


def test_a_budget_as_large_as_the_context_answers_as_dense_attention(
    tmp_path: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference_model_path())
    author = Author(tokenizer, real_text_tokens(tokenizer, 20_000))
    items = [item for name in ("needle of many", "variable tracking") for item in author.items(TASKS[name], CONTEXT, 3)]
    asked = [(item, reading) for item in items for reading in READINGS]
    serving = Serving(truncated_model_path(4), "float32", 2, 0.5)
    store = Store(tmp_path / "answers.jsonl")
    for policy in (dense(), lookahead("lookahead", CONTEXT)):
        evaluate(serving, tokenizer, policy, asked, store)
    texts = {answer.key[:1] + answer.key[2:]: answer.text for answer in store.answers()}
    assert len(texts) == 2 * len(asked)
    for (policy_name, *item), text in texts.items():
        assert text == texts[DENSE, *item], (policy_name, item)
    # Both readings see the same tokens, so their answers are the same too.
    for item in items:
        read_both = {texts[DENSE, item.task.name, CONTEXT, reading, item.number] for reading in READINGS}
        assert len(read_both) == 1

"""The evaluation itself: items, scores, statistics, forced tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmark.quality.documents import Author, Item, share_found
from benchmark.quality.drift import compare
from benchmark.quality.findings import cells
from benchmark.quality.forcing import ForcedTokens
from benchmark.quality.policies import DENSE, dense, lookahead
from benchmark.quality.run import Answer, Store, key_of
from benchmark.quality.tasks import TASKS
from benchmark.quality.tasks.reading import score_record
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens

CONTEXT = 2048


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(reference_model_path())


@pytest.fixture(scope="module")
def author(tokenizer: Any) -> Author:
    return Author(tokenizer, real_text_tokens(tokenizer, 20_000))


def read(item: Item, tokenizer: Any) -> str:
    return tokenizer.decode([*item.prefix, *item.question])


@pytest.mark.parametrize("name", TASKS)
def test_items_fit_hold_their_answers_and_are_the_same_every_time(author: Author, tokenizer: Any, name: str) -> None:
    items = author.items(TASKS[name], CONTEXT, 12)
    assert items == [*author.items(TASKS[name], CONTEXT, 5), *items[5:]]
    assert [item.number for item in items] == list(range(12))
    for item in items:
        text = read(item, tokenizer)
        assert CONTEXT * 0.8 < len(item.prefix) + len(item.question) + item.task.output <= CONTEXT
        assert text.endswith(item.asked.beginning)
        for one in item.asked.expected:
            assert one.split("=")[-1] in text
        assert item.task.score_of(item.asked.beginning, item.asked.expected) == 0


@pytest.mark.parametrize("name", TASKS)
def test_a_right_answer_scores_one(author: Author, name: str) -> None:
    (item,) = author.items(TASKS[name], CONTEXT, 1)
    right = " ".join(item.asked.expected)
    if name == "text to JSON":
        right = ", ".join(f'"{key}": "{value}"' for key, value in (e.split("=") for e in item.asked.expected)) + "}"
    assert item.task.score_of(f"{item.asked.beginning} {right}", item.asked.expected) == 1


def test_needles_of_one_text_share_their_prefix_deepest_first(author: Author) -> None:
    items = author.items(TASKS["needle"], CONTEXT, 11)
    room = len(items[0].prefix)
    shared = [
        next(place for place, (a, b) in enumerate(zip(one.prefix, two.prefix, strict=False)) if a != b)
        for one, two in pairwise(items)
    ]
    assert shared[0] > 0.8 * room
    assert shared[:9] == sorted(shared[:9], reverse=True)
    assert shared[9] < 0.1 * room  # the next ten are in another text


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"name": "A", "age": 30, "city": "Oslo"} and more', 1.0),
        ('{"name": "A", "age": "30", "city": "Rome"}', 0.5),
        ('{"name": "A", "age": 30', 0.0),
        ("[1]", 0.0),
    ],
)
def test_records_are_scored_by_their_fields(answer: str, score: float) -> None:
    assert score_record(answer, ("age=30", "city=Oslo")) == score


def test_every_process_asks_the_same() -> None:
    """Words of equal frequency once came in the order of a set, which each process has its own of."""
    ask = """
from random import Random
from benchmark.quality.tasks.words import frequent
print([frequent(Random(seed), 0, 1).questions[0].expected for seed in range(30)])
"""
    said = [
        subprocess.check_output([sys.executable, "-c", ask], env=os.environ | {"PYTHONHASHSEED": seed}, text=True)
        for seed in "123"
    ]
    assert said[0].count("(") == 30
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize(("answer", "score"), [("It is All, id", 1.0), ("callable idle", 0.0), ("(all)", 0.5)])
def test_only_whole_words_count(answer: str, score: float) -> None:
    assert share_found(answer, ("all", "id")) == score


def given(policy: str, scores: list[float], budget: int = 0) -> list[Answer]:
    return [
        Answer(policy, budget, "t", 4096, "prefilled", number, score, "", "f") for number, score in enumerate(scores)
    ]


def test_cells_pair_items_with_dense_and_come_worst_first() -> None:
    answers = [
        *given(DENSE, [1, 1, 1, 1, 1, 1, 0]),
        *given("good", [1, 1, 1, 1, 1, 1], 512),  # the seventh item is not answered, and does not count
        *given("bad", [0, 0, 0, 0, 0, 0.5, 1], 512),
    ]
    bad, good = cells(answers)
    assert (bad.policy, bad.items, bad.won, bad.lost) == ("bad", 7, 1, 6)
    assert bad.delta == pytest.approx(100 * (1.5 - 6) / 7)
    assert bad.p == pytest.approx(2 * (1 + 7) / 2**7)
    assert (good.items, good.dense, good.delta, good.p) == (6, 1.0, 0.0, 1.0)
    assert bad.known


def test_a_store_remembers_what_was_answered(tmp_path: Path, author: Author) -> None:
    (item,) = author.items(TASKS["needle"], CONTEXT, 1)
    file = tmp_path / "new" / "answers.jsonl"
    key = key_of(dense(), item, "decoded", "auto")
    answer = Answer(*key[:-1], 1.0, " 5", key[-1])
    Store(file).add(answer)
    again = Store(file)
    assert again.get(key) == answer
    other_item = replace(item, question=[1, 2])
    others = [
        key_of(dense(), item, "prefilled", "auto"),
        key_of(dense(), item, "decoded", "float32"),
        key_of(dense(), other_item, "decoded", "auto"),
        key_of(replace(dense(), flags=("--other",)), item, "decoded", "auto"),
        key_of(lookahead("lookahead", 512), item, "decoded", "auto"),
    ]
    assert len({key, *others}) == 6
    assert [again.get(other) for other in others] == [None] * 5


def test_tokens_are_forced_and_distributions_kept(tmp_path: Path) -> None:
    logits = torch.randn(3, 2, 7)  # three steps of two requests
    whole, chunk = (SimpleNamespace(origin_input_ids=[0] * 9, extend_end=end) for end in (9, 4))
    kept = {"forced": [4, 2], "keep": str(tmp_path / "kept.npy"), "steps": 3, "__req__": whole}
    requests: list[dict[str, Any]] = [kept, {"__req__": whole}]
    ForcedTokens()(torch.randn(1, 7), [kept | {"__req__": chunk}])  # leaves no trace
    assert "step" not in kept
    outs = [ForcedTokens()(step.clone(), requests) for step in logits]
    assert [int(out[0].argmax()) for out in outs] == [4, 2, int(logits[2, 0].argmax())]
    assert all(torch.equal(out[1], step[1]) for out, step in zip(outs, logits, strict=True))
    expected = torch.log_softmax(logits[:, 0], -1).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "kept.npy"), expected, atol=2e-3)


def test_distributions_are_compared(tmp_path: Path) -> None:
    left, right = np.log([[0.5, 0.25, 0.25], [1, 1e-9, 1e-9]]), np.log([[0.25, 0.5, 0.25], [1, 1e-9, 1e-9]])
    np.save(tmp_path / "a.npy", left)
    np.save(tmp_path / "b.npy", right)
    divergence, same = compare(tmp_path / "a.npy", tmp_path / "b.npy")
    np.testing.assert_allclose(divergence, [0.25 * np.log(2), 0], atol=1e-6)
    assert same.tolist() == [0, 1]

"""What `benchmark.studies.agreement` measures, on a tiny model and a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmark.studies.agreement import measure, quiet_before
from benchmark.studies.agreement_findings import IDEAL, OFF, SHORTLIST, SMOOTHINGS, Findings, Setup, claims, draw
from benchmark.studies.lookahead_sources import (
    DUAL,
    EAGLE3,
    LAST_QUERY,
    ORACLE,
    DecodedText,
    Eagle3,
    decode,
    dual,
    guessed,
)
from benchmark.studies.texts import DECODED_TEXTS
from benchmark.studies.working_set import Smoothing, simulate, smooth
from scripts.eagle3.head import Head, HeadShape
from sglang_oasis.testing.sparse_reference import SparseReference
from sglang_oasis.testing.tiny_model import tiny_model

STEPS = 12
VOCABULARY = 61


@pytest.fixture(scope="module")
def reference() -> SparseReference:
    return SparseReference(tiny_model())


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(VOCABULARY, (400,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def text(reference: SparseReference, tokens: list[int]) -> DecodedText:
    return decode(reference, tokens, STEPS, (0, 1))


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, /) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


@pytest.mark.parametrize("kind", DECODED_TEXTS)
def test_texts_have_the_length_that_was_asked_for(kind: str) -> None:
    for context in (6000, 6001):
        found = DECODED_TEXTS[kind](Bytes(), 2, context, 128)
        assert [len(tokens) for tokens in found] == [context] * 2
        assert found[0] != found[1]


def test_every_needle_that_is_asked_for_is_in_the_text_once_before() -> None:
    (tokens,) = DECODED_TEXTS["needles"](Bytes(), 1, 6000, 128)
    prompt, answer = bytes(tokens[:-128]), bytes(tokens[-128:])
    named = answer.split(b". ")[:-1]
    assert len(named) > 2
    assert all(prompt.count(fact) == 1 for fact in named)


def test_a_right_guess_has_the_query_that_comes(reference: SparseReference, text: DecodedText) -> None:
    queries, _ = guessed(reference, text, text.tokens[text.next_positions], text.next_positions)
    torch.testing.assert_close(queries, text.queries[:, 1:], rtol=1e-4, atol=1e-4)


def test_dual_believes_what_the_model_says_after_its_last_belief(reference: SparseReference, text: DecodedText) -> None:
    beliefs = dual(reference, text).tokens
    assert beliefs is not None
    assert beliefs[0] == text.tokens[text.prompt], "the first belief is the first token again"
    _, expected = guessed(reference, text, beliefs, text.next_positions)
    assert torch.equal(beliefs[1:], expected[:-1])


def test_smoothing_is_a_running_mean_that_rises_at_once() -> None:
    unknown = float("-inf")
    startup = torch.tensor([[[0.4, 0.0, unknown]]])
    scores = torch.tensor([[[[0.0, 0.6, unknown]]], [[[0.0, 0.0, 0.5]]]])
    expected = torch.tensor([[[[0.2, 0.3, unknown]]], [[[0.1, 0.15, 0.5]]]])
    torch.testing.assert_close(smooth(scores, startup, Smoothing(0.5)), expected)
    assert smooth(scores, startup, Smoothing(0.9, 2.0))[0, 0, 0, 1] == pytest.approx(0.3), "half of the new score"
    assert torch.equal(smooth(scores, startup, OFF), scores)


def test_a_working_set_without_a_cap_holds_the_best_and_with_one_moves_as_much() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(9, 1, 2, 3, 20, generator=generator)
    startup, weights = torch.rand(2, 3, 20, generator=generator), torch.rand(9, 1, 2, 3, 20, generator=generator)
    candidates = torch.full((9,), 20)
    free = simulate(scores, startup, candidates, weights, k=5, cap=5)
    held = weights[:, 0].gather(-1, scores[:, 0].topk(5).indices).sum(-1).mean((0, 2))
    torch.testing.assert_close(free.held[0, 0], held)
    assert (simulate(scores, startup, candidates, weights, k=5, cap=1).fetched <= 1).all()


def test_a_block_is_quiet_after_eight_steps_without_attention() -> None:
    mass = torch.zeros(12, 1, 1)
    mass[2] = 0.5
    assert quiet_before(mass).flatten().tolist() == [False] * 11 + [True]


def test_measurements_are_consistent(reference: SparseReference, tokens: list[int]) -> None:
    setup = Setup(("code",), (len(tokens),), 1, STEPS, (8, 4), None)
    shape = HeadShape.of(reference.model.config, 20, (0, 1))
    drafter = Eagle3(Head(shape).eval(), torch.arange(20))
    found = measure(setup, reference, drafter, "code", 0, tokens)
    cells = {(m.k, m.source, m.smoothing): m for m in found}
    sources = (LAST_QUERY, DUAL, EAGLE3, ORACLE)
    assert len(cells) == len(sources) * (len(SMOOTHINGS) + len(SHORTLIST)) + 2
    for k in setup.blocks:
        oracle, best = cells[k, ORACLE, str(OFF)], cells[k, IDEAL, str(OFF)]
        assert set(oracle.agreement) == {1.0}
        assert oracle.mass == pytest.approx(oracle.free_mass, abs=2e-4), "without a cap it holds what was predicted"
        for source in sources:
            assert all(a <= b + 1e-4 for a, b in zip(cells[k, source, str(OFF)].mass, best.mass, strict=True))
    findings = Findings(setup, found)
    assert all(len(claim.evidence) == 1 for claim in claims(findings))
    assert len(draw(findings).axes) == 3

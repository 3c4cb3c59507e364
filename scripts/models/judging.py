"""Compares the answers of an engine with Hugging Face in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.models.serving import PROMPTS
from sglang_oasis.testing.selection import selection_is_top_k
from sglang_oasis.testing.sparse_reference import SparseReference
from sglang_oasis.testing.trace import load_trace

TOLERANCE = 1e-3
"""Tolerance of log-probabilities, in nats."""
WIDE_TIE = 0.1
"""Relative tolerance of a block's score: the change of a bfloat16 summary by a key's last float32 bit."""


def judge(reference: Path, answers: dict[str, dict[str, Any]], trace: Path, sparse: bool) -> dict[str, Any]:
    """Return the largest differences from the reference.

    Returns:
        `below`, `above`: the largest difference of a log-probability, in nats. `greedy`: every token is the
        reference's most probable, ties within the tolerance. Where it attends sparsely also `top_k`, the share of
        selections that are the top K of the reference's own scores, and `dense`, how far the answers past the budget
        are from attention to everything.
    """
    model = SparseReference(AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32))
    verdict: dict[str, Any] = {"greedy": True}
    for name, prompt in PROMPTS.items():
        answer = answers[name]
        prefilled = model.prefill(prompt)
        processed = answer["output_ids"][:-1]
        dense = torch.cat([prefilled.logprobs[None], model.decode_dense(prefilled, processed)])
        expected = dense
        if sparse and name == "above":
            steps = load_trace(trace, answer["rid"])[: len(processed)]
            decoded = model.decode_recorded(prefilled, processed, steps)
            expected = torch.cat([prefilled.logprobs[None], decoded.logprobs])
            selected = torch.stack([step.selected for step in steps], dim=1)
            verdict["top_k"] = float(selection_is_top_k(decoded.scores, selected, WIDE_TIE).float().mean())
            verdict["dense"] = _difference(answer["logprobs"], dense)
        verdict[name] = _difference(answer["logprobs"], expected)
        chosen = expected.gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
        verdict["greedy"] &= bool((chosen >= expected.amax(-1) - TOLERANCE).all())
    return verdict


def is_equal(verdict: dict[str, Any]) -> bool:
    """Whether the answers equal those of the reference."""
    sparse = verdict.get("top_k", 1.0) == 1.0 and verdict.get("dense", 1.0) > 10 * TOLERANCE
    return verdict["greedy"] and max(verdict["below"], verdict["above"]) < TOLERANCE and sparse


def is_as_stock(verdict: dict[str, Any], stock: dict[str, Any]) -> bool:
    """Whether an answer that differs from the reference equals stock SGLang's, which then differs from it, too.

    Past the budget stock SGLang has no such answer, so there the differences must be of the same size.
    """
    same = max(verdict["from_stock"].values()) < TOLERANCE
    return same and verdict["above"] < 2 * max(stock["below"], stock["above"]) + TOLERANCE


def difference_from_stock(
    answers: dict[str, dict[str, Any]], stock: dict[str, dict[str, Any]], sparse: bool
) -> dict[str, float]:
    """Return the largest difference of a chosen token's log-probability, per prompt with equal attention, in nats."""
    differences = {}
    for name in PROMPTS:
        if sparse and name == "above":
            continue
        ours, theirs = answers[name], stock[name]
        differences[name] = 0.0
        for mine, other in zip(ours["logprobs"], theirs["logprobs"], strict=True):
            (token, value), (other_token, other_value) = mine[0], other[0]
            if token != other_token:  # after a tie, the answers continue different texts
                break
            differences[name] = max(differences[name], abs(value - other_value))
    return differences


def _difference(logprobs: list[list[tuple[int, float]]], expected: Tensor) -> float:
    """Return the largest difference over the tokens that the engine reported; `expected` is [tokens, vocabulary]."""
    largest = 0.0
    for reported, row in zip(logprobs, expected, strict=True):
        tokens, values = zip(*reported, strict=True)
        largest = max(largest, float((torch.tensor(values) - row[list(tokens)]).abs().max()))
    return largest

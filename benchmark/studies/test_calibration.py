"""How the study divides budgets, and what it says on a tiny model."""

from __future__ import annotations

import torch

from benchmark.studies.calibration import (
    CALIBRATED,
    IDEAL,
    PER_HEAD,
    PER_LAYER,
    Ranked,
    fill,
    gaps,
    rankings,
)
from benchmark.studies.selectors import TAIL, capture
from sglang_oasis.testing.sparse_reference import SparseReference
from sglang_oasis.testing.tiny_model import tiny_model

CONTEXT, BLOCKS = TAIL + 512, 16


def test_budgets_go_where_the_next_block_is_worth_most() -> None:
    """Two heads: one has all its mass in few blocks, the other one spreads it. All 16 blocks are given away."""
    steep = torch.tensor([0.4, 0.3, 0.2] + [0.001] * 29)
    flat = torch.full((32,), 0.02)
    assert fill(torch.stack([steep, flat])[None], 8).tolist() == [[3, 13]]


def test_a_block_behind_a_poor_one_is_worth_what_it_brings() -> None:
    """A ranking is not monotone: the blocks at ranks 4 and 5 of the first head come only together."""
    hidden = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.0, 0.09] + [0.0] * 10)
    other = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.04] + [0.0] * 10)
    assert fill(torch.stack([hidden, other])[None], 5).tolist() == [[6, 4]]


def test_captured_mass_is_that_of_the_first_ranks() -> None:
    ranked = Ranked(0.1, torch.tensor([[0.4, 0.2, 0.1], [0.3, 0.3, 0.0]]))
    assert ranked.captured(torch.tensor([2, 1])) == torch.tensor(0.1 + (0.6 + 0.3) / 2)


def test_what_was_fitted_to_the_same_text_loses_nothing_to_the_uniform_ideal() -> None:
    reference = SparseReference(tiny_model())
    rng = torch.Generator().manual_seed(0)
    text = capture(reference, torch.randint(reference.model.config.vocab_size, (CONTEXT,), generator=rng).tolist())
    for name, found in rankings(dict.fromkeys("abcd", text), CONTEXT, queries=4, blocks=BLOCKS).items():
        by_way = {gap.way: gap.layers for gap in gaps(name, found, BLOCKS)}
        assert IDEAL not in by_way, "it is what the others are compared with"
        assert sum(by_way[IDEAL + PER_HEAD]) <= sum(by_way[IDEAL + PER_LAYER]) <= 1e-3
        assert all(min(by_way[way]) > -1e-3 for way in ("bf16", "int8", "int4", CALIBRATED)), "better than the best"

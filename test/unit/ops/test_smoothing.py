"""Averages of scores against plain loops, and what they do to a working set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_oasis.ops.smoothing import ESCAPE, UNKNOWN, smooth_scores
from test.cases.kernel_cases import SEEDS, generator, many


@pytest.mark.usefixtures("kernels")
@many
@given(
    heads=st.integers(1, 3),
    blocks=st.integers(1, 40),
    decay=st.sampled_from([0.5, 0.8, 0.95]),
    seed=SEEDS,
)
def test_kernel_and_reference_equal_loops(heads: int, blocks: int, decay: float, seed: int) -> None:
    rng = generator(seed)
    rows = torch.randperm(4, generator=rng)[:2]
    averages = torch.rand((4, heads, blocks + 3), generator=rng)
    averages[torch.rand(averages.shape, generator=rng) < 0.3] = UNKNOWN
    scores = torch.rand((2, heads, blocks), generator=rng)
    candidates = torch.randint(0, blocks + 1, (2,), generator=rng)
    expected_averages, expected = averages.clone(), scores.clone()
    for i, head in [(i, head) for i in range(2) for head in range(heads)]:
        for block in range(int(candidates[i])):
            old, new = float(averages[rows[i], head, block]), float(scores[i, head, block])
            value = max(new if old < 0 else decay * old + (1 - decay) * new, new / ESCAPE)
            expected_averages[rows[i], head, block] = expected[i, head, block] = value
    for smooth in (smooth_scores, smooth_scores.reference):
        got_averages, got = averages.clone(), scores.clone()
        smooth(got_averages, rows, got, candidates, decay)
        torch.testing.assert_close(got_averages, expected_averages, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


def ranks_first(scores: list[list[float]], decay: float) -> list[int]:
    """Which block ranks first after each step."""
    averages, rows, candidates = torch.full((1, 1, 3), UNKNOWN), torch.tensor([0]), torch.tensor([3])
    first = []
    for step in scores:
        smoothed = torch.tensor([[step]])
        smooth_scores(averages, rows, smoothed, candidates, decay)
        first.append(int(smoothed.argmax()))
    return first


def test_near_ties_do_not_change_places() -> None:
    assert ranks_first([[0.50, 0.48, 0.02], [0.48, 0.50, 0.02], [0.50, 0.48, 0.02]], 0.8) == [0, 0, 0]


def test_a_block_that_suddenly_matters_ranks_first_at_once() -> None:
    calm, sudden = [0.30, 0.28, 0.02], [0.02, 0.01, 0.97]
    assert ranks_first([calm, calm, sudden], 0.9) == [0, 0, 2]

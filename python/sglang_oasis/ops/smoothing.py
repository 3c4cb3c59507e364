"""Hysteresis: blocks are ranked by a running average of their scores, so that near-ties do not move them every step."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op

UNKNOWN = -1.0
"""Average of a block that was not scored yet; scores are never negative."""
ESCAPE = 3.0
"""A block whose score is so many times what it takes to be selected is selected at once."""


@device_op
def smooth_scores(
    averages: Tensor, rows: Tensor, scores: Tensor, candidates: Tensor, decay: float, escape: float = ESCAPE
) -> None:
    """Replace scores by their averages over the steps and remember those, both in place.

    The average is `decay * average + (1 - decay) * score`, and the score where there was none; but never below
    `score / escape`.

    Args:
        averages: [S, H, N] float32, of all rows.
        rows: [n] int64.
        scores: [n, H, M] float32, M <= N; those of blocks that are no candidates stay what they are.
        candidates: [n] int64, blocks [0, candidates) of each row have scores.
        decay: weight of the past, in [0, 1).
        escape: at least 1.
    """
    width = scores.shape[-1]
    candidate = (torch.arange(width, device=scores.device) < candidates.to(scores.device)[:, None])[:, None]
    old = averages[rows, :, :width]
    blended = torch.where(old < 0, scores, decay * old + (1 - decay) * scores)
    smoothed = torch.maximum(blended, scores / escape)
    scores.copy_(torch.where(candidate, smoothed, scores))
    averages[rows, :, :width] = torch.where(candidate, smoothed, old)

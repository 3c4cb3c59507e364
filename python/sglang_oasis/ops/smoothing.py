"""Hysteresis: blocks are ranked by a running average of their scores, so that near-ties do not move them every step."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op

UNKNOWN = -1.0
"""The average of a block that was not scored yet; it is below all scores, which are never negative."""
ESCAPE = 3.0
"""A block is selected immediately if its score is this many times the score that it takes to be selected."""


@device_op
def smooth_scores(
    averages: Tensor, rows: Tensor, scores: Tensor, candidates: Tensor, decay: float, escape: float = ESCAPE
) -> None:
    """Replace scores by their running averages over the steps, and store these averages, both in place.

    The average is `decay * average + (1 - decay) * score`, or the score if there was no average yet, and is at least
    `score / escape`.

    Args:
        averages: [S, H, N] float32, averages of all rows.
        rows: [n] int64.
        scores: [n, H, M] float32, M <= N; the scores of blocks that are not candidates do not change.
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

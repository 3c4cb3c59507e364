"""The decisions that a host and a device share: which rows exceed the budget, and how marks are numbered."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.window import Windows

URGENT, AHEAD = 0, 1
"""The two kinds of task: what a step fetches for itself, before attention, and what it predicts for the next."""


def mark(step_number: int, kind: int) -> int:
    """With which a step's tasks mark blocks as selected: those that it fetches first, then those that it predicts."""
    return 2 * step_number + kind


def urgent_candidates(step: DecodeStep, layout: TierLayout) -> Tensor:
    """[n] int64, blocks that may be selected for this very step in each row that exceeds the budget, 0 in others.

    A row also counts that will not fit with the drafts it may have: it may be back from where it did not fit.
    """
    return _selectable(step.windows, step.windows.later(layout.draft_tokens), layout)


def ahead_candidates(step: DecodeStep, layout: TierLayout, *, moves_on: bool = True) -> Tensor:
    """[n] int64, blocks that may be selected for the next step in each row that exceeds the budget, 0 in others.

    Args:
        step: the step.
        layout: the tier layout.
        moves_on: False where the next step may serve a row at the length of this one, as a draft model's do.
    """
    windows = step.windows.next if moves_on else step.windows
    return _selectable(windows, windows, layout)


def _selectable(windows: Windows, most: Windows, layout: TierLayout) -> Tensor:
    return torch.where(most.first_local > min(layout.selected_blocks), windows.first_local, 0)

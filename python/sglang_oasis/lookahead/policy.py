"""The decisions that both engines share: which rows exceed the budget, and how marks are numbered."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.window import Windows

URGENT, AHEAD = 0, 1
"""The two kinds of task: a step's fetches for itself, before attention, and its predictions for the next step."""


def mark(step_number: int, kind: int) -> int:
    """Return the mark of the blocks that a task of a step selects; urgent marks are smaller than predicted ones."""
    return 2 * step_number + kind


def urgent_candidates(step: DecodeStep, layout: TierLayout) -> Tensor:
    """Return how many blocks may be selected for this step: [n] int64, 0 for rows that fit the budget.

    A row that would exceed the budget with all its drafts counts, too: rejected drafts may have taken it below again.
    """
    return _selectable(step.windows, step.windows.later(layout.draft_tokens), layout)


def ahead_candidates(step: DecodeStep, layout: TierLayout, *, moves_on: bool = True) -> Tensor:
    """Return how many blocks may be selected for the next step: [n] int64, 0 for rows that fit the budget.

    Args:
        step: the step.
        layout: the tier layout.
        moves_on: False where the next step may serve a row at the same length, as steps of a draft model do.
    """
    windows = step.windows.next if moves_on else step.windows
    return _selectable(windows, windows, layout)


def _selectable(windows: Windows, most: Windows, layout: TierLayout) -> Tensor:
    return torch.where(most.first_local > min(layout.selected_blocks), windows.first_local, 0)

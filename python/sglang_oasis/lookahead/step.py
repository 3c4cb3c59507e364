"""What one decode step knows about its rows; computed once and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sglang_oasis.tier.window import Window


@dataclass(frozen=True)
class DecodeStep:
    """A batch of rows that decode one token each.

    Attributes:
        number: steps are numbered from 1; the head map's last-selected steps are these numbers.
        rows: [n] int64.
        before: per row, the window before this step.
        windows: per row, the window of this step.
        pages: [n, blocks] int64 on the host, host page of each logical block, arbitrary beyond a row's open block.
    """

    number: int
    rows: Tensor
    before: Sequence[Window]
    windows: Sequence[Window]
    pages: Tensor

    @cached_property
    def positions(self) -> Tensor:
        """[n] int64, position of each row's new token."""
        return torch.tensor([window.length - 1 for window in self.windows])

    @cached_property
    def graduates(self) -> list[tuple[int, int]]:
        """(row, block) of the blocks that leave the local slots with this step's tokens."""
        return [
            (row, block)
            for row, before, window in zip(self.rows.tolist(), self.before, self.windows, strict=True)
            for block in range(before.first_local, window.first_local)
        ]

    @cached_property
    def completed(self) -> list[tuple[int, int, int]]:
        """(row, block, host page) of the blocks that this step's tokens complete."""
        return [
            (row, block, int(self.pages[i, block]))
            for i, (row, before, window) in enumerate(zip(self.rows.tolist(), self.before, self.windows, strict=True))
            for block in range(before.complete_blocks, window.complete_blocks)
        ]

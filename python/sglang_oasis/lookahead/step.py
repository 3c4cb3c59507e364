"""What one decode pass knows about its rows; computed once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.tier.resident_tier import ResidentLayer
from sglang_oasis.tier.window import Windows


class Blocks(NamedTuple):
    """Some blocks of some rows, [b] int64 each.

    Attributes:
        rows: row of each block.
        blocks: logical block.
        pages: host page.
    """

    rows: Tensor
    blocks: Tensor
    pages: Tensor

    def __bool__(self) -> bool:
        return self.rows.numel() > 0


@dataclass(frozen=True)
class DecodeStep:
    """A batch of rows that decode m tokens each: a committed token and the drafts after it, or drafts alone.

    Attributes:
        number: steps are numbered from 1.
        rows: [n] int64.
        before: the rows' windows before this step.
        windows: the rows' windows in this step, which drafts do not move.
        pages: [n, blocks] int32 on the host, host page of each logical block, arbitrary beyond a row's open block; has
            no blocks where only the device looks up pages.
        tokens: m.
        first: distance of the first of the m tokens from the newest committed token; 0 when it is that token.
        completes: False if the windows moved over tokens that may still be rejected; no summaries are built then.
    """

    number: int
    rows: Tensor
    before: Windows
    windows: Windows
    pages: Tensor
    tokens: int = 1
    first: int = 0
    completes: bool = True
    _places: dict[int, Tensor] = field(default_factory=dict)

    def singly(self) -> list[DecodeStep]:
        """Return a step for each of the m tokens, as if the tokens before were committed; each has its own number."""
        windows = [self.windows.later(self.first + i) for i in range(self.tokens)]
        befores = [self.before, *windows]
        return [
            DecodeStep(self.number + i, self.rows, before, now, self.pages, completes=i == 0)
            for i, (before, now) in enumerate(zip(befores, windows, strict=False))
        ]

    @property
    def last(self) -> Windows:
        """The rows' windows if all tokens of the step were committed."""
        return self.windows.later(self.first + self.tokens - 1)

    @cached_property
    def token_rows(self) -> Tensor:
        """[n * m] int64, row of each token."""
        return self.rows if self.tokens == 1 else self.rows.repeat_interleave(self.tokens)

    def places(self, layer: ResidentLayer) -> Tensor:
        """Return the place (slot * B + offset) of each token in the layer's local slots: [n * m] int64."""
        key = layer.selected
        if key not in self._places:
            size = self.windows.block_size
            position = (self.windows.length - 1 + self.first)[:, None] + torch.arange(self.tokens)
            slot = layer.local_slot(position // size)
            self._places[key] = (slot * size + position % size).flatten()
        return self._places[key]

    @property
    def graduating(self) -> Tensor:
        """[n] int64, block of each row that leaves the local slots in this step, or -1."""
        return _passed(self.before.first_local, self.windows.first_local)

    @property
    def completing(self) -> Tensor:
        """[n] int64, block of each row whose tokens have all been committed since the step before, or -1."""
        after = self.windows if self.completes else self.before
        return _passed(self.before.complete_blocks, after.complete_blocks)

    @property
    def expecting(self) -> Tensor:
        """[n] int64, block of each row that this step's drafts complete, if they are accepted, or -1."""
        committed = (self.windows if self.completes else self.before).complete_blocks
        if self.first > 0:
            return _passed(committed, committed)  # these drafts are written again before they are verified
        return _passed(committed, self.last.complete_blocks)

    @cached_property
    def graduates(self) -> Blocks:
        return self._locate(self.graduating)

    @cached_property
    def completed(self) -> Blocks:
        return self._locate(self.completing)

    @cached_property
    def expected(self) -> Blocks:
        return self._locate(self.expecting)

    def _locate(self, block: Tensor) -> Blocks:
        entries = (block >= 0).nonzero().flatten()
        blocks = block[entries]
        return Blocks(self.rows[entries], blocks, self.pages[entries, blocks].long())


def _passed(before: Tensor, after: Tensor) -> Tensor:
    """Return the block that a boundary passed, or -1: [n]. A step commits at most B tokens: it passes at most one."""
    return torch.where(after > before, before, -1)

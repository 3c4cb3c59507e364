"""What one decode step knows about its rows; computed once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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
    """A batch of rows that decode one token each.

    Attributes:
        number: steps are numbered from 1; the head map's last-selected steps are these numbers.
        rows: [n] int64.
        before: the rows' windows before this step.
        windows: the rows' windows in this step.
        pages: [n, blocks] int32 on the host, host page of each logical block, arbitrary beyond a row's open block.
    """

    number: int
    rows: Tensor
    before: Windows
    windows: Windows
    pages: Tensor
    _places: dict[int, Tensor] = field(default_factory=dict)

    def places(self, layer: ResidentLayer) -> Tensor:
        """[n] int64, slot * B + offset of each row's new token in the layer's local slots."""
        key = layer.selected
        if key not in self._places:
            slot = layer.local_slot(self.windows.open_block)
            self._places[key] = slot * self.windows.block_size + self.windows.open_fill - 1
        return self._places[key]

    @cached_property
    def graduates(self) -> Blocks:
        """The blocks that leave the local slots with this step's tokens."""
        return self._passed(self.before.first_local, self.windows.first_local)

    @cached_property
    def completed(self) -> Blocks:
        """The blocks that this step's tokens complete."""
        return self._passed(self.before.complete_blocks, self.windows.complete_blocks)

    def _passed(self, before: Tensor, after: Tensor) -> Blocks:
        """Blocks that a boundary [n] passed; one token moves it by one block at most."""
        entries = (after > before).nonzero().flatten()
        blocks = before[entries]
        return Blocks(self.rows[entries], blocks, self.pages[entries, blocks].long())

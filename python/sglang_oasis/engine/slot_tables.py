"""The slots that a decode step attends to, on the device: fixed addresses, fixed shapes, for any attention kernel.

All layers with the same number of selected slots share one table, because attention never reads the head map.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.engine.plan import DecodePlan
from sglang_oasis.lookahead.step_table import PADDING_LENGTH
from sglang_oasis.tier.layout import TierLayout


class Slots(NamedTuple):
    """The slots that the n entries of a step attend to, in layers with K selected slots; on the device.

    Attributes:
        rows: [n] int64.
        slots: [n, K+R] int32; token t of an entry is in slot `slots[i, t // B]`.
        kv_lengths: [n] int32, tokens of each entry, including those of the step.
    """

    rows: Tensor
    slots: Tensor
    kv_lengths: Tensor


class HeadPages(NamedTuple):
    """`Slots` as a page table of single KV heads, in FlashInfer's format; `b = n * H` sequences.

    A page is a slot of one (row, head): number `(row * H + head) * (K + R) + slot`.

    Attributes:
        indices: [b * (K+R) + 1] int32, pages of the sequences, one sequence after another; the rest is arbitrary.
        last_page_len: [b] int32, tokens in each sequence's last page, 1 to B.
    """

    indices: Tensor
    last_page_len: Tensor


class SlotTable:
    """The table of one pass, for layers with `selected` slots.

    Args:
        layout: the tier layout.
        selected: K.
        rows: [S] int64 on the device, rows of the pass's entries; the caller keeps them up to date.
    """

    def __init__(self, layout: TierLayout, selected: int, rows: Tensor) -> None:
        self.selected = selected
        self._block_size, self._heads = layout.block_size, layout.kv_heads
        self._width = selected + layout.local_slots
        self._max_rows = len(rows)
        self._packed = torch.zeros(len(rows) * (1 + self._width), dtype=torch.int32, device=rows.device)
        self._slots = self._views(self._packed, rows)
        self._pages = torch.zeros(len(rows), dtype=torch.int32)

    def load(self, plan: DecodePlan) -> None:
        """Copy a pass's slots to the device without waiting for it; entries beyond the plan's become padding."""
        count = len(plan.step.rows)
        packed = torch.empty(self._packed.shape, dtype=torch.int32, pin_memory=self._packed.is_cuda)
        _, slots, lengths = self._views(packed, plan.step.rows)
        lengths.fill_(PADDING_LENGTH + plan.step.tokens - 1)
        slots.fill_(self.selected)
        if count:
            _, used, lengths[:count], _ = plan.resident(self.selected)
            slots[:count, : used.shape[1]] = used
        self._pages = (lengths + self._block_size - 1) // self._block_size
        self._packed.copy_(packed, non_blocking=True)

    def pages(self, count: int) -> Tensor:
        """Return the number of pages of each entry: [count] int32 on the host."""
        return self._pages[:count]

    def first_entries(self, count: int) -> Slots:
        """Return the first `count` entries, padding included."""
        return Slots(*(field[:count] for field in self._slots))

    def flatten_heads(self, count: int, out: HeadPages) -> None:
        """Write the first `count` entries as a page table of single heads; runs on the device alone."""
        rows, slots, lengths = self.first_entries(count)
        heads, width, device = self._heads, self._width, rows.device
        pages = (lengths + self._block_size - 1) // self._block_size
        head = torch.arange(heads, device=device)[None, :, None]
        column = torch.arange(width, device=device)
        starts = (pages.cumsum(0) - pages) * heads
        position = starts[:, None, None] + head * pages[:, None, None] + column
        beyond = count * heads * width
        position = torch.where(column < pages[:, None, None], position, beyond)
        number = (rows[:, None, None] * heads + head) * width + slots[:, None, :]
        out.indices.scatter_(0, position.flatten(), number.flatten().to(torch.int32))
        last = (lengths - 1) % self._block_size + 1
        out.last_page_len.copy_(last[:, None].expand(count, heads).flatten())

    def _views(self, packed: Tensor, rows: Tensor) -> Slots:
        """Return views into `packed`, which holds all lengths, then the slots of each entry in turn."""
        return Slots(rows, packed[self._max_rows :].view(-1, self._width), packed[: self._max_rows])

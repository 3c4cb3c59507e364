"""L1, the resident tier: per row, layer and KV head, K selected blocks and R local blocks that mirror host pages.

The slots of a (row, head) are [0, K) selected and [K, K+R) local. Attention never reads the head map: the selected
slots in use are always a prefix of [0, K), of the same length for every head. Local block j lives in slot K + j % R.
While everything fits, selected slot j holds block j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.summary import SUMMARY_DTYPE
from sglang_oasis.tier.layout import MAP_DTYPE, TierLayout
from sglang_oasis.tier.rows import RowTable
from sglang_oasis.tier.window import Window


class ResidentLayer:
    """One layer of the resident tier; S rows, H KV heads, K selected slots, R local slots, N logical blocks.

    Attributes:
        blocks: [S, H, K+R, 2, B, D].
        head_map: [S, H, K] int32, logical block of each selected slot or -1.
        last_selected: [S, H, K] int32, step in which each selected slot was last selected.
        slot_of: [S, H, N] int32, inverse of `head_map`: slot of each logical block or -1.
        summaries: [S, H, N, 2, D] bfloat16, of the row's completed blocks.
    """

    def __init__(self, layout: TierLayout, layer: int, num_rows: int, device: torch.device) -> None:
        heads, block_size, head_dim = layout.kv_heads, layout.block_size, layout.head_dim
        self.selected = layout.selected_blocks[layer]
        self.local = layout.local_slots
        self.block_size = block_size
        self.blocks = torch.zeros(
            (num_rows, heads, self.selected + self.local, 2, block_size, head_dim), dtype=layout.dtype, device=device
        )
        self.head_map = torch.full((num_rows, heads, self.selected), -1, dtype=MAP_DTYPE, device=device)
        self.last_selected = torch.zeros((num_rows, heads, self.selected), dtype=MAP_DTYPE, device=device)
        self.slot_of = torch.full((num_rows, heads, layout.max_blocks), -1, dtype=MAP_DTYPE, device=device)
        self.summaries = torch.zeros(
            (num_rows, heads, layout.max_blocks, 2, head_dim), dtype=SUMMARY_DTYPE, device=device
        )

    def local_slot(self, block: int | Tensor) -> int | Tensor:
        return self.selected + block % self.local

    def write_tokens(self, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store tokens in their rows' local slots.

        Args:
            rows, positions: [T] int64, row and position in the request of each token.
            keys, values: [T, H, D].
        """
        slot = self.local_slot(positions // self.block_size)
        offset = positions % self.block_size
        self.blocks[rows, :, slot, 0, offset] = keys.to(self.blocks.dtype)
        self.blocks[rows, :, slot, 1, offset] = values.to(self.blocks.dtype)

    def build(self, row: int, selected: Tensor, window: Window, host_kv: Tensor, pages: Tensor) -> None:
        """Fill a row from the host: selected blocks and local blocks; whatever the row held is gone.

        Args:
            row: the row.
            selected: [H, n] int64 logical blocks, n <= K.
            window: the row's window; its tokens are all in the host pool.
            host_kv: [N_pages, H, 2, B, D].
            pages: [open_block + 1] int64, host page of each logical block of the row.
        """
        self.head_map[row] = -1
        self.slot_of[row] = -1
        count = selected.shape[1]
        heads = torch.arange(selected.shape[0]).unsqueeze(1)
        self.blocks[row, :, :count] = host_kv[pages[selected.cpu()], heads].to(self.blocks.device)
        self.head_map[row, :, :count] = selected.to(self.head_map)
        self.last_selected[row, :, :count] = 0
        slots = torch.arange(count, dtype=MAP_DTYPE, device=self.slot_of.device).expand_as(selected)
        self.slot_of[row].scatter_(1, selected.to(self.slot_of.device), slots)
        for block in range(window.first_local, window.open_block + 1):
            self.blocks[row, :, self.local_slot(block)] = host_kv[pages[block]].to(self.blocks.device)

    def graduate(self, row: int, block: int, step: int) -> None:
        """Keep a block that leaves the local slots, where there is room; otherwise it lives on in the host only."""
        if block >= self.selected:
            return
        self.blocks[row, :, block] = self.blocks[row, :, self.local_slot(block)]
        self.head_map[row, :, block] = block
        self.last_selected[row, :, block] = step
        self.slot_of[row, :, block] = block

    def admit(self, rows: Tensor, heads: Tensor, slots: Tensor, blocks: Tensor, chunks: Tensor, step: int) -> None:
        """Overwrite resident slots with other blocks; all arguments but the last two are [n] int64.

        Args:
            rows, heads, slots: the slots to overwrite, all occupied.
            blocks: logical block that each slot holds from now on.
            chunks: [n, 2, B, D], K and V of those blocks.
            step: step in which they were selected.
        """
        self.slot_of[rows, heads, self.head_map[rows, heads, slots].long()] = -1
        self.blocks[rows, heads, slots] = chunks
        self.head_map[rows, heads, slots] = blocks.to(MAP_DTYPE)
        self.last_selected[rows, heads, slots] = step
        self.slot_of[rows, heads, blocks] = slots.to(MAP_DTYPE)


class ResidentTier:
    """All layers of the resident tier and the table of the rows that are live in it."""

    def __init__(self, layout: TierLayout, num_rows: int, device: torch.device) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.device = device
        self.rows = RowTable()
        self.layers = [ResidentLayer(layout, layer, num_rows, device) for layer in range(layout.num_layers)]

    def window(self, length: int) -> Window:
        return Window(length, self.layout.block_size, self.layout.recent_blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes of K and V that live rows hold resident."""
        chunks = 0
        for _, state in self.rows.items():
            local = state.window.open_block - state.window.first_local + 1
            chunks += sum(min(k, state.window.first_local) + local for k in self.layout.selected_blocks)
        return chunks * self.layout.kv_heads * self.layout.chunk_bytes

    @property
    def used_summary_bytes(self) -> int:
        """Bytes of summaries of the live rows' completed blocks."""
        blocks = sum(state.summarised_blocks for _, state in self.rows.items())
        return blocks * self.layout.num_layers * self.layout.kv_heads * self.layout.summary_bytes

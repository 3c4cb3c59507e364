"""L1, the resident tier: per row, layer and KV head, K selected blocks and R local blocks that mirror host pages.

The slots of a (row, head) are [0, K) selected and [K, K+R) local. Attention never reads the head map: the selected
slots in use are always a prefix of [0, K), of the same length for every head. Local block j lives in slot K + j % R.
While everything fits, selected slot j holds block j.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from sglang_oasis.ops.eviction import Maps, graduate_blocks
from sglang_oasis.ops.smoothing import UNKNOWN
from sglang_oasis.ops.tokens import store_tokens
from sglang_oasis.tier.layout import MAP_DTYPE, SCORE_DTYPE, TierLayout
from sglang_oasis.tier.rows import RowTable
from sglang_oasis.tier.window import Window, Windows

BlockIndex = TypeVar("BlockIndex", int, Tensor)


class ResidentLayer:
    """One layer of the resident tier: S rows, H KV heads, K selected slots, R local slots, N logical blocks.

    Attributes:
        blocks: [S, H, K+R, 2, B, D].
        head_map: [S, H, K] int32, logical block of each selected slot or -1.
        last_selected: [S, H, K] int32, mark of the step in which each selected slot was last selected.
        slot_of: [S, H, N] int32, inverse of `head_map`: slot of each logical block or -1.
        summaries: [S, H, N, R] uint8, of the row's completed blocks.
        averages: [S, H, N] float32, average score of each logical block; None where scores are not smoothed.
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
            (num_rows, heads, layout.max_blocks, layout.summary_bytes), dtype=torch.uint8, device=device
        )
        self.averages: Tensor | None = None
        if layout.smoothed and layer in layout.sparse_layers:
            self.averages = torch.full(self.slot_of.shape, UNKNOWN, dtype=SCORE_DTYPE, device=device)

    @property
    def maps(self) -> Maps:
        return Maps(self.head_map, self.last_selected, self.slot_of)

    def local_slot(self, block: BlockIndex) -> BlockIndex:
        return self.selected + block % self.local

    def write_tokens(self, rows: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store K and V of tokens in their rows' local slots.

        Args:
            rows: [T] int64.
            places: [T] int64, slot * B + offset of each token.
            keys, values: [T, H, D].
        """
        store_tokens(self.blocks, rows, places, keys, values)

    def begin_averages(self, row: int, scores: Tensor | None) -> None:
        """Reset a row's average scores, to the `scores` [H, n] of its first blocks if they are given."""
        if self.averages is not None:
            self.averages[row] = UNKNOWN
            if scores is not None:
                self.averages[row, :, : scores.shape[1]] = scores

    def build(self, row: int, selected: Tensor, window: Window, kv: Tensor, pages: Tensor) -> None:
        """Fill a row with selected and local blocks from pages, replacing all that it held.

        Args:
            row: the row.
            selected: [H, n] int64 logical blocks, n <= K.
            window: the row's window; all its tokens must be in the pages.
            kv: [X, H, 2, B, D], the host pool, or pages that are staged on the device.
            pages: [open_block + 1] int64 on the device of `kv`, page of each logical block of the row.
        """
        self.head_map[row] = -1
        self.slot_of[row] = -1
        count = selected.shape[1]
        heads = torch.arange(selected.shape[0], device=kv.device).unsqueeze(1)
        self.blocks[row, :, :count] = kv[pages[selected.to(kv.device)], heads].to(self.blocks.device)
        self.head_map[row, :, :count] = selected.to(self.head_map)
        self.last_selected[row, :, :count] = 0
        slots = torch.arange(count, dtype=MAP_DTYPE, device=self.slot_of.device).expand_as(selected)
        self.slot_of[row].scatter_(1, selected.to(self.slot_of.device), slots)
        local = torch.arange(window.first_local, window.open_block + 1, device=self.blocks.device)
        chunks = kv[pages[window.first_local : window.open_block + 1]].to(self.blocks.device)
        self.blocks[row][:, self.local_slot(local)] = chunks.transpose(0, 1)

    def graduate(self, rows: Tensor, blocks: Tensor, step: int) -> None:
        """Keep blocks that leave the local slots if there is a selected slot for them; others stay in the host only.

        Args:
            rows, blocks: [g] int64.
            step: the step in which they count as selected.
        """
        graduate_blocks(self.blocks, self.maps, rows, blocks, self.local_slot(blocks), step)


class ResidentTier:
    """All layers of the resident tier, and the table of its live rows."""

    def __init__(self, layout: TierLayout, num_rows: int, device: torch.device) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.device = device
        self.rows = RowTable(num_rows)
        self.layers = [ResidentLayer(layout, layer, num_rows, device) for layer in range(layout.num_layers)]

    def window(self, length: int) -> Window:
        return Window(length, self.layout.block_size, self.layout.recent_blocks)

    def windows(self, lengths: Tensor) -> Windows:
        """Return the windows of rows with `lengths` tokens, [n] int64."""
        return Windows(lengths, self.layout.block_size, self.layout.recent_blocks)

    @property
    def used_bytes(self) -> int:
        """Bytes of K and V that are resident for live rows."""
        windows = self._live_windows()
        local = (windows.open_block - windows.first_local + 1).sum() * self.layout.num_layers
        selected = sum(int(windows.first_local.clamp(max=k).sum()) for k in self.layout.selected_blocks)
        return (selected + int(local)) * self.layout.kv_heads * self.layout.chunk_bytes

    @property
    def used_summary_bytes(self) -> int:
        """Bytes of summaries of the live rows' completed blocks."""
        blocks = int(self._live_windows().complete_blocks.sum())
        return blocks * self.layout.num_layers * self.layout.kv_heads * self.layout.summary_bytes

    def _live_windows(self) -> Windows:
        return self.windows(self.rows.length[self.rows.occupied()])

"""A row's first resident set: the blocks that its last prompt queries select, so that decode does not start cold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentLayer
from sglang_oasis.tier.window import Window

STARTUP_QUERIES = 16
"""Number of last prompt queries that choose a row's first resident set."""


def build_row(
    resident: ResidentLayer,
    layout: TierLayout,
    row: int,
    window: Window,
    kv: Tensor,
    pages: Tensor,
    rank: Callable[[int], Tensor] | None,
) -> int:
    """Fill a row of a layer from pages, replacing its blocks; its summaries must be complete and are kept.

    Args:
        resident: the layer.
        layout: the tier layout.
        row: the row.
        window: its window; all its tokens are in the pages.
        kv: [X, H, 2, B, D], the host pool, or pages that are staged on the device.
        pages: [open_block + 1] int64 on the device of `kv`, page of each logical block of the row.
        rank: returns the scores of blocks [0, n) for the last prompt queries, [H, >= n] float32; None if there is no
            query: the row then starts from its sinks and its newest blocks.

    Returns:
        Number of blocks loaded, over all KV heads.
    """
    heads, count = layout.kv_heads, min(resident.selected, window.first_local)
    candidates, scores = window.next.first_local, None
    if candidates <= resident.selected:
        selected = torch.arange(count, device=kv.device)
    elif rank is None:
        sinks = min(layout.sink_blocks, count)
        newest = torch.arange(window.first_local - (count - sinks), window.first_local, device=kv.device)
        selected = torch.cat([torch.arange(sinks, device=kv.device), newest])
    else:
        scores = rank(candidates)
        selected = scores.topk(count, dim=-1).indices
    resident.begin_averages(row, None if scores is None else scores[:, :candidates])
    resident.build(row, selected.expand(heads, count), window, kv, pages)
    return heads * count

"""Device cache of host pages that prefill reads again and again: an L1 for prefixes, in memory that nothing else uses.

Direct mapped: page p is in place p % A or nowhere. All decisions are made by the device, once per group of requests
and for all layers at once, before anything is copied; the copies of a layer only follow them. That is why an entry can
neither be torn nor be seen half filled:

- of the pages in a group that are missing and want the same place, the last one takes it;
- a place that the group reads keeps its page;
- the copies that follow, of all layers, run in the order of the decisions.

Tags run ahead of the copies: from its decision on a page counts as cached, and it is read only by copies of later
decisions. A pass that stops before its last layer breaks that, and must be followed by `clear`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.staging import forget_pages
from sglang_oasis.tier.layout import TierLayout

TAG_DTYPE = torch.int32


class Placement(NamedTuple):
    """What the cache does for each of p pages; [p] int32, places or -1.

    Attributes:
        hits: where the page is.
        fills: where the page goes, once it is read from the host.
    """

    hits: Tensor
    fills: Tensor


class PageCache:
    """Pages of all layers, under one set of tags.

    Args:
        layout: sizes of the tiers.
        places: A, pages of all layers that it holds; 0 for no cache.
        device: where.

    Attributes:
        arena: [L, A, H, 2, B, D]; places without a tag hold anything.
        tags: [A] int32, host page or -1.
    """

    def __init__(self, layout: TierLayout, places: int, device: torch.device) -> None:
        shape = layout.num_layers, places, layout.kv_heads, 2, layout.block_size, layout.head_dim
        self.arena = torch.empty(shape, dtype=layout.dtype, device=device)
        self.tags = torch.full((places,), -1, dtype=TAG_DTYPE, device=device)
        self._block_size = layout.block_size

    @staticmethod
    def places_in(layout: TierLayout, nbytes: int) -> int:
        """A of the largest cache in `nbytes`."""
        page_bytes = layout.num_layers * layout.kv_heads * layout.chunk_bytes
        return max(0, nbytes) // (page_bytes + TAG_DTYPE.itemsize)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes + self.tags.nbytes

    def place(self, pages: Tensor, complete: Tensor) -> Placement:
        """Decide for the pages that one group reads, and move the tags on.

        Args:
            pages: [p] int32, host pages.
            complete: [p], non-zero where all tokens of the page are in it; others are neither looked up nor kept.
        """
        count = len(self.tags)
        if not count or not len(pages):
            return Placement(torch.full_like(pages, -1), torch.full_like(pages, -1))
        places = pages.long() % count
        hit = (complete != 0) & (self.tags[places] == pages)
        order = torch.arange(len(pages), device=pages.device)
        none = torch.full((count,), -1, dtype=order.dtype, device=pages.device)
        last = none.scatter_reduce(0, places, torch.where((complete != 0) & ~hit, order, -1), "amax")
        read = none.scatter_reduce(0, places, torch.where(hit, order, -1), "amax") >= 0
        taken = (last >= 0) & ~read
        self.tags.copy_(torch.where(taken, pages[last.clamp(min=0)], self.tags))
        fill = taken[places] & (last[places] == order)
        return Placement(torch.where(hit, places, -1).to(pages.dtype), torch.where(fill, places, -1).to(pages.dtype))

    def forget(self, indices: Tensor) -> None:
        """Drop the pages whose tokens are written: KV indices [t] int64 on the device. One launch, capture-safe."""
        forget_pages(self.tags, indices, self._block_size)

    def clear(self) -> None:
        """Drop all pages."""
        self.tags.fill_(-1)

"""Device cache of host pages that prefill reads repeatedly, in device memory that is otherwise unused.

The cache is direct-mapped: page p is in place p % A or not cached. The device makes all decisions, once per group of
requests and for all layers together, before anything is copied; the copies of a layer only follow them. Therefore no
entry can be read while it is partly filled:

- if several missing pages of a group have the same place, the last one takes it;
- a place that the group reads keeps its page;
- the copies that follow, of all layers, run in the order of the decisions.

Tags change before the copies run: a page counts as cached from its decision on, and only copies of later decisions read
it. A pass that stops before its last layer violates this, so `clear` must be called after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.staging import forget_pages
from sglang_oasis.tier.layout import TierLayout

TAG_DTYPE = torch.int32


class Placement(NamedTuple):
    """The decision about each of p pages; [p] int32, places or -1.

    Attributes:
        hits: place in which the page is cached.
        fills: place into which the page is copied after it was read from the host.
    """

    hits: Tensor
    fills: Tensor


class PageCache:
    """The cached pages of all layers, which share one set of tags.

    Args:
        layout: sizes of the tiers.
        places: A, number of pages (of all layers) that the cache can hold; 0 for no cache.
        device: device of the cache.

    Attributes:
        arena: [L, A, H, 2, B, D]; places without a tag have arbitrary contents.
        tags: [A] int32, host page or -1.
    """

    def __init__(self, layout: TierLayout, places: int, device: torch.device) -> None:
        shape = layout.num_layers, places, layout.kv_heads, 2, layout.block_size, layout.head_dim
        self.arena = torch.empty(shape, dtype=layout.dtype, device=device)
        self.tags = torch.full((places,), -1, dtype=TAG_DTYPE, device=device)
        self._block_size = layout.block_size

    @staticmethod
    def places_in(layout: TierLayout, nbytes: int) -> int:
        """Return A of the largest cache that fits into `nbytes` bytes."""
        page_bytes = layout.num_layers * layout.kv_heads * layout.chunk_bytes
        return max(0, nbytes) // (page_bytes + TAG_DTYPE.itemsize)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes + self.tags.nbytes

    def place(self, pages: Tensor, complete: Tensor) -> Placement:
        """Decide about the pages that one group reads, and update the tags.

        Args:
            pages: [p] int32, host pages.
            complete: [p], non-zero if the page has all its tokens; other pages are neither looked up nor cached.
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
        """Remove the pages of KV indices that are written, [t] int64 on the device. One launch; works in a capture."""
        forget_pages(self.tags, indices, self._block_size)

    def clear(self) -> None:
        """Remove all pages."""
        self.tags.fill_(-1)

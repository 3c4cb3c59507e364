"""Moves pages between the host pool, a staging buffer that prefill attends to, and a device cache of host pages.

All shapes are known to the host and no op reads the values that it copies, so nothing synchronises. No two entries of
a table may share a target, a fill or a written token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op


class PageCopies(NamedTuple):
    """Host pages to copy into a staging buffer; [p] int32 each, on the device of the buffer.

    Attributes:
        pages: host page; negative entries are skipped.
        targets: place in the staging buffer.
        hits: place in the cache that holds the page, or -1 to read the page from the host pool.
        fills: place in the cache to copy the page to, or -1. A table never reads and fills the same place.
    """

    pages: Tensor
    targets: Tensor
    hits: Tensor
    fills: Tensor


class TokenRuns(NamedTuple):
    """New tokens to copy from a staging buffer to their host pages; [w] int32 each, one entry per page with new tokens.

    Attributes:
        places: place in the staging buffer.
        pages: host page.
        first, last: tokens `first` to `last` (exclusive) of the page are written.
    """

    places: Tensor
    pages: Tensor
    first: Tensor
    last: Tensor


@device_op
def stage_pages(staging: Tensor, arena: Tensor, host_kv: Tensor, copies: PageCopies) -> None:
    """Copy pages from the cache or the host pool into the staging buffer, and some host pages into the cache.

    Args:
        staging: [X, H, 2, B, D].
        arena: [A, H, 2, B, D], the cache's pages of this layer.
        host_kv: [N_pages, H, 2, B, D] on the host; pinned, where a device reads it.
        copies: which pages, from where, to where.
    """
    hit = (copies.pages >= 0) & (copies.hits >= 0)
    missed = (copies.pages >= 0) & (copies.hits < 0)
    filling = missed & (copies.fills >= 0)
    staging[copies.targets[hit].long()] = arena[copies.hits[hit].long()]
    staging[copies.targets[missed].long()] = _read(host_kv, copies.pages[missed]).to(staging.device)
    arena[copies.fills[filling].long()] = staging[copies.targets[filling].long()]


@device_op
def write_back(staging: Tensor, host_kv: Tensor, runs: TokenRuns) -> None:
    """Copy new tokens from the staging buffer to their host pages; the rest of those pages is not touched.

    Args:
        staging: [X, H, 2, B, D].
        host_kv: [N_pages, H, 2, B, D] on the host; pinned, where a device writes it.
        runs: which tokens, from where, to where.
    """
    offsets = torch.arange(staging.shape[-2], device=staging.device)
    written = (offsets >= runs.first[:, None]) & (offsets < runs.last[:, None])
    run, offset = written.nonzero(as_tuple=True)
    tokens = staging[runs.places[run].long(), :, :, offset].to(host_kv.device)
    host_kv[runs.pages[run].to(host_kv.device).long(), :, :, offset.to(host_kv.device)] = tokens


@device_op
def forget_pages(tags: Tensor, indices: Tensor, block_size: int) -> None:
    """Remove pages from the cache whose tokens are being written; page p can only be in place p % A.

    Args:
        tags: [A] int32, page in each place or -1; changed.
        indices: [t] int64, KV indices; several may lie in one page, negative ones are skipped.
        block_size: tokens per page.
    """
    if not len(tags):
        return
    pages = (indices // block_size).to(tags.dtype)
    places = (pages % len(tags)).long()
    # The minimum, because a page that is not cached may share its place with one that is.
    left = torch.where((tags[places] == pages) & (indices >= 0), -1, torch.iinfo(tags.dtype).max)
    tags.scatter_reduce_(0, places, left.to(tags.dtype), "amin")


def _read(host_kv: Tensor, pages: Tensor) -> Tensor:
    return host_kv[pages.to(host_kv.device).long()]

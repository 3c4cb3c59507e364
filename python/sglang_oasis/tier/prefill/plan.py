"""Plans where the tokens of a prefill pass are in the staging buffer, with arithmetic on lengths on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_oasis.ops.staging import PageCopies, TokenRuns
from sglang_oasis.tier.prefill.page_cache import PageCache

Indices = NDArray[np.int32]
T = TypeVar("T")


class PrefillPass(NamedTuple):
    """An extend pass. The host knows the lengths; only the device knows in which pages the tokens are.

    Attributes:
        rows: [n] int64 on the device.
        prefixes: per request, tokens that are already in the host pool.
        new_tokens: per request, tokens that the pass computes.
        indices: [T] int64 on the device, KV indices of the new tokens.
        req_to_token: SGLang's [rows, context] table of KV indices, on the device.
    """

    rows: Tensor
    prefixes: Sequence[int]
    new_tokens: Sequence[int]
    indices: Tensor
    req_to_token: Tensor


class PageTable(NamedTuple):
    """The staged pages of n requests, in the format of FlashInfer's paged wrappers; int32.

    Attributes:
        indptr: [n + 1] on the host; the pages of request i are `indices[indptr[i]:indptr[i + 1]]`.
        indices: [pages] on the device.
        last_page_len: [n] on the host, tokens in the last page, 1 to B; 0 for a request without pages.
        query_starts: [n + 1] on the host, where the new tokens of each request begin.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    query_starts: Tensor


class StagedGroup(NamedTuple):
    """Requests that are staged together. Tables are on the device unless stated otherwise.

    Attributes:
        requests: slice of the pass's requests.
        tokens: slice of the pass's new tokens.
        starts: place of the first page of each request, and the end of the last request; block j of request i of the
            group is in place `starts[i] + j`.
        copies: prefix pages to copy into the buffer, including partly filled ones.
        positions: [t] int64, place * B + offset of each new token.
        runs: new tokens to write back.
        completed_places, completed_pages: [c] int64, pages that the pass completes: their places in the buffer, and
            their host pages.
        slots: [n, W] int32, the places in the format of `paged_attention`; entries beyond a request are arbitrary.
        kv_lengths: [n] int32, tokens of each request.
        query_starts: [n + 1] int32.
        pages: the places in the format of FlashInfer.
    """

    requests: slice
    tokens: slice
    starts: Sequence[int]
    copies: PageCopies
    positions: Tensor
    runs: TokenRuns
    completed_places: Tensor
    completed_pages: Tensor
    slots: Tensor
    kv_lengths: Tensor
    query_starts: Tensor
    pages: PageTable


def groups(lengths: Sequence[int], block_size: int, max_pages: int) -> list[slice]:
    """Divide the requests of a pass, in their order, into groups that fit into a staging buffer.

    Args:
        lengths: prefix and new tokens of each request; 0 for a request that computes nothing.
        block_size: tokens per page.
        max_pages: pages of the buffer.

    Raises:
        ValueError: a single request does not fit.
    """
    found, first, used = [], 0, 0
    for i, length in enumerate(lengths):
        pages = -(-length // block_size)
        if pages > max_pages:
            raise ValueError(f"A request of {pages} pages does not fit into a staging buffer of {max_pages} pages.")
        if used + pages > max_pages:
            found.append(slice(first, i))
            first, used = i, 0
        used += pages
    return [*found, slice(first, len(lengths))]


def plan_pass(batch: PrefillPass, cache: PageCache, max_pages: int) -> list[StagedGroup]:
    """Plan a pass, and decide which pages the cache serves, without waiting for the device.

    Args:
        batch: the pass; the pages of its new tokens must have been removed from the cache.
        cache: the page cache.
        max_pages: pages of a staging buffer.
    """
    block_size = cache.arena.shape[-2]
    prefixes, new_tokens = np.array(batch.prefixes, np.int32), np.array(batch.new_tokens, np.int32)
    lengths = np.where(new_tokens > 0, prefixes + new_tokens, 0)
    return [
        _plan_group(batch, requests, prefixes, lengths, block_size, cache)
        for requests in groups(lengths.tolist(), block_size, max_pages)
    ]


class _Tables(NamedTuple, Generic[T]):
    """What the device must know about a group, all int32; pages are in the order of their places.

    Attributes:
        entry, token: per page, its request in the pass and its first token.
        brought, complete: pages with prefix tokens, and whether they have no other tokens.
        touched, first, last: pages with new tokens, and the range of new tokens in each.
        completed: pages of `touched` that are full after the pass.
        positions: per new token, place * B + offset.
        starts, query_starts: per request, with one more entry for the end: first page and first new token.
        lengths: tokens per request.
    """

    entry: T
    token: T
    brought: T
    complete: T
    touched: T
    first: T
    last: T
    completed: T
    positions: T
    starts: T
    query_starts: T
    lengths: T


def _tables(first_request: int, prefixes: Indices, lengths: Indices, block_size: int) -> _Tables[Indices]:
    blocks, new_tokens = -(-lengths // block_size), lengths - prefixes
    starts, query_starts = _starts(blocks), _starts(new_tokens)
    request = np.repeat(np.arange(len(lengths)), blocks)
    token = (np.arange(len(request)) - starts[request]) * block_size
    known, filled = (np.clip(ends[request] - token, 0, block_size) for ends in (prefixes, lengths))
    brought, touched = (known > 0).nonzero()[0], (filled > known).nonzero()[0]
    asked = np.repeat(np.arange(len(lengths)), new_tokens)
    first_position = starts[:-1] * block_size + prefixes
    tables = _Tables(
        entry=first_request + request,
        token=token,
        brought=brought,
        complete=known[brought] == block_size,
        touched=touched,
        first=known[touched],
        last=filled[touched],
        completed=(filled[touched] == block_size).nonzero()[0],
        positions=first_position[asked] + np.arange(len(asked)) - query_starts[asked],
        starts=starts,
        query_starts=query_starts,
        lengths=lengths,
    )
    return _Tables(*(table.astype(np.int32) for table in tables))


def _plan_group(
    batch: PrefillPass, requests: slice, prefixes: Indices, lengths: Indices, block_size: int, cache: PageCache
) -> StagedGroup:
    host = _tables(requests.start, np.minimum(prefixes, lengths)[requests], lengths[requests], block_size)
    table = _to_device(host, batch.rows.device)
    pages = (batch.req_to_token[batch.rows[table.entry], table.token] // block_size).int()
    copied, touched = pages[table.brought], pages[table.touched]
    blocks = np.diff(host.starts)
    before = sum(batch.new_tokens[: requests.start])
    return StagedGroup(
        requests=requests,
        tokens=slice(before, before + int(host.query_starts[-1])),
        starts=host.starts.tolist(),
        copies=PageCopies(copied, table.brought, *cache.place(copied, table.complete)),
        positions=table.positions.long(),
        runs=TokenRuns(table.touched, touched, table.first, table.last),
        completed_places=table.touched[table.completed].long(),
        completed_pages=touched[table.completed].long(),
        slots=table.starts[:-1, None] + torch.arange(int(blocks.max()), dtype=torch.int32, device=pages.device),
        kv_lengths=table.lengths,
        query_starts=table.query_starts,
        pages=PageTable(
            torch.from_numpy(host.starts),
            torch.arange(len(pages), dtype=torch.int32, device=pages.device),
            torch.from_numpy(host.lengths - np.maximum(blocks - 1, 0) * block_size),
            torch.from_numpy(host.query_starts),
        ),
    )


def _starts(counts: Indices) -> Indices:
    return np.concatenate([[0], counts.cumsum()]).astype(np.int32)


def _to_device(tables: _Tables[Indices], device: torch.device) -> _Tables[Tensor]:
    """Copy tables to the device in one transfer, from pinned memory, because else the host would wait."""
    packed = torch.from_numpy(np.concatenate(tables))
    if device.type == "cuda":
        packed = packed.pin_memory()
    return _Tables(*packed.to(device, non_blocking=True).split([len(table) for table in tables]))

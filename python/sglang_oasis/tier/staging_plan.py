"""Where the tokens of a prefill pass lie in the staging buffer: host arithmetic on lengths, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_oasis.ops.staging import PageCopies, TokenRuns
from sglang_oasis.tier.page_cache import PageCache

Indices = NDArray[np.int32]


class PrefillPass(NamedTuple):
    """An extend pass. Lengths are known to the host, where tokens lie only to the device.

    Attributes:
        rows: [n] int64 on the device.
        prefixes: per request, tokens that the host pool has.
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
    """The staged pages of n requests, as FlashInfer's paged wrappers take them; int32.

    Attributes:
        indptr: [n + 1] on the host; the pages of request i are `indices[indptr[i]:indptr[i + 1]]`.
        indices: [pages] on the device.
        last_page_len: [n] on the host, tokens in the last page, 1 to B; 0 for a request without pages.
        query_starts: [n + 1] on the host, of the group's new tokens.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    query_starts: Tensor


class StagedGroup(NamedTuple):
    """Requests that are staged together. Tables are on the device unless said.

    Attributes:
        requests: slice of the pass's requests.
        tokens: slice of the pass's new tokens.
        starts: place of the first page of each request, and the end of the last one's; block j of request i, counted
            in the group, is in place `starts[i] + j`.
        copies: prefix pages to bring in, the partly filled ones included.
        positions: [t] int64, place * B + offset of each new token.
        runs: new tokens to write back.
        completed_places, completed_pages: [c] int64, pages that the pass completes: where they are staged, and in the
            host pool.
        slots: [n, W] int32, the places again, as `paged_attention` takes them; entries beyond a request are arbitrary.
        kv_lengths: [n] int32, tokens of each request.
        query_starts: [n + 1] int32.
        pages: the same for FlashInfer.
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
        lengths: tokens of each request, prefix and new ones; 0 for a request that computes nothing.
        block_size: tokens per page.
        max_pages: pages of the buffer.

    Raises:
        ValueError: a request alone does not fit.
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
    """Plan a pass, and decide what the cache serves. Nothing waits for the device.

    Args:
        batch: the pass; its new tokens are forgotten by the cache already.
        cache: the cache of pages.
        max_pages: pages of a staging buffer.
    """
    block_size = cache.arena.shape[-2]
    prefixes, new_tokens = np.array(batch.prefixes, np.int32), np.array(batch.new_tokens, np.int32)
    lengths = np.where(new_tokens > 0, prefixes + new_tokens, 0)
    return [
        _plan_group(batch, requests, prefixes, lengths, block_size, cache)
        for requests in groups(lengths.tolist(), block_size, max_pages)
    ]


def _plan_group(
    batch: PrefillPass, requests: slice, prefixes: Indices, lengths: Indices, block_size: int, cache: PageCache
) -> StagedGroup:
    prefixes, lengths = np.minimum(prefixes, lengths)[requests], lengths[requests]
    new_tokens, blocks = lengths - prefixes, -(-lengths // block_size)
    starts, query_starts = _starts(blocks), _starts(new_tokens)
    # One entry per staged page: its request, its block, how many of its tokens are of the prefix, and how many in all.
    request = np.repeat(np.arange(len(lengths)), blocks)
    block = np.arange(len(request)) - starts[request]
    known = np.clip(prefixes[request] - block * block_size, 0, block_size)
    filled = np.clip(lengths[request] - block * block_size, 0, block_size)
    brought, touched = (known > 0).nonzero()[0], (filled > known).nonzero()[0]
    completed = (filled[touched] == block_size).nonzero()[0]
    token = np.repeat(np.arange(len(lengths)), new_tokens)
    position = (starts * block_size)[token] + prefixes[token] + np.arange(len(token)) - query_starts[token]
    device = batch.rows.device
    (
        entry,
        first_token,
        brought_,
        complete,
        touched_,
        first,
        last,
        completed_,
        positions,
        offsets,
        kv_lengths,
        queries,
    ) = _to_device(
        [
            request + requests.start,
            block * block_size,
            brought,
            known[brought] == block_size,
            touched,
            known[touched],
            filled[touched],
            completed,
            position,
            starts[:-1],
            lengths,
            query_starts,
        ],
        device,
    )
    pages = (batch.req_to_token[batch.rows[entry], first_token] // block_size).int()
    copied = pages[brought_]
    placement = cache.place(copied, complete)
    runs = TokenRuns(touched_, pages[touched_], first, last)
    widest = torch.arange(int(blocks.max(initial=0)), dtype=torch.int32, device=device)
    before = int(sum(batch.new_tokens[: requests.start]))
    return StagedGroup(
        requests=requests,
        tokens=slice(before, before + int(query_starts[-1])),
        starts=starts.tolist(),
        copies=PageCopies(copied, brought_, placement.hits, placement.fills),
        positions=positions.long(),
        runs=runs,
        completed_places=runs.places[completed_].long(),
        completed_pages=runs.pages[completed_].long(),
        slots=offsets[:, None] + widest,
        kv_lengths=kv_lengths,
        query_starts=queries,
        pages=PageTable(
            torch.from_numpy(starts),
            torch.arange(len(request), dtype=torch.int32, device=device),
            torch.from_numpy(lengths - (blocks - (blocks > 0)) * block_size),
            torch.from_numpy(query_starts),
        ),
    )


def _starts(counts: Indices) -> Indices:
    return np.concatenate([[0], counts.cumsum()]).astype(np.int32)


def _to_device(tables: Sequence[NDArray[np.generic]], device: torch.device) -> Sequence[Tensor]:
    """The tables as int32, in one transfer; from pinned memory, else the host would wait for the device."""
    packed = torch.from_numpy(np.concatenate(tables).astype(np.int32))
    if device.type == "cuda":
        packed = packed.pin_memory()
    return packed.to(device, non_blocking=True).split([len(table) for table in tables])

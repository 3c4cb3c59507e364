"""Turns SGLang's forward batch into what one forward pass needs; computed once, shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window


class ColdRow(NamedTuple):
    """A row that reached decode without a resident set; it is built from its first decode query.

    Attributes:
        entry: position in the batch.
        row: the row.
        window: its window before this step.
    """

    entry: int
    row: int
    window: Window


@dataclass(frozen=True)
class DecodePlan:
    """One decode pass.

    Attributes:
        step: rows, windows and host pages.
        cold: rows to build before their first attention.
        rids: request ids, in batch order.
        layout: the tier layout.
    """

    step: DecodeStep
    cold: Sequence[ColdRow]
    rids: Sequence[str]
    layout: TierLayout

    @cached_property
    def kv_lengths(self) -> dict[int, list[int]]:
        """Per number of selected slots K: tokens that each row attends to."""
        return {selected: self._lengths(slots) for selected, slots in self.slots.items()}

    @cached_property
    def slots(self) -> dict[int, list[Tensor]]:
        """Per K: the resident slots of each row, selected ones first, the open block last."""
        return {
            k: [self._row_slots(k, window) for window in self.step.windows] for k in set(self.layout.selected_blocks)
        }

    def _lengths(self, slots: Sequence[Tensor]) -> list[int]:
        size = self.layout.block_size
        return [(len(row) - 1) * size + window.open_fill for row, window in zip(slots, self.step.windows, strict=True)]

    def _row_slots(self, selected: int, window: Window) -> Tensor:
        local = torch.arange(window.first_local, window.open_block + 1) % self.layout.local_slots
        return torch.cat([torch.arange(min(selected, window.first_local)), selected + local])


class PrefillRequest(NamedTuple):
    """One request of an extend pass.

    Attributes:
        row: the row.
        tokens: slice of the batch's tokens that belong to this request.
        prefix: tokens already in the host pool.
        window: the window after this pass.
        pages: [open_block + 1] int64, host pages.
        builds: this is the request's last prefill chunk, decode follows.
    """

    row: int
    tokens: slice
    prefix: int
    window: Window
    pages: Tensor
    builds: bool

    @property
    def prefix_pages(self) -> Tensor:
        return self.pages[: -(-self.prefix // self.window.block_size)]

    @property
    def completed_pages(self) -> Tensor:
        """Pages that this pass completes."""
        return self.pages[self.prefix // self.window.block_size : self.window.complete_blocks]


@dataclass(frozen=True)
class PrefillPlan:
    """One extend pass.

    Attributes:
        requests: in batch order.
        completed_pages: [P] int64, host pages that the pass completes.
    """

    requests: Sequence[PrefillRequest]
    completed_pages: Tensor


def host_pages(req_to_token: Tensor, rows: Tensor | int, length: int, block_size: int) -> Tensor:
    """Host pages of the first `length` tokens: [blocks] for one row, [n, blocks] for several; int64 on the host.

    Entries beyond a row's own length are arbitrary.
    """
    return (req_to_token[rows, 0:length:block_size] // block_size).to("cpu", torch.int64)


def plan_decode(
    tier: ResidentTier,
    *,
    number: int,
    rows: Sequence[int],
    generations: Sequence[int],
    lengths: Sequence[int],
    rids: Sequence[str],
    req_to_token: Tensor,
) -> DecodePlan:
    """Plan a decode pass and move the rows' windows on to it.

    Args:
        tier: the resident tier.
        number: number of the step.
        rows, generations, lengths: per row; `lengths` include the token that decodes now.
        rids: request ids.
        req_to_token: SGLang's [rows, context] table of KV indices.
    """
    cold, before, windows = [], [], []
    for entry, (row, generation, length) in enumerate(zip(rows, generations, lengths, strict=True)):
        state = tier.rows.find(row, generation)
        if state is None:
            state = tier.rows.claim(row, generation, tier.window(length - 1))
            cold.append(ColdRow(entry, row, state.window))
        before.append(state.window)
        windows.append(tier.window(length))
        state.advance(windows[-1])
    row_index = torch.tensor(rows)
    pages = host_pages(req_to_token, row_index.to(req_to_token.device), max(lengths), tier.layout.block_size)
    return DecodePlan(DecodeStep(number, row_index, before, windows, pages), cold, rids, tier.layout)


def plan_prefill(
    tier: ResidentTier,
    *,
    rows: Sequence[int],
    generations: Sequence[int],
    prefixes: Sequence[int],
    new_tokens: Sequence[int],
    last_chunks: Sequence[bool],
    req_to_token: Tensor,
) -> PrefillPlan:
    """Plan an extend pass and claim the rows that decode next.

    Args:
        tier: the resident tier.
        rows, generations, prefixes, new_tokens, last_chunks: per request.
        req_to_token: SGLang's [rows, context] table of KV indices.
    """
    requests = []
    start = 0
    for row, generation, prefix, count, last in zip(rows, generations, prefixes, new_tokens, last_chunks, strict=True):
        window = tier.window(prefix + count)
        pages = host_pages(req_to_token, row, window.length, tier.layout.block_size)
        requests.append(PrefillRequest(row, slice(start, start + count), prefix, window, pages, last))
        start += count
        if last:
            tier.rows.claim(row, generation, window)
        else:
            tier.rows.release(row)
    return PrefillPlan(requests, torch.cat([request.completed_pages for request in requests]))

"""The plan of a forward pass: what it needs to know about its rows; computed once, shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.engine.batch import DecodeBatch, PrefillBatch
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window


class Sequences(NamedTuple):
    """Where the tokens of n sequences are and which of them are queries: the table that `paged_attention` takes.

    Attributes:
        rows: [n] int64.
        slots: [n, W] int32.
        kv_lengths: [n] int32.
        query_starts: [n + 1] int32.
    """

    rows: Tensor
    slots: Tensor
    kv_lengths: Tensor
    query_starts: Tensor


class ColdRow(NamedTuple):
    """A row that reached decode without a resident set, which must be built before the row attends.

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
    """One decode pass: one attention call per layer.

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
    _resident: dict[int, Sequences] = field(default_factory=dict)

    def resident(self, selected: int) -> Sequences:
        """Resident slots of each row in a layer with `selected` slots K: selected ones first, the open block last."""
        if selected not in self._resident:
            step, first_local, last = self.step, self.step.windows.first_local, self.step.last
            ahead = first_local.clamp(max=selected)
            local = last.open_block - first_local + 1
            column = torch.arange(int((ahead + local).max()))
            block = first_local[:, None] + column - ahead[:, None]
            slots = torch.where(column < ahead[:, None], column, selected + block % self.layout.local_slots)
            lengths = (ahead + local - 1) * self.layout.block_size + last.open_fill
            starts = queries_each(step.tokens, len(step.rows))
            self._resident[selected] = Sequences(step.rows, slots.int(), lengths.int(), starts)
        return self._resident[selected]


class PrefillRow(NamedTuple):
    """One row of an extend pass.

    Attributes:
        row: the row.
        tokens: slice of the batch's tokens that belong to it.
        window: the window after this pass.
        builds: whether this is the request's last prefill chunk, after which its resident set is built.
    """

    row: int
    tokens: slice
    window: Window
    builds: bool


def queries_each(queries: int, count: int) -> Tensor:
    """Return `query_starts` [count + 1] of `count` sequences with `queries` queries each."""
    return queries * torch.arange(count + 1, dtype=torch.int32)


def host_pages(req_to_token: Tensor, rows: Tensor | int, length: int, block_size: int) -> Tensor:
    """Return the host pages of the first `length` tokens: [blocks] for one row, [n, blocks] for several; int32, host.

    Entries beyond a row's own length are arbitrary.
    """
    return (req_to_token[rows, 0:length:block_size] // block_size).to("cpu", torch.int32)


def plan_host(req_to_token: Tensor, rows: Tensor, lengths: Tensor, new_tokens: Tensor, block_size: int) -> Sequences:
    """Return sequences whose tokens are read from their host pages.

    Args:
        req_to_token: SGLang's [rows, context] table of KV indices.
        rows: [n] int64.
        lengths, new_tokens: [n], tokens of each row, and how many of them are queries.
        block_size: tokens per page.
    """
    pages = host_pages(req_to_token, rows.to(req_to_token.device), int(lengths.max()), block_size)
    starts = torch.nn.functional.pad(new_tokens.cumsum(0), (1, 0)).int()
    return Sequences(rows, pages, lengths.int(), starts)


def plan_decode(
    tier: ResidentTier, batch: DecodeBatch, *, number: int, req_to_token: Tensor | None, singly: bool
) -> list[DecodePlan]:
    """Plan the passes of a decode step and advance the rows' windows to it.

    Args:
        tier: the resident tier.
        batch: the rows.
        number: number of the step.
        req_to_token: SGLang's [rows, context] table of KV indices; None where only the device looks up pages.
        singly: True for one pass per token of a row, as if the tokens before it were committed; else one pass for all.
    """
    rows, generations, lengths, tokens, first = batch.rows, batch.generations, batch.lengths, batch.tokens, batch.first
    cold = []
    live = tier.rows.live(rows, generations)
    if first == 0:
        live &= tier.rows.length[rows] < lengths  # blocks fetched ahead for one length do not serve a second step at it
    for entry in (~live).nonzero().flatten().tolist():
        row, length = int(rows[entry]), int(lengths[entry]) - 1
        tier.rows.claim(row, int(generations[entry]), length)
        cold.append(ColdRow(entry, row, tier.window(length)))
    before = tier.windows(tier.rows.length[rows])
    tier.rows.advance(rows, lengths)
    pages = torch.empty(len(rows), 0, dtype=torch.int32)
    if req_to_token is not None:
        most = int(lengths.max()) + first + tokens - 1
        pages = host_pages(req_to_token, rows.to(req_to_token.device), most, tier.layout.block_size)
    step = DecodeStep(number, rows, before, tier.windows(lengths), pages, tokens, first)
    steps = step.singly() if singly else [step]
    return [DecodePlan(step, () if i else cold, batch.rids, tier.layout) for i, step in enumerate(steps)]


def claim_rows(tier: ResidentTier, batch: PrefillBatch) -> list[PrefillRow]:
    """Plan the rows of an extend pass, and claim the rows of the requests that decode next."""
    requests = zip(batch.rows, batch.generations, batch.prefixes, batch.new_tokens, batch.last_chunks, strict=True)
    claimed = []
    start = 0
    for row, generation, prefix, count, last in requests:
        window = tier.window(prefix + count)
        claimed.append(PrefillRow(row, slice(start, start + count), window, last))
        start += count
        if last:
            tier.rows.claim(row, generation, window.length)
        else:
            tier.rows.release(row)
    return claimed

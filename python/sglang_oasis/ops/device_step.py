"""The ops of a decode step that a device drives alone: every index is a tensor, nothing comes back to the host.

The references say what an op does, in loops over entries and heads; `kernels/triton/` has the device's versions.
Shapes: S rows, of which row 0 is padding that several entries may name at once, H KV heads, G query heads per KV head,
D head dimension, B tokens per block, K selected and R local slots, N logical blocks per row, n batch entries, m tokens
per entry, C admission width. Contents are trusted: rows, slots, blocks and pages must be in range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.dispatch import device_op
from sglang_oasis.ops.eviction import Maps, graduate_blocks
from sglang_oasis.ops.smoothing import ESCAPE, smooth_scores
from sglang_oasis.ops.summary import SummaryFormat, block_scores, summarise
from sglang_oasis.ops.tokens import store_tokens

HEAD_DIM_STEP, HEAD_DIM_MOST = 16, 256
"""Head sizes of the device's kernels."""


def serves(head_dim: int) -> bool:
    """Whether a device's kernels can work on heads of this size; the references would wait for the device."""
    return head_dim % HEAD_DIM_STEP == 0 and head_dim <= HEAD_DIM_MOST


class StepTable(NamedTuple):
    """What a decode step knows about its n entries, on the device; [n] int32 unless said otherwise.

    Attributes:
        rows: [n] int64, SGLang's req_pool_indices.
        lengths: committed tokens, the newest included, at least 1.
        graduates: logical block that leaves the local slots in this step, or -1.
        completed: logical block whose tokens are now all committed, or -1; it still lies in its local slot.
        expected: logical block that this step's drafts complete if they are accepted, or -1.
        urgent: selectable blocks in this step, for entries that exceed their budget, else 0.
        candidates: selectable blocks in the next step, for entries that will exceed it, else 0.
        number: [1], of the step; urgent fetches mark blocks with 2 * number, predictions with 2 * number + 1.
    """

    rows: Tensor
    lengths: Tensor
    graduates: Tensor
    completed: Tensor
    expected: Tensor
    urgent: Tensor
    candidates: Tensor
    number: Tensor


class DeviceAdmissions(NamedTuple):
    """Blocks to load and over which slots, [n, H, C] int32 each; -1 from the first one that is unused."""

    blocks: Tensor
    slots: Tensor


@device_op
def take_tokens(
    blocks: Tensor,
    maps: Maps,
    summaries: Tensor,
    host_kv: Tensor,
    host_summaries: Tensor,
    req_to_token: Tensor,
    table: StepTable,
    indices: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    fmt: SummaryFormat,
) -> None:
    """Take the step's new tokens into both tiers.

    In this order, per entry and head: the block that graduates is copied from its local slot to the selected slot of
    its own number, where there is one, and marked with 2 * number - 1; the m tokens' K and V are stored in their host
    pages and local slots; the completed block is summarised for row and host; the expected one for the host only.

    Args:
        blocks: [S, H, K+R, 2, B, D].
        maps: of the layer.
        summaries: [S, H, N, Rec] uint8.
        host_kv: [pages, H, 2, B, D], host memory that the device reaches by address.
        host_summaries: [pages, H, Rec] uint8, likewise.
        req_to_token: [S, context] int32, KV index of each token of a row.
        table: of the step.
        indices: [n * m] int64, KV indices of the new tokens.
        keys, values: [n * m, H, D], converted on storing; any strides, the last dimension contiguous.
        first: how far the first of the m tokens is from the newest committed one.
        fmt: how summaries are stored.
    """
    size, selected = blocks.shape[-2], maps.head_map.shape[-1]
    local = blocks.shape[2] - selected
    tokens = len(indices) // len(table.rows)
    store_tokens.reference(host_kv, None, indices.to(host_kv.device), keys, values)
    for i, row in enumerate(table.rows.tolist()):
        at = torch.tensor([row], device=blocks.device)
        if int(table.graduates[i]) >= 0:
            graduate = table.graduates[i : i + 1].long()
            graduate_blocks.reference(
                blocks, maps, at, graduate, selected + graduate % local, 2 * int(table.number) - 1
            )
        position = int(table.lengths[i]) - 1 + first + torch.arange(tokens, device=blocks.device)
        places = (selected + position // size % local) * size + position % size
        mine = slice(i * tokens, (i + 1) * tokens)
        store_tokens.reference(blocks, at.expand(tokens), places, keys[mine], values[mine])
        for block, of_row in ((int(table.completed[i]), True), (int(table.expected[i]), False)):
            if block >= 0:
                record = summarise(blocks[row, :, selected + block % local, 0], fmt)
                host_summaries[int(req_to_token[row, block * size]) // size] = record.to(host_summaries.device)
                if of_row:
                    summaries[row, :, block] = record


@device_op
def score_blocks(
    queries: Tensor,
    summaries: Tensor,
    rows: Tensor,
    candidates: Tensor,
    fmt: SummaryFormat,
    scale: float,
    tightness: float,
    averages: Tensor | None,
    decay: float,
    sinks: int,
    escape: float = ESCAPE,
) -> Tensor:
    """Rank the blocks [0, candidates) of each entry, as `block_scores` and then `smooth_scores` do; sinks come first.

    An entry without candidates costs nothing and leaves its averages alone.

    Args:
        queries: [n, Q, H*G, D].
        summaries: [S, H, N, Rec] uint8.
        rows: [n] int64.
        candidates: [n] int32.
        fmt: how summaries are stored.
        scale: softmax scale of the attention.
        tightness: factor of the half range.
        averages: [S, H, N] float32, updated in place; None where scores are not smoothed.
        decay: weight of the past in the averages.
        sinks: the first so many candidates get infinity, after smoothing.
        escape: see `smooth_scores`.

    Returns:
        [n, H, N] float32, -inf for blocks that are no candidates.
    """
    num_blocks = summaries.shape[2]
    scores = torch.full((len(rows), *summaries.shape[1:3]), float("-inf"), device=queries.device)
    for i, count in enumerate(candidates.tolist()):
        if count == 0:
            continue
        row, among = rows[i : i + 1], candidates[i : i + 1].long()
        found = block_scores.reference(
            queries[i : i + 1], summaries[row, :, :count], fmt, among, scale, tightness
        )  # fmt: skip
        if averages is not None:
            smooth_scores.reference(averages, row, found, among, decay, escape)
        found[..., :sinks] = float("inf")
        scores[i, :, : min(count, num_blocks)] = found[0]
    return scores


@device_op
def select_admissions(
    predicted: Tensor,
    candidates: Tensor,
    rows: Tensor,
    maps: Maps,
    number: Tensor,
    offset: int,
    cap: Tensor,
    admissions: DeviceAdmissions,
    counters: Tensor,
) -> None:
    """Pair the best missing blocks with the least recently selected slots whose blocks are not predicted.

    As `select_blocks` does after its sort; equally old slots go in the order of the slots. Marks the slots of predicted
    blocks with 2 * number + offset. An entry without candidates marks nothing and admits nothing.

    Args:
        predicted: [n, H, K] int64, the K best blocks, best first; those that are no candidates are ignored.
        candidates: [n] int32.
        rows: [n] int64.
        maps: of the layer; all K slots of an entry with candidates are occupied.
        number: [1] int32.
        offset: 0 for urgent fetches, 1 for predictions.
        cap: [1] int32, most blocks admitted per (entry, head), besides C.
        admissions: written everywhere.
        counters: [2] int64, blocks admitted and blocks deferred are added to them.
    """
    admissions.blocks.fill_(-1)
    admissions.slots.fill_(-1)
    step, width = 2 * int(number) + offset, min(int(cap), admissions.blocks.shape[-1])
    for i, row in enumerate(rows.tolist()):
        for head in range(predicted.shape[1]):
            best = [block for block in predicted[i, head].tolist() if block < int(candidates[i])]
            if not best:
                continue
            held = maps.slot_of[row, head]
            ages = maps.last_selected[row, head]
            missing = [block for block in best if held[block] < 0]
            for block in best:
                if held[block] >= 0:
                    ages[held[block].long()] = step
            oldest = torch.sort(ages, stable=True).indices.tolist()
            count = min(width, len(missing))
            admissions.blocks[i, head, :count] = torch.tensor(missing[:count], dtype=torch.int32)
            admissions.slots[i, head, :count] = torch.tensor(oldest[:count], dtype=torch.int32)
            counters += torch.tensor([count, len(missing) - count]).to(counters)


@device_op
def fetch_blocks(
    blocks: Tensor,
    maps: Maps,
    host_kv: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    admissions: DeviceAdmissions,
    number: Tensor,
    offset: int,
) -> None:
    """Load admitted blocks from their host pages over their slots and update the maps, marking 2 * number + offset.

    Args:
        blocks: [S, H, P, 2, B, D].
        maps: of the layer.
        host_kv: [pages, H, 2, B, D], host memory that the device reaches by address.
        req_to_token: [S, context] int32, KV index of each token of a row.
        rows: [n] int64.
        admissions: what to load; blocks that are not resident, over slots that no other admission names.
        number: [1] int32.
        offset: 0 for urgent fetches, 1 for predictions.
    """
    size = blocks.shape[-2]
    for i, head, rank in (admissions.blocks >= 0).nonzero().tolist():
        row, block, slot = int(rows[i]), int(admissions.blocks[i, head, rank]), int(admissions.slots[i, head, rank])
        page = int(req_to_token[row, block * size]) // size
        blocks[row, head, slot] = host_kv[page, head].to(blocks)
        old = int(maps.head_map[row, head, slot])
        if old >= 0:
            maps.slot_of[row, head, old] = -1
        maps.head_map[row, head, slot] = block
        maps.slot_of[row, head, block] = slot
        maps.last_selected[row, head, slot] = 2 * int(number) + offset


@device_op
def attend(
    query: Tensor,
    blocks: Tensor,
    rows: Tensor,
    slots: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    max_queries: int,
) -> Tensor:
    """`paged_attention` without a host synchronisation.

    Args:
        query, blocks, rows, slots, kv_lengths, scale: as there.
        query_starts: [n + 1] int32 on the device.
        max_queries: no sequence has more query tokens.

    Returns:
        [T, H*G, D], dtype of `query`.
    """
    return paged_attention.reference(query, blocks, rows, slots, kv_lengths, query_starts, scale)


@device_op
def summarise_blocks(kv: Tensor, sources: Tensor, records: Tensor, targets: Tensor, fmt: SummaryFormat) -> None:
    """Rebuild the summaries of completed blocks, as `summarise_pages` does.

    Args:
        kv: [X, H, 2, B, D].
        sources: [p] int64, places in `kv`; negative ones are skipped.
        records: [Y, H, Rec] uint8, written.
        targets: [p] int64, places in `records`.
        fmt: how summaries are stored.
    """
    wanted = sources >= 0
    found = summarise(kv[sources[wanted].to(kv.device), :, 0], fmt)
    records[targets[wanted].to(records.device)] = found.to(records.device)

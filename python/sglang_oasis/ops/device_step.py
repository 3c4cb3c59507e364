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


class LayerState(NamedTuple):
    """One layer of both tiers.

    Attributes:
        blocks: [S, H, K+R, 2, B, D].
        maps: of the selected slots.
        summaries: [S, H, N, Rec] uint8.
        averages: [S, H, N] float32, average scores; None where scores are not smoothed.
        host_kv: [pages, H, 2, B, D], host memory that the device reaches by address.
        host_summaries: [pages, H, Rec] uint8, likewise.
        req_to_token: [S, context] int32, KV index of each token of a row.
    """

    blocks: Tensor
    maps: Maps
    summaries: Tensor
    averages: Tensor | None
    host_kv: Tensor
    host_summaries: Tensor
    req_to_token: Tensor


class NewTokens(NamedTuple):
    """The tokens of a step.

    Attributes:
        indices: [n * m] int64, KV indices.
        keys, values: [n * m, H, D], converted on storing; any strides, the last dimension contiguous.
        first: how far the first of a row's m tokens is from its newest committed one.
    """

    indices: Tensor
    keys: Tensor
    values: Tensor
    first: int = 0


class Among(NamedTuple):
    """Which blocks may be chosen.

    Attributes:
        rows: [n] int64.
        candidates: [n] int32, blocks [0, candidates) of each row; an entry without candidates costs nothing.
    """

    rows: Tensor
    candidates: Tensor


class Ranking(NamedTuple):
    """How blocks are ranked.

    Attributes:
        fmt: how summaries are stored.
        scale: softmax scale of the attention.
        tightness: factor of the half range, see `block_scores`.
        decay: weight of the past in the average scores.
        sinks: the first so many candidates come before all others.
        escape: see `smooth_scores`.
    """

    fmt: SummaryFormat
    scale: float
    tightness: float
    decay: float = 0.0
    sinks: int = 0
    escape: float = ESCAPE


class Mark(NamedTuple):
    """With which blocks are marked as selected: 2 * number + offset.

    Attributes:
        number: [1] int32, of the step.
        offset: `URGENT` or `AHEAD`.
    """

    number: Tensor
    offset: int

    @property
    def value(self) -> int:
        """Waits for the device."""
        return 2 * int(self.number) + self.offset


class DeviceAdmissions(NamedTuple):
    """Blocks to load and over which slots, [n, H, C] int32 each; -1 from the first one that is unused."""

    blocks: Tensor
    slots: Tensor


class Admitting(NamedTuple):
    """How much may be admitted, and where it is written.

    Attributes:
        cap: [1] int32, most blocks admitted per (entry, head), besides C.
        admissions: written everywhere.
        counters: [2] int64, blocks admitted and blocks deferred are added to them.
    """

    cap: Tensor
    admissions: DeviceAdmissions
    counters: Tensor


@device_op
def take_tokens(layer: LayerState, table: StepTable, tokens: NewTokens, fmt: SummaryFormat) -> None:
    """Take the step's new tokens into both tiers.

    In this order, per entry and head: the block that graduates is copied from its local slot to the selected slot of
    its own number, where there is one, and marked with 2 * number - 1; the m tokens' K and V are stored in their host
    pages and local slots; the completed block is summarised for row and host; the expected one for the host only.

    Args:
        layer: written.
        table: of the step.
        tokens: the new ones.
        fmt: how summaries are stored.
    """
    blocks, maps, summaries, _, host_kv, host_summaries, req_to_token = layer
    indices, keys, values, first = tokens
    size, selected = blocks.shape[-2], maps.head_map.shape[-1]
    local = blocks.shape[2] - selected
    each = len(indices) // len(table.rows)
    store_tokens.reference(host_kv, None, indices.to(host_kv.device), keys, values)
    for i, row in enumerate(table.rows.tolist()):
        at = torch.tensor([row], device=blocks.device)
        if int(table.graduates[i]) >= 0:
            graduate = table.graduates[i : i + 1].long()
            graduate_blocks.reference(
                blocks, maps, at, graduate, selected + graduate % local, 2 * int(table.number) - 1
            )
        position = int(table.lengths[i]) - 1 + first + torch.arange(each, device=blocks.device)
        places = (selected + position // size % local) * size + position % size
        mine = slice(i * each, (i + 1) * each)
        store_tokens.reference(blocks, at.expand(each), places, keys[mine], values[mine])
        for block, of_row in ((int(table.completed[i]), True), (int(table.expected[i]), False)):
            if block >= 0:
                record = summarise(blocks[row, :, selected + block % local, 0], fmt)
                host_summaries[int(req_to_token[row, block * size]) // size] = record.to(host_summaries.device)
                if of_row:
                    summaries[row, :, block] = record


@device_op
def score_blocks(
    queries: Tensor, summaries: Tensor, among: Among, ranking: Ranking, averages: Tensor | None = None
) -> Tensor:
    """Rank the candidates of each entry, as `block_scores` and then `smooth_scores` do; sinks get infinity after that.

    An entry without candidates leaves its averages alone.

    Args:
        queries: [n, Q, H*G, D].
        summaries: [S, H, N, Rec] uint8.
        among: what may be chosen.
        ranking: how.
        averages: [S, H, N] float32, updated in place; None where scores are not smoothed.

    Returns:
        [n, H, N] float32, -inf for blocks that are no candidates.
    """
    (rows, candidates), (fmt, scale, tightness, decay, sinks, escape) = among, ranking
    num_blocks = summaries.shape[2]
    scores = torch.full((len(rows), *summaries.shape[1:3]), float("-inf"), device=queries.device)
    for i, count in enumerate(candidates.tolist()):
        if count == 0:
            continue
        row, limit = rows[i : i + 1], candidates[i : i + 1].long()
        found = block_scores.reference(
            queries[i : i + 1], summaries[row, :, :count], fmt, limit, scale, tightness
        )  # fmt: skip
        if averages is not None:
            smooth_scores.reference(averages, row, found, limit, decay, escape)
        found[..., :sinks] = float("inf")
        scores[i, :, : min(count, num_blocks)] = found[0]
    return scores


@device_op
def select_admissions(predicted: Tensor, among: Among, maps: Maps, mark: Mark, admitting: Admitting) -> None:
    """Pair the best missing blocks with the least recently selected slots whose blocks are not predicted.

    As `select_blocks` does after its sort; equally old slots go in the order of the slots. Marks the slots of predicted
    blocks. An entry without candidates marks nothing and admits nothing.

    Args:
        predicted: [n, H, K] int64, the K best blocks, best first; those that are no candidates are ignored.
        among: what may be chosen.
        maps: of the layer; all K slots of an entry with candidates are occupied.
        mark: of the predicted blocks.
        admitting: what is written.
    """
    (rows, candidates), (cap, admissions, counters) = among, admitting
    admissions.blocks.fill_(-1)
    admissions.slots.fill_(-1)
    step, width = mark.value, min(int(cap), admissions.blocks.shape[-1])
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
def fetch_blocks(layer: LayerState, rows: Tensor, admissions: DeviceAdmissions, mark: Mark) -> None:
    """Load admitted blocks from their host pages over their slots, and update the maps.

    Args:
        layer: written.
        rows: [n] int64.
        admissions: what to load; blocks that are not resident, over slots that no other admission names.
        mark: of the loaded blocks.
    """
    blocks, maps, host_kv, req_to_token = layer.blocks, layer.maps, layer.host_kv, layer.req_to_token
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
        maps.last_selected[row, head, slot] = mark.value


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

"""The ops of a decode step that a device runs without the host: every index is a tensor, and no result is copied back.

The references define what an op does, in loops over entries and heads; `kernels/triton/` has the device's versions.
Shapes: S rows, of which row 0 is padding, which several entries may share, H KV heads, G query heads per KV head,
D head dimension, B tokens per block, K selected and R local slots, N logical blocks per row, n batch entries, m tokens
per entry, C admission width. Contents are not checked: rows, slots, blocks and pages must be in range.
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
"""The device's kernels support head sizes that are multiples of the first number, up to the second."""


def serves(head_dim: int) -> bool:
    """Whether a device's kernels support this head size; the references cannot replace them, as they synchronise."""
    return head_dim % HEAD_DIM_STEP == 0 and head_dim <= HEAD_DIM_MOST


class StepTable(NamedTuple):
    """What a decode step knows about its n entries, on the device; [n] int32 unless said otherwise.

    Attributes:
        rows: [n] int64, SGLang's req_pool_indices.
        lengths: committed tokens, including the newest, at least 1.
        graduates: logical block that leaves the local slots in this step, or -1.
        completed: logical block whose tokens are now all committed, or -1; it is still in its local slot.
        expected: logical block that this step's drafts complete if they are accepted, or -1.
        urgent: selectable blocks in this step, for entries that exceed their budget, else 0.
        candidates: selectable blocks in the next step, for entries that will exceed it, else 0.
        number: [1], number of the step; urgent fetches mark blocks with 2 * number, predictions with 2 * number + 1.
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
    """The tensors of both tiers that belong to one layer.

    Attributes:
        blocks: [S, H, K+R, 2, B, D].
        maps: maps of the selected slots.
        summaries: [S, H, N, Rec] uint8.
        averages: [S, H, N] float32, average scores; None where scores are not smoothed.
        host_kv: [pages, H, 2, B, D], host memory that the device can access by address.
        host_summaries: [pages, H, Rec] uint8, the same kind of memory.
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
        keys, values: [n * m, H, D], converted when stored; any strides, but the last dimension is contiguous.
        first: distance of the first of a row's m tokens from its newest committed token.
    """

    indices: Tensor
    keys: Tensor
    values: Tensor
    first: int = 0


class Among(NamedTuple):
    """Which blocks may be chosen.

    Attributes:
        rows: [n] int64.
        candidates: [n] int32, blocks [0, candidates) of each row; an entry with 0 candidates takes no time.
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
        sinks: number of first blocks that rank before all others.
        escape: see `smooth_scores`.
    """

    fmt: SummaryFormat
    scale: float
    tightness: float
    decay: float = 0.0
    sinks: int = 0
    escape: float = ESCAPE


class Mark(NamedTuple):
    """The mark of selected blocks: 2 * number + offset.

    Attributes:
        number: [1] int32, number of the step.
        offset: `URGENT` or `AHEAD`.
    """

    number: Tensor
    offset: int

    @property
    def value(self) -> int:
        """Return the mark as a number; waits for the device."""
        return 2 * int(self.number) + self.offset


class DeviceAdmissions(NamedTuple):
    """Blocks to load and the slots to overwrite, [n, H, C] int32 each; -1 from the first unused entry on."""

    blocks: Tensor
    slots: Tensor


class Admitting(NamedTuple):
    """How many blocks may be admitted, and where the admissions are written.

    Attributes:
        cap: [1] int32, most blocks admitted per (entry, head); C is another limit.
        admissions: output; every element is written.
        counters: [2] int64, to which the numbers of admitted and of deferred blocks are added.
    """

    cap: Tensor
    admissions: DeviceAdmissions
    counters: Tensor


@device_op
def take_tokens(layer: LayerState, table: StepTable, tokens: NewTokens, fmt: SummaryFormat) -> None:
    """Store the step's new tokens in both tiers.

    In this order, per entry and head: the block that graduates is copied from its local slot to the selected slot with
    the block's number, if it exists, and marked with 2 * number - 1; K and V of the m tokens are stored in host pages
    and local slots; the completed block is summarised for row and host, the expected block for the host only.

    Args:
        layer: tensors of the layer; written.
        table: table of the step.
        tokens: the new tokens.
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

    The averages of an entry without candidates do not change.

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
    """Assign the best missing blocks to the least recently selected slots whose blocks are not predicted.

    The same as `select_blocks` after its sort; equally old slots are taken in their order. Marks the slots of predicted
    blocks. An entry without candidates marks nothing and admits nothing.

    Args:
        predicted: [n, H, K] int64, the K best blocks, best first; blocks that are not candidates are ignored.
        among: what may be chosen.
        maps: maps of the layer; all K slots of an entry with candidates must be occupied.
        mark: mark of the predicted blocks.
        admitting: limits and outputs.
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
    """Load admitted blocks from their host pages into their slots, and update the maps.

    Args:
        layer: tensors of the layer; written.
        rows: [n] int64.
        admissions: blocks to load, which must not be resident, and their slots, which must all differ.
        mark: mark of the loaded blocks.
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
    """Return what `paged_attention` returns, without a synchronisation with the host.

    Args:
        query, blocks, rows, slots, kv_lengths, scale: as in `paged_attention`.
        query_starts: [n + 1] int32 on the device.
        max_queries: upper bound on the query tokens of a sequence.

    Returns:
        [T, H*G, D], dtype of `query`.
    """
    return paged_attention.reference(query, blocks, rows, slots, kv_lengths, query_starts, scale)


@device_op
def summarise_blocks(kv: Tensor, sources: Tensor, records: Tensor, targets: Tensor, fmt: SummaryFormat) -> None:
    """Build the summaries of completed blocks, as `summarise_pages` does.

    Args:
        kv: [X, H, 2, B, D].
        sources: [p] int64, indices into `kv`; negative ones are skipped.
        records: [Y, H, Rec] uint8, written.
        targets: [p] int64, indices into `records`.
        fmt: how summaries are stored.
    """
    wanted = sources >= 0
    found = summarise(kv[sources[wanted].to(kv.device), :, 0], fmt)
    records[targets[wanted].to(records.device)] = found.to(records.device)

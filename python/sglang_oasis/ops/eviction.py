"""Delta selection and capped eviction (OasisKV section 3.4, Algorithm 2), and its updates of the resident tier."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op


class Maps(NamedTuple):
    """Which blocks a layer of the resident tier holds.

    Attributes:
        head_map: [S, H, K] int32, logical block of each selected slot or -1.
        last_selected: [S, H, K] int32, mark of the step in which each selected slot was last selected.
        slot_of: [S, H, N] int32, slot of each logical block or -1.
    """

    head_map: Tensor
    last_selected: Tensor
    slot_of: Tensor


class Admissions(NamedTuple):
    """Blocks to load, at most C per row and head, and the slots to overwrite.

    Attributes:
        blocks: [n, H, C] int32, logical blocks, best first, then -1.
        slots: [n, H, C] int32, resident slots to overwrite, -1 where `blocks` is.
        deferred: number of predicted blocks that are neither resident nor admitted.
    """

    blocks: Tensor
    slots: Tensor
    deferred: int

    @property
    def admitted(self) -> int:
        """Number of blocks to load."""
        return int((self.blocks >= 0).sum())


@device_op
def select_blocks(scores: Tensor, candidates: Tensor, rows: Tensor, maps: Maps, step: int, cap: int) -> Admissions:
    """Assign the best missing blocks to the least recently selected slots whose blocks are not among the K best.

    Marks the resident ones of the K best blocks as selected in `step` (in place); does not change the other maps.
    Equal scores rank in the order of the blocks, equally old slots in the order of the slots. All K slots of every
    (row, head) must be occupied, and there must be at least K candidates.

    Args:
        scores: [n, H, N] float32.
        candidates: [n] int64, blocks [0, candidates) of each row may be chosen; the scores of the others are -inf.
        rows: [n] int64.
        maps: maps of the layer.
        step: the current step, larger than any earlier step.
        cap: most blocks admitted per (row, head).
    """
    selected = maps.head_map.shape[-1]
    predicted = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :selected]
    last_selected = maps.last_selected[rows]
    slots = maps.slot_of[rows].gather(-1, predicted).long()
    missing = slots < 0
    # A missing block has no slot to mark: mark an extra slot after the last one, and cut it off afterwards.
    marked = torch.nn.functional.pad(last_selected, (0, 1))
    marked.scatter_(-1, slots.masked_fill(missing, selected), step)
    last_selected = marked[..., :-1].contiguous()
    maps.last_selected[rows] = last_selected

    # Stable sorts keep prediction rank among the missing and slot order among equally old candidates.
    width = min(cap, selected)
    best_missing = torch.sort(missing, dim=-1, descending=True, stable=True).indices[..., :width]
    oldest = torch.sort(last_selected, dim=-1, stable=True).indices[..., :width]
    absent = ~missing.gather(-1, best_missing)
    blocks = predicted.gather(-1, best_missing).masked_fill(absent, -1).int()
    return Admissions(blocks, oldest.masked_fill(absent, -1).int(), int(missing.sum() - (~absent).sum()))


@device_op
def admit_blocks(
    blocks: Tensor, maps: Maps, host_kv: Tensor, pages: Tensor, rows: Tensor, admissions: Admissions, step: int
) -> None:
    """Load admitted blocks from their host pages into resident slots, and update the maps.

    Args:
        blocks: [S, H, P, 2, B, D].
        maps: of the layer.
        host_kv: [N_pages, H, 2, B, D] on the host.
        pages: [n, blocks] int32 on the host, host page of each logical block.
        rows: [n] int64.
        admissions: what to load.
        step: step in which they were selected.
    """
    entry, head, rank = (admissions.blocks >= 0).nonzero(as_tuple=True)
    block, slot = admissions.blocks[entry, head, rank], admissions.slots[entry, head, rank]
    page = pages[entry.cpu(), block.cpu().long()].long()
    row = rows.to(entry.device)[entry]
    maps.slot_of[row, head, maps.head_map[row, head, slot.long()].long()] = -1
    blocks[row, head, slot.long()] = host_kv[page, head.cpu()].to(blocks.device)
    maps.head_map[row, head, slot.long()] = block
    maps.last_selected[row, head, slot.long()] = step
    maps.slot_of[row, head, block.long()] = slot


@device_op
def graduate_blocks(
    blocks: Tensor, maps: Maps, rows: Tensor, graduates: Tensor, local_slots: Tensor, step: int
) -> None:
    """Keep blocks that leave the local slots: block b moves to slot b if it exists; other blocks stay in the host only.

    Args:
        blocks: [S, H, P, 2, B, D].
        maps: of the layer.
        rows, graduates, local_slots: [g] int64, row, logical block and local slot of each.
        step: the current step.
    """
    fits = graduates < maps.head_map.shape[-1]
    rows, graduates, local_slots = rows[fits], graduates[fits], local_slots[fits]
    blocks[rows, :, graduates] = blocks[rows, :, local_slots]
    for held in (maps.head_map, maps.slot_of):
        held[rows, :, graduates] = graduates.to(held)[:, None]
    maps.last_selected[rows, :, graduates] = step

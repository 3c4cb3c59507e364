"""Delta selection and capped eviction (OasisKV section 3.4, Algorithm 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op


class Admissions(NamedTuple):
    """Blocks to load, one entry each: int64 vectors of equal length `n_admit`, plus what the cap left out.

    Attributes:
        entry: position in the batch of rows given to `capped_eviction`.
        head: KV head.
        slot: resident slot to overwrite.
        block: logical block to load.
        deferred: number of predicted blocks that are neither resident nor admitted.
    """

    entry: Tensor
    head: Tensor
    slot: Tensor
    block: Tensor
    deferred: int


@device_op
def capped_eviction(predicted: Tensor, slot_of: Tensor, last_selected: Tensor, step: int, cap: int) -> Admissions:
    """Pair the best predicted blocks that are missing with the least recently selected blocks not predicted.

    Marks the predicted blocks that are resident as selected in `step` (in place) and leaves the maps as they are.
    All K slots of every (row, head) must be occupied.

    Args:
        predicted: [n, H, K] int64, predicted logical blocks, best first.
        slot_of: [n, H, N] int32, slot of each logical block or -1.
        last_selected: [n, H, K] int32, step in which each slot was last selected; updated in place.
        step: the current step, larger than any step before.
        cap: most blocks admitted per (row, head).
    """
    slots = slot_of.gather(-1, predicted).long()
    missing = slots < 0
    # A missing block has no slot to mark: mark a slot one past the end and cut it off.
    marked = torch.nn.functional.pad(last_selected, (0, 1))
    marked.scatter_(-1, slots.masked_fill(missing, last_selected.shape[-1]), step)
    last_selected.copy_(marked[..., :-1])

    wanted = int(missing.sum())
    # Stable sorts keep prediction rank among the missing and slot order among equally old candidates.
    width = min(cap, predicted.shape[-1])
    best_missing = torch.sort(missing, dim=-1, descending=True, stable=True).indices[..., :width]
    oldest = torch.sort(last_selected, dim=-1, stable=True).indices[..., :width]
    entry, head, rank = missing.gather(-1, best_missing).nonzero(as_tuple=True)
    return Admissions(
        entry=entry,
        head=head,
        slot=oldest[entry, head, rank],
        block=predicted[entry, head, best_missing[entry, head, rank]],
        deferred=wanted - entry.numel(),
    )

"""Checks all invariants between the resident tier and the host pool. It is slow, for tests and debugging only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_oasis.ops.summary import vectors
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.resident_tier import ResidentLayer, ResidentTier
from sglang_oasis.tier.window import Window

RECOMPUTED_FLOAT32, RECOMPUTED_16_BIT = 1e-3, 0.1
"""Relative difference allowed for a key or value vector that was computed in another batch."""


SUMMARY_TOLERANCE = {"bf16": 0.02, "int8": 0.05, "int4": 0.3}
"""Relative difference allowed for a summary, in which a last bit may also lead to another code."""


class IntegrityError(AssertionError):
    """An invariant of the tiers does not hold."""


def check_integrity(tier: ResidentTier, host: HostPool, pages_of: Callable[[int, int], Tensor]) -> None:
    """Compare the resident tier of every live row with the host pool.

    Args:
        tier: the resident tier; no transfer may be in flight.
        host: the pool of record.
        pages_of: (row, number of blocks) -> [blocks] int64 host pages of the row's first blocks.

    Raises:
        IntegrityError: an invariant does not hold; the message names the layer, the row and the invariant.
    """
    for row in tier.rows.occupied():
        window = tier.window(int(tier.rows.length[row]))
        pages = pages_of(row, window.open_block + 1)
        for index, layer in enumerate(tier.layers):
            try:
                _check_head_map(layer, row, window, tier.layout.draft_tokens)
                _check_contents(layer, row, window, host.kv[index], pages)
                _check_summaries(layer, row, window, host, index, pages)
            except IntegrityError as error:
                generation = int(tier.rows.generation[row])
                raise IntegrityError(f"layer {index}, row {row}, generation {generation}: {error}") from None


def _require(condition: bool | Tensor, invariant: str) -> None:
    if not bool(condition):
        raise IntegrityError(invariant)


def _check_head_map(layer: ResidentLayer, row: int, window: Window, drafts: int) -> None:
    used = min(layer.selected, window.first_local)
    # Blocks that would have left the local slots if all drafts had been accepted may already have a selected slot.
    most = min(layer.selected, window.later(drafts).first_local)
    head_map, slot_of = layer.head_map[row].long(), layer.slot_of[row].long()
    occupied = head_map >= 0
    _require(~occupied[:, most:].any(), f"slots beyond the first {most} are empty")
    _require(occupied[:, :used].all(), f"the first {used} slots are occupied")
    # A block that is local now but selectable in the next step may have been fetched ahead.
    _require((head_map < window.later(1 + drafts).first_local).all(), "resident blocks are selectable")
    slots = torch.arange(layer.selected).expand_as(head_map).to(head_map)
    inverse = slot_of.gather(1, head_map.clamp(min=0))
    _require((inverse == slots)[occupied].all(), "slot_of inverts head_map")
    _require(((slot_of >= 0).sum(1) == occupied.sum(1)).all(), "slot_of names no block that is not resident")


def _check_contents(layer: ResidentLayer, row: int, window: Window, host_kv: Tensor, pages: Tensor) -> None:
    used = min(layer.selected, window.first_local)
    head_map = layer.head_map[row, :, :used].long().cpu()
    heads = torch.arange(head_map.shape[0]).unsqueeze(1)
    _require(
        _mirrors(layer.blocks[row, :, :used], host_kv[pages[head_map], heads]),
        "resident blocks mirror their host pages",
    )
    for block in range(window.first_local, window.open_block + 1):
        fill = window.open_fill if block == window.open_block else layer.block_size
        resident = layer.blocks[row, :, layer.local_slot(block), :, :fill]
        _require(_mirrors(resident, host_kv[pages[block], :, :, :fill]), f"local block {block} mirrors its host page")


def _check_summaries(layer: ResidentLayer, row: int, window: Window, host: HostPool, index: int, pages: Tensor) -> None:
    complete = window.complete_blocks
    fmt = host.formats[index]
    resident = vectors(layer.summaries[row, :, :complete], fmt)
    mirrored = vectors(host.summaries[index][pages[:complete]].transpose(0, 1), fmt)
    tolerance = SUMMARY_TOLERANCE[fmt.name]
    _require(_mirrors(resident, mirrored, tolerance), "resident summaries mirror the host's")


def _mirrors(resident: Tensor, host: Tensor, least_tolerance: float = 0.0) -> Tensor:
    """Whether each vector [..., D] equals the host's, up to the rounding differences of a second computation.

    When two requests compute the same page, SGLang's radix tree keeps one copy for both rows. The copy that was dropped
    may differ in the last bits, because it was computed in another batch.
    """
    tolerance = max(least_tolerance, RECOMPUTED_FLOAT32 if host.dtype == torch.float32 else RECOMPUTED_16_BIT)
    resident, host = resident.cpu().double(), host.double()
    return ((resident - host).norm(dim=-1) <= tolerance * (host.norm(dim=-1) + 1e-6)).all()

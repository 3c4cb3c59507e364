"""What attends on a device: FlashInfer's paged kernels where they serve, a Triton kernel elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_oasis.attention.slot_tables import SlotTable
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.staging_plan import StagedGroup


class DecodeAttention(Protocol):
    """Attention of n entries with m tokens each over the slots of a `SlotTable`."""

    def plan(self, table: SlotTable, entries: int, tokens: int, scale: float) -> None:
        """Prepare for a step; outside of a captured graph, after the table was loaded."""

    def refresh(self, table: SlotTable, entries: int, tokens: int, scale: float) -> None:
        """Prepare what the device can do by itself; inside of a captured graph."""

    def run(self, query: Tensor, blocks: Tensor, table: SlotTable, entries: int, scale: float) -> Tensor:
        """query [n * m, H*G, D], blocks [S, H, K+R, 2, B, D] -> [n * m, H*G, D]."""


class PrefillAttention(Protocol):
    """Causal attention of a group's new tokens over all its tokens."""

    def plan(self, groups: Sequence[StagedGroup]) -> None:
        """Prepare for a pass."""

    def run(self, query: Tensor, kv: Tensor, group: StagedGroup, scale: float) -> Tensor:
        """query [t, H*G, D], kv [X, H, 2, B, D] -> [t, H*G, D]."""


class DeviceAttention(NamedTuple):
    """Both kinds."""

    decode: DecodeAttention
    prefill: PrefillAttention


def choose_attention(
    layout: TierLayout, query_heads: int, query_dtype: torch.dtype, device: torch.device
) -> DeviceAttention:
    """FlashInfer, or Triton where FlashInfer is absent or does not know the head size or the dtype."""
    from sglang_oasis.attention import flashinfer_attention, triton_attention

    if flashinfer_attention.serves(layout, query_dtype):
        return flashinfer_attention.make(layout, query_heads, query_dtype, device)
    return DeviceAttention(triton_attention.TritonDecode(device), triton_attention.TritonPrefill())

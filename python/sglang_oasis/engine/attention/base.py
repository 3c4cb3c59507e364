"""The interface of a device's attention kernels, and the parameters that all of them need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_oasis.engine.slot_tables import SlotTable
from sglang_oasis.ops.streams import Streams
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.plan import StagedGroup


class DecodeAttention(Protocol):
    """Attention of n entries with m tokens each over the slots of a `SlotTable`."""

    def plan(self, table: SlotTable, entries: int, tokens: int) -> None:
        """Prepare for a step; called outside of a captured graph, after the table was loaded."""

    def refresh(self, table: SlotTable, entries: int, tokens: int) -> None:
        """Do the part of the preparation that the device can do alone; called inside of a captured graph."""

    def run(self, query: Tensor, blocks: Tensor, table: SlotTable, entries: int) -> Tensor:
        """Attend: query [n * m, H*G, D], blocks [S, H, K+R, 2, B, D] -> [n * m, H*G, D]."""


class PrefillAttention(Protocol):
    """Causal attention of the new tokens of a group of requests over all its tokens."""

    def plan(self, groups: Sequence[StagedGroup]) -> None:
        """Prepare for a pass."""

    def run(self, query: Tensor, kv: Tensor, group: StagedGroup) -> Tensor:
        """Attend: query [t, H*G, D], kv [X, H, 2, B, D] -> [t, H*G, D]."""


class AttentionSetup(NamedTuple):
    """The parameters that are the same for all layers and steps.

    Attributes:
        layout: the tier layout.
        query_heads: query heads of this rank.
        dtype: dtype of the queries.
        scale: softmax scale.
        device, streams: the device that attends, and its streams.
    """

    layout: TierLayout
    query_heads: int
    dtype: torch.dtype
    scale: float
    device: torch.device
    streams: Streams


class DeviceAttention(NamedTuple):
    """The attention kernels of decode and of prefill."""

    decode: DecodeAttention
    prefill: PrefillAttention

"""What attends on a device: the interface of the kernels, and what all of them need to know."""

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
        """Prepare for a step; outside of a captured graph, after the table was loaded."""

    def refresh(self, table: SlotTable, entries: int, tokens: int) -> None:
        """Prepare what the device can do by itself; inside of a captured graph."""

    def run(self, query: Tensor, blocks: Tensor, table: SlotTable, entries: int) -> Tensor:
        """query [n * m, H*G, D], blocks [S, H, K+R, 2, B, D] -> [n * m, H*G, D]."""


class PrefillAttention(Protocol):
    """Causal attention of a group's new tokens over all its tokens."""

    def plan(self, groups: Sequence[StagedGroup]) -> None:
        """Prepare for a pass."""

    def run(self, query: Tensor, kv: Tensor, group: StagedGroup) -> Tensor:
        """query [t, H*G, D], kv [X, H, 2, B, D] -> [t, H*G, D]."""


class AttentionSetup(NamedTuple):
    """What is the same for all layers and steps.

    Attributes:
        layout: the tier layout.
        query_heads: of this rank.
        dtype: of the queries.
        scale: softmax scale.
        device, streams: what attends.
    """

    layout: TierLayout
    query_heads: int
    dtype: torch.dtype
    scale: float
    device: torch.device
    streams: Streams


class DeviceAttention(NamedTuple):
    """The kernels of decode and of prefill."""

    decode: DecodeAttention
    prefill: PrefillAttention

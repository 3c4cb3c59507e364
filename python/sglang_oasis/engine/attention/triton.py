"""Attention on a device with one Triton kernel, which serves any head size up to 256 and every dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_oasis.engine.attention.base import AttentionSetup, DeviceAttention
from sglang_oasis.engine.slot_tables import SlotTable
from sglang_oasis.ops.device_step import attend
from sglang_oasis.tier.prefill.plan import StagedGroup


def make(setup: AttentionSetup) -> DeviceAttention:
    """Make the kernels of decode and of prefill."""
    return DeviceAttention(TritonDecode(setup), TritonPrefill(setup))


class TritonDecode:
    """One program per entry and KV head reads the slots one after the other."""

    def __init__(self, setup: AttentionSetup) -> None:
        self._setup = setup
        self._starts: dict[tuple[int, int], Tensor] = {}

    def plan(self, table: SlotTable, entries: int, tokens: int) -> None:
        if (entries, tokens) not in self._starts:
            self._starts[entries, tokens] = tokens * torch.arange(
                entries + 1, dtype=torch.int32, device=self._setup.device
            )

    def refresh(self, table: SlotTable, entries: int, tokens: int) -> None:
        pass

    def run(self, query: Tensor, blocks: Tensor, table: SlotTable, entries: int) -> Tensor:
        tokens = len(query) // entries
        slots = table.first_entries(entries)
        return attend(query, blocks, *slots, self._starts[entries, tokens], self._setup.scale, tokens)


class TritonPrefill:
    """Prefill with the kernel of decode, which serves any number of queries."""

    def __init__(self, setup: AttentionSetup) -> None:
        self._scale = setup.scale

    def plan(self, groups: Sequence[StagedGroup]) -> None:
        pass

    def run(self, query: Tensor, kv: Tensor, group: StagedGroup) -> Tensor:
        starts = group.pages.query_starts
        most = int((starts[1:] - starts[:-1]).max())
        rows = group.kv_lengths  # not used: pages are the slots of every row
        return attend(query, kv, rows, group.slots, group.kv_lengths, group.query_starts, self._scale, most)

"""Decode attention on a device: FlashInfer's paged kernels where they serve, a Triton kernel elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_oasis.attention.slot_tables import HeadPages, SlotTable
from sglang_oasis.ops.device_step import attend
from sglang_oasis.tier.layout import TierLayout

FLASHINFER_HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends for the partial results of split sequences."""


class DecodeAttention(Protocol):
    """Attention of n entries with m tokens each over the slots of a `SlotTable`."""

    def plan(self, table: SlotTable, entries: int, tokens: int, scale: float) -> None:
        """Prepare for a step; outside of a captured graph, after the table was loaded."""

    def refresh(self, table: SlotTable, entries: int, tokens: int, scale: float) -> None:
        """Prepare what the device can do by itself; inside of a captured graph."""

    def run(self, query: Tensor, blocks: Tensor, table: SlotTable, entries: int, scale: float) -> Tensor:
        """query [n * m, H*G, D], blocks [S, H, K+R, 2, B, D] -> [n * m, H*G, D]."""


def choose_attention(layout: TierLayout, query_heads: int, query_dtype: torch.dtype, device: Any) -> DecodeAttention:
    """FlashInfer, or Triton where FlashInfer is absent or does not know the head size or the dtype."""
    serves = (
        layout.head_dim in FLASHINFER_HEAD_DIMS
        and query_dtype in (torch.float16, torch.bfloat16)
        and layout.dtype == query_dtype
    )
    if serves and importlib.util.find_spec("flashinfer") is not None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        return FlashInferAttention(layout, query_heads, query_dtype, device, BatchDecodeWithPagedKVCacheWrapper)
    return TritonAttention(device)


class TritonAttention:
    """One program per entry and KV head reads the slots one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starts: dict[tuple[int, int], Tensor] = {}

    def plan(self, table: SlotTable, entries: int, tokens: int, scale: float) -> None:
        if (entries, tokens) not in self._starts:
            self._starts[entries, tokens] = tokens * torch.arange(entries + 1, dtype=torch.int32, device=self._device)

    def refresh(self, table: SlotTable, entries: int, tokens: int, scale: float) -> None:
        pass

    def run(self, query: Tensor, blocks: Tensor, table: SlotTable, entries: int, scale: float) -> Tensor:
        tokens = len(query) // entries
        slots = table.first_entries(entries)
        return attend(query, blocks, *slots, self._starts[entries, tokens], scale, tokens)


class _Planned(NamedTuple):
    """A FlashInfer wrapper with the memory that its graph reads."""

    wrapper: Any
    pages: HeadPages


class FlashInferAttention:
    """`BatchDecodeWithPagedKVCacheWrapper` (FlashInfer 0.7.2) on single KV heads: n * H sequences of G query heads.

    One wrapper per shape of step, shared by all layers with as many slots. The plan of its `fa2` kernels depends on the
    number of pages of each sequence only (`scheduler.cuh`, DecodePlan and PrefillSplitQOKVIndptr), which for rows that
    exceed their budget never changes, so a step rarely plans. m tokens per entry are `q_len_per_req`, which that backend
    serves with its tensor core kernels, causally.

    Args:
        layout: the tier layout.
        query_heads: query heads of this rank.
        dtype: of queries, keys and values.
        device: the device.
        make_wrapper: the wrapper's class.
    """

    def __init__(
        self,
        layout: TierLayout,
        query_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        make_wrapper: Callable[..., Any],
    ) -> None:
        self._layout, self._group, self._dtype, self._device = layout, query_heads // layout.kv_heads, dtype, device
        self._make_wrapper = make_wrapper
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[tuple[SlotTable, int, int, float], _Planned] = {}
        self._plans: dict[tuple[SlotTable, int, int, float], Tensor] = {}

    def plan(self, table: SlotTable, entries: int, tokens: int, scale: float) -> None:
        key = (table, entries, tokens, scale)
        if key not in self._planned:
            self._planned[key] = self._make(table, entries)
        pages = table.pages(entries)
        if key in self._plans and torch.equal(self._plans[key], pages):
            return
        heads, (wrapper, buffers) = self._layout.kv_heads, self._planned[key]
        starts = torch.nn.functional.pad(pages.repeat_interleave(heads).cumsum(0), (1, 0)).int()
        wrapper.plan(
            starts,
            buffers.indices[: int(starts[-1])],
            torch.full((entries * heads,), self._layout.block_size, dtype=torch.int32),
            self._group,
            1,
            self._layout.head_dim,
            self._layout.block_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=scale,
            q_len_per_req=tokens,
        )
        self._plans[key] = pages.clone()

    def refresh(self, table: SlotTable, entries: int, tokens: int, scale: float) -> None:
        table.flatten_heads(entries, self._planned[table, entries, tokens, scale].pages)

    def run(self, query: Tensor, blocks: Tensor, table: SlotTable, entries: int, scale: float) -> Tensor:
        tokens, heads = len(query) // entries, self._layout.kv_heads
        wrapper = self._planned[table, entries, tokens, scale].wrapper
        pages = blocks.flatten(0, 2).unsqueeze(3)  # [pages, 2, B, 1, D]: layout NHD with one KV head
        # A sequence's tokens are neighbours: [n, m, H, G, D] -> [n, H, m, G, D].
        by_head = query.view(entries, tokens, heads, self._group, -1).transpose(1, 2)
        out = wrapper.run(by_head.flatten(0, 2), pages)
        return out.view(by_head.shape).transpose(1, 2).reshape(query.shape)

    def _make(self, table: SlotTable, entries: int) -> _Planned:
        sequences, device = entries * self._layout.kv_heads, self._device
        capacity = sequences * (table.selected + self._layout.local_slots) + 1
        pages = HeadPages(
            torch.zeros(capacity, dtype=torch.int32, device=device),
            torch.ones(sequences, dtype=torch.int32, device=device),
        )
        wrapper = self._make_wrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=pages.indices,
            paged_kv_last_page_len_buffer=pages.last_page_len,
            backend="fa2",
        )
        return _Planned(wrapper, pages)

"""Attention of a device by FlashInfer's paged kernels; read from FlashInfer 0.7.2, which SGLang 0.5.23 pins."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_oasis.attention.device_attention import DeviceAttention
from sglang_oasis.attention.slot_tables import HeadPages, SlotTable
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.staging_plan import StagedGroup

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends for the partial results of split sequences."""


def serves(layout: TierLayout, query_dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed and knows the head size and the dtype."""
    known = query_dtype in (torch.float16, torch.bfloat16) and layout.dtype == query_dtype
    return known and layout.head_dim in HEAD_DIMS and importlib.util.find_spec("flashinfer") is not None


def make(layout: TierLayout, query_heads: int, dtype: torch.dtype, device: torch.device) -> DeviceAttention:
    """Decode and prefill, which share a workspace: they never run at once."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return DeviceAttention(
        FlashInferDecode(layout, query_heads, dtype, workspace, BatchDecodeWithPagedKVCacheWrapper),
        FlashInferPrefill(layout, query_heads, dtype, workspace, BatchPrefillWithPagedKVCacheWrapper),
    )


class _Planned(NamedTuple):
    """A FlashInfer wrapper with the memory that its graph reads."""

    wrapper: Any
    pages: HeadPages


class FlashInferDecode:
    """`BatchDecodeWithPagedKVCacheWrapper` (FlashInfer 0.7.2) on single KV heads: n * H sequences of G query heads.

    One wrapper per shape of step, shared by all layers with as many slots. The plan of its `fa2` kernels depends on the
    number of pages of each sequence only (`scheduler.cuh`, DecodePlan and PrefillSplitQOKVIndptr), which for rows that
    exceed their budget never changes, so a step rarely plans. m tokens per entry are `q_len_per_req`, which tensor core
    kernels of that backend serve, causally.

    Args:
        layout: the tier layout.
        query_heads: query heads of this rank.
        dtype: of queries, keys and values.
        workspace: for the partial results of split sequences.
        make_wrapper: the wrapper's class.
    """

    def __init__(
        self,
        layout: TierLayout,
        query_heads: int,
        dtype: torch.dtype,
        workspace: Tensor,
        make_wrapper: Callable[..., Any],
    ) -> None:
        self._layout, self._group, self._dtype = layout, query_heads // layout.kv_heads, dtype
        self._make_wrapper = make_wrapper
        self._workspace = workspace
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
        sequences, device = entries * self._layout.kv_heads, self._workspace.device
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


class FlashInferPrefill:
    """`BatchPrefillWithPagedKVCacheWrapper` (FlashInfer 0.7.2); K and V of a page are strided halves, layout HND.

    One wrapper per group of a pass, planned for the first layer; a layer with another softmax scale plans again.

    Args:
        layout: the tier layout.
        query_heads: query heads of this rank.
        dtype: of queries, keys and values.
        workspace: for the partial results of split sequences.
        make_wrapper: the wrapper's class.
    """

    def __init__(
        self,
        layout: TierLayout,
        query_heads: int,
        dtype: torch.dtype,
        workspace: Tensor,
        make_wrapper: Callable[..., Any],
    ) -> None:
        self._layout, self._query_heads, self._dtype = layout, query_heads, dtype
        self._make_wrapper = make_wrapper
        self._workspace = workspace
        self._wrappers: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._planned: dict[int, float] = {}

    def plan(self, groups: Sequence[StagedGroup]) -> None:
        self._numbers = {group.requests.start: number for number, group in enumerate(groups)}
        self._planned = {}
        while len(self._wrappers) < len(groups):
            self._wrappers.append(self._make_wrapper(self._workspace, "HND", backend="fa2"))

    def run(self, query: Tensor, kv: Tensor, group: StagedGroup, scale: float) -> Tensor:
        number = self._numbers[group.requests.start]
        wrapper = self._wrappers[number]
        if self._planned.get(number) != scale:
            self._plan(wrapper, group, scale)
            self._planned[number] = scale
        return wrapper.run(query, kv.unbind(2))

    def _plan(self, wrapper: Any, group: StagedGroup, scale: float) -> None:
        wrapper.plan(
            group.pages.query_starts,
            group.pages.indptr,
            group.pages.indices,
            group.pages.last_page_len,
            self._query_heads,
            self._layout.kv_heads,
            self._layout.head_dim,
            self._layout.block_size,
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=scale,
        )

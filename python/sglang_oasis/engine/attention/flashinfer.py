"""Attention on a device with FlashInfer's paged kernels; read from FlashInfer 0.7.2, which SGLang 0.5.23 pins."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_oasis.engine.attention.base import AttentionSetup, DeviceAttention
from sglang_oasis.engine.slot_tables import HeadPages, SlotTable
from sglang_oasis.ops.streams import Event
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.plan import StagedGroup

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
"""Bytes that FlashInfer's documentation recommends for the partial results of split sequences."""
PLAN_BYTES = 1 << 20
"""Bytes of device memory, and of pinned memory, for a plan."""


def serves(layout: TierLayout, query_dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed and supports the head size and the dtype."""
    known = query_dtype in (torch.float16, torch.bfloat16) and layout.dtype == query_dtype
    return known and layout.head_dim in HEAD_DIMS and importlib.util.find_spec("flashinfer") is not None


def make(setup: AttentionSetup) -> DeviceAttention:
    """Make the kernels of decode and of prefill, which share a workspace because they never run concurrently."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device)
    return DeviceAttention(
        FlashInferDecode(setup, workspace, BatchDecodeWithPagedKVCacheWrapper),
        FlashInferPrefill(setup, workspace, BatchPrefillWithPagedKVCacheWrapper),
    )


@dataclass
class _Planned:
    """A FlashInfer wrapper with the memory that its graph reads.

    Attributes:
        wrapper: FlashInfer's wrapper.
        pages: the page table that the wrapper reads.
        counts: [n], pages of each entry in the current plan; None before the first plan.
        copied: event after which the device has copied that plan.
    """

    wrapper: Any
    pages: HeadPages
    counts: Tensor | None = None
    copied: Event = None


class FlashInferDecode:
    """`BatchDecodeWithPagedKVCacheWrapper` (FlashInfer 0.7.2) on single KV heads: n * H sequences of G query heads.

    One wrapper per shape of step, shared by all layers with as many slots. The plan of its `fa2` kernels depends on the
    number of pages of each sequence only (`scheduler.cuh`, DecodePlan and PrefillSplitQOKVIndptr): it never changes for
    rows that exceed their budget, and changes every B steps for other rows. m tokens per entry are passed as
    `q_len_per_req`, which the tensor-core kernels of that backend support, causally.

    Args:
        setup: what attends; keys and values are of the queries' dtype.
        workspace: for the partial results of split sequences.
        make_wrapper: the wrapper's class.
    """

    def __init__(self, setup: AttentionSetup, workspace: Tensor, make_wrapper: Callable[..., Any]) -> None:
        self._setup, self._layout = setup, setup.layout
        self._group = setup.query_heads // setup.layout.kv_heads
        self._make_wrapper = make_wrapper
        self._workspace = workspace
        self._planned: dict[tuple[SlotTable, int, int], _Planned] = {}

    def plan(self, table: SlotTable, entries: int, tokens: int) -> None:
        key = table, entries, tokens
        if key not in self._planned:
            self._planned[key] = self._make(table, entries)
        planned, counts = self._planned[key], table.pages(entries)
        if planned.counts is not None:
            if torch.equal(planned.counts, counts):
                return
            # The wrapper copies all its plans from one pinned buffer, and an earlier plan may not be copied yet.
            self._setup.streams.synchronize(planned.copied)
        heads = self._layout.kv_heads
        starts = torch.nn.functional.pad(counts.repeat_interleave(heads).cumsum(0), (1, 0)).int()
        planned.wrapper.plan(
            starts,
            planned.pages.indices[: int(starts[-1])],
            torch.full((entries * heads,), self._layout.block_size, dtype=torch.int32),
            self._group,
            1,
            self._layout.head_dim,
            self._layout.block_size,
            q_data_type=self._setup.dtype,
            kv_data_type=self._setup.dtype,
            sm_scale=self._setup.scale,
            q_len_per_req=tokens,
        )
        planned.counts, planned.copied = counts.clone(), self._setup.streams.record()

    def refresh(self, table: SlotTable, entries: int, tokens: int) -> None:
        table.flatten_heads(entries, self._planned[table, entries, tokens].pages)

    def run(self, query: Tensor, blocks: Tensor, table: SlotTable, entries: int) -> Tensor:
        tokens, heads = len(query) // entries, self._layout.kv_heads
        wrapper = self._planned[table, entries, tokens].wrapper
        pages = blocks.flatten(0, 2).unsqueeze(3)  # [pages, 2, B, 1, D]: layout NHD with one KV head
        # The tokens of a sequence must be adjacent: [n, m, H, G, D] -> [n, H, m, G, D].
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
        # A plan takes a few numbers per sequence and tile; the wrapper's own buffers take 8 MiB for each shape of step.
        numbers = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
        wrapper.reset_workspace_buffer(self._workspace, numbers)
        return _Planned(wrapper, pages)


class FlashInferPrefill:
    """`BatchPrefillWithPagedKVCacheWrapper` (FlashInfer 0.7.2); K and V of a page are strided halves, layout HND.

    One wrapper per group of a pass, planned once for all layers.

    Args:
        setup: what attends; keys and values are of the queries' dtype.
        workspace: for the partial results of split sequences.
        make_wrapper: the wrapper's class.
    """

    def __init__(self, setup: AttentionSetup, workspace: Tensor, make_wrapper: Callable[..., Any]) -> None:
        self._setup = setup
        self._make_wrapper = make_wrapper
        self._workspace = workspace
        self._wrappers: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._planned: Event = None

    def plan(self, groups: Sequence[StagedGroup]) -> None:
        self._numbers = {group.requests.start: number for number, group in enumerate(groups)}
        while len(self._wrappers) < len(groups):
            self._wrappers.append(self._make_wrapper(self._workspace, "HND", backend="fa2"))
        if self._planned is not None:
            self._setup.streams.synchronize(self._planned)  # as in `FlashInferDecode.plan`
        for group in groups:
            self._plan(group)
        self._planned = self._setup.streams.record()

    def run(self, query: Tensor, kv: Tensor, group: StagedGroup) -> Tensor:
        return self._wrappers[self._numbers[group.requests.start]].run(query, kv.unbind(2))

    def _plan(self, group: StagedGroup) -> None:
        layout, pages = self._setup.layout, group.pages
        self._wrappers[self._numbers[group.requests.start]].plan(
            pages.query_starts,
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            self._setup.query_heads,
            layout.kv_heads,
            layout.head_dim,
            layout.block_size,
            causal=True,
            q_data_type=self._setup.dtype,
            kv_data_type=self._setup.dtype,
            sm_scale=self._setup.scale,
        )

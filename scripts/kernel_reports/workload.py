"""Shapes of one layer's decode step, and the resulting kernel launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.kernels.triton import launches
from sglang_oasis.ops.device_step import (
    Admitting,
    Among,
    DeviceAdmissions,
    LayerState,
    Mark,
    NewTokens,
    Ranking,
    StepTable,
)
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat


class Workload(NamedTuple):
    """A decode step of a batch of rows that all exceed their budget, in one layer of one TP rank.

    Attributes:
        batch, heads, group, head_dim: n, H, G, D.
        block_size: B.
        selected, local: K, R, all in use.
        context: tokens per row, whose blocks are all candidates.
        most: C, admissions per row and head, all of which are made.
        tokens: m.
        queries: lookahead queries per row, Q.
        summary: name of the summary format.
        dtype: of K, V and queries.
        smoothed: whether scores are averaged over the steps.
    """

    batch: int = 8
    heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    selected: int = 128
    local: int = 2
    context: int = 32768
    most: int = 6
    tokens: int = 1
    queries: int = 1
    summary: str = "int4"
    dtype: torch.dtype = torch.bfloat16
    smoothed: bool = True

    @property
    def fmt(self) -> SummaryFormat:
        return SUMMARY_FORMATS[self.summary]

    @property
    def blocks(self) -> int:
        """Candidates of a row."""
        return self.context // self.block_size

    @property
    def record_bytes(self) -> int:
        return self.fmt.record_bytes(self.head_dim)

    @property
    def vector_bytes(self) -> int:
        """Bytes of a key, value or query vector."""
        return self.head_dim * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of K and V of one block of one head."""
        return 2 * self.block_size * self.vector_bytes


QWEN3_8B = Workload()
"""One layer of Qwen3-8B at 32K tokens per row, with a budget of 2048, C = 0.05 K, and int4 summaries."""
WORKLOADS = {"qwen3-8b": QWEN3_8B, "head-64": QWEN3_8B._replace(head_dim=64, heads=4, group=7, tokens=3, queries=2)}


def launches_of(load: Workload, device: str = "meta") -> list[launches.Launch]:
    """Return the launch of every Triton kernel for the workload; the tensors are not initialised."""
    n, heads, size, dim = load.batch, load.heads, load.block_size, load.head_dim
    rows, logical, fmt, pages = n + 1, load.blocks + 1, load.fmt, n * load.blocks

    def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def kv(*shape: int) -> Tensor:
        return tensor(*shape, dtype=load.dtype)

    record = load.record_bytes
    blocks, host_kv = kv(rows, heads, load.selected + load.local, 2, size, dim), kv(pages, heads, 2, size, dim)
    maps = Maps(*(tensor(rows, heads, width) for width in (load.selected, load.selected, logical)))
    summaries = tensor(rows, heads, logical, record, dtype=torch.uint8)
    host_summaries = tensor(pages, heads, record, dtype=torch.uint8)
    lengths, graduates, completed, expected, urgent, candidates = (tensor(n) for _ in range(6))
    table = StepTable(
        tensor(n, dtype=torch.int64), lengths, graduates, completed, expected, urgent, candidates, tensor(1)
    )
    # After SGLang's projection, queries, keys and values of a token are adjacent.
    projected = kv(n * load.tokens, (load.group + 2) * heads, dim)
    query, keys, values = projected.split([load.group * heads, heads, heads], dim=1)
    averages = tensor(rows, heads, logical, dtype=torch.float32) if load.smoothed else None
    scores = tensor(n, heads, logical, dtype=torch.float32)
    admissions = DeviceAdmissions(tensor(n, heads, load.most), tensor(n, heads, load.most))
    indices, req_to_token = tensor(n * load.tokens, dtype=torch.int64), tensor(rows, load.context + size)
    queries = query.unflatten(0, (n, load.tokens))[:, load.tokens - load.queries :]
    predicted = tensor(n, heads, load.selected, dtype=torch.int64)
    starts, kv_lengths = tensor(n + 1), tensor(n)
    slots = tensor(n, load.selected + load.local)
    sources, targets = tensor(n, dtype=torch.int64), tensor(n, dtype=torch.int64)
    scale, out = dim**-0.5, torch.empty_like(query)
    layer = LayerState(blocks, maps, summaries, averages, host_kv, host_summaries, req_to_token)
    among, mark = Among(table.rows, table.candidates), Mark(table.number, 1)
    admitting = Admitting(tensor(1), admissions, tensor(2, dtype=torch.int64))
    return [
        launches.take_tokens(layer, table, NewTokens(indices, keys, values), fmt),
        *launches.score_blocks(queries, summaries, among, Ranking(fmt, scale, 0.6, 0.8, 1), averages, scores),
        launches.select_admissions(predicted, among, maps, mark, admitting),
        launches.fetch_blocks(layer, table.rows, admissions, mark),
        launches.attend(query, blocks, table.rows, slots, kv_lengths, starts, scale, load.tokens, out),
        launches.summarise_blocks(host_kv, sources, host_summaries, targets, fmt),
    ]

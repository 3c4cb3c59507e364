"""Runs the resident tier on a device that drives itself: `LookaheadController` without a host in the loop.

Once per step, outside a captured graph: `load`. In the graph: `begin_step`; per layer `take_tokens`, `fetch_misses`
(policy `fetch`), the attention call, `look_ahead`; after the last layer `end_step`. Before the host runs anything else
on the rows, such as prefill: `drain`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_oasis.config import FETCH, LAST_QUERY, LookaheadKVConfig
from sglang_oasis.lookahead.counters import LookaheadCounters
from sglang_oasis.lookahead.device_pipeline import Batch, DevicePipeline
from sglang_oasis.lookahead.selector import BoundSelector, find_selector
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.lookahead.step_table import DeviceTables, first_entries, tabulate
from sglang_oasis.ops.device_step import take_tokens
from sglang_oasis.ops.streams import Streams
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import fetch_cap
from sglang_oasis.tier.resident_tier import ResidentTier


class DeviceController:
    """Policy over the tiers of a device.

    Args:
        config: the validated configuration, of what a device can do: a fixed fetch ratio, no audit.
        tier: the resident tier, on the device.
        host: the host pool, in memory that the device reaches by address.
        req_to_token: SGLang's [S, context] table of KV indices, int32 on the device.
        scales: softmax scale of each layer.
        max_rows: most entries of a step, padding included.
        query_heads: query heads of this rank.
        query_dtype: their dtype.
        streams: the device's streams.

    Attributes:
        counters: of the host.
    """

    def __init__(
        self,
        config: LookaheadKVConfig,
        tier: ResidentTier,
        host: HostPool,
        req_to_token: Tensor,
        *,
        scales: Sequence[float],
        max_rows: int,
        query_heads: int,
        query_dtype: torch.dtype,
        streams: Streams,
    ) -> None:
        selector = find_selector(config.selector)
        assert isinstance(selector, BoundSelector), "checked before the server starts"
        assert config.fetch_ratio is not None, "checked before the server starts"
        layout = tier.layout
        self.config, self.tier, self.host = config, tier, host
        self.counters = LookaheadCounters()
        self.cap = fetch_cap(config.fetch_ratio, min(layout.selected_blocks))
        self._req_to_token = req_to_token
        self._fetches = config.miss_policy == FETCH
        self._looks_at_drafts = config.source != LAST_QUERY
        passes = 1 + config.draft_tokens if self._fetches else 1
        self._tables = [DeviceTables(max_rows, tier.device) for _ in range(passes)]
        self._left_over: Batch | None = None
        self.pipeline = DevicePipeline(
            tier, host, req_to_token, selector, config.smoothing,
            scales=scales, cap=self.cap, tables=self._tables[0], max_rows=max_rows,
            max_queries=max(1, config.draft_tokens), query_heads=query_heads, query_dtype=query_dtype, streams=streams,
        )  # fmt: skip

    def batch(self, rows: int, tokens: int) -> Batch:
        """The shape of a step of `rows` entries with m `tokens` each."""
        return Batch(rows, tokens - 1 if self._looks_at_drafts and tokens > 1 else 1)

    def load(self, rows: Tensor, steps: Sequence[DecodeStep], batch: Batch) -> None:
        """Send a step to the device; not part of a captured graph.

        Args:
            rows: [n] int64 on any device, padding included.
            steps: its passes, of the entries that are no padding: one, or one per token with policy `fetch`.
            batch: its shape.
        """
        if self._left_over not in (None, batch):
            self.drain()
        if self._fetches:
            for table, step in zip(self._tables, steps, strict=False):
                table.load(rows, tabulate(step, self.tier.layout, fetches=True), step.number)
            return
        (table,), (step,) = self._tables, steps
        table.advance()
        if self._left_over is None:
            table.forget_previous()
        table.load(rows, tabulate(step, self.tier.layout, fetches=False), step.number)
        self._left_over = batch

    def drain(self) -> None:
        """Do now what the last step has left for the next one; the current stream waits for it."""
        if self._left_over is not None:
            self.pipeline.drain(self._left_over)
            self._left_over = None

    def begin_step(self, batch: Batch) -> None:
        """Start what the step before has left over."""
        if not self._fetches:
            self.pipeline.begin_step(batch)

    def take_tokens(self, layer: int, taken: int, batch: Batch, indices: Tensor, key: Tensor, value: Tensor) -> None:
        """Take new tokens into both tiers, once the layer's own transfer is through.

        Args:
            layer: layer of this rank.
            taken: number of the pass.
            batch: shape of the step.
            indices: [n * m] int64, KV indices.
            key, value: [n * m, H, D].
        """
        self.pipeline.wait(layer)
        resident = self.tier.layers[layer]
        take_tokens(
            resident.blocks, resident.maps, resident.summaries, self.host.kv[layer], self.host.summaries[layer],
            self._req_to_token, first_entries(self._tables[taken].current, batch.rows), indices, key, value, 0,
            self.tier.layout.summary_format,
        )  # fmt: skip

    def fetch_misses(self, layer: int, taken: int, batch: Batch, query: Tensor) -> None:
        """Load what the true query selects before attention sees it, with policy `fetch`.

        Args:
            layer, taken, batch: as in `take_tokens`.
            query: [n * m, H*G, D].
        """
        if self._fetches and layer in self.tier.layout.sparse_layers:
            table = first_entries(self._tables[taken].current, batch.rows)
            self.pipeline.fetch_now(layer, table, query.unflatten(0, (batch.rows, -1)))

    def look_ahead(self, layer: int, batch: Batch, query: Tensor) -> None:
        """Hand the step's queries [n * m, H*G, D] to the pipeline, after the layer's attention."""
        if not self._fetches and layer in self.tier.layout.sparse_layers:
            queries = query.unflatten(0, (batch.rows, -1))
            drafts = queries[:, 1:] if self._looks_at_drafts and queries.shape[1] > 1 else queries[:, :1]
            self.pipeline.submit(layer, batch, drafts)

    def end_step(self) -> None:
        """After the last layer."""
        self.pipeline.end_step()

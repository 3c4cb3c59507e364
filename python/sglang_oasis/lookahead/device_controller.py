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
from sglang_oasis.lookahead.controller import STARTUP_QUERIES
from sglang_oasis.lookahead.counters import LookaheadCounters
from sglang_oasis.lookahead.fetch_cap import FixedCap
from sglang_oasis.lookahead.pipelines.device import Batch, DevicePipeline
from sglang_oasis.lookahead.selectors.bound import BoundSelector, find_selector
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.lookahead.step_table import DeviceTables, first_entries, tabulate
from sglang_oasis.ops.device_step import score_blocks, summarise_blocks, take_tokens
from sglang_oasis.ops.streams import Streams
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window


class DeviceController:
    """Policy over the tiers of a device.

    Args:
        config: the validated configuration, of what a device can do: a fixed fetch ratio, no audit.
        tier: the resident tier, on the device.
        host: the host pool, in memory that the device reaches by address.
        req_to_token: SGLang's [S, context] table of KV indices, int32 on the device.
        scale: softmax scale of all layers.
        max_rows: most entries of a step, padding included.
        query_heads: query heads of this rank.
        query_dtype: their dtype.
        streams: the device's streams.

    Attributes:
        counters: of the host.
        cap: most blocks fetched ahead per KV head, layer and step.
        tables: of each pass.
    """

    def __init__(
        self,
        config: LookaheadKVConfig,
        tier: ResidentTier,
        host: HostPool,
        req_to_token: Tensor,
        *,
        scale: float,
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
        self.cap = FixedCap(config.fetch_ratio)
        self._selector, self._scale = selector, scale
        self._req_to_token = req_to_token
        self._fetches = config.miss_policy == FETCH
        self._looks_at_drafts = config.source != LAST_QUERY
        passes = 1 + config.draft_tokens if self._fetches else 1
        self.tables = [DeviceTables(max_rows, tier.device) for _ in range(passes)]
        self._left_over: Batch | None = None
        self.pipeline = DevicePipeline(
            tier, host, req_to_token, selector, config.smoothing,
            scale=scale, cap=self.cap.blocks(min(layout.selected_blocks)), tables=self.tables[0], max_rows=max_rows,
            max_queries=max(1, config.draft_tokens), query_heads=query_heads, query_dtype=query_dtype, streams=streams,
        )  # fmt: skip

    def build(self, layer: int, row: int, window: Window, kv: Tensor, first_place: int, queries: Tensor) -> None:
        """Build a row's first resident set from its last prompt queries; nothing waits for the device.

        Args:
            layer: layer of this rank.
            row: the row.
            window: the window of the prompt.
            kv: [X, H, 2, B, D] on the device, in which block j of the row is page `first_place + j`.
            first_place: see there.
            queries: [Q, H*G, D], the last prompt queries.
        """
        resident, layout, device = self.tier.layers[layer], self.tier.layout, self.tier.device
        places = first_place + torch.arange(window.open_block + 1, device=device)
        complete, count = window.complete_blocks, min(resident.selected, window.first_local)
        records = resident.summaries.new_empty((complete, layout.kv_heads, layout.summary_bytes))
        summarise_blocks(kv, places[:complete], records, places[:complete] - first_place, layout.summary_format)
        resident.summaries[row, :, :complete] = records.transpose(0, 1)
        candidates = window.next.first_local
        if candidates <= resident.selected:
            selected = torch.arange(count, device=device).expand(layout.kv_heads, count)
            resident.begin_averages(row, None)
        else:
            scores = score_blocks(
                queries[None, -STARTUP_QUERIES:],
                resident.summaries,
                torch.full((1,), row, dtype=torch.int64, device=device),
                torch.full((1,), candidates, dtype=torch.int32, device=device),
                layout.summary_format,
                self._scale,
                self._selector.tightness,
                None,
                0.0,
                layout.sink_blocks,
            )
            selected = scores[0].topk(count, dim=-1).indices
            resident.begin_averages(row, scores[0, :, :candidates])
        resident.build(row, selected, window, kv, places)
        self.counters.blocks_built += layout.kv_heads * count

    def build_cold(self, row: int, window: Window, pages: Tensor) -> None:
        """Build a row that reached decode without a resident set: sinks and newest blocks, for want of a query.

        Args:
            row: the row.
            window: its window; all its tokens are in the host pool.
            pages: [open_block + 1] int64 on the host, its host pages.
        """
        layout = self.tier.layout
        for layer, resident in enumerate(self.tier.layers):
            complete, count = window.complete_blocks, min(resident.selected, window.first_local)
            records = self.host.summaries[layer][pages[:complete]].transpose(0, 1)
            resident.summaries[row, :, :complete] = records.to(self.tier.device)
            sinks = min(layout.sink_blocks, count)
            newest = torch.arange(window.first_local - (count - sinks), window.first_local)
            selected = torch.cat([torch.arange(sinks), newest])
            resident.begin_averages(row, None)
            resident.build(row, selected.expand(layout.kv_heads, count), window, self.host.kv[layer], pages)
        self.counters.blocks_built += layout.kv_heads * sum(min(k, window.first_local) for k in layout.selected_blocks)

    def batch(self, rows: int, tokens: int) -> Batch:
        """The shape of a step of `rows` entries with m `tokens` each."""
        return Batch(rows, tokens - 1 if self._looks_at_drafts and tokens > 1 else 1)

    def load(self, rows: Tensor, steps: Sequence[DecodeStep], batch: Batch) -> None:
        """Send a step to the device; not part of a captured graph.

        Args:
            rows: [n] int64 on any device, of the entries that are no padding.
            steps: its passes, of the same: one, or one per token with policy `fetch`.
            batch: its shape.
        """
        if self._left_over not in (None, batch):
            self.drain()
        if self._fetches:
            for table, step in zip(self.tables, steps, strict=False):
                table.load(rows, tabulate(step, self.tier.layout, fetches=True), step.number)
            return
        (table,), (step,) = self.tables, steps
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
            self._req_to_token, first_entries(self.tables[taken].current, batch.rows), indices, key, value, 0,
            self.tier.layout.summary_format,
        )  # fmt: skip

    def fetch_misses(self, layer: int, taken: int, batch: Batch, query: Tensor) -> None:
        """Load what the true query selects before attention sees it, with policy `fetch`.

        Args:
            layer, taken, batch: as in `take_tokens`.
            query: [n * m, H*G, D].
        """
        if self._fetches and layer in self.tier.layout.sparse_layers:
            table = first_entries(self.tables[taken].current, batch.rows)
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

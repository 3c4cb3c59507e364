"""The engine of a device that drives its steps by itself, also in captured graphs. It has not run on a GPU yet.

A decode step is the same whether it runs eagerly or is captured:

    before the graph | `begin_decode`: tables from the host's lengths, attention's plan, rows without a resident set
    in the graph     | `start`: tasks that the last step left; per layer: store tokens, attend, look ahead; `end`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_oasis.engine.attention.base import AttentionSetup, DeviceAttention
from sglang_oasis.engine.attention.choice import choose_attention
from sglang_oasis.engine.base import DecodeForward, Engine, EngineSetup, PrefillForward, Snapshot
from sglang_oasis.engine.batch import DecodeBatch, PrefillBatch
from sglang_oasis.engine.plan import DecodePlan, claim_rows
from sglang_oasis.engine.slot_tables import SlotTable
from sglang_oasis.lookahead.fetch_cap import FixedCap
from sglang_oasis.lookahead.pipelines.device import Batch, DevicePipeline
from sglang_oasis.lookahead.policy import URGENT
from sglang_oasis.lookahead.selectors import SELECTORS, BoundSelector
from sglang_oasis.lookahead.startup import STARTUP_QUERIES, build_row
from sglang_oasis.lookahead.step_table import DeviceTables, first_entries, tabulate
from sglang_oasis.ops.device_step import (
    Among,
    LayerState,
    NewTokens,
    Ranking,
    score_blocks,
    summarise_blocks,
    take_tokens,
)
from sglang_oasis.ops.streams import Streams, streams_of
from sglang_oasis.tier.prefill.page_cache import PageCache
from sglang_oasis.tier.prefill.plan import PrefillPass
from sglang_oasis.tier.prefill.staging import PrefillStaging
from sglang_oasis.tier.window import Window


@dataclass(frozen=True)
class DeviceSetup:
    """The arguments that the device's engine needs in addition to `EngineSetup`.

    Attributes:
        device: the device.
        query_heads: query heads of this rank.
        query_dtype: dtype of the queries.
        cache_bytes: device memory that the page cache may use.
        streams: streams of the device; None for the default ones.
        attention: the attention kernels; None for the fastest that are available.
    """

    device: torch.device
    query_heads: int
    query_dtype: torch.dtype
    cache_bytes: int = 0
    streams: Streams | None = None
    attention: DeviceAttention | None = None


class DeviceEngine(Engine):
    """Serves from a resident tier on a device.

    Args:
        setup: what to serve. A device supports a fixed fetch ratio, no audit, a bound as the selector and one softmax
            scale. The host pool must be in memory that the device can access by address.
        device: the device and its settings.

    Attributes:
        staging: the buffers through which prefill stages host pages.
        pipeline: predicts and fetches on streams beside the forward pass.
        cap: most blocks fetched ahead.
        tables: the slot tables of each pass of a step, on the device.
    """

    captured = True

    def __init__(self, setup: EngineSetup, device: DeviceSetup) -> None:
        super().__init__(setup, device.device)
        config, layout = setup.config, setup.layout
        selector = SELECTORS.find(config.selector)
        assert isinstance(selector, BoundSelector), "checked before the server starts"
        assert config.fetch_ratio is not None, "checked before the server starts"
        self._streams = streams = streams_of(device.device) if device.streams is None else device.streams
        (self._scale,) = set(setup.scales)
        self.cap = FixedCap(config.fetch_ratio)
        passes = 1 + config.draft_tokens if self._fetches else 1
        self.tables = [DeviceTables(self.max_entries, device.device) for _ in range(passes)]
        self._left_over: Batch | None = None
        self._lookahead_queries = {
            m: self._source(torch.zeros(1, m, device.query_heads, layout.head_dim)).shape[1]
            for m in (1, 1 + config.draft_tokens)
        }
        self._states = [
            LayerState(
                each.blocks, each.maps, each.summaries, each.averages, host_kv, host_summaries, setup.req_to_token
            )
            for each, host_kv, host_summaries in zip(self.tier.layers, setup.host.kv, setup.host.summaries, strict=True)
        ]
        self._formats = [fmt.to(device.device) for fmt in setup.host.formats]
        self._rankings = [
            Ranking(fmt, self._scale, selector.tightness, config.smoothing, layout.sink_blocks) for fmt in self._formats
        ]
        shape = (self.max_entries, max(self._lookahead_queries.values()), device.query_heads, layout.head_dim)
        queries = {
            layer: torch.zeros(shape, dtype=device.query_dtype, device=device.device) for layer in sorted(self._sparse)
        }
        cap = self.cap.blocks(min(layout.selected_blocks))
        self.pipeline = DevicePipeline(self.tier, self._states, self._rankings, cap, self.tables[0], queries, streams)
        self.staging = PrefillStaging(
            layout, setup.host.kv, max_pages=layout.max_blocks,
            cache_places=PageCache.places_in(layout, device.cache_bytes), device=device.device, streams=streams,
        )  # fmt: skip
        self._attention = device.attention or choose_attention(
            AttentionSetup(layout, device.query_heads, device.query_dtype, self._scale, device.device, streams)
        )
        kinds = sorted(set(layout.selected_blocks))
        self._slots = [
            {selected: SlotTable(layout, selected, tables.current.rows) for selected in kinds} for tables in self.tables
        ]

    # --- prefill ---

    def begin_prefill(self, batch: PrefillBatch) -> PrefillForward:
        self._drain()
        rows = claim_rows(self.tier, batch)
        device_rows = torch.tensor(batch.rows).to(self.tier.device) if batch.device_rows is None else batch.device_rows
        staged = PrefillPass(device_rows, batch.prefixes, batch.new_tokens, batch.indices, self._req_to_token)
        self._attention.prefill.plan(self.staging.begin(staged))
        return PrefillForward(rows)

    def prefill_layer(self, forward: PrefillForward, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        fmt = self._formats[layer]
        out = torch.zeros_like(query)  # padding tokens of a graph must not bring NaN into the next op
        for group, kv in self.staging.layer(layer, key, value):
            summarise_blocks(kv, group.completed_places, self.host.summaries[layer], group.completed_pages, fmt)
            out[group.tokens] = self._attention.prefill.run(query[group.tokens], kv, group)
            for each, first_place in zip(forward.rows[group.requests], group.starts, strict=False):
                if each.builds:
                    self.build(layer, each.row, each.window, kv, first_place, query[each.tokens][-STARTUP_QUERIES:])
        return out

    def build(self, layer: int, row: int, window: Window, kv: Tensor, first_place: int, queries: Tensor) -> None:
        """Build a row's first resident set from its last queries [Q, H*G, D], without waiting for the device.

        Block j of the row is page `first_place + j` of `kv` [X, H, 2, B, D], on the device.
        """
        resident, layout, device = self.tier.layers[layer], self.layout, self.tier.device
        places = first_place + torch.arange(window.open_block + 1, device=device)
        complete = window.complete_blocks
        records = resident.summaries.new_empty((complete, layout.kv_heads, layout.summary_bytes))
        summarise_blocks(kv, places[:complete], records, places[:complete] - first_place, self._formats[layer])
        resident.summaries[row, :, :complete] = records.transpose(0, 1)

        def rank(candidates: int) -> Tensor:
            among = torch.full((1,), candidates, dtype=torch.int32, device=device)
            whose = torch.full((1,), row, dtype=torch.int64, device=device)
            return score_blocks(queries[None], resident.summaries, Among(whose, among), self._rankings[layer])[0]

        self.counters.blocks_built += build_row(resident, layout, row, window, kv, places, rank)

    def _build_cold(self, row: int, window: Window) -> None:
        """Build the resident set of a row that reached decode without one; there is no query yet to rank its blocks."""
        pages = self.pages_of(row, window.open_block + 1)
        complete = pages[: window.complete_blocks]
        for layer, resident in enumerate(self.tier.layers):
            records = self.host.summaries[layer][complete].transpose(0, 1)
            resident.summaries[row, :, : len(complete)] = records.to(self.tier.device)
            kv = self.host.kv[layer]
            self.counters.blocks_built += build_row(resident, self.layout, row, window, kv, pages, None)

    # --- decode ---

    def begin_decode(self, batch: DecodeBatch) -> DecodeForward:
        self.staging.join()
        return super().begin_decode(batch)

    def _load(self, forward: DecodeForward, batch: DecodeBatch) -> None:
        if batch.first:
            raise NotImplementedError("The device engine has tables for one step and cannot plan draft passes ahead.")
        if cold := forward.plans[0].cold:
            self.settle()
            for each in cold:
                self._build_cold(each.row, each.window)
        rows = batch.rows if batch.device_rows is None else batch.device_rows
        self._load_tables(rows, forward)
        for plan, slots in self._planned(forward):
            slots.load(plan)
            self._attention.decode.plan(slots, forward.entries, plan.step.tokens)

    def _load_tables(self, rows: Tensor, forward: DecodeForward) -> None:
        """Copy a step's tables to the device; `rows` [n] int64 belong to the entries that are not padding."""
        shape, steps = self._shape(forward), [plan.step for plan in forward.plans]
        if self._left_over not in (None, shape):
            self._drain()
        if not self._fetches:
            self.tables[0].advance()
            if self._left_over is None:
                self.tables[0].forget_previous()
            self._left_over = shape
        for table, step in zip(self.tables, steps, strict=False):
            table.load(rows, tabulate(step, self.layout, fetches=self._fetches), step.number)

    def start(self, forward: DecodeForward, indices: Tensor) -> None:
        self.staging.cache.forget(indices)
        if not self._fetches:
            self.pipeline.begin_step(self._shape(forward))
        for plan, slots in self._planned(forward):
            self._attention.decode.refresh(slots, forward.entries, plan.step.tokens)

    def _arrive(self, layer: int, new: NewTokens) -> None:
        self.pipeline.wait(layer)

    def _prepare(self, forward: DecodeForward, number: int, layer: int, query: Tensor, new: NewTokens) -> None:
        table = first_entries(self.tables[number].current, forward.entries)
        new = new._replace(indices=new.indices.contiguous())
        take_tokens(self._states[layer], table, new, self._formats[layer])
        if self._fetches and layer in self._sparse:
            self.pipeline.fetch_now(layer, table, query.unflatten(0, (forward.entries, -1)))

    def _attend(self, forward: DecodeForward, number: int, layer: int, query: Tensor) -> Tensor:
        resident = self.tier.layers[layer]
        slots = self._slots[number][resident.selected]
        return self._attention.decode.run(query, resident.blocks, slots, forward.entries)

    def _look_ahead(self, forward: DecodeForward, layer: int, query: Tensor) -> None:
        if not self._fetches and layer in self._sparse:
            queries = self._source(query.unflatten(0, (forward.entries, -1)))
            self.pipeline.submit(layer, self._shape(forward), queries)

    def end(self) -> None:
        self.pipeline.end_step()

    # --- for other parts of the product ---

    def settle(self) -> None:
        self._drain()
        self._streams.synchronize(self._streams.record())

    def close(self) -> None:
        """Do nothing: this engine has no threads."""

    def snapshot(self) -> Snapshot:
        """Return the counts and sizes of the engine; waits for the device."""
        urgent = int(self.pipeline.counters[URGENT, 0])
        return self._snapshot(
            replace(self.counters, blocks_urgent=urgent),
            self.pipeline.statistics(),
            self.cap.blocks(min(self.layout.selected_blocks)),
            staging_bytes=self.staging.nbytes,
            cached_tokens=len(self.staging.cache.tags) * self.layout.block_size,
        )

    def _shape(self, forward: DecodeForward) -> Batch:
        return Batch(forward.entries, self._lookahead_queries[forward.tokens])

    def _planned(self, forward: DecodeForward) -> Iterator[tuple[DecodePlan, SlotTable]]:
        """Yield every slot table of every pass of the current step."""
        for plan, slots in zip(forward.plans, self._slots, strict=False):
            for table in slots.values():
                yield plan, table

    def _drain(self) -> None:
        """Run the tasks that the last step left for the next one; the current stream waits for them."""
        if self._left_over is not None:
            self.pipeline.drain(self._left_over)
            self._left_over = None

"""The pipeline of a device: predicts and fetches on side streams, in a step whose every address and shape is fixed.

A layer's task waits for the layer's attention and is waited for before the same layer of the next step. A captured
graph cannot leave a stream running when it ends, so only the first half of the layers start their tasks in their own
step; those of the second half start at the beginning of the next. Each task so has at least half a step's time, and
the link is busy all along:

    step t      | tasks of layers L/2 .. L-1 of step t-1 | tasks of layers 0 .. L/2-1 of step t |
    attention   | layers 0 .. L/2-1                      | layers L/2 .. L-1                    |

Eager steps keep the same order, so that there is one to prove. What must not be postponed, because the host is about
to change what a postponed task reads, is run by `drain`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.lookahead.pipelines.base import PipelineStatistics
from sglang_oasis.lookahead.policy import AHEAD, URGENT
from sglang_oasis.lookahead.step_table import DeviceTables, first_entries
from sglang_oasis.ops.device_step import (
    Admitting,
    Among,
    DeviceAdmissions,
    LayerState,
    Mark,
    Ranking,
    StepTable,
    fetch_blocks,
)
from sglang_oasis.ops.prediction import predict_admissions
from sglang_oasis.ops.streams import Event, Streams
from sglang_oasis.tier.resident_tier import ResidentTier

PREDICT, TRANSFER = "predict", "transfer"
"""The side streams. A transfer is bound by the link, the next layer's prediction need not wait for it."""


class Batch(NamedTuple):
    """The shape of a step; a graph is captured for each.

    Attributes:
        rows: n, entries, padding included.
        queries: Q, queries with which each looks ahead.
    """

    rows: int
    queries: int


class DevicePipeline:
    """Runs a step's tasks.

    Args:
        tier: the resident tier, on the device.
        states: of its layers.
        ranking: how blocks are ranked.
        cap: most blocks fetched ahead per KV head, layer and step.
        tables: the steps' tables.
        queries: buffer of the queries with which each sparse layer looks ahead, [rows, Q, H*G, D].
        streams: the device's streams.

    Attributes:
        counters: [2, 2] int64 on the device; blocks fetched and blocks over the cap, first of urgent tasks, then of
            predictions.
    """

    def __init__(
        self,
        tier: ResidentTier,
        states: Sequence[LayerState],
        ranking: Ranking,
        cap: int,
        tables: DeviceTables,
        queries: Mapping[int, Tensor],
        streams: Streams,
    ) -> None:
        layout, device = tier.layout, tier.device
        self._states, self._ranking = states, ranking
        self._tables, self._queries, self._streams = tables, queries, streams
        self.layers = sorted(layout.sparse_layers)
        self._postponed = frozenset(layer for layer in self.layers if layer >= layout.num_layers // 2)
        max_rows = tables.max_rows
        most = max((layout.selected_blocks[layer] for layer in self.layers), default=1)
        self._ahead = {layer: _admissions(max_rows, layout.kv_heads, min(cap, most), device) for layer in self.layers}
        self._urgent = _admissions(max_rows, layout.kv_heads, most, device)
        self._cap = torch.tensor([cap], dtype=torch.int32, device=device)
        self._no_cap = torch.tensor([most], dtype=torch.int32, device=device)
        self.counters = torch.zeros((2, 2), dtype=torch.int64, device=device)
        self._arrivals: dict[int, Event] = {}

    def begin_step(self, batch: Batch) -> None:
        """Start the tasks that the step before left over; `batch` must be its batch, too, unless nothing is left."""
        for layer in sorted(self._postponed):
            self._start(layer, batch, self._tables.previous)

    def wait(self, layer: int) -> None:
        """Let the current stream wait for the layer's task, no other layer's."""
        if (arrival := self._arrivals.pop(layer, None)) is not None:
            self._streams.wait(arrival)

    def fetch_now(self, layer: int, table: StepTable, queries: Tensor) -> None:
        """Fetch what the true queries [n, Q, H*G, D] select, in the current stream."""
        admissions = _first_entries_of(self._urgent, len(table.rows))
        admitting = Admitting(self._no_cap, admissions, self.counters[URGENT])
        self._predict(layer, table, table.urgent, queries, URGENT, admitting)
        self._fetch(layer, table, URGENT, admissions)

    def submit(self, layer: int, batch: Batch, queries: Tensor) -> None:
        """Look ahead with queries [n, Q, H*G, D]; called after the layer's attention."""
        self._queries[layer][: batch.rows, : batch.queries].copy_(queries)
        if layer not in self._postponed:
            self._start(layer, batch, self._tables.current)

    def end_step(self) -> None:
        """Let the current stream wait for all tasks that were started."""
        for layer in list(self._arrivals):
            self.wait(layer)

    def drain(self, batch: Batch) -> None:
        """Do now what the step at hand, of `batch`, has left over for the next."""
        for layer in sorted(self._postponed):
            self._start(layer, batch, self._tables.current)
        self.end_step()

    def statistics(self) -> PipelineStatistics:
        """Waits for the device. What a graph's streams wait for is not measured."""
        (urgent, _), (ahead, deferred) = self.counters.tolist()
        return PipelineStatistics(urgent + ahead, deferred, 0, 0.0, {})

    def _start(self, layer: int, batch: Batch, table: StepTable) -> None:
        entries, streams = first_entries(table, batch.rows), self._streams
        queries = self._queries[layer][: batch.rows, : batch.queries]
        admissions = _first_entries_of(self._ahead[layer], batch.rows)
        ready = streams.record()
        with streams.side(PREDICT):
            streams.wait(ready)
            admitting = Admitting(self._cap, admissions, self.counters[AHEAD])
            self._predict(layer, entries, entries.candidates, queries, AHEAD, admitting)
            predicted = streams.record()
        with streams.side(TRANSFER):
            streams.wait(predicted)
            self._fetch(layer, entries, AHEAD, admissions)
            self._arrivals[layer] = streams.record()

    def _predict(
        self, layer: int, table: StepTable, candidates: Tensor, queries: Tensor, offset: int, admitting: Admitting
    ) -> None:
        state = self._states[layer]
        if offset == URGENT:  # what is fetched now is for this step alone
            state = state._replace(averages=None)
        mark, among = Mark(table.number, offset), Among(table.rows, candidates)
        predict_admissions(queries, state, among, self._ranking, mark, admitting)

    def _fetch(self, layer: int, table: StepTable, offset: int, admissions: DeviceAdmissions) -> None:
        fetch_blocks(self._states[layer], table.rows, admissions, Mark(table.number, offset))


def _admissions(max_rows: int, kv_heads: int, width: int, device: torch.device) -> DeviceAdmissions:
    return DeviceAdmissions(*torch.full((2, max_rows, kv_heads, width), -1, dtype=torch.int32, device=device))


def _first_entries_of(admissions: DeviceAdmissions, count: int) -> DeviceAdmissions:
    return DeviceAdmissions(*(part[:count] for part in admissions))

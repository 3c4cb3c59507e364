"""The pipeline of a device: predicts and fetches on side streams, in a step whose every address and shape is fixed.

A layer's task waits for the layer's attention and is waited for before the same layer of the next step. A captured
graph must join all its streams before it ends, so only the first half of the layers start their tasks in the same step;
those of the second half start at the beginning of the next step. So each task has at least half a step's time, and the
link is busy all the time:

    step t      | tasks of layers L/2 .. L-1 of step t-1 | tasks of layers 0 .. L/2-1 of step t |
    attention   | layers 0 .. L/2-1                      | layers L/2 .. L-1                    |

Eager steps keep the same order, so that only one order has to be verified. `drain` runs the postponed tasks early when
the host is about to change what they read.
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
"""The side streams; two, so that the next layer's prediction need not wait for a transfer, which the link limits."""


class Batch(NamedTuple):
    """The shape of a step; a graph is captured for each.

    Attributes:
        rows: n, number of entries, padding included.
        queries: Q, lookahead queries per entry.
    """

    rows: int
    queries: int


class DevicePipeline:
    """Runs the tasks of a step on side streams.

    Args:
        tier: the resident tier, on the device.
        states: states of its layers.
        rankings: per layer, how blocks are ranked.
        cap: most blocks fetched ahead per KV head, layer and step.
        tables: tables of the current and the previous step.
        queries: buffer of each sparse layer's lookahead queries, [rows, Q, H*G, D].
        streams: the device's streams.

    Attributes:
        counters: [2, 2] int64 on the device; blocks fetched and blocks over the cap, in row 0 by urgent tasks, in row 1
            by predictions.
    """

    def __init__(
        self,
        tier: ResidentTier,
        states: Sequence[LayerState],
        rankings: Sequence[Ranking],
        cap: int,
        tables: DeviceTables,
        queries: Mapping[int, Tensor],
        streams: Streams,
    ) -> None:
        layout, device = tier.layout, tier.device
        self._states, self._rankings = states, rankings
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
        """Start the tasks that the previous step postponed; unless there are none, `batch` must be its batch, too."""
        for layer in sorted(self._postponed):
            self._start(layer, batch, self._tables.previous)

    def wait(self, layer: int) -> None:
        """Let the current stream wait for the task of this layer only."""
        if (arrival := self._arrivals.pop(layer, None)) is not None:
            self._streams.wait(arrival)

    def fetch_now(self, layer: int, table: StepTable, queries: Tensor) -> None:
        """Fetch the blocks that the true queries [n, Q, H*G, D] select, in the current stream."""
        admissions = _first_entries_of(self._urgent, len(table.rows))
        admitting = Admitting(self._no_cap, admissions, self.counters[URGENT])
        self._predict(layer, table, table.urgent, queries, URGENT, admitting)
        self._fetch(layer, table, URGENT, admissions)

    def submit(self, layer: int, batch: Batch, queries: Tensor) -> None:
        """Start or postpone a task with lookahead queries [n, Q, H*G, D]; called after the layer's attention."""
        self._queries[layer][: batch.rows, : batch.queries].copy_(queries)
        if layer not in self._postponed:
            self._start(layer, batch, self._tables.current)

    def end_step(self) -> None:
        """Let the current stream wait for all tasks that were started."""
        for layer in list(self._arrivals):
            self.wait(layer)

    def drain(self, batch: Batch) -> None:
        """Run the tasks that the current step, of `batch`, has postponed to the next one."""
        for layer in sorted(self._postponed):
            self._start(layer, batch, self._tables.current)
        self.end_step()

    def statistics(self) -> PipelineStatistics:
        """Return the sums since start-up; waits for the device. The waits of streams in a graph are not measured."""
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
        if offset == URGENT:  # urgent fetches serve this step only
            state = state._replace(averages=None)
        mark, among = Mark(table.number, offset), Among(table.rows, candidates)
        predict_admissions(queries, state, among, self._rankings[layer], mark, admitting)

    def _fetch(self, layer: int, table: StepTable, offset: int, admissions: DeviceAdmissions) -> None:
        fetch_blocks(self._states[layer], table.rows, admissions, Mark(table.number, offset))


def _admissions(max_rows: int, kv_heads: int, width: int, device: torch.device) -> DeviceAdmissions:
    return DeviceAdmissions(*torch.full((2, max_rows, kv_heads, width), -1, dtype=torch.int32, device=device))


def _first_entries_of(admissions: DeviceAdmissions, count: int) -> DeviceAdmissions:
    return DeviceAdmissions(*(part[:count] for part in admissions))

"""The engine that the host drives, on a CPU, with a pipeline in background threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_oasis.config import AUTO
from sglang_oasis.engine.base import DecodeForward, Engine, EngineSetup, PrefillForward, Snapshot
from sglang_oasis.engine.batch import DecodeBatch, PrefillBatch
from sglang_oasis.engine.plan import Sequences, claim_rows, plan_host
from sglang_oasis.lookahead.audit import Audit
from sglang_oasis.lookahead.fetch_cap import AdaptiveCap, FetchCap, FixedCap
from sglang_oasis.lookahead.pipelines.base import PredictionStep
from sglang_oasis.lookahead.pipelines.choice import make_pipeline
from sglang_oasis.lookahead.policy import AHEAD, URGENT, ahead_candidates, mark, urgent_candidates
from sglang_oasis.lookahead.selectors import SELECTORS, rank_blocks
from sglang_oasis.lookahead.startup import STARTUP_QUERIES, build_row
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.device_step import NewTokens
from sglang_oasis.tier.window import Window


@dataclass(frozen=True)
class HostPrefill(PrefillForward):
    """A prefill pass that has begun.

    Attributes:
        rows: its rows, in batch order.
        sequences: the host pages of these rows.
        completed_pages: [P] int64, host pages that the pass completes.
        indices: [t] int64, KV indices of the new tokens.
    """

    sequences: Sequences
    completed_pages: Tensor
    indices: Tensor

    def pages_of(self, entry: int) -> Tensor:
        """Return the host pages of a row of the pass: [open_block + 1] int64."""
        return self.sequences.slots[entry, : self.rows[entry].window.open_block + 1].long()


class HostEngine(Engine):
    """Serves from a resident tier in host memory.

    Args:
        setup: what to serve.
        moves_on: False when the next pass may serve a row at the same length again, as passes of a draft model do.

    Attributes:
        audit: measures the true recall from time to time, None when it is off.
        pipeline: predicts and fetches in the background.
        cap: most blocks fetched ahead.
    """

    captured = False

    def __init__(self, setup: EngineSetup, *, moves_on: bool = True) -> None:
        super().__init__(setup, torch.device("cpu"))
        config = setup.config
        self.audit: Audit | None = None
        if config.audit_interval:
            self.audit = Audit(self.tier, self.host, config.audit_interval, self.pages_of)
        self._moves_on = moves_on
        self._selector = SELECTORS.find(config.selector)
        self._step: DecodeStep | None = None
        self._urgent: frozenset[int] = frozenset()
        self._predicting = False
        self.pipeline = make_pipeline(self.tier, self.host, self._selector, config.smoothing)
        self.cap = self._make_cap()

    def begin_prefill(self, batch: PrefillBatch) -> HostPrefill:
        counts = torch.tensor(batch.new_tokens)
        lengths = torch.tensor(batch.prefixes) + counts
        size = self.layout.block_size
        sequences = plan_host(self._req_to_token, torch.tensor(batch.rows), lengths, counts, size)
        rows = claim_rows(self.tier, batch)
        completed = [
            sequences.slots[entry, prefix // size : row.window.complete_blocks].long()
            for entry, (row, prefix) in enumerate(zip(rows, batch.prefixes, strict=True))
        ]
        return HostPrefill(rows, sequences, torch.cat(completed), batch.indices)

    def prefill_layer(self, forward: HostPrefill, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._arrive(layer, NewTokens(forward.indices, key, value))
        self.host.summarise(layer, forward.completed_pages)
        out = paged_attention(query, self.host.kv[layer], *forward.sequences, self.scales[layer])
        for entry, row in enumerate(forward.rows):
            if row.builds:
                startup = query[row.tokens][-STARTUP_QUERIES:]
                self.build(layer, row.row, row.window, forward.pages_of(entry), startup)
        return out

    def start(self, forward: DecodeForward, indices: Tensor) -> None:
        """Do nothing: the host's engine has no work before the first layer."""

    def end(self) -> None:
        """Do nothing: tasks continue in the background."""

    def _load(self, forward: DecodeForward, batch: DecodeBatch) -> None:
        if batch.first == 0:
            self.clock.begin_step()
            if self.audit is not None:
                self.audit.begin(forward.plans[0].step)

    def _arrive(self, layer: int, new: NewTokens) -> None:
        # SGLang may have freed pages that the transfer still reads, and the new tokens may overwrite these pages.
        self.pipeline.wait(layer)
        self.host.write(layer, new.indices, new.keys, new.values)

    def _prepare(self, forward: DecodeForward, number: int, layer: int, query: Tensor, new: NewTokens) -> None:
        plan, step = forward.plans[number], forward.plans[number].step
        for cold in plan.cold:
            pages = step.pages[cold.entry, : cold.window.open_block + 1].long()
            self.build(layer, cold.row, cold.window, pages, query[cold.entry * step.tokens, None])
        # Policy `auto` depends on the recall of lookahead alone, so measure it before missing blocks are fetched.
        if self.audit is not None and not self._fetches:
            self.audit.observe(layer, step, query, self.scales[layer])
        self._take_tokens(layer, step, query, new)
        if self.audit is not None and self._fetches:
            self.audit.observe(layer, step, query, self.scales[layer])

    def _take_tokens(self, layer: int, step: DecodeStep, query: Tensor, new: NewTokens) -> None:
        if step is not self._step:
            self._begin(step)
        resident = self.tier.layers[layer]
        if step.graduates:
            # Marked as older than the blocks that this step selects, so that they are evicted before those.
            resident.graduate(step.graduates.rows, step.graduates.blocks, mark(step.number, URGENT) - 1)
        resident.write_tokens(step.token_rows, step.places(resident), new.keys, new.values)
        if step.completed:
            rows, blocks, pages = step.completed
            self.host.summarise(layer, pages)
            resident.summaries[rows, :, blocks] = self.host.summaries[layer][pages]
        if step.expected:  # the request may end here, and another request may find the page in the prefix cache
            self.host.summarise(layer, step.expected.pages)
        if layer in self._urgent:
            queries = query.unflatten(0, (-1, step.tokens))
            self.counters.blocks_urgent += self.pipeline.run(layer, queries, self.scales[layer], cap=resident.selected)

    def _attend(self, forward: DecodeForward, number: int, layer: int, query: Tensor) -> Tensor:
        resident = self.tier.layers[layer]
        slots = forward.plans[number].resident(resident.selected)
        return paged_attention(query, resident.blocks, *slots, self.scales[layer])

    def _look_ahead(self, forward: DecodeForward, layer: int, query: Tensor) -> None:
        # Queries of tokens that a draft model decodes after the committed ones do not predict its next step. With
        # policy `fetch` nothing is predicted: the true queries fetch all the blocks that a prediction could.
        step = forward.plans[-1].step
        if step.first == 0 and self._predicting and layer in self._sparse:
            cap = self.cap.blocks(self.tier.layers[layer].selected)
            queries = self._source(query.unflatten(0, (-1, step.tokens)))
            self.pipeline.submit(layer, queries, self.scales[layer], cap)

    def _begin(self, step: DecodeStep) -> None:
        """Begin the pipeline's step with the rows that exceed the budget: now, if misses are fetched, else later."""
        self._step = step
        self._urgent, self._predicting = frozenset(), False
        if layers := self._layers_that_fetch():
            urgent = _prediction(step, mark(step.number, URGENT), urgent_candidates(step, self.layout))
            if urgent is not None:
                self._urgent = layers
                self.pipeline.begin_urgent(urgent)
        if not self._fetches:
            candidates = ahead_candidates(step, self.layout, moves_on=self._moves_on)
            ahead = _prediction(step, mark(step.number, AHEAD), candidates)
            self.cap.begin_step(0 if ahead is None else len(ahead.rows))
            if ahead is not None:
                self._predicting = True
                self.pipeline.begin_step(ahead)

    def build(self, layer: int, row: int, window: Window, pages: Tensor, queries: Tensor) -> None:
        """Build a row's first resident set from its last queries [Q, H*G, D] and host pages [open_block + 1] int64."""
        resident, layout = self.tier.layers[layer], self.layout
        complete = window.complete_blocks
        resident.summaries[row, :, :complete] = self.host.summaries[layer][pages[:complete]].transpose(0, 1)

        def rank(candidates: int) -> Tensor:
            records = resident.summaries[row, None, :, :complete]
            among, scale = torch.tensor([candidates]), self.scales[layer]
            fmt, sinks = self.host.formats[layer], layout.sink_blocks
            return rank_blocks(self._selector, queries[None], records, fmt, among, scale, sinks)[0]

        self.counters.blocks_built += build_row(resident, layout, row, window, self.host.kv[layer], pages, rank)

    def _make_cap(self) -> FetchCap:
        if self.config.fetch_ratio is not None:
            return FixedCap(self.config.fetch_ratio)
        heads = self.layout.kv_heads * len(self._sparse)
        selected, pipeline = min(self.layout.selected_blocks), self.pipeline
        return AdaptiveCap(pipeline.statistics, selected, heads, self.layout.chunk_bytes, pipeline.threads)

    def _layers_that_fetch(self) -> frozenset[int]:
        """Return the layers that load the true query's missing blocks before they attend."""
        if self._fetches:
            return self._sparse
        if self.config.miss_policy != AUTO or self.audit is None:
            return frozenset()
        return frozenset(filter(self.audit.is_poor, self._sparse))

    def settle(self) -> None:
        self.pipeline.drain()

    def snapshot(self) -> Snapshot:
        return self._snapshot(
            replace(self.counters),
            self.pipeline.statistics(),
            self.cap.blocks(min(self.layout.selected_blocks)),
            recall=None if self.audit is None else self.audit.statistics(),
        )

    def close(self) -> None:
        self.pipeline.close()
        if self.audit is not None:
            self.audit.close()


def _prediction(step: DecodeStep, number: int, candidates: Tensor) -> PredictionStep | None:
    """Return the prediction step of the rows that have candidates; None if there are no such rows."""
    entries = candidates.nonzero().flatten()
    if not entries.numel():
        return None
    return PredictionStep(number, entries, step.rows[entries], candidates[entries], step.pages)

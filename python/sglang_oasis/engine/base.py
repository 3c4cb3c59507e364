"""A forward pass over the tiers, without SGLang: the contract of both engines, and the order of a decode step.

A pass begins with what the host knows about its rows, then serves the layers in order, then ends:

    prefill | begin_prefill; per layer: prefill_layer
    decode  | begin_decode; start; per layer: decode_layer; end

The result of `begin_decode` belongs to one pass, so the host's engine can plan the passes of a draft model in advance.
The device's engine may capture `start`, the layers and `end` in a graph; `begin_decode` runs before each replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_oasis.config import FETCH, LookaheadKVConfig
from sglang_oasis.engine.batch import DecodeBatch, PrefillBatch
from sglang_oasis.engine.clock import StepClock
from sglang_oasis.engine.plan import DecodePlan, PrefillRow, host_pages, plan_decode
from sglang_oasis.lookahead.counters import LookaheadCounters
from sglang_oasis.lookahead.pipelines.base import PipelineStatistics
from sglang_oasis.lookahead.sources import SOURCES
from sglang_oasis.ops.device_step import NewTokens
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.integrity import check_integrity
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier


class DecodeForward(NamedTuple):
    """A decode step that has begun.

    Attributes:
        plans: one plan for all m tokens, or one per token.
        entries: n, entries of the batch, padding included.
        tokens: m, tokens per row.
    """

    plans: Sequence[DecodePlan]
    entries: int
    tokens: int


@dataclass(frozen=True)
class PrefillForward:
    """A prefill pass that has begun.

    Attributes:
        rows: its rows, in batch order.
    """

    rows: Sequence[PrefillRow]


class Observer(Protocol):
    """Is shown, before each layer attends, what the layer will attend to."""

    def record(self, layer: int, plan: DecodePlan, tier: ResidentTier) -> None: ...


@dataclass(frozen=True)
class Snapshot:
    """The counts and sizes of an engine; the source of all statistics and metrics of a server.

    Attributes:
        config, layout: the engine's configuration and tier layout.
        rows_capacity, rows_active: number of rows, without the padding row, and of those that are live.
        host_bytes: bytes of the host pool, summaries included.
        host_tokens: tokens that the host pool can hold.
        device_bytes, resident_bytes, summary_bytes: bytes of the resident tiers, of the blocks that live rows hold in
            them, and of the live rows' summaries; those of a draft model are included.
        staging_bytes, cached_tokens: bytes of the prefill staging, and tokens that its page cache can hold.
        counters, pipeline: counts since start-up.
        fetch_cap: most blocks fetched ahead per KV head, layer and step.
        step_seconds: where the time of decode steps goes.
        calibrated: whether summaries are relative to the model's calibration.
        recall: results of the audits, None without audits.
    """

    config: LookaheadKVConfig
    layout: TierLayout
    rows_capacity: int
    rows_active: int
    host_bytes: int
    host_tokens: int
    device_bytes: int
    resident_bytes: int
    summary_bytes: int
    staging_bytes: int
    cached_tokens: int
    counters: LookaheadCounters
    pipeline: PipelineStatistics
    fetch_cap: int
    step_seconds: dict[str, float]
    calibrated: bool
    recall: dict[str, Any] | None


@dataclass(frozen=True)
class EngineSetup:
    """The arguments that both engines need.

    Attributes:
        config: the validated configuration.
        layout: sizes of the tiers.
        host: the pool of record.
        num_rows: S, rows of the resident tier; row 0 is padding.
        req_to_token: SGLang's table of KV indices, int32, on the engine's device; one row for each row that a batch may
            have, and one for padding.
        scales: softmax scale of each layer.
        integrity_interval: decode steps between two checks of every invariant, 0 for none.
    """

    config: LookaheadKVConfig
    layout: TierLayout
    host: HostPool
    num_rows: int
    req_to_token: Tensor
    scales: Sequence[float]
    integrity_interval: int = 0


class Engine(ABC):
    """Serves the layers of forward passes from the tiers.

    Args:
        setup: what to serve.
        device: device of the resident tier.

    Attributes:
        tier: the resident tier.
        tiers: all resident tiers that hold the same rows: this engine's, and that of a draft model.
        counters: counts since start-up.
        observer: is shown what decode attends to, or None; it reads the tiers between two kernels.
        clock: where the time of decode steps goes.
        scales: softmax scale of each layer.
        max_entries: most entries of a batch, padding included.
    """

    captured: bool
    """Whether steps may be captured in graphs: then batches are padded, and some are dummies."""

    def __init__(self, setup: EngineSetup, device: torch.device) -> None:
        self.config, self.layout, self.host = setup.config, setup.layout, setup.host
        self.tier = ResidentTier(setup.layout, setup.num_rows, device)
        self.tiers = [self.tier]
        self.counters = LookaheadCounters()
        self.observer: Observer | None = None
        self.clock = StepClock(runs=not self.captured)
        self.scales = list(setup.scales)
        self.max_entries = len(setup.req_to_token)
        self._req_to_token = setup.req_to_token
        self._integrity_interval = setup.integrity_interval
        self._source = SOURCES.find(setup.config.source)
        self._fetches = setup.config.miss_policy == FETCH
        self._sparse = setup.layout.sparse_layers
        self._passes_begun = 0

    # --- prefill ---

    @abstractmethod
    def begin_prefill(self, batch: PrefillBatch) -> PrefillForward:
        """Plan an extend pass, and claim the rows of the requests that are in their last chunk."""

    @abstractmethod
    def prefill_layer(self, forward: Any, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the prompts, dense and causal, and build the rows that decode next.

        Args:
            forward: what `begin_prefill` returned.
            layer: layer of this rank.
            query: [t, H*G, D]; tokens after those of the batch are padding.
            key, value: [t, H, D].

        Returns:
            [t, H*G, D].
        """

    # --- decode ---

    def begin_decode(self, batch: DecodeBatch) -> DecodeForward:
        """Plan a decode step and advance the rows' windows to it; not part of a captured graph.

        Args:
            batch: the rows.

        Raises:
            IntegrityError: a check was due, and found an invariant that does not hold.
        """
        if batch.real and batch.first == 0:
            self._count_step()
        plans = plan_decode(
            self.tier,
            batch,
            number=self._passes_begun + 1,
            req_to_token=None if self.captured else self._req_to_token,
            singly=batch.tokens > 1 and self._fetches,
        )
        self._passes_begun += len(plans)
        entries = len(batch.rows) if batch.entries is None else batch.entries
        forward = DecodeForward(plans, entries, batch.tokens)
        self._load(forward, batch)
        return forward

    @abstractmethod
    def start(self, forward: DecodeForward, indices: Tensor) -> None:
        """Do the work before the first layer; part of a captured graph.

        Args:
            forward: what `begin_decode` returned.
            indices: [n * m] int64, KV indices of the new tokens.
        """

    def decode_layer(
        self, forward: DecodeForward, layer: int, query: Tensor, key: Tensor, value: Tensor, indices: Tensor
    ) -> Tensor:
        """Decode or verify drafts in one layer: m tokens per row, all in one pass or each in a pass of its own.

        Args:
            forward: what `begin_decode` returned.
            layer: layer of this rank.
            query: [n * m, H*G, D]; the tokens of a row are adjacent.
            key, value: [n * m, H, D].
            indices: [n * m] int64, KV indices.

        Returns:
            [n * m, H*G, D].
        """
        self.clock.enter_layer()
        taken, new = query, NewTokens(indices, key, value)
        self._arrive(layer, new)
        self.clock.lap("write_through")
        passes, outs = len(forward.plans), []
        for number, plan in enumerate(forward.plans):
            if passes > 1:
                taken = query[number::passes]
                new = NewTokens(indices[number::passes], key[number::passes], value[number::passes])
            self._prepare(forward, number, layer, taken, new)
            self.clock.lap("prepare")
            if self.observer is not None:
                self.observer.record(layer, plan, self.tier)
            outs.append(self._attend(forward, number, layer, taken))
            self.clock.lap("attention")
        self._look_ahead(forward, layer, query)
        self.clock.lap("look_ahead")
        return outs[0] if passes == 1 else torch.stack(outs, dim=1).flatten(0, 1)

    @abstractmethod
    def end(self) -> None:
        """Do the work after the last layer; part of a captured graph."""

    # --- the parts of a decode step ---

    @abstractmethod
    def _load(self, forward: DecodeForward, batch: DecodeBatch) -> None:
        """Prepare the engine for a planned step."""

    @abstractmethod
    def _arrive(self, layer: int, new: NewTokens) -> None:
        """Wait for the layer's own transfer; the host's engine then stores the new tokens in their pages."""

    @abstractmethod
    def _prepare(self, forward: DecodeForward, number: int, layer: int, query: Tensor, new: NewTokens) -> None:
        """Store a pass's tokens in the resident tier; with miss policy `fetch`, load the blocks that are missing.

        Args:
            forward, number, layer: the step, the number of the pass in the step, the layer.
            query: [n * m', H*G, D], queries of the pass's tokens, m' for each row.
            new: these tokens.
        """

    @abstractmethod
    def _attend(self, forward: DecodeForward, number: int, layer: int, query: Tensor) -> Tensor:
        """Return the attention of a pass over the resident slots: query [n * m', H*G, D] -> the same shape."""

    @abstractmethod
    def _look_ahead(self, forward: DecodeForward, layer: int, query: Tensor) -> None:
        """Start to predict, select and transfer the blocks for the next step, from query [n * m, H*G, D]."""

    # --- for other parts of the product ---

    @abstractmethod
    def settle(self) -> None:
        """Finish all pending work on both tiers, so that the host may read them."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return the counts and sizes of the engine."""

    @abstractmethod
    def close(self) -> None:
        """End the background threads."""

    def check_integrity(self) -> None:
        """Verify every invariant of the tiers.

        Raises:
            IntegrityError: names the layer, the row and the invariant.
        """
        self.settle()
        check_integrity(self.tier, self.host, self.pages_of)

    def pages_of(self, row: int, blocks: int) -> Tensor:
        """Return the host pages of a row's first blocks, as SGLang's table has them now: [blocks] int64."""
        size = self.layout.block_size
        return host_pages(self._req_to_token, row, blocks * size, size).long()

    def _count_step(self) -> None:
        self.counters.decode_steps += 1
        if self._integrity_interval and self.counters.decode_steps % self._integrity_interval == 0:
            self.check_integrity()

    def _snapshot(
        self,
        counters: LookaheadCounters,
        pipeline: PipelineStatistics,
        fetch_cap: int,
        staging_bytes: int = 0,
        cached_tokens: int = 0,
        recall: dict[str, Any] | None = None,
    ) -> Snapshot:
        return Snapshot(
            config=self.config,
            layout=self.layout,
            rows_capacity=self.tier.num_rows - 1,
            rows_active=len(self.tier.rows),
            host_bytes=self.host.nbytes,
            host_tokens=(self.host.num_pages - 1) * self.layout.block_size,
            device_bytes=sum(tier.num_rows * tier.layout.row_bytes for tier in self.tiers),
            resident_bytes=sum(tier.used_bytes for tier in self.tiers),
            summary_bytes=sum(tier.used_summary_bytes for tier in self.tiers),
            counters=counters,
            pipeline=pipeline,
            fetch_cap=fetch_cap,
            step_seconds=dict(self.clock.seconds),
            calibrated=any(fmt.scaling is not None for fmt in self.host.formats),
            staging_bytes=staging_bytes,
            cached_tokens=cached_tokens,
            recall=recall,
        )

"""Runs the resident tier through a request's life: built at the end of prefill, then one step ahead of decode.

Per layer and decode step: `write_through` (wait for this layer's own transfer, store the new tokens in the host pool),
`prepare` (take them into the resident tier), the attention call, then `look_ahead` (hand the lookahead query to the
background pipeline). Each layer owns its state, so only the order within a layer matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.lookahead.counters import LookaheadCounters
from sglang_oasis.lookahead.pipeline import Stage, StagePipeline
from sglang_oasis.lookahead.selector import find_selector
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.ops.eviction import Admissions, capped_eviction
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import fetch_cap
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window

STARTUP_QUERIES = 16
"""Last prompt queries that choose a row's first resident set."""


class _Prediction(NamedTuple):
    """What passes between the stages of the pipeline for one layer.

    Attributes:
        layer: the layer.
        step: number of the step that predicts.
        rows: [m] int64, rows that do not fit the budget.
        pages: [m, blocks] int64, their host pages.
        candidates: [m] int64, blocks [0, candidates) may be selected.
        queries: [m, 1, H*G, D].
        scale: softmax scale.
        cap: most blocks admitted per row and KV head.
    """

    layer: int
    step: int
    rows: Tensor
    pages: Tensor
    candidates: Tensor
    queries: Tensor
    scale: float
    cap: int


class LookaheadController:
    """Policy over the tiers.

    Args:
        config: the validated configuration.
        tier: the resident tier.
        host: the host pool.
    """

    def __init__(self, config: LookaheadKVConfig, tier: ResidentTier, host: HostPool) -> None:
        self.config = config
        self.tier = tier
        self.host = host
        self.counters = LookaheadCounters()
        self._select_blocks = find_selector(config.selector)
        self.pipeline = StagePipeline(
            [
                Stage("predict", self._predict),
                Stage("select", self._select),
                Stage("transfer", self._transfer),
            ],
            tier.layout.num_layers,
            # On a GPU the stages run on the forward pass's stream until they have streams and events of their own.
            background=tier.device.type == "cpu",
        )

    def write_through(self, layer: int, indices: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new tokens in the host pool; the first thing a forward pass does in a layer.

        It waits for the layer's own transfer: SGLang may have freed pages that the transfer still reads, and this pass
        may be the one that writes over them.

        Args:
            layer: layer of this rank.
            indices: [T], KV indices.
            key, value: [T, H, D].
        """
        self.pipeline.wait(layer)
        self.host.write(layer, indices, key, value)

    def build(self, layer: int, row: int, window: Window, pages: Tensor, queries: Tensor, scale: float) -> None:
        """Build a row's first resident set from its last prompt queries, so that decode never starts cold.

        Args:
            layer: layer of this rank.
            row: the row.
            window: the window of the prompt; all its tokens are in the host pool.
            pages: [open_block + 1] int64, the row's host pages.
            queries: [Q, H*G, D], the last prompt queries, newest last.
            scale: softmax scale.
        """
        resident = self.tier.layers[layer]
        complete = pages[: window.complete_blocks]
        summaries = self.host.summaries[layer][complete].to(self.tier.device).transpose(0, 1)
        resident.summaries[row, :, : len(complete)] = summaries
        count = min(resident.selected, window.first_local)
        if window.next.first_local <= resident.selected:
            selected = torch.arange(count).expand(self.tier.layout.kv_heads, count)
        else:
            candidates = torch.tensor([window.next.first_local])
            scores = self._score(queries.unsqueeze(0), summaries.unsqueeze(0), candidates, scale)
            selected = scores[0].topk(count, dim=-1).indices
        resident.build(row, selected, window, self.host.kv[layer], pages)
        self.counters.blocks_built += selected.numel()

    def prepare(self, layer: int, step: DecodeStep, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """Make a layer's resident set ready for this step's attention.

        The new tokens are already in the host pool.

        Args:
            layer: layer of this rank.
            step: the decode step.
            query: [n, H*G, D]; key, value: [n, H, D], of the new tokens.
            scale: softmax scale.
        """
        resident = self.tier.layers[layer]
        for row, block in step.graduates:
            resident.graduate(row, block, step.number)
        resident.write_tokens(step.rows, step.positions, key, value)
        self._summarise(layer, step.completed)
        if self.config.miss_policy == "fetch":
            self._fetch_misses(layer, step, query, scale)

    def look_ahead(self, layer: int, step: DecodeStep, query: Tensor, scale: float) -> None:
        """Start predicting, selecting and transferring what the next step will need.

        With policy `fetch` the last query has already brought in all that it would predict.
        """
        if self.config.miss_policy == "fetch":
            return
        upcoming = [window.next for window in step.windows]
        cap = fetch_cap(self.config.fetch_ratio, self.tier.layers[layer].selected)
        task = self._prediction(layer, step, upcoming, query, scale, cap)
        if task is not None:
            self.pipeline.submit(layer, task)

    def close(self) -> None:
        """End the background threads."""
        self.pipeline.close()

    def _prediction(
        self, layer: int, step: DecodeStep, windows: Sequence[Window], query: Tensor, scale: float, cap: int
    ) -> _Prediction | None:
        """The part of the batch that does not fit the budget in `windows`; None when everything fits."""
        budget = self.tier.layers[layer].selected
        over = [i for i, window in enumerate(windows) if window.first_local > budget]
        if not over:
            return None
        return _Prediction(
            layer=layer,
            step=step.number,
            rows=step.rows[over],
            pages=step.pages[over],
            candidates=torch.tensor([windows[i].first_local for i in over]),
            queries=query[over].unsqueeze(1),
            scale=scale,
            cap=cap,
        )

    def _fetch_misses(self, layer: int, step: DecodeStep, query: Tensor, scale: float) -> None:
        budget = self.tier.layers[layer].selected
        task = self._prediction(layer, step, step.windows, query, scale, cap=budget)
        if task is None:
            return
        _, admissions = self.pipeline.run(task)
        self.counters.blocks_urgent += admissions.entry.numel()
        self.counters.misses += admissions.entry.numel()

    def _score(self, queries: Tensor, summaries: Tensor, candidates: Tensor, scale: float) -> Tensor:
        scores = self._select_blocks(queries, summaries, candidates, scale)
        scores[..., : self.tier.layout.sink_blocks] = float("inf")
        return scores

    def _predict(self, task: _Prediction) -> tuple[_Prediction, Tensor]:
        """Stage 1: the K best blocks of each row and head, [m, H, K] int64, best first."""
        resident = self.tier.layers[task.layer]
        summaries = resident.summaries[task.rows, :, : int(task.candidates.max())]
        scores = self._score(task.queries, summaries, task.candidates, task.scale)
        return task, scores.topk(resident.selected, dim=-1).indices

    def _select(self, predicted: tuple[_Prediction, Tensor]) -> tuple[_Prediction, Admissions]:
        """Stage 2: which of them to load, and over what."""
        task, blocks = predicted
        resident = self.tier.layers[task.layer]
        last_selected = resident.last_selected[task.rows]
        admissions = capped_eviction(blocks, resident.slot_of[task.rows], last_selected, task.step, task.cap)
        resident.last_selected[task.rows] = last_selected
        return task, admissions

    def _transfer(self, selected: tuple[_Prediction, Admissions]) -> tuple[_Prediction, Admissions]:
        """Stage 3: gather the blocks from the host and update the head map."""
        task, admissions = selected
        count = admissions.entry.numel()
        if count:
            pages = task.pages[admissions.entry.cpu(), admissions.block.cpu()]
            chunks = self.host.kv[task.layer][pages, admissions.head.cpu()].to(self.tier.device)
            rows = task.rows[admissions.entry.cpu()].to(self.tier.device)
            self.tier.layers[task.layer].admit(
                rows, admissions.head, admissions.slot, admissions.block, chunks, task.step
            )
        self.counters.blocks_fetched += count
        self.counters.evictions += count
        self.counters.misses += admissions.deferred
        return selected

    def _summarise(self, layer: int, completed: Sequence[tuple[int, int, int]]) -> None:
        if not completed:
            return
        rows, blocks, pages = torch.tensor(completed).unbind(1)
        self.host.summarise(layer, pages)
        self.tier.layers[layer].summaries[rows, :, blocks] = self.host.summaries[layer][pages].to(self.tier.device)

"""Runs the resident tier through a request's life: built at the end of prefill, then one step ahead of decode.

Per layer and decode step: `write_through` (wait for this layer's own transfer, store the new tokens in the host pool),
`prepare` (take them into the resident tier), the attention call, then `look_ahead` (hand the lookahead query to the
background pipeline). Each layer owns its state, so only the order within a layer matters. A step whose draft tokens are
served one by one (miss policy `fetch`) repeats `prepare` and the attention call for each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_oasis.config import AUTO, FETCH, LAST_QUERY, LookaheadKVConfig
from sglang_oasis.lookahead.counters import LookaheadCounters
from sglang_oasis.lookahead.fetch_cap import AdaptiveCap, FetchCap, FixedCap
from sglang_oasis.lookahead.pipelines.native import PredictionStep, make_pipeline
from sglang_oasis.lookahead.selectors.bound import find_selector, rank_blocks
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window, Windows

STARTUP_QUERIES = 16
"""Last prompt queries that choose a row's first resident set."""


class LookaheadController:
    """Policy over the tiers.

    Args:
        config: the validated configuration.
        tier: the resident tier.
        host: the host pool.
        recall_is_low: layer -> whether lookahead alone serves it badly; miss policy `auto` needs it.
        moves_on: False when the next pass may serve a row at the length of this one, as a draft model's do.

    Attributes:
        cap: most blocks fetched ahead per KV head, layer and step.
    """

    def __init__(
        self,
        config: LookaheadKVConfig,
        tier: ResidentTier,
        host: HostPool,
        recall_is_low: Callable[[int], bool] | None = None,
        *,
        moves_on: bool = True,
    ) -> None:
        self.config = config
        self.tier = tier
        self.host = host
        self.counters = LookaheadCounters()
        self._selector = find_selector(config.selector)
        self._recall_is_low = recall_is_low
        self._moves_on = moves_on
        self._sparse_layers = tier.layout.sparse_layers
        self._looks_at_drafts = config.source != LAST_QUERY
        self._step: DecodeStep | None = None
        self._urgent: frozenset[int] = frozenset()
        self._predicting = False
        self.pipeline = make_pipeline(tier, host, self._selector, config.smoothing)
        self.cap = self._make_cap()

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
        resident, layout = self.tier.layers[layer], self.tier.layout
        complete = pages[: window.complete_blocks]
        summaries = self.host.summaries[layer][complete].to(self.tier.device).transpose(0, 1)
        resident.summaries[row, :, : len(complete)] = summaries
        count = min(resident.selected, window.first_local)
        if window.next.first_local <= resident.selected:
            selected = torch.arange(count).expand(layout.kv_heads, count)
            resident.begin_averages(row, None)
        else:
            candidates = torch.tensor([window.next.first_local])
            records = resident.summaries[row, None, :, : len(complete)]
            scores = rank_blocks(
                self._selector, queries[None], records, layout.summary_format, candidates, scale, layout.sink_blocks
            )
            selected = scores[0].topk(count, dim=-1).indices
            resident.begin_averages(row, scores[0, :, : window.next.first_local])
        resident.build(row, selected, window, self.host.kv[layer], pages)
        self.counters.blocks_built += selected.numel()

    def prepare(self, layer: int, step: DecodeStep, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """Make a layer's resident set ready for this step's attention.

        The new tokens are already in the host pool.

        Args:
            layer: layer of this rank.
            step: the decode step, of n rows with m tokens each.
            query: [n * m, H*G, D]; key, value: [n * m, H, D], of the new tokens.
            scale: softmax scale.
        """
        if step is not self._step:
            self._begin(step)
        resident = self.tier.layers[layer]
        if step.graduates:
            # Older than what is selected now, which must outlive them.
            resident.graduate(step.graduates.rows, step.graduates.blocks, urgent_number(step) - 1)
        resident.write_tokens(step.token_rows, step.places(resident), key, value)
        if step.completed:
            rows, blocks, pages = step.completed
            self.host.summarise(layer, pages)
            resident.summaries[rows, :, blocks] = self.host.summaries[layer][pages].to(self.tier.device)
        if step.expected:  # a request may end here, and another find the page in the prefix cache
            self.host.summarise(layer, step.expected.pages)
        if layer in self._urgent:
            queries = query.unflatten(0, (-1, step.tokens))
            self.counters.blocks_urgent += self.pipeline.run(layer, queries, scale, cap=resident.selected)

    def look_ahead(self, layer: int, step: DecodeStep, query: Tensor, scale: float) -> None:
        """Start predicting, selecting and transferring what the next step will need.

        Nothing is done with policy `fetch`: the true queries have brought in all that they would predict.

        Args:
            layer: layer of this rank.
            step: the decode step, of n rows with m tokens each.
            query: [n * m, H*G, D].
            scale: softmax scale.
        """
        if self._predicting and layer in self._sparse_layers:
            cap = self.cap.blocks(self.tier.layers[layer].selected)
            queries = query.unflatten(0, (-1, step.tokens))
            drafts = queries[:, 1:] if self._looks_at_drafts and step.tokens > 1 else queries[:, :1]
            self.pipeline.submit(layer, drafts, scale, cap)

    def _begin(self, step: DecodeStep) -> None:
        """Find the rows that do not fit the budget: in this step, where misses are fetched, and in the next."""
        self._step = step
        self._urgent, self._predicting = frozenset(), False
        if layers := self._layers_that_fetch():
            # A row also counts that will not fit with the drafts it may have: it may be back from where it did not fit.
            most = step.windows.later(self.tier.layout.draft_tokens)
            if (urgent := self._exceeding(step, urgent_number(step), step.windows, most)) is not None:
                self._urgent = layers
                self.pipeline.begin_urgent(urgent)
        if self.config.miss_policy != FETCH:
            then = step.windows.next if self._moves_on else step.windows
            ahead = self._exceeding(step, urgent_number(step) + 1, then, then)
            self.cap.begin_step(0 if ahead is None else len(ahead.rows))
            if ahead is not None:
                self._predicting = True
                self.pipeline.begin_step(ahead)

    def _exceeding(self, step: DecodeStep, number: int, windows: Windows, most: Windows) -> PredictionStep | None:
        """The rows whose windows `most` exceed the budget, with candidates as in `windows`; None without such rows."""
        entries = (most.first_local > min(self.tier.layout.selected_blocks)).nonzero().flatten()
        if not entries.numel():
            return None
        return PredictionStep(number, entries, step.rows[entries], windows.first_local[entries], step.pages)

    def close(self) -> None:
        """End the background threads."""
        self.pipeline.close()

    def _make_cap(self) -> FetchCap:
        if self.config.fetch_ratio is not None:
            return FixedCap(self.config.fetch_ratio)
        layout, pipeline = self.tier.layout, self.pipeline
        heads = layout.kv_heads * len(self._sparse_layers)
        selected = min(layout.selected_blocks)
        return AdaptiveCap(pipeline.statistics, selected, heads, layout.chunk_bytes, pipeline.threads)

    def _layers_that_fetch(self) -> frozenset[int]:
        """Layers that load what the true query misses before they attend."""
        if self.config.miss_policy == FETCH:
            return self._sparse_layers
        if self.config.miss_policy != AUTO or self._recall_is_low is None:
            return frozenset()
        return frozenset(filter(self._recall_is_low, self._sparse_layers))


def urgent_number(step: DecodeStep) -> int:
    """With which a step's urgent fetches mark blocks as selected; its predictions, which come later, with the next."""
    return 2 * step.number

"""Runs the resident tier through a request's life: built at the end of prefill, then one step ahead of decode.

Per layer and decode step: `write_through` (wait for this layer's own transfer, store the new tokens in the host pool),
`prepare` (take them into the resident tier), the attention call, then `look_ahead` (hand the lookahead query to the
background pipeline). Each layer owns its state, so only the order within a layer matters. A step whose draft tokens are
served one by one (miss policy `fetch`) repeats `prepare` and the attention call for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.config import LAST_QUERY, LookaheadKVConfig
from sglang_oasis.lookahead.counters import LookaheadCounters
from sglang_oasis.lookahead.pipeline import PredictionStep, make_pipeline
from sglang_oasis.lookahead.selector import find_selector, rank_blocks
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import fetch_cap
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window

STARTUP_QUERIES = 16
"""Last prompt queries that choose a row's first resident set."""


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
        self._selector = find_selector(config.selector)
        self._fetches_misses = config.miss_policy == "fetch"
        self._looks_at_drafts = config.source != LAST_QUERY
        self._step: DecodeStep | None = None
        self._predicting = False
        self.pipeline = make_pipeline(tier, host, self._selector)

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
        else:
            candidates = torch.tensor([window.next.first_local])
            records = resident.summaries[row, None, :, : len(complete)]
            scores = rank_blocks(
                self._selector, queries[None], records, layout.summary_format, candidates, scale, layout.sink_blocks
            )
            selected = scores[0].topk(count, dim=-1).indices
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
            resident.graduate(step.graduates.rows, step.graduates.blocks, step.number)
        resident.write_tokens(step.token_rows, step.places(resident), key, value)
        if step.completed:
            rows, blocks, pages = step.completed
            self.host.summarise(layer, pages)
            resident.summaries[rows, :, blocks] = self.host.summaries[layer][pages].to(self.tier.device)
        if self._fetches_misses and self._predicts(layer):
            queries = query.unflatten(0, (-1, step.tokens))
            self.counters.blocks_urgent += self.pipeline.run(layer, queries, scale, cap=resident.selected)

    def look_ahead(self, layer: int, step: DecodeStep, query: Tensor, scale: float) -> None:
        """Start predicting, selecting and transferring what the next step will need.

        With policy `fetch` the true queries have already brought in all that they would predict.

        Args:
            layer: layer of this rank.
            step: the decode step, of n rows with m tokens each.
            query: [n * m, H*G, D].
            scale: softmax scale.
        """
        if not self._fetches_misses and self._predicts(layer):
            cap = fetch_cap(self.config.fetch_ratio, self.tier.layers[layer].selected)
            queries = query.unflatten(0, (-1, step.tokens))
            drafts = queries[:, 1:] if self._looks_at_drafts and step.tokens > 1 else queries[:, :1]
            self.pipeline.submit(layer, drafts, scale, cap)

    def _begin(self, step: DecodeStep) -> None:
        """Find the rows that do not fit the budget when the pipeline works for them.

        With policy `fetch` it works for this step's attention, else for the next step's. A row also counts that will
        not fit with the drafts it may have: it may be back from where it did not fit.
        """
        self._step = step
        if self._fetches_misses:
            candidates, most = step.windows.first_local, step.windows.later(self.tier.layout.draft_tokens).first_local
        else:
            candidates = most = step.windows.next.first_local
        entries = (most > min(self.tier.layout.selected_blocks)).nonzero().flatten()
        self._predicting = entries.numel() > 0
        if self._predicting:
            self.pipeline.begin_step(
                PredictionStep(step.number, entries, step.rows[entries], candidates[entries], step.pages)
            )

    def close(self) -> None:
        """End the background threads."""
        self.pipeline.close()

    def _predicts(self, layer: int) -> bool:
        """Whether the step has rows that exceed the layer's slots; those of a dense layer never do."""
        return self._predicting and self.tier.layers[layer].selected < self.tier.layout.max_blocks

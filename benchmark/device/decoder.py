"""Prefill and decoding on a device as SGLang's backend runs them, without SGLang: tiers, controller and attention.

What `engine/device.py` does between SGLang's hooks; inputs of the layers come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.engine.attention.base import DeviceAttention
from sglang_oasis.engine.plan import PrefillRow, claim_rows, plan_decode
from sglang_oasis.engine.slot_tables import SlotTable
from sglang_oasis.lookahead.device_controller import DeviceController
from sglang_oasis.lookahead.pipelines.device import Batch
from sglang_oasis.ops.device_step import summarise_blocks
from sglang_oasis.ops.streams import streams_of
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.plan import PrefillPass
from sglang_oasis.tier.prefill.staging import PrefillStaging
from sglang_oasis.tier.resident_tier import ResidentTier


class LayerInputs(NamedTuple):
    """Of all layers, for t tokens.

    Attributes:
        queries: [layers, t, H*G, D].
        keys, values: [layers, t, H, D].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class DeviceDecoder:
    """A resident tier with what drives it; policy `drop`, all layers with as many slots.

    Args:
        config, layout: of the tiers.
        host: the host pool, in memory that the device reaches by address.
        req_to_token: [S, context] int32 on the device, KV index of each token of a row.
        query_heads: H * G.
        scale: softmax scale of all layers.
        attention: what attends.
        tokens: m, tokens per row and decode step.
        cache_places: pages that prefill's cache holds.

    Attributes:
        tier, controller, staging: the product's.
    """

    def __init__(
        self,
        config: LookaheadKVConfig,
        layout: TierLayout,
        host: HostPool,
        req_to_token: Tensor,
        *,
        query_heads: int,
        scale: float,
        attention: DeviceAttention,
        tokens: int = 1,
        cache_places: int = 0,
    ) -> None:
        device, rows = req_to_token.device, len(req_to_token)
        streams = streams_of(device)
        self.tier = ResidentTier(layout, rows, device)
        self.controller = DeviceController(
            config, self.tier, host, req_to_token, scale=scale, max_rows=rows,
            query_heads=query_heads, query_dtype=layout.dtype, streams=streams,
        )  # fmt: skip
        self.staging = PrefillStaging(
            layout, host.kv, max_pages=layout.max_blocks, cache_places=cache_places, device=device, streams=streams
        )
        self._host, self._req_to_token = host, req_to_token
        self._attention, self._tokens = attention, tokens
        self._table = SlotTable(layout, layout.selected_blocks[0], self.controller.tables[0].current.rows)
        self._batch = Batch(0, 1)
        self._steps = 0

    def prefill(self, rows: list[int], prefixes: list[int], counts: list[int], inputs: LayerInputs) -> Tensor:
        """The last tokens of the rows' prompts: what all layers attend to, [layers, t, H*G, D].

        Args:
            rows: those that decode from now on.
            prefixes, counts: tokens of each that are in the host pool, and new ones.
            inputs: of the new tokens.
        """
        self.controller.drain()
        device, ends = self.tier.device, [first + count for first, count in zip(prefixes, counts, strict=True)]
        spans = zip(rows, prefixes, ends, strict=True)
        written = torch.cat([self._req_to_token[row, first:end] for row, first, end in spans]).long()
        claimed = claim_rows(
            self.tier, rows=rows, generations=[1] * len(rows), prefixes=prefixes, new_tokens=counts,
            last_chunks=[True] * len(rows),
        )  # fmt: skip
        batch = PrefillPass(torch.tensor(rows, device=device), prefixes, counts, written, self._req_to_token)
        self._attention.prefill.plan(self.staging.begin(batch))
        out = torch.empty_like(inputs.queries)
        for layer, (query, key, value) in enumerate(zip(*inputs, strict=True)):
            self._prefill_layer(layer, claimed, query, key, value, out[layer])
        self.staging.join()
        return out

    def _prefill_layer(
        self, layer: int, claimed: Sequence[PrefillRow], query: Tensor, key: Tensor, value: Tensor, out: Tensor
    ) -> None:
        fmt = self.tier.layout.summary_format
        for group, kv in self.staging.layer(layer, key, value):
            summarise_blocks(kv, group.completed_places, self._host.summaries[layer], group.completed_pages, fmt)
            out[group.tokens] = self._attention.prefill.run(query[group.tokens], kv, group)
            for each, first_place in zip(claimed[group.requests], group.starts, strict=False):
                self.controller.build(layer, each.row, each.window, kv, first_place, query[each.tokens])

    def load(self, rows: Sequence[int], lengths: Sequence[int], entries: int) -> None:
        """Send a decode step to the device; not part of a captured graph.

        Args:
            rows: that decode; none while a graph is captured.
            lengths: committed tokens of each, the newest included.
            entries: of the batch, padding included.
        """
        decoding = torch.tensor(rows, dtype=torch.int64)
        (plan,) = plan_decode(
            self.tier, number=self._steps + 1, rows=decoding, generations=torch.ones_like(decoding),
            lengths=torch.tensor(lengths, dtype=torch.int64), rids=(), req_to_token=None, tokens=self._tokens,
        )  # fmt: skip
        assert not plan.cold, "every row is prefilled before it decodes"
        self._steps += 1
        self._batch = self.controller.batch(entries, self._tokens)
        self.controller.load(decoding, [plan.step], self._batch)
        self._table.load(plan)
        self._attention.decode.plan(self._table, entries, self._tokens)

    def begin_step(self) -> None:
        """The part of a step before its first layer."""
        self.controller.begin_step(self._batch)
        self._attention.decode.refresh(self._table, self._batch.rows, self._tokens)

    def attend(self, layer: int, indices: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A layer's part of a step: KV indices [n * m] int64, query [n * m, H*G, D] -> [n * m, H*G, D]."""
        batch, blocks = self._batch, self.tier.layers[layer].blocks
        self.controller.take_tokens(layer, 0, batch, indices, key, value)
        out = self._attention.decode.run(query, blocks, self._table, batch.rows)
        self.controller.look_ahead(layer, batch, query)
        return out

    def end_step(self) -> None:
        """The part of a step after its last layer."""
        self.controller.end_step()


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`run` as a CUDA graph, to be replayed; `run` itself on a CPU. It must have run before."""
    if device.type != "cuda":
        return run
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay

"""SGLang attention backend `lookahead_kv` on a CUDA device: the device drives itself, also inside of a captured graph.

Read from sglang 0.5.23: `layers/attention/base_attn_backend.py` (the out-of-graph and in-graph halves of the metadata,
SharedReadEnds), `model_executor/runner/decode_cuda_graph_runner.py` (what a replay's view of the batch holds),
`model_executor/forward_batch_info.py`. Not run on a GPU yet. A decode step is the same eagerly and captured:

    out of graph | `load` tables from the host's lengths, plan attention
    in graph     | start what the last step left over; per layer: take tokens, attend, look ahead; join the side streams
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from sglang_oasis.config import FETCH, LookaheadKVConfig
from sglang_oasis.engine.attention.base import AttentionSetup
from sglang_oasis.engine.attention.choice import choose_attention
from sglang_oasis.engine.plan import DecodePlan, PrefillRow, claim_rows, plan_decode
from sglang_oasis.engine.slot_tables import SlotTable
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.lookahead.counters import LookaheadCounters
from sglang_oasis.lookahead.device_controller import DeviceController
from sglang_oasis.lookahead.pipelines.device import URGENT, Batch
from sglang_oasis.ops.device_step import summarise_blocks
from sglang_oasis.ops.streams import Streams, streams_of
from sglang_oasis.serving.batch import committed_tokens, decoded_tokens
from sglang_oasis.serving.layers import attention_layers, layer_inputs
from sglang_oasis.serving.lookahead_backend import LAST_CHUNKS_ATTRIBUTE, ROWS_ATTRIBUTE, TierBackend
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.page_cache import PageCache
from sglang_oasis.tier.prefill.plan import PrefillPass
from sglang_oasis.tier.prefill.staging import PrefillStaging

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner


class DeviceAttentionBackend(TierBackend):
    """Attention over two tiers, driven by the device.

    Args:
        runner, config, layout, host: as in `TierBackend`; the host pool is pinned.
        cache_bytes: device memory that the page cache may use.
        streams: of the device, None for its own.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: LookaheadKVConfig,
        layout: TierLayout,
        host: HostPool,
        cache_bytes: int,
        streams: Streams | None = None,
    ) -> None:
        super().__init__(runner, config, layout, host)
        device = self.tier.device
        streams = self._streams = streams_of(device) if streams is None else streams
        layers = attention_layers(runner.model)
        scale, query_heads = layers[0].scaling, layers[0].tp_q_head_num
        if any(module.scaling != scale for module in layers):
            raise LookaheadKVError(
                "--enable-lookahead-kv cannot serve this model on a CUDA device: its attention layers differ in their "
                "softmax scale; start it without the flag."
            )
        self._scale = scale
        self._max_rows = self.req_to_token_pool.size + 1
        self.controller = DeviceController(
            config, self.tier, host, self.req_to_token_pool.req_to_token, scale=scale, max_rows=self._max_rows,
            query_heads=query_heads, query_dtype=runner.dtype, streams=streams,
        )  # fmt: skip
        self.staging: PrefillStaging = PrefillStaging(
            layout, host.kv, max_pages=layout.max_blocks,
            cache_places=PageCache.places_in(layout, cache_bytes), device=device, streams=streams,
        )  # fmt: skip
        self._attention = choose_attention(AttentionSetup(layout, query_heads, runner.dtype, scale, device, streams))
        kinds = sorted(set(layout.selected_blocks))
        self._tables = [
            {selected: SlotTable(layout, selected, tables.current.rows) for selected in kinds}
            for tables in self.controller.tables
        ]
        self._is_dummy = False
        self._batch: Batch | None = None
        self._plans: Sequence[DecodePlan] = ()
        self._prefill: Sequence[PrefillRow] = ()

    def settle(self) -> None:
        """Both tiers are up to date, and the host may look into them."""
        self.controller.drain()
        self._streams.synchronize(self._streams.record())

    def counters(self) -> LookaheadCounters:
        """Waits for the device."""
        urgent = int(self.controller.pipeline.counters[URGENT, 0])
        return replace(self.controller.counters, blocks_urgent=urgent)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > self._max_rows:
            raise RuntimeError(f"A graph of {max_bs} requests was asked for, and there are {self._max_rows} rows.")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Kernels of all layers look up pages in SGLang's table of KV indices.

        So do the tasks that a step leaves to the next. They need no fence: what a live row has in the table stays, and
        what is fetched for a row that is gone is not read before the row is built again.
        """
        if fm.is_decode() or fm.is_target_verify():
            return SharedReadEnds.POST_REPLAY
        return SharedReadEnds.UNKNOWN

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._batch, self._prefill = None, ()
        self._is_dummy = in_capture or _is_dummy(forward_batch)
        if forward_batch.forward_mode.is_idle():
            return
        if (tokens := decoded_tokens(forward_batch)) is None:
            if not self._is_dummy:
                self._plan_prefill(forward_batch)
            return
        entries = forward_batch.batch_size
        self._batch = self.controller.batch(entries, tokens)
        rows = [] if self._is_dummy else getattr(self._runner, ROWS_ATTRIBUTE)
        lengths = committed_tokens(forward_batch, tokens)[: len(rows)]
        self._plans = self._plan_decode(rows, lengths, tokens, getattr(forward_batch, "rids", None) or ())
        steps = [plan.step for plan in self._plans]
        self.controller.load(forward_batch.req_pool_indices[: len(rows)], steps, self._batch)
        for plan, table in self._planned_tables():
            table.load(plan)
            self._attention.decode.plan(table, entries, plan.step.tokens)
        if not self._is_dummy:
            self._publish_when_due()

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if self._batch is None:
            return
        self.staging.cache.forget(forward_batch.out_cache_loc)
        self.controller.begin_step(self._batch)
        for plan, table in self._planned_tables():
            self._attention.decode.refresh(table, self._batch.rows, plan.step.tokens)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Decode, or verify drafts: m tokens per row, in one pass or in one pass each."""
        batch = self._batch
        assert batch is not None
        query, key, value = self._inputs(layer, q, k, v, save_kv_cache, kwargs)
        index, controller = layer.layer_id - self.token_to_kv_pool.start_layer, self.controller
        resident, passes = self.tier.layers[index], len(self._plans)
        indices = forward_batch.out_cache_loc.view(batch.rows, -1)
        outs = []
        for number, (plan, tables) in enumerate(zip(self._plans, self._tables, strict=False)):
            taken = slice(number, None, passes)  # a row's tokens are neighbours
            written = indices[:, taken].contiguous().flatten()
            controller.take_tokens(index, number, batch, written, key[taken], value[taken])
            controller.fetch_misses(index, number, batch, query[taken])
            if self.trace is not None:  # looks into the tiers: not in a graph
                self.trace.record(index, plan, self.tier)
            table = tables[resident.selected]
            outs.append(self._attention.decode.run(query[taken], resident.blocks, table, batch.rows))
        controller.look_ahead(index, batch, query)
        if index == self.tier.layout.num_layers - 1:
            controller.end_step()
        out = outs[0] if passes == 1 else torch.stack(outs, dim=1)
        return out.view(q.shape)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        if self._batch is not None:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        query, key, value = self._inputs(layer, q, k, v, save_kv_cache, kwargs)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        fmt = self.tier.layout.summary_format
        out = torch.zeros_like(query)  # a graph pads its tokens, and what follows attention must not meet NaN
        if self._is_dummy:
            return out.view(q.shape)
        for group, kv in self.staging.layer(index, key, value):
            summarise_blocks(kv, group.completed_places, self.host.summaries[index], group.completed_pages, fmt)
            out[group.tokens] = self._attention.prefill.run(query[group.tokens], kv, group)
            for each, first_place in zip(self._prefill[group.requests], group.starts, strict=False):
                if each.builds:
                    self.controller.build(index, each.row, each.window, kv, first_place, query[each.tokens])
        return out.view(q.shape)

    def _inputs(self, layer: RadixAttention, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As `layer_inputs`; the softmax scale is the one that the kernels were made with."""
        if layer.scaling != self._scale:
            raise NotImplementedError(
                f"sglang-oasis cannot serve attention layer {layer.layer_id}, whose softmax scale changed from "
                f"{self._scale} to {layer.scaling} after the start."
            )
        return layer_inputs(layer, *inputs)

    def _planned_tables(self) -> Iterator[tuple[DecodePlan, SlotTable]]:
        """Every table of every pass of the step at hand."""
        for plan, tables in zip(self._plans, self._tables, strict=False):
            for table in tables.values():
                yield plan, table

    def _plan_decode(self, rows: Sequence[int], lengths: Tensor, tokens: int, rids: Sequence[str]) -> list[DecodePlan]:
        self.staging.join()
        if not self._is_dummy:
            self.count_step()
        plans = plan_decode(
            self.tier,
            number=self._passes_begun + 1,
            rows=torch.tensor(rows, dtype=torch.int64),
            generations=torch.as_tensor(self.req_to_token_pool.req_generation[rows]),
            lengths=lengths,
            rids=rids,
            req_to_token=None,
            tokens=tokens,
            singly=tokens > 1 and self.config.miss_policy == FETCH,
        )
        self._passes_begun += len(plans)
        if plans[0].cold:
            self.settle()
        for cold in plans[0].cold:
            pages = self._pages_of(cold.row, cold.window.open_block + 1)
            self.controller.build_cold(cold.row, cold.window, pages)
        return plans

    def _plan_prefill(self, forward_batch: ForwardBatch) -> None:
        self.controller.drain()
        rows = getattr(self._runner, ROWS_ATTRIBUTE)
        prefixes, new_tokens = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        self._prefill = claim_rows(
            self.tier,
            rows=rows,
            generations=self.req_to_token_pool.req_generation[rows].tolist(),
            prefixes=prefixes,
            new_tokens=new_tokens,
            last_chunks=getattr(self._runner, LAST_CHUNKS_ATTRIBUTE),
        )
        batch = PrefillPass(
            forward_batch.req_pool_indices,
            prefixes,
            new_tokens,
            forward_batch.out_cache_loc,
            self.req_to_token_pool.req_to_token,
        )
        self._attention.prefill.plan(self.staging.begin(batch))


def _is_dummy(forward_batch: Any) -> bool:
    """Whether SGLang made the batch up, to warm up or to capture: it has no request ids.

    Nor have views of a batch for replay, which have `num_padding`.
    """
    return getattr(forward_batch, "rids", None) is None and not hasattr(forward_batch, "num_padding")

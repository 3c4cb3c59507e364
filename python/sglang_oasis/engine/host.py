"""SGLang attention backend `lookahead_kv`: dense exact prefill on the host pool, sparse decode on the resident tier.

Read from sglang 0.5.23: `layers/attention/base_attn_backend.py` (AttentionBackend), `layers/radix_attention.py`
(RadixAttention), `mem_cache/memory_pool.py` (ReqToTokenPool.attach_aux_cache, req_generation). When upstream changes
the forward modes or the aux-cache protocol, this file and `row_observer.py` are what to revisit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from sglang_oasis.config import FETCH, LookaheadKVConfig
from sglang_oasis.engine.plan import DecodePlan, PrefillPlan, plan_decode, plan_prefill
from sglang_oasis.lookahead.audit import Audit
from sglang_oasis.lookahead.controller import STARTUP_QUERIES, LookaheadController
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.serving.batch import committed_tokens, decoded_tokens, host_lengths
from sglang_oasis.serving.layers import layer_inputs
from sglang_oasis.serving.lookahead_backend import LAST_CHUNKS_ATTRIBUTE, TierBackend
from sglang_oasis.serving.row_observer import RowObserver
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class LookaheadAttentionBackend(TierBackend):
    """Attention over two tiers, driven by the host: on a CPU.

    Args:
        runner, config, layout, host, row_observer: as in `TierBackend`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: LookaheadKVConfig,
        layout: TierLayout,
        host: HostPool,
        row_observer: RowObserver | None = None,
    ) -> None:
        super().__init__(runner, config, layout, host, row_observer)
        self.audit = Audit(self.tier, host, config.audit_interval, self._pages_of) if config.audit_interval else None
        self.controller = LookaheadController(
            config,
            self.tier,
            host,
            None if self.audit is None else self.audit.is_poor,
            moves_on=not runner.is_draft_worker,
        )
        self._decode: list[DecodePlan] = []
        self._draft_steps: list[list[DecodePlan]] = []
        self._prefill: PrefillPlan | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        self._decode, self._prefill = [], None
        if mode.is_idle():
            return
        if (tokens := decoded_tokens(forward_batch)) is not None:
            self._decode = self._plan_decode(forward_batch, committed_tokens(forward_batch, tokens), tokens)
        else:
            self._prefill = self._plan_prefill(forward_batch)

    def init_draft_steps(self, forward_batch: ForwardBatch, steps: int) -> None:
        """Plan the passes in which a draft model decodes one token each, behind the committed ones."""
        lengths = host_lengths(forward_batch)
        self._draft_steps = [
            self._plan_decode(forward_batch, lengths, tokens=1, first=1 + step) for step in range(steps)
        ]

    def settle(self) -> None:
        self.controller.pipeline.drain()

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
        if self._decode:
            return self._forward_decode(self._decode, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        plan = self._prefill
        assert plan is not None
        query, key, value = layer_inputs(layer, q, k, v, save_kv_cache, kwargs)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        self.controller.write_through(index, forward_batch.out_cache_loc, key, value)
        self.host.summarise(index, plan.completed_pages)
        out = paged_attention(query, self.host.kv[index], *plan.sequences, layer.scaling)
        for request in plan.requests:
            if request.builds:
                startup = query[request.tokens][-STARTUP_QUERIES:]
                self.controller.build(index, request.row, request.window, request.pages, startup, layer.scaling)
        return out.view(q.shape)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward_decode(self._decode, *args, **kwargs)

    def forward_draft_step(self, step: int, *args: Any, **kwargs: Any) -> Tensor:
        """One of the passes that `init_draft_steps` planned."""
        return self._forward_decode(self._draft_steps[step], *args, **kwargs)

    def _forward_decode(
        self,
        passes: Sequence[DecodePlan],
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Decode, or verify drafts: m tokens per row, in one pass or in one pass each."""
        scale, clock = layer.scaling, self.clock
        clock.enter_layer()
        query, key, value = layer_inputs(layer, q, k, v, save_kv_cache, kwargs)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        self.controller.write_through(index, forward_batch.out_cache_loc, key, value)
        clock.lap("write_through")
        outs = []
        for i, plan in enumerate(passes):
            taken = slice(i, None, len(passes))  # a row's tokens are neighbours
            outs.append(self._attend(index, plan, query[taken], key[taken], value[taken], scale))
        # What a draft model decodes behind the committed tokens is not what its next step will look at.
        if passes[-1].step.first == 0:
            self.controller.look_ahead(index, passes[-1].step, query, scale)
        clock.lap("look_ahead")
        out = outs[0] if len(outs) == 1 else torch.stack(outs, dim=1)
        return out.view(q.shape)

    def _attend(self, index: int, plan: DecodePlan, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        step, clock = plan.step, self.clock
        for cold in plan.cold:
            pages = step.pages[cold.entry, : cold.window.open_block + 1].long()
            self.controller.build(index, cold.row, cold.window, pages, query[cold.entry * step.tokens, None], scale)
        # What policy `auto` goes by is how lookahead alone serves a layer, before it fetches what is missed.
        audits_after = self.config.miss_policy == FETCH
        if self.audit is not None and not audits_after:
            self.audit.observe(index, step, query, scale)
        self.controller.prepare(index, step, query, key, value, scale)
        if self.audit is not None and audits_after:
            self.audit.observe(index, step, query, scale)
        clock.lap("prepare")
        if self.trace is not None:
            self.trace.record(index, plan, self.tier)
        resident = self.tier.layers[index]
        out = paged_attention(query, resident.blocks, *plan.resident(resident.selected), scale)
        clock.lap("attention")
        return out

    def _plan_decode(
        self, forward_batch: ForwardBatch, lengths: Tensor, tokens: int, first: int = 0
    ) -> list[DecodePlan]:
        if first == 0:
            self.count_step()
            self._publish_when_due()
            self.clock.begin_step()
        rows = forward_batch.req_pool_indices.to("cpu", torch.int64)
        passes = plan_decode(
            self.tier,
            number=self._passes_begun + 1,
            rows=rows,
            generations=torch.as_tensor(self.req_to_token_pool.req_generation[rows]),
            lengths=lengths,
            rids=forward_batch.rids or [],
            req_to_token=self.req_to_token_pool.req_to_token,
            tokens=tokens,
            first=first,
            singly=tokens > 1 and self.config.miss_policy == "fetch",
        )
        self._passes_begun += len(passes)
        if self.audit is not None and first == 0:
            self.audit.begin(passes[0].step)
        return passes

    def _plan_prefill(self, forward_batch: ForwardBatch) -> PrefillPlan:
        rows = forward_batch.req_pool_indices.tolist()
        return plan_prefill(
            self.tier,
            rows=rows,
            generations=self.req_to_token_pool.req_generation[rows].tolist(),
            prefixes=forward_batch.extend_prefix_lens_cpu,
            new_tokens=forward_batch.extend_seq_lens_cpu,
            last_chunks=getattr(self._runner, LAST_CHUNKS_ATTRIBUTE),
            req_to_token=self.req_to_token_pool.req_to_token,
        )

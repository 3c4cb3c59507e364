"""SGLang's attention backend `lookahead_kv`: passes forward batches to either engine.

Read from sglang 0.5.23: `layers/attention/base_attn_backend.py` (AttentionBackend: the parts of the metadata outside
and inside a graph, SharedReadEnds), `layers/radix_attention.py` (RadixAttention), `mem_cache/memory_pool.py`
(ReqToTokenPool.attach_aux_cache, req_generation), `model_executor/forward_context.py` (the pools that models ask for),
`model_executor/runner/decode_cuda_graph_runner.py` (the fields of a replay's view of the batch). When upstream changes
the forward modes or the aux-cache protocol, check this file and `row_observer.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from sglang_oasis.engine.base import DecodeForward, Engine, PrefillForward
from sglang_oasis.engine.batch import DecodeBatch, PrefillBatch
from sglang_oasis.observability.metrics import MetricsExporter
from sglang_oasis.observability.report import statistics
from sglang_oasis.serving.batch import committed_tokens, decoded_tokens, host_lengths
from sglang_oasis.serving.layers import layer_inputs
from sglang_oasis.serving.notes import notes_of
from sglang_oasis.serving.row_observer import RowObserver

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner


class LookaheadBackend(AttentionBackend):
    """Attention over the host pool and the resident tier.

    Args:
        runner: the model runner, whose pools exist.
        engine: the engine that serves the model's layers.
        row_observer: that of the target model if the runner's model drafts; None to attach a new one.
        exporter: publishes the statistics to Prometheus, None when SGLang's metrics are off.

    Attributes:
        engine: the engine that serves the layers.
        token_to_kv_pool, req_to_token_pool: the runner's pools, where SGLang's forward context looks for them.
    """

    needs_cpu_seq_lens = True

    def __init__(
        self,
        runner: ModelRunner,
        engine: Engine,
        row_observer: RowObserver | None = None,
        exporter: MetricsExporter | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.max_context_len = runner.model_config.context_len
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._runner = runner
        self._exporter = exporter
        if row_observer is None:
            row_observer = RowObserver(engine.tier, runner.max_total_num_tokens, self._publish_when_idle)
            self.req_to_token_pool.attach_aux_cache(row_observer)
        else:
            row_observer.tiers.append(engine.tier)
        engine.tiers = row_observer.tiers
        self._decode: DecodeForward | None = None
        self._prefill: PrefillForward | None = None
        self._draft_steps: list[DecodeForward] = []
        self._made_up = False

    def statistics(self) -> dict[str, Any]:
        """Return what `/lookahead_kv/stats` reports for this rank."""
        free = self._runner.token_to_kv_pool_allocator.available_size()
        return statistics(self.engine.snapshot(), self._runner.max_total_num_tokens, free)

    # --- the batch ---

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._decode = self._prefill = None
        if forward_batch.forward_mode.is_idle():
            return
        self._made_up = made_up = self.engine.captured and (in_capture or _is_made_up(forward_batch))
        if (tokens := decoded_tokens(forward_batch)) is not None:
            lengths = committed_tokens(forward_batch, tokens)
            self._decode = self._begin_decode(forward_batch, lengths, tokens, real=not made_up)
            if not made_up:
                self._publish_when_due()
        elif not made_up:
            self._prefill = self._begin_prefill(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if self._decode is not None:
            self.engine.start(self._decode, forward_batch.out_cache_loc)

    def init_draft_steps(self, forward_batch: ForwardBatch, steps: int) -> None:
        """Plan `steps` passes in which a draft model decodes one token each, after the committed tokens."""
        lengths = host_lengths(forward_batch)
        self._draft_steps = [
            self._begin_decode(forward_batch, lengths, tokens=1, first=1 + step) for step in range(steps)
        ]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if not self.engine.captured:
            raise NotImplementedError("A step that the host drives cannot be captured in a graph.")
        if max_bs > self.engine.max_entries:
            raise RuntimeError(f"A graph can be captured for at most {self.engine.max_entries} requests, got {max_bs}.")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """Tell SGLang that kernels of all layers read its table of KV indices.

        The tasks that a step postpones to the next one read it, too. They need no fence: a live row's entries do not
        change, and blocks fetched for a released row are not read before the row is built again.
        """
        if self.engine.captured and (fm.is_decode() or fm.is_target_verify()):
            return SharedReadEnds.POST_REPLAY
        return SharedReadEnds.UNKNOWN

    # --- the layers ---

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
        if self._decode is not None:
            return self._decode_layer(self._decode, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        query, key, value = self._inputs(layer, q, k, v, save_kv_cache, kwargs)
        if self._prefill is None:
            if not self._made_up:
                raise RuntimeError("An extend pass has no metadata: initialise it before the first layer.")
            return torch.zeros_like(q)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        out = self.engine.prefill_layer(self._prefill, index, query, key, value)
        return out.view(q.shape)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self._decode is not None
        return self._decode_layer(self._decode, *args, **kwargs)

    def forward_draft_step(self, step: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention of pass `step` of those that `init_draft_steps` planned."""
        return self._decode_layer(self._draft_steps[step], *args, **kwargs)

    def _decode_layer(
        self,
        forward: DecodeForward,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        query, key, value = self._inputs(layer, q, k, v, save_kv_cache, kwargs)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        out = self.engine.decode_layer(forward, index, query, key, value, forward_batch.out_cache_loc)
        if index == self.engine.layout.num_layers - 1:
            self.engine.end()
        return out.view(q.shape)

    def _inputs(self, layer: RadixAttention, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return `layer_inputs`, and adopt the layer's softmax scale, which must not change under a graph."""
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        scale = self.engine.scales[index]
        if layer.scaling != scale and self.engine.captured:
            raise NotImplementedError(
                f"sglang-oasis cannot serve attention layer {layer.layer_id}, whose softmax scale changed from "
                f"{scale} to {layer.scaling} after the start."
            )
        self.engine.scales[index] = layer.scaling
        return layer_inputs(layer, *inputs)

    def _begin_decode(
        self, forward_batch: ForwardBatch, lengths: Tensor, tokens: int, first: int = 0, real: bool = True
    ) -> DecodeForward:
        """Begin a decode step; a dummy batch has no rows, and a batch for a graph has padding after its rows."""
        device_rows = forward_batch.req_pool_indices
        rows = self._rows(forward_batch) if real else []
        return self.engine.begin_decode(
            DecodeBatch(
                rows=torch.tensor(rows, dtype=torch.int64),
                generations=torch.as_tensor(self.req_to_token_pool.req_generation[rows]),
                lengths=lengths[: len(rows)],
                tokens=tokens,
                first=first,
                rids=getattr(forward_batch, "rids", None) or (),
                entries=forward_batch.batch_size,
                device_rows=device_rows[: len(rows)],
                real=real,
            )
        )

    def _begin_prefill(self, forward_batch: ForwardBatch) -> PrefillForward:
        rows, last_chunks = self._rows(forward_batch), notes_of(self._runner).last_chunks
        if last_chunks is None or len(last_chunks) != len(rows):
            raise RuntimeError("The notes do not say which requests of the batch are in their last prefill chunk.")
        return self.engine.begin_prefill(
            PrefillBatch(
                rows=rows,
                generations=self.req_to_token_pool.req_generation[rows].tolist(),
                prefixes=forward_batch.extend_prefix_lens_cpu,
                new_tokens=forward_batch.extend_seq_lens_cpu,
                last_chunks=last_chunks,
                indices=forward_batch.out_cache_loc,
                device_rows=forward_batch.req_pool_indices,
            )
        )

    def _rows(self, forward_batch: ForwardBatch) -> list[int]:
        """Return the rows of the batch's requests, without padding, from the host, so as not to wait for the device."""
        if not self.engine.captured:
            return forward_batch.req_pool_indices.tolist()
        rows = notes_of(self._runner).rows
        if not rows or len(rows) > forward_batch.batch_size:
            raise RuntimeError(f"Notes on {forward_batch.batch_size} requests must have as many rows, got {rows}.")
        return rows

    # --- Prometheus ---

    def _publish_when_due(self) -> None:
        if self._exporter is not None and self._exporter.due():
            self._exporter.publish(self.statistics())

    def _publish_when_idle(self) -> None:
        """Publish the statistics after the last row is released, because no decode step follows that would do so."""
        if self._exporter is not None and not len(self.engine.tier.rows):
            self._exporter.publish(self.statistics())


def _is_made_up(forward_batch: Any) -> bool:
    """Whether the batch is a dummy that SGLang made to warm up or to capture a graph: it has no request ids.

    Views of a batch for a replay have no request ids either, but have `num_padding`.
    """
    return getattr(forward_batch, "rids", None) is None and not hasattr(forward_batch, "num_padding")

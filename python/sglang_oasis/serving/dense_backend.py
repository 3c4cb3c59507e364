"""SGLang's attention backend `oasis_cpu`: dense attention that reads the paged KV pool in place.

The baseline of lookahead KV, and the fastest way to serve a model on a CPU if all contexts fit into memory.
Read from sglang 0.5.23: `layers/attention/base_attn_backend.py` (AttentionBackend), `model_executor/forward_context.py`
(the pools that models ask for).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from sglang_oasis.config import DENSE_BACKEND_NAME
from sglang_oasis.engine.clock import StepClock
from sglang_oasis.engine.plan import Sequences, plan_host
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.serving.batch import committed_tokens, decoded_tokens, host_lengths
from sglang_oasis.serving.layers import check_layers, layer_inputs
from sglang_oasis.tier.host_pool import HostPool

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class DenseAttentionBackend(AttentionBackend):
    """Causal attention over all of a request's tokens.

    Args:
        runner: the model runner, whose pools exist.
        pool: the paged pool that the runner's KV pool wraps.

    Attributes:
        token_to_kv_pool, req_to_token_pool: the runner's pools, where SGLang's forward context looks for them.
        clock: measures the parts of decode steps.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: ModelRunner, pool: HostPool) -> None:
        super().__init__()
        check_layers(runner.model, f"--attention-backend {DENSE_BACKEND_NAME}")
        self.pool = pool
        self.max_context_len = runner.model_config.context_len
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._sequences: Sequences | None = None
        self._draft_steps: list[Sequences] = []
        self.clock = StepClock()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._sequences = None
        if forward_batch.forward_mode.is_idle():
            return
        lengths = host_lengths(forward_batch)
        if (tokens := decoded_tokens(forward_batch)) is not None:
            lengths = committed_tokens(forward_batch, tokens) + tokens - 1
            new_tokens = torch.full_like(lengths, tokens)
            self.clock.begin_step()
        else:
            new_tokens = torch.tensor(forward_batch.extend_seq_lens_cpu)
        self._sequences = self._plan(forward_batch, lengths, new_tokens)

    def init_draft_steps(self, forward_batch: ForwardBatch, steps: int) -> None:
        """Plan `steps` passes in which a draft model decodes one token each, after the committed tokens."""
        lengths = host_lengths(forward_batch)
        self._draft_steps = [
            self._plan(forward_batch, lengths + 1 + step, torch.ones_like(lengths)) for step in range(steps)
        ]

    def _plan(self, forward_batch: ForwardBatch, lengths: Tensor, new_tokens: Tensor) -> Sequences:
        rows = forward_batch.req_pool_indices.to(torch.int64)
        return plan_host(self.req_to_token_pool.req_to_token, rows, lengths, new_tokens, self.pool.block_size)

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward(self._sequences, *args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        self.clock.enter_layer()
        out = self._forward(self._sequences, *args, **kwargs)
        self.clock.lap("attention")
        return out

    def forward_draft_step(self, step: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention of pass `step` of those that `init_draft_steps` planned."""
        return self._forward(self._draft_steps[step], *args, **kwargs)

    def _forward(
        self,
        sequences: Sequences | None,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        assert sequences is not None
        query, key, value = layer_inputs(layer, q, k, v, save_kv_cache, kwargs)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        self.pool.write(index, forward_batch.out_cache_loc, key, value)
        return paged_attention(query, self.pool.kv[index], *sequences, layer.scaling).view(q.shape)

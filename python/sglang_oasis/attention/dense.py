"""SGLang attention backend `oasis_cpu`: dense attention that reads the paged KV pool in place.

What lookahead KV is compared with, and the fastest way to serve a model on a CPU whose contexts fit its memory.
Read from sglang 0.5.23: `layers/attention/base_attn_backend.py` (AttentionBackend).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from sglang_oasis.attention.clock import StepClock
from sglang_oasis.attention.layers import check_layers, layer_inputs
from sglang_oasis.attention.plan import Sequences, plan_host
from sglang_oasis.config import DENSE_BACKEND_NAME
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.tier.host_pool import HostPool

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class DenseAttentionBackend(AttentionBackend):
    """Causal attention over all of a request's tokens.

    Args:
        runner: the model runner, its pools built.
        pool: the paged pool that the runner's KV pool wraps.

    Attributes:
        clock: where the time of decode steps goes.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: ModelRunner, pool: HostPool) -> None:
        super().__init__()
        check_layers(runner.model, f"--attention-backend {DENSE_BACKEND_NAME}")
        self.pool = pool
        self.max_context_len = runner.model_config.context_len
        self._first_layer = runner.token_to_kv_pool.start_layer
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._sequences: Sequences | None = None
        self.clock = StepClock()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        self._sequences = None
        if mode.is_idle():
            return
        lengths = forward_batch.seq_lens_cpu if forward_batch.seq_lens_cpu is not None else forward_batch.seq_lens
        if mode.is_decode():
            new_tokens = torch.ones(len(lengths), dtype=torch.int64)
            self.clock.begin_step()
        elif mode.is_extend_without_speculative():
            new_tokens = torch.tensor(forward_batch.extend_seq_lens_cpu)
        else:
            raise NotImplementedError(
                f"{DENSE_BACKEND_NAME} cannot run a {mode.name} batch; turn the feature off that makes it."
            )
        rows = forward_batch.req_pool_indices.to(torch.int64)
        self._sequences = plan_host(self._req_to_token, rows, lengths, new_tokens, self.pool.block_size)

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
        assert self._sequences is not None
        query, key, value = layer_inputs(layer, q, k, v, save_kv_cache, kwargs)
        index = layer.layer_id - self._first_layer
        self.pool.write(index, forward_batch.out_cache_loc, key, value)
        return paged_attention(query, self.pool.kv[index], *self._sequences, layer.scaling).view(q.shape)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        self.clock.enter_layer()
        out = self.forward_extend(*args, **kwargs)
        self.clock.lap("attention")
        return out

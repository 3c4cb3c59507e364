"""The attention backends of a draft model's decode steps; SGLang uses a backend of its own for each step of a chain.

Read from sglang 0.5.23: `speculative/draft_utils.DraftBackendFactory.create_decode_backend`,
`speculative/eagle_worker_v2.EagleDraftWorker.draft_forward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DraftingBackend(Protocol):
    """The interface of the draft model's own backend."""

    max_context_len: int
    token_to_kv_pool: Any
    req_to_token_pool: Any

    def init_draft_steps(self, forward_batch: ForwardBatch, steps: int) -> None:
        """Plan `steps` passes, each of which decodes one token per request after the committed tokens."""

    def forward_draft_step(self, step: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention of pass `step`; other arguments as in `AttentionBackend.forward_decode`."""


class DraftSteps:
    """The backends of all steps of a chain.

    Args:
        backend: the draft model's backend.
        steps: decode passes of the draft model per speculative step.

    Attributes:
        attn_backends: one per pass.
    """

    needs_cpu_seq_lens = True

    def __init__(self, backend: DraftingBackend, steps: int) -> None:
        self._backend = backend
        self.attn_backends = [DraftStep(backend, step) for step in range(steps)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._backend.init_draft_steps(forward_batch, len(self.attn_backends))


class DraftStep(AttentionBackend):
    """The backend of one step of a chain."""

    needs_cpu_seq_lens = True

    def __init__(self, backend: DraftingBackend, step: int) -> None:
        super().__init__()
        self._backend = backend
        self._step = step
        self.max_context_len = backend.max_context_len
        self.token_to_kv_pool = backend.token_to_kv_pool
        self.req_to_token_pool = backend.req_to_token_pool

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._backend.forward_draft_step(self._step, *args, **kwargs)

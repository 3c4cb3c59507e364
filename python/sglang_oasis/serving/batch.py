"""Computes how many tokens per request a forward batch decodes, and where they begin.

Read from sglang 0.5.23: `model_executor/forward_batch_info.py` (ForwardMode, ForwardBatch.seq_lens),
`speculative/eagle_utils.eagle_prepare_for_verify`, `speculative/eagle_worker_common.prepare_for_draft_extend`. The
lengths of a DECODE batch count its new token; those of a TARGET_VERIFY batch count none of its tokens, those of a
DRAFT_EXTEND_V2 batch all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def decoded_tokens(forward_batch: ForwardBatch) -> int | None:
    """Return m, the tokens per request of a batch that decodes; None for prefill.

    The first token is committed: the target model has chosen it or the token before it. The others are drafts.

    Raises:
        NotImplementedError: the batch has another mode.
    """
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return 1
    if mode.is_target_verify() or mode.is_draft_extend_v2():
        return forward_batch.input_ids.numel() // forward_batch.batch_size
    if mode.is_extend_without_speculative() and not mode.is_mixed():
        return None
    raise NotImplementedError(f"sglang-oasis cannot run a {mode.name} batch: turn off the feature that makes it.")


def committed_tokens(forward_batch: ForwardBatch, tokens: int) -> Tensor:
    """Return the committed tokens of each request of a decoding batch, including the first of its m: [n] int64, host.

    Args:
        forward_batch: the batch.
        tokens: m, what `decoded_tokens` returns.
    """
    mode, lengths = forward_batch.forward_mode, host_lengths(forward_batch)
    if mode.is_target_verify():
        return lengths + 1
    if mode.is_draft_extend_v2():
        return lengths - tokens + 1
    return lengths


def host_lengths(forward_batch: ForwardBatch) -> Tensor:
    """Return the batch's sequence lengths: [n] int64 on the host."""
    lengths = forward_batch.seq_lens_cpu if forward_batch.seq_lens_cpu is not None else forward_batch.seq_lens
    return lengths.to("cpu", torch.int64)

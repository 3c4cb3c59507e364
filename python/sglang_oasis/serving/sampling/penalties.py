"""Penalties that count each output token of a request exactly once.

SGLang gives its penalizers one token per step: with overlap the token before the newest (at first the last token of the
prompt), with speculation the last accepted token, and after a retraction no token from before it. Here their state is
computed from all output tokens.

Read from sglang 0.5.23: `sampling/penaltylib/` (the four penalizers' attributes), `penaltylib/orchestrator.py`.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor


def recount(orchestrator: Any, histories: list[array[int]]) -> None:
    """Set the state of a batch's penalizers from the output tokens.

    Args:
        orchestrator: a BatchedPenalizerOrchestrator.
        histories: output tokens of each request of the batch.
    """
    counts = _counts(histories, orchestrator.vocab_size, orchestrator.device)
    lengths = torch.tensor([[len(tokens)] for tokens in histories], dtype=torch.int32).to(orchestrator.device)
    for kind, penalizer in orchestrator.penalizers.items():
        if penalizer.is_prepared():
            _SET[kind.__name__](penalizer, counts, lengths)


def penalise(orchestrator: Any, logits: Tensor) -> None:
    """Apply a batch's penalties in place, in SGLang's order: first additive, then multiplicative ones.

    Args:
        orchestrator: a BatchedPenalizerOrchestrator.
        logits: [n, V].
    """
    orchestrator.accumulate_additive_penalties(logits)
    scales = orchestrator.accumulate_scaling_penalties()
    if scales is not None:
        scale(logits, scales)


def scale(logits: Tensor, scaling_penalties: Tensor) -> None:
    """Do the same as SGLang's `apply_scaling_penalties`, without torch.compile, which needs a C++ compiler."""
    logits.copy_(torch.where(logits < 0, logits * scaling_penalties, logits / scaling_penalties))


def _counts(histories: list[array[int]], vocabulary: int, device: Any) -> Tensor:
    """Return how often each token occurs, [n, V] int32, made on the device, so that only the tokens are copied."""
    ids = [np.array(tokens, np.int64) for tokens in histories]
    places = np.concatenate([row * vocabulary + tokens[tokens < vocabulary] for row, tokens in enumerate(ids)])
    where = torch.from_numpy(places).to(device)
    counts = torch.zeros(len(ids) * vocabulary, dtype=torch.int32, device=device)
    return counts.scatter_add_(0, where, torch.ones_like(where, dtype=torch.int32)).view(-1, vocabulary)


def _set_frequency(penalizer: Any, counts: Tensor, lengths: Tensor) -> None:
    penalizer.cumulated_frequency_penalties = counts * penalizer.frequency_penalties


def _set_presence(penalizer: Any, counts: Tensor, lengths: Tensor) -> None:
    penalizer.cumulated_presence_penalties = (counts > 0) * penalizer.presence_penalties


def _set_repetition(penalizer: Any, counts: Tensor, lengths: Tensor) -> None:
    penalizer.cumulated_repetition_penalties = torch.where(counts > 0, penalizer.repetition_penalties, 1.0)


def _set_length(penalizer: Any, counts: Tensor, lengths: Tensor) -> None:
    penalizer.len_output_tokens = lengths


_SET = {
    "BatchedFrequencyPenalizer": _set_frequency,
    "BatchedPresencePenalizer": _set_presence,
    "BatchedRepetitionPenalizer": _set_repetition,
    "BatchedMinNewTokensPenalizer": _set_length,
}

"""Verifies drafts by sampling: after each token of a chain, samples the token that the request would have got without
speculation. Drafts are accepted as long as they equal the sampled tokens.

For deterministic drafts this is speculative sampling: a draft of probability p equals the sampled token with
probability p, and otherwise the token has the remaining distribution. SGLang's own verification ignores min_p, custom
logit processors and the effect of drafts on penalties, and combines top_k and top_p in another way than its sampler.

Read from sglang 0.5.23: `speculative/eagle_utils.eagle_sample` (greedy where the batch is), `layers/sampler.Sampler`,
`sampling/sampling_batch_info.SamplingBatchInfo`, `model_executor/model_runner._preprocess_logits` (the order).
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_oasis.serving.sampling.history import show
from sglang_oasis.serving.sampling.penalties import penalise, recount

Verdict = tuple[Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class LooksBack:
    """What a running batch's sampling depends on besides its logits.

    Attributes:
        requests: requests of the batch.
        histories: output tokens of each request.
        penalties: the BatchedPenalizerOrchestrator, or None where no request has penalties.
        processes: whether a request has a custom logit processor.
    """

    requests: list[Any]
    histories: list[array[int]]
    penalties: Any
    processes: bool

    def behind(self, drafts: list[list[int]], count: int) -> list[array[int]]:
        """Return the histories extended by the first `count` drafts of each request."""
        return [tokens + array("q", chain[:count]) for tokens, chain in zip(self.histories, drafts, strict=True)]


def verify(
    eagle_sample: Callable[..., Verdict],
    looks_back: LooksBack | None,
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    **kwargs: Any,
) -> Verdict:
    """Verify chains: prepares the logits, and calls SGLang's `eagle_sample` with the sampled tokens.

    Args:
        eagle_sample: SGLang's function.
        looks_back: the batch's history, None if sampling does not depend on it.
        verify_input, batch, logits_output, grammar_mask, kwargs: arguments of `eagle_sample`; the logits [n * m, V]
            are replaced by those that were sampled from, before temperature and filters.
    """
    if batch.forward_mode.is_idle():
        return eagle_sample(verify_input, batch, logits_output, grammar_mask, **kwargs)
    info = batch.sampling_info
    logits = logits_output.next_token_logits
    _transform(logits, looks_back, verify_input, info, grammar_mask)
    if not info.is_all_greedy:
        logits = _only(_sample(logits, verify_input, info), logits)
    batch.sampling_info = dataclasses.replace(
        info, is_all_greedy=True, acc_additive_penalties=None, acc_scaling_penalties=None, logit_bias=None
    )
    try:
        return eagle_sample(verify_input, batch, dataclasses.replace(logits_output, next_token_logits=logits), **kwargs)
    finally:
        batch.sampling_info = info


def _transform(logits: Tensor, looks_back: LooksBack | None, verify_input: Any, info: Any, grammar_mask: Any) -> None:
    """Change the model's logits [n * m, V] in place as SGLang does before sampling, in the sampler's order."""
    from sglang.srt.layers.sampler import apply_custom_logit_processor

    m = verify_input.draft_token_num
    chains = logits.view(-1, m, logits.shape[-1])
    if looks_back is not None:
        drafts = verify_input.draft_token.view(-1, m)[:, 1:].tolist()
        behind = [looks_back.behind(drafts, count) for count in range(m)]
        if looks_back.penalties is not None:
            for place, histories in enumerate(behind):
                recount(looks_back.penalties, histories)
                penalise(looks_back.penalties, chains[:, place])
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        chains.add_(info.logit_bias.unsqueeze(1))
    if looks_back is not None and looks_back.processes:
        # One position after another, so that a processor is called as without speculation, with one row per request.
        for place, histories in enumerate(behind):
            show(looks_back.requests, histories)
            rows = chains[:, place].contiguous()
            apply_custom_logit_processor(rows, info)
            chains[:, place] = rows


def _sample(logits: Tensor, verify_input: Any, info: Any) -> Tensor:
    """Sample a token for each row of logits: [n * m]."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.runtime_context import get_parallel

    m = verify_input.draft_token_num
    rows = {
        name: None if value is None else value.repeat_interleave(m, dim=0)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        for value in (getattr(info, name),)
    }
    per_place = dataclasses.replace(
        info,
        **rows,
        grammars=None,
        has_custom_logit_processor=False,
        sampling_mask_batch_indices=None,
    )
    output = LogitsProcessorOutput(next_token_logits=logits.clone())  # the sampler overwrites them
    tokens = _sampler()(output, per_place, False, [], [], verify_input.positions)
    group = get_parallel().tp_group
    if group.world_size > 1:
        group.broadcast(tokens, src=0)
    return tokens


def _only(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return logits [T, V] in which each row's token has the largest one."""
    return torch.full_like(logits, -torch.inf).scatter_(1, tokens.long().unsqueeze(1), 0.0)


@functools.cache
def _sampler() -> Any:
    from sglang.srt.layers.sampler import create_sampler

    return create_sampler()

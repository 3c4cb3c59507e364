"""Sampling parameters mean the same with overlap, after a retraction and with speculation; seeds are honoured.

Read from sglang 0.5.23: `managers/scheduler.Scheduler.run_batch` (every batch passes it, with results of an earlier one
still unprocessed in `result_queue`), `layers/sampler.Sampler._sample_from_probs`,
`sampling/penaltylib/repetition_penalty.apply_scaling_penalties`. AROUND: what a step looks back at is there while it
runs. `seams/speculation.py` hands verification to `sampling/verification.py`. Remove the first where upstream's
penalizers count exactly, the second where seeds need no deterministic mode, the third where a CPU does not compile it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang_oasis.platform.detect import cpu_platform_wanted
from sglang_oasis.sampling.history import output_tokens, show
from sglang_oasis.sampling.penalties import recount, scale
from sglang_oasis.sampling.seeds import draw, seeds_of
from sglang_oasis.sampling.verification import LooksBack
from sglang_oasis.seams.catalogue import Seam

_running: LooksBack | None = None


def looks_back() -> LooksBack | None:
    """What the batch that ran last depends on beside its logits; with a grammar its sampling may still be due."""
    return _running


def _run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _running
    info = batch.sampling_info
    if info is None:
        return original(scheduler, batch, *args, **kwargs)
    _running = _prepare(batch, getattr(scheduler, "result_queue", ()))
    info.sampling_seed = seeds_of(batch.reqs, batch.device)
    try:
        return original(scheduler, batch, *args, **kwargs)
    finally:
        info.sampling_seed = None  # batches with and without seeds are merged


def _prepare(batch: Any, unprocessed: Any) -> LooksBack | None:
    info = batch.sampling_info
    penalties = info.penalizer_orchestrator if info.penalizer_orchestrator.is_required else None
    if penalties is None and not info.has_custom_logit_processor:
        return None
    histories = output_tokens(batch, unprocessed)
    if penalties is not None:
        recount(penalties, histories)
    if info.has_custom_logit_processor:
        show(batch.reqs, histories)
    return LooksBack(list(batch.reqs), histories, penalties, info.has_custom_logit_processor)


def _sample_with_seeds(
    original: Callable[..., Any], sampler: Any, probs: Any, info: Any, positions: Any, simple_sampling_case: bool
) -> Any:
    if info.sampling_seed is None:
        return original(sampler, probs, info, positions, simple_sampling_case)
    tokens, capture = draw(probs, info, positions), None
    if info.sampling_mask_batch_indices is not None:
        _, capture = original(
            sampler, probs, dataclasses.replace(info, sampling_seed=None), positions, simple_sampling_case
        )
        capture = capture._replace(selected_weight=None)  # SGLang then looks the sampled token's up
    return tokens, capture


SEAMS = [
    Seam("managers.scheduler.Scheduler.run_batch", _run_batch, "AROUND"),
    Seam("layers.sampler.Sampler._sample_from_probs", _sample_with_seeds, "AROUND"),
    *(
        [Seam("sampling.penaltylib.repetition_penalty.apply_scaling_penalties", scale, "REPLACE")]
        if cpu_platform_wanted()
        else []
    ),
]

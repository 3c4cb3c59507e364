"""Runs code around each batch: updates the batch's penalizers before, and releases rows of finished requests after.

Read from sglang 0.5.23: `managers/scheduler.Scheduler.run_batch` (every batch passes it, with results of an earlier one
still unprocessed in `result_queue`) and `is_disable_overlap_for_batch` (before NGRAM's batches with a grammar, the
earlier result is processed, which may finish requests of the batch: these run once more, on freed rows). AROUND: the
data that a step depends on must exist while it runs. Remove the parts when upstream's penalizers count exactly, and
when finished requests leave the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sglang_oasis.seams.seam import Seam
from sglang_oasis.serving.sampling.history import output_tokens, show
from sglang_oasis.serving.sampling.penalties import recount
from sglang_oasis.serving.sampling.seeds import seeds_of
from sglang_oasis.serving.sampling.verification import LooksBack

_running: LooksBack | None = None


def looks_back() -> LooksBack | None:
    """Return what sampling the newest batch depends on besides its logits; with a grammar it may not be sampled yet."""
    return _running


def _run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _running
    info = batch.sampling_info
    if info is None:
        _running = None
        return original(scheduler, batch, *args, **kwargs)
    _running = _prepare(batch, getattr(scheduler, "result_queue", ()))
    info.sampling_seed = seeds_of(batch.reqs, batch.device, _generator(scheduler.random_seed))
    finished = [entry for entry, request in enumerate(batch.reqs) if request.finished()]
    rows = batch.req_pool_indices[finished].tolist() if finished else []
    try:
        return original(scheduler, batch, *args, **kwargs)
    finally:
        info.sampling_seed = None  # because SGLang merges batches with and without seeds
        _give_up(scheduler.req_to_token_pool, rows)


@functools.cache
def _generator(seed: int) -> torch.Generator:
    """Return the source of seeds for requests without one, in a batch with seeds; it is the same on all ranks."""
    return torch.Generator().manual_seed(seed)


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


def _give_up(pool: Any, rows: list[int]) -> None:
    """Tell the observer of SGLang's rows that these rows hold no request."""
    if pool._aux_cache is not None:
        for row in rows:
            pool._aux_cache.free(row)


SEAMS = [Seam("managers.scheduler.Scheduler.run_batch", _run_batch, "AROUND")]

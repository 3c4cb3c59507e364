"""Sampling with a seed: a token depends on the request's seed and the token's position, not on other requests.

SGLang supports seeds only in its deterministic mode, and there without min_p.

Read from sglang 0.5.23: `sampling/sampling_batch_info.SamplingBatchInfo` (its filters, one row per request),
`layers/sampler.top_k_top_p_min_p_sampling_from_probs_torch` (the order in which filters apply).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ANY_SEED = 2**62


def seeds_of(requests: list[Any], device: Any, others: torch.Generator) -> Tensor | None:
    """Return seeds, [n] int64, drawn from `others` for requests without one; None if no request has a seed."""
    given = [request.sampling_params.sampling_seed for request in requests]
    if all(seed is None for seed in given):
        return None
    seeds = torch.randint(_ANY_SEED, (len(given),), generator=others)
    for row, seed in enumerate(given):
        if seed is not None:
            seeds[row] = seed
    return seeds.to(device)


def draw(probs: Tensor, info: Any, positions: Tensor) -> Tensor:
    """Sample a token per row.

    Args:
        probs: [T, V].
        info: a SamplingBatchInfo of T rows, with seeds.
        positions: [T], positions of the input tokens.

    Returns:
        [T] int32.
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    dropped = (
        (ranks >= info.top_ks.unsqueeze(1))
        | (before > info.top_ps.unsqueeze(1))
        | (ordered < ordered[:, :1] * info.min_ps.unsqueeze(1))
    )
    waiting = torch.stack([_waiting_times(probs[0], *key) for key in _keys(info.sampling_seed, positions)])
    # Exponential waiting times with rates p: each token has the shortest one with probability p.
    rates = ordered.masked_fill(dropped, 0.0) / waiting.gather(1, index)
    return index.gather(1, rates.argmax(-1, keepdim=True)).squeeze(1).int()


def _keys(seeds: Tensor, positions: Tensor) -> list[tuple[int, int]]:
    return list(zip(seeds.tolist(), positions.tolist(), strict=True))


def _waiting_times(like: Tensor, seed: int, position: int) -> Tensor:
    """Return positive waiting times, [V], that depend on the seed and the position only."""
    generator = torch.Generator(like.device).manual_seed(hash((seed, position)))
    times = torch.empty_like(like, dtype=torch.float32).exponential_(generator=generator)
    return times.clamp_(min=torch.finfo(torch.float32).tiny)

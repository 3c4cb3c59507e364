"""Simulates the product's working set step by step, without keys and values: from scores to captured attention mass.

It runs the product's own ops on the maps only. V ways of scoring are followed in parallel, in L layers of H KV heads
with N blocks; the predictions of steps 0 to m - 1 serve steps 1 to m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.eviction import Maps, admit_blocks, select_blocks
from sglang_oasis.ops.smoothing import smooth_scores

NO_ESCAPE = 1e9
"""An escape factor that no score reaches, so that it has no effect."""


@dataclass(frozen=True)
class Smoothing:
    """Ranks blocks by a running mean of their scores, which a high new score can raise immediately.

    Attributes:
        decay: weight of the past, 0 for none.
        escape: the running mean is at least the newest score divided by this number; None for no such limit.
    """

    decay: float = 0.0
    escape: float | None = None

    def __str__(self) -> str:
        if not self.decay:
            return "off"
        return f"{self.decay}, escape {self.escape:g}" if self.escape else f"{self.decay}, no escape"


def smooth(scores: Tensor, startup: Tensor, smoothing: Smoothing) -> Tensor:
    """Return the running means [m, L, H, N] after each of the scores [m, L, H, N], starting from `startup` [L, H, N].

    Blocks that are not candidates have -inf, and blocks that become candidates start with their first score.
    """
    if not smoothing.decay:
        return scores
    layers, _, count = startup.shape
    rows, candidates = torch.arange(layers), torch.full((layers,), count)
    averages, found = startup.contiguous().clone(), scores.contiguous().clone()
    for score in found:
        smooth_scores(averages, rows, score, candidates, smoothing.decay, smoothing.escape or NO_ESCAPE)
    return found


class Trajectory(NamedTuple):
    """Means over KV heads and the m predicted steps.

    Attributes:
        held: [W, V, L], weight of the selected blocks.
        fetched: [V, L], blocks fetched.
    """

    held: Tensor
    fetched: Tensor


def simulate(scores: Tensor, startup: Tensor, candidates: Tensor, weights: Tensor, k: int, cap: int) -> Trajectory:
    """Let V working sets of K blocks for every layer and KV head follow V ways of scoring.

    Args:
        scores: [m, V, L, H, N] float32, -inf for blocks that are not candidates.
        startup: [L, H, N], scores that choose the first working set.
        candidates: [m] int64, blocks [0, candidates) may be chosen.
        weights: [m, W, L, H, N], W weights of every block in the predicted step, such as attention mass.
        k: blocks per KV head.
        cap: most blocks fetched per KV head and step.
    """
    _, variants, layers, heads, count = scores.shape
    rows = torch.arange(variants * layers)
    maps = _maps(startup.repeat(variants, 1, 1).topk(k).indices, count)
    resident, host = torch.empty(len(rows), heads, k, 0), torch.empty(count, heads, 0)  # keys without coordinates
    pages = torch.arange(count).expand(len(rows), count)
    held, fetched = torch.zeros(weights.shape[1], variants, layers), torch.zeros(variants, layers)
    for step, (score, end, weight) in enumerate(zip(scores, candidates, weights, strict=True), start=1):
        admissions = select_blocks(score.flatten(0, 1), end.repeat(len(rows)), rows, maps, step, cap)
        admit_blocks.reference(resident, maps, host, pages, rows, admissions, step)
        slots = maps.head_map.long().unflatten(0, (variants, layers)).expand(len(weight), -1, -1, -1, -1)
        every = weight[:, None].expand(-1, variants, -1, -1, -1)
        held += every.gather(-1, slots).sum(-1).mean(-1)
        fetched += (admissions.blocks >= 0).sum(-1).float().mean(-1).unflatten(0, (variants, layers))
    return Trajectory(held / len(scores), fetched / len(scores))


def _maps(selected: Tensor, count: int) -> Maps:
    """Return maps of rows that hold the blocks `selected` [rows, H, K] of `count`."""
    slots = torch.arange(selected.shape[-1], dtype=torch.int32).expand(selected.shape)
    slot_of = torch.full((*selected.shape[:2], count), -1, dtype=torch.int32)
    return Maps(selected.int(), torch.zeros_like(selected, dtype=torch.int32), slot_of.scatter_(-1, selected, slots))

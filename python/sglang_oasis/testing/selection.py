"""The `minmax` selection rule, written from its description: which completed blocks a query would attend to.

Shapes use `H` KV heads, `G` query heads per KV head, `Hq = H * G`, `D` head dim, `T` tokens, `B` tokens per block,
`M = T // B` completed blocks and `n` queries. Keys and queries carry RoPE already. Everything is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOT_A_CANDIDATE = float("-inf")
ALWAYS_SELECTED = float("inf")
EMPTY_SLOT = -1


def block_bounds(keys: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the midpoint and half range, per coordinate, of the keys of each completed block, rounded to bfloat16.

    `keys` is `[H, T, D]`; both results are `[H, M, D]` float32. The open block is ignored.
    """
    heads, length, dim = keys.shape
    completed = length // block_size
    blocks = keys[:, : completed * block_size].reshape(heads, completed, block_size, dim)
    lower, upper = blocks.amin(2), blocks.amax(2)
    return ((lower + upper) / 2).bfloat16().float(), ((upper - lower) / 2).bfloat16().float()


def minmax_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    first_local_block: Tensor,
    block_size: int,
    scaling: float,
    sink_blocks: int = 0,
) -> Tensor:
    """Return the scores of every completed block for every query: `[n, H, M]`.

    Per query head the upper bound of `q . k` over a block, times `scaling`, goes through a softmax over the candidate
    blocks; the score is the mean over the `G` heads of the group. Candidates of query `i` are the blocks below
    `first_local_block[i]`; all others score `-inf`. The first `sink_blocks` candidates score `+inf`.

    `queries` is `[Hq, n, D]`, `keys` `[H, T, D]`, `first_local_block` int64 `[n]`.
    """
    midpoint, half_range = block_bounds(keys, block_size)
    kv_heads, completed, dim = midpoint.shape
    count = queries.shape[1]
    grouped = queries.reshape(kv_heads, -1, dim)
    bounds = grouped @ midpoint.mT + grouped.abs() @ half_range.mT
    bounds = scaling * bounds.reshape(kv_heads, -1, count, completed)

    block = torch.arange(completed)
    candidate = block < first_local_block[:, None]
    mass = bounds.masked_fill(~candidate, NOT_A_CANDIDATE).softmax(-1).mean(1).transpose(0, 1)
    scores = torch.where(candidate[:, None], mass, NOT_A_CANDIDATE)
    return torch.where((candidate & (block < sink_blocks))[:, None], ALWAYS_SELECTED, scores)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the `k` candidate blocks of highest score: int32 `[..., k]` from `[..., M]`, -1 if there are too few."""
    best = scores.topk(min(k, scores.shape[-1]))
    selected = best.indices.masked_fill(best.values == NOT_A_CANDIDATE, EMPTY_SLOT)
    return torch.nn.functional.pad(selected, (0, k - selected.shape[-1]), value=EMPTY_SLOT).int()


def membership(selected: Tensor, blocks: int) -> Tensor:
    """Return how often each of `blocks` blocks occurs in a selection: int64 `[..., blocks]` from `[..., K]`.

    Raises `RuntimeError` or `IndexError` where a selected id is not below `blocks`.
    """
    slots = torch.where(selected == EMPTY_SLOT, blocks, selected).long()
    counts = torch.zeros(*selected.shape[:-1], blocks + 1, dtype=torch.int64)
    return counts.scatter_add_(-1, slots, torch.ones_like(slots))[..., :blocks]


def selection_is_top_k(scores: Tensor, selected: Tensor, tolerance: float) -> Tensor:
    """Whether each selection is a top-K of its scores, near-ties allowed: bool `[...]`.

    True if every selected score is at least (1 - `tolerance`) times the score of every candidate that was not selected,
    no block occurs twice, only candidates occur, and no slot is empty while a candidate is not selected.

    `scores` is `[..., M]` float32 (`-inf` for non-candidates), `selected` `[..., K]` with -1 for empty slots.
    """
    counts = membership(selected, scores.shape[-1])
    member = counts > 0
    candidates = (scores > NOT_A_CANDIDATE).sum(-1)
    lowest_in = scores.masked_fill(~member, float("inf")).amin(-1)
    highest_out = scores.masked_fill(member, NOT_A_CANDIDATE).amax(-1)
    ordered = (lowest_in >= highest_out) | (lowest_in >= highest_out - tolerance * highest_out.abs())
    full = member.sum(-1) == candidates.clamp(max=selected.shape[-1])
    return ordered & full & (counts <= 1).all(-1)

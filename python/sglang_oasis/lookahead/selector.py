"""Selectors rank blocks for a query from the blocks' summaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.ops.summary import bound_scores


class Selector(Protocol):
    """Scores blocks for queries."""

    def __call__(self, queries: Tensor, summaries: Tensor, candidates: Tensor, scale: float) -> Tensor:
        """Rank blocks.

        Args:
            queries: [n, Q, H*G, D], Q queries per row.
            summaries: [n, H, N, 2, D] bfloat16.
            candidates: [n] int64, blocks [0, candidates) of each row may be chosen.
            scale: softmax scale of the attention.

        Returns:
            [n, H, N] float32, larger is better; blocks that are no candidates get -inf.
        """
        ...


_SELECTORS: dict[str, Selector] = {}


def register_selector(name: str) -> Callable[[Selector], Selector]:
    """Decorator: make a selector available as `--lookahead-kv-selector name`."""

    def decorate(selector: Selector) -> Selector:
        _SELECTORS[name] = selector
        return selector

    return decorate


def find_selector(name: object) -> Selector:
    """The selector of that name.

    Raises:
        LookaheadKVError: no such selector.
    """
    if not isinstance(name, str) or name not in _SELECTORS:
        known = ", ".join(sorted(_SELECTORS))
        raise LookaheadKVError(f"--lookahead-kv-selector {name} is not possible: use one of {known}.")
    return _SELECTORS[name]


@register_selector("minmax")
def minmax(queries: Tensor, summaries: Tensor, candidates: Tensor, scale: float) -> Tensor:
    """Softmax of the min/max bound per query head, then the mean over the group and the queries.

    The mean of softmaxes keeps about one point more attention mass than the maximum over the group.
    """
    n, num_queries, _, head_dim = queries.shape
    kv_heads, num_blocks = summaries.shape[1:3]
    grouped = queries.view(n, num_queries, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    scores = bound_scores(grouped, summaries).mul_(scale)
    absent = torch.arange(num_blocks, device=scores.device) >= candidates.to(scores.device).unsqueeze(1)
    scores.masked_fill_(absent[:, None, None], float("-inf"))
    ranking = torch.softmax(scores, dim=-1).mean(dim=2)
    return ranking.masked_fill_(absent[:, None], float("-inf"))

"""Selectors rank blocks for a query from the blocks' summaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.ops.summary import SummaryFormat, block_scores


class Selector(Protocol):
    """Scores blocks for queries."""

    def __call__(
        self, queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float
    ) -> Tensor:
        """Rank blocks.

        Args:
            queries: [n, Q, H*G, D], Q queries per row.
            records: [n, H, N, R] uint8, summaries.
            fmt: how the summaries are stored.
            candidates: [n] int64, blocks [0, candidates) of each row may be chosen.
            scale: softmax scale of the attention.

        Returns:
            [n, H, N] float32, larger is better, not negative; blocks that are no candidates get -inf.
        """
        ...


@dataclass(frozen=True)
class BoundSelector:
    """Ranks by q @ midpoint + tightness * |q| @ half_range, see `ops.summary.block_scores`.

    Attributes:
        tightness: 1 is the min/max bound (Quest).
    """

    tightness: float

    def __call__(
        self, queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float
    ) -> Tensor:
        return block_scores(queries, records, fmt, candidates, scale, self.tightness)


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


def rank_blocks(
    selector: Selector,
    queries: Tensor,
    records: Tensor,
    fmt: SummaryFormat,
    candidates: Tensor,
    scale: float,
    sink_blocks: int,
) -> Tensor:
    """The selector's scores [n, H, N], with infinity for the first `sink_blocks`, which are always selected."""
    scores = selector(queries, records, fmt, candidates, scale)
    scores[..., :sink_blocks] = float("inf")
    return scores


register_selector("minmax")(BoundSelector(tightness=1.0))
# Of the tightnesses in docs/selectors.md, the one that is nearly best at every budget, block size and summary dtype.
register_selector("midrange")(BoundSelector(tightness=0.6))

"""A selector ranks blocks for a query from the blocks' summaries."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sglang_oasis.ops.summary import SummaryFormat
from sglang_oasis.registry import Registry


class Selector(Protocol):
    """Scores blocks for queries.

    Any such function works on a CPU. The kernels, and with them the device path, support only a `BoundSelector`, with
    any tightness.
    """

    def __call__(
        self, queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float
    ) -> Tensor:
        """Return a score for each block.

        Args:
            queries: [n, Q, H*G, D], Q queries per row.
            records: [n, H, N, R] uint8, summaries; `ops.summary.vectors` converts them.
            fmt: how the summaries are stored.
            candidates: [n] int64, blocks [0, candidates) of each row may be chosen.
            scale: softmax scale of the attention.

        Returns:
            [n, H, N] float32, larger is better, not negative; blocks that are no candidates get -inf.
        """
        ...


SELECTORS: Registry[Selector] = Registry("--lookahead-kv-selector", "sglang_oasis.selectors")


def rank_blocks(
    selector: Selector,
    queries: Tensor,
    records: Tensor,
    fmt: SummaryFormat,
    candidates: Tensor,
    scale: float,
    sink_blocks: int,
) -> Tensor:
    """Return the selector's scores [n, H, N], with infinity for the first `sink_blocks`, which are always selected."""
    scores = selector(queries, records, fmt, candidates, scale)
    scores[..., :sink_blocks] = float("inf")
    return scores

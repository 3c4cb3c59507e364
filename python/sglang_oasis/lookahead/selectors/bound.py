"""Selectors that use a bound on the scores of a block's keys; the C++, Triton and CUDA kernels compute them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglang_oasis.lookahead.selectors.base import SELECTORS
from sglang_oasis.ops.summary import SummaryFormat, block_scores


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


SELECTORS.register("minmax")(BoundSelector(tightness=1.0))
# docs/selectors.md: this tightness is nearly the best at every budget, block size and summary dtype.
SELECTORS.register("midrange")(BoundSelector(tightness=0.6))

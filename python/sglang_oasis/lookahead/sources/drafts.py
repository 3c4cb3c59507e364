"""The queries of tokens that are expected to follow (OasisKV, DualDecoder): drafts, or the model's own guess."""

from __future__ import annotations

from torch import Tensor

from sglang_oasis.config import DRAFT, DUAL
from sglang_oasis.lookahead.sources.base import SOURCES


@SOURCES.register(DRAFT)
@SOURCES.register(DUAL)
def drafts(queries: Tensor) -> Tensor:
    """Return all queries but the first of each row; the first one if the step has no drafts."""
    return queries[:, 1:] if queries.shape[1] > 1 else queries

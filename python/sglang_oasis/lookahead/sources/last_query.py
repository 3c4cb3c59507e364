"""The query of the newest committed token (InfiniGen, FreeKV), which needs no guess."""

from __future__ import annotations

from torch import Tensor

from sglang_oasis.config import LAST_QUERY
from sglang_oasis.lookahead.sources.base import SOURCES


@SOURCES.register(LAST_QUERY)
def last_query(queries: Tensor) -> Tensor:
    """Return the first query of each row."""
    return queries[:, :1]

"""A source picks the queries with which a step predicts the next one's blocks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sglang_oasis.registry import Registry


class Source(Protocol):
    """Picks the queries that look ahead; on a device it runs in a captured graph, so its shapes must be fixed."""

    def __call__(self, queries: Tensor) -> Tensor:
        """Return the lookahead queries of each row.

        Args:
            queries: [n, m, H*G, D] of a layer, m tokens per row: the newest committed one, then drafts.

        Returns:
            [n, Q, H*G, D], 1 to m of the queries of each row; their scores are averaged.
        """
        ...


SOURCES: Registry[Source] = Registry("--lookahead-kv-source", "sglang_oasis.sources")

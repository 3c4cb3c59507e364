"""A source picks the queries with which a step predicts the next one's blocks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sglang_oasis.registry import Registry


class Source(Protocol):
    """Picks the queries that look ahead; on a device it is part of a captured graph, and its shape must be fixed."""

    def __call__(self, queries: Tensor) -> Tensor:
        """Pick.

        Args:
            queries: [n, m, H*G, D] of a layer, m tokens per row: the newest committed one, and drafts behind it.

        Returns:
            [n, Q, H*G, D], at least one and at most m of them; their scores are averaged.
        """
        ...


SOURCES: Registry[Source] = Registry("--lookahead-kv-source", "sglang_oasis.sources")

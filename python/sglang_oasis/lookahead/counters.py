"""Counters of the lookahead pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LookaheadCounters:
    """Monotonic counts since start-up, over all layers, rows and KV heads of this rank.

    Attributes:
        decode_steps: forward passes in decode mode.
        blocks_fetched: blocks loaded from the host while decoding, ahead of time or urgently.
        blocks_built: blocks loaded when a row's first resident set was built.
        blocks_urgent: of `blocks_fetched`, those the foreground waited for (miss policy fetch).
        misses: blocks that the selector wanted and attention had to do without (drop) or wait for (fetch).
        evictions: resident blocks overwritten by others.
    """

    decode_steps: int = 0
    blocks_fetched: int = 0
    blocks_built: int = 0
    blocks_urgent: int = 0
    misses: int = 0
    evictions: int = 0

"""Counters of an engine; the pipeline has counters of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LookaheadCounters:
    """Monotonic counts since start-up, over all layers, rows and KV heads of this rank.

    Attributes:
        decode_steps: forward passes in decode mode.
        blocks_built: blocks loaded when a row's first resident set was built.
        blocks_urgent: blocks that the foreground waited for (miss policies fetch and auto).
    """

    decode_steps: int = 0
    blocks_built: int = 0
    blocks_urgent: int = 0

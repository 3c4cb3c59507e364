"""How many blocks a step may fetch ahead: a fixed share of the budget, or what the link can move and the rows need.

OasisKV (Eq. 3) bounds a step's fetch by what the link moves while the step computes, B_link * T_decode. Both are
measured: the rate in the pipeline's transfer stage, the time between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from sglang_oasis.config import DEFAULT_FETCH_RATIO
from sglang_oasis.lookahead.pipelines.base import PipelineStatistics
from sglang_oasis.tier.layout import fetch_cap

LINK_SHARE = 0.5
"""Share of a step that transfers may take; prediction and selection run in the same threads."""
STALLED = 0.02
"""Share of a step that waiting for the link may take before the cap shrinks."""
STALE = 0.01
"""Share of the selected blocks that may be missing before the cap grows."""
LONGEST = 2.0
"""The time of a step is limited to this multiple of the mean: longer steps waited for a prefill or a request."""
MEMORY = 8
"""Number of steps over which the running means of rate and time extend."""


class FetchCap(Protocol):
    """Gives C, the largest number of blocks admitted per KV head, layer and step."""

    def begin_step(self, rows: int) -> None:
        """Note that a decode step begins in which `rows` rows exceed the budget."""

    def blocks(self, selected: int) -> int:
        """Return C, between 1 and K, for a layer with K = `selected` slots."""


class FixedCap:
    """A cap that is a fixed share of the selected blocks.

    Args:
        ratio: the share, in (0, 1].
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def begin_step(self, rows: int) -> None:
        pass

    def blocks(self, selected: int) -> int:
        return fetch_cap(self._ratio, selected)


class AdaptiveCap:
    """A cap that grows while blocks are missing, as far as the link allows, and shrinks when layers wait for the link.

    All heads share the link: while few heads miss blocks, as after a change of topic in one row, these may fetch more.

    Args:
        statistics: returns the pipeline's sums since start-up.
        selected: K.
        heads: KV heads of a row, over all layers in which it may exceed the budget.
        chunk_bytes: bytes of a block of one KV head and layer.
        threads: number of pipeline threads; each moves blocks at the rate measured in its transfers.
        clock: returns a time in seconds.
    """

    def __init__(
        self,
        statistics: Callable[[], PipelineStatistics],
        selected: int,
        heads: int,
        chunk_bytes: int,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._statistics = statistics
        self._selected = selected
        self._heads_per_row = heads
        self._chunk_bytes = chunk_bytes
        self._threads = threads
        self._clock = clock
        self._needed = self._least = float(fetch_cap(DEFAULT_FETCH_RATIO, selected))
        self._share = LINK_SHARE
        self._used = 1.0  # share of the cap that is fetched, mean over heads; rises immediately, falls slowly
        self._heads = 0  # in the current step, over its rows
        self._step_seconds: float | None = None
        self._link_rate: float | None = None
        self._last, self._last_time = statistics(), clock()

    @property
    def link_bytes_per_second(self) -> float | None:
        """Measured rate of one thread's transfers in bytes per second; None before the first transfer."""
        return self._link_rate

    def begin_step(self, rows: int) -> None:
        now, found = self._clock(), self._statistics()
        if self._heads and now > self._last_time:  # the step that ends here had blocks to fetch
            self._learn(now - self._last_time, self._last, found)
        self._heads, self._last, self._last_time = rows * self._heads_per_row, found, now

    def blocks(self, selected: int) -> int:
        return max(1, min(int(self._needed), self._affordable(), selected))

    def _affordable(self) -> int:
        """Return the cap with which all heads together fetch as much as the link moves in its share of a step."""
        if self._link_rate is None or self._step_seconds is None or not self._heads or not self._used:
            return self._selected
        blocks = self._link_rate * self._threads * self._step_seconds * self._share / self._chunk_bytes
        return min(int(blocks / self._heads / self._used), self._selected)

    def _learn(self, seconds: float, before: PipelineStatistics, after: PipelineStatistics) -> None:
        stages = {name: total - before.seconds[name] for name, total in after.seconds.items()}
        fetched, transfer = after.fetched - before.fetched, stages["transfer"]
        used = min(1.0, fetched / self._heads / self.blocks(self._selected))
        self._used = max(used, _mean(self._used, used))
        if fetched and transfer > 0:
            self._link_rate = _mean(self._link_rate, fetched * self._chunk_bytes / transfer)
        waited = after.stall_seconds - before.stall_seconds
        # Waiting for the link, or a pause before the step, must not count as time that the link may use.
        computed = max(0.0, seconds - waited)
        if self._step_seconds is not None:
            computed = min(computed, LONGEST * self._step_seconds)
        self._step_seconds = _mean(self._step_seconds, computed)
        # If a task began late because no core was free, a layer waits for all its stages; only one of them is the link.
        busy = sum(stages.values())
        stalled = waited / (computed + waited) * transfer / busy if busy else 0.0
        if stalled <= STALLED:
            self._share = min(LINK_SHARE, self._share * 1.1)
        elif self._affordable() > 1:  # at 1 the cap cannot shrink, and a smaller share would grow back slowly
            self._share /= 2
        missing = (after.deferred - before.deferred) / self._heads / self._selected
        if missing > STALE:
            self._needed = min(2 * self._needed, float(self._selected))
        elif not missing:
            self._needed = max(self._needed * 0.9, self._least)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + (new - old) / MEMORY

"""Measures the time of work on a device, by events in its stream, or by a clock on a CPU; medians with quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Spread(NamedTuple):
    """Median and quartiles of times in seconds.

    Attributes:
        median, low, high: the median and the quartiles.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        return cls(median, low, high)


class Marks:
    """Points in the current stream of a device, and the time between neighbours."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the times between neighbouring marks; waits for the last mark."""
        if self._device.type == "cuda":
            self._events[-1].synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [second - first for first, second in zip(self._times, self._times[1:], strict=False)]


def time_of(run: Callable[[], object], device: torch.device, repeats: int, between: Callable[[], object]) -> Spread:
    """Return the time of `run`, which must have run before; `between` runs before each repeat and is not timed."""
    seconds = []
    for _ in range(repeats):
        between()
        marks = Marks(device)
        marks.mark()
        run()
        marks.mark()
        seconds += marks.seconds()
    return Spread.of(seconds)

"""Measures where the time of decode steps goes, as seen from the attention layers."""

from __future__ import annotations

import time


class StepClock:
    """Adds up the wall time of the parts of decode steps, like the laps of a stopwatch.

    Args:
        runs: False where the host cannot measure the parts, because a device runs the steps by itself.

    Attributes:
        steps: decode steps begun.
        seconds: part -> time. `model` is the time between two attention layers; the time from the last layer of a step
            to the first layer of the next one is not counted.
    """

    def __init__(self, *, runs: bool = True) -> None:
        self._runs = runs
        self.steps = 0
        self.seconds: dict[str, float] = {}
        self._last = 0.0
        self._between_layers = False

    def begin_step(self) -> None:
        self.steps += 1
        self._between_layers = False

    def enter_layer(self) -> None:
        """Note that an attention layer begins."""
        if self._between_layers:
            self.lap("model")
        else:
            self._last = time.perf_counter()
        self._between_layers = True

    def lap(self, part: str) -> None:
        """Add the time since the last reading to `part`."""
        if not self._runs:
            return
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

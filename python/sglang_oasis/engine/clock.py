"""Where the time of decode steps goes, as seen from attention: laps of one watch."""

from __future__ import annotations

import time


class StepClock:
    """Adds up the wall time of the parts of decode steps, laps of one watch.

    Args:
        runs: False where the host does not see the time go, because a device runs the steps by itself.

    Attributes:
        steps: decode steps begun.
        seconds: part -> time. `model` is what passes between two attention layers, and nothing counts from a step's
            last layer to the next step's first.
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
        """An attention layer begins."""
        if self._between_layers:
            self.lap("model")
        else:
            self._last = time.perf_counter()
        self._between_layers = True

    def lap(self, part: str) -> None:
        """The time since the last reading was spent in `part`."""
        if not self._runs:
            return
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

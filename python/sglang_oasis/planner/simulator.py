"""Discrete-event simulation of the decode pipeline: the forward pass and the three background stages.

As in docs/architecture.md (OasisKV Algorithm 1): after a layer's attention its task enters predict, select and
transfer, each of which serves one task at a time, in order; before its attention in the next step the layer waits for
its own task only. The forward pass, predict and select share the device equally while they run concurrently; only
transfers use the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

WARM_UP_STEPS, MEASURED_STEPS = 16, 16
"""Numbers of steps. If device and link take equally long, the backlog settles slowly; it is at most one task per layer;
so the error of the mean is at most a step's background work divided by MEASURED_STEPS."""
STAGES = ("predict", "select", "transfer")
FORWARD = "forward"
SHARE_THE_DEVICE = (FORWARD, "predict", "select")


class LayerWork(NamedTuple):
    """Seconds of each part of a layer if it has the device, or the link, to itself.

    Attributes:
        attention: the layer up to the end of attention, after which its task can start.
        rest: the remaining part of the layer.
        predict, select, transfer: the stages of the layer's background task.
    """

    attention: float
    rest: float
    predict: float
    select: float
    transfer: float


class Simulation(NamedTuple):
    """The results in the steady state.

    Attributes:
        step_seconds: time from one token to the next.
        stall_seconds: part of this time in which the forward pass waited for a transfer.
        link_seconds: part of this time in which the link was busy.
    """

    step_seconds: float
    stall_seconds: float
    link_seconds: float


def simulate(layers: int, work: LayerWork, epilogue: float) -> Simulation:
    """Simulate decode steps, and measure those after the first ones.

    Args:
        layers: number of equal layers, at least 1.
        work: work of each layer.
        epilogue: seconds of the forward pass after the last layer.
    """
    return _Machine(layers, work, epilogue).run()


class _Machine:
    def __init__(self, layers: int, work: LayerWork, epilogue: float) -> None:
        self._layers, self._work, self._epilogue = layers, work, epilogue
        self._now = 0.0
        self._left: dict[str, float] = {}  # seconds that a running activity still needs if it runs alone
        self._queues: dict[str, deque[int]] = {stage: deque() for stage in STAGES}
        self._pending: set[int] = set()  # layers whose task is not finished
        self._awaited: int | None = None
        self._stalled = self._link = 0.0

    def run(self) -> Simulation:
        forward = self._forward()
        marks = []
        for _ in range(WARM_UP_STEPS + MEASURED_STEPS + 1):
            marks.append((self._now, self._stalled, self._link))
            self._advance_until_step_ends(forward)
        first, last = marks[WARM_UP_STEPS], marks[-1]
        return Simulation(*((after - before) / MEASURED_STEPS for before, after in zip(first, last, strict=True)))

    def _forward(self) -> Iterator[bool]:
        """Run one decode step after another; yields, whenever time must pass, whether the step has ended."""
        while True:
            for layer in range(self._layers):
                if layer in self._pending:
                    self._awaited = layer
                    yield False
                    self._awaited = None
                self._left[FORWARD] = self._work.attention
                yield False
                self._pending.add(layer)
                self._queues["predict"].append(layer)
                self._left[FORWARD] = self._work.rest
                yield False
            self._left[FORWARD] = self._epilogue
            yield False
            yield True

    def _advance_until_step_ends(self, forward: Iterator[bool]) -> None:
        while not next(forward):
            while FORWARD in self._left or self._awaited in self._pending:
                self._pass_time()

    def _pass_time(self) -> None:
        """Advance the time to the next event, the end of the activity that finishes first."""
        for stage in STAGES:
            if stage not in self._left and self._queues[stage]:
                self._left[stage] = getattr(self._work, stage)
        sharing = sum(name in self._left for name in SHARE_THE_DEVICE)
        speed = {name: 1 / sharing if name in SHARE_THE_DEVICE else 1.0 for name in self._left}
        first = min(self._left, key=lambda name: self._left[name] / speed[name])
        passed = self._left[first] / speed[first]
        self._now += passed
        self._stalled += passed * (self._awaited is not None)
        self._link += passed * ("transfer" in self._left)
        for name in self._left:
            self._left[name] -= passed * speed[name]
        del self._left[first]
        if first != FORWARD:
            self._end_stage(first)

    def _end_stage(self, stage: str) -> None:
        layer = self._queues[stage].popleft()
        following = STAGES.index(stage) + 1
        if following < len(STAGES):
            self._queues[STAGES[following]].append(layer)
        else:
            self._pending.discard(layer)

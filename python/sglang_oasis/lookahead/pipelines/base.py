"""What the host engine asks of a background pipeline, which predicts, selects and transfers what comes next.

One task per layer at a time. A layer waits for its own task; where one thread does them all, for those before it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

STAGES = ("predict", "select", "transfer")


class PredictionStep(NamedTuple):
    """The rows of a decode step that do not fit the budget; m of the batch's n.

    Attributes:
        number: larger than that of all tasks before, in every row.
        entries: [m] int64, places in the batch.
        rows: [m] int64.
        candidates: [m] int64, blocks [0, candidates) may be selected.
        pages: [n, blocks] int32 on the host, host page of each logical block.
    """

    number: int
    entries: Tensor
    rows: Tensor
    candidates: Tensor
    pages: Tensor


class PipelineStatistics(NamedTuple):
    """Sums since start-up.

    Attributes:
        fetched: blocks loaded.
        deferred: blocks that were among the best, not resident, and over the cap.
        stalls: waits that found a task unfinished.
        stall_seconds: time they took.
        seconds: time in each stage, over all threads.
    """

    fetched: int
    deferred: int
    stalls: int
    stall_seconds: float
    seconds: Mapping[str, float]


class LookaheadPipeline(Protocol):
    """What a pipeline does.

    Attributes:
        threads: that transfer blocks at once.
    """

    threads: int

    def begin_step(self, step: PredictionStep) -> None:
        """Tasks submitted from now on belong to `step`; earlier ones may still be under way."""

    def begin_urgent(self, step: PredictionStep) -> None:
        """Tasks run from now on belong to `step`."""

    def submit(self, layer: int, query: Tensor, scale: float, cap: int) -> None:
        """Start a task with Q queries per row, [n, Q, H*G, D]; the layer's previous task was waited for."""

    def run(self, layer: int, query: Tensor, scale: float, cap: int) -> int:
        """Do the same now, without smoothing; returns the number of blocks loaded."""

    def wait(self, layer: int) -> None:
        """Block until the layer's task is through; raises what the task raised."""

    def drain(self) -> None:
        """Wait for the tasks of all layers."""

    def statistics(self) -> PipelineStatistics: ...

    def close(self) -> None:
        """End the background threads; tasks under way are finished first."""

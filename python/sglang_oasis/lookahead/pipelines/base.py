"""The interface of the host engine's background pipelines, which predict, select and transfer the next step's blocks.

A layer has at most one task at a time and waits for that task; if one thread runs all tasks, also for earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

STAGES = ("predict", "select", "transfer")


class PredictionStep(NamedTuple):
    """The rows of a decode step that exceed the budget: m of the n rows of the batch.

    Attributes:
        number: larger than the number of every earlier task, in every row.
        entries: [m] int64, positions in the batch.
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
    """Sums over all tasks since start-up.

    Attributes:
        fetched: blocks loaded.
        deferred: blocks that were among the best and not resident, but exceeded the cap.
        stalls: waits that found a task unfinished.
        stall_seconds: time of these waits.
        seconds: time in each stage, over all threads.
    """

    fetched: int
    deferred: int
    stalls: int
    stall_seconds: float
    seconds: Mapping[str, float]


class LookaheadPipeline(Protocol):
    """Runs the tasks of the layers.

    Attributes:
        threads: number of threads that transfer blocks concurrently.
    """

    threads: int

    def begin_step(self, step: PredictionStep) -> None:
        """Let tasks that are submitted from now on belong to `step`; earlier tasks may still be running."""

    def begin_urgent(self, step: PredictionStep) -> None:
        """Let tasks that are run from now on belong to `step`."""

    def submit(self, layer: int, query: Tensor, scale: float, cap: int) -> None:
        """Start a task with Q queries per row, [n, Q, H*G, D]; the layer's previous task must have been waited for."""

    def run(self, layer: int, query: Tensor, scale: float, cap: int) -> int:
        """Run a task in the caller's thread, without smoothing; returns the number of blocks loaded."""

    def wait(self, layer: int) -> None:
        """Wait until the layer's task is finished; raises what the task raised."""

    def drain(self) -> None:
        """Wait for the tasks of all layers."""

    def statistics(self) -> PipelineStatistics: ...

    def close(self) -> None:
        """End the background threads, after the running tasks are finished."""

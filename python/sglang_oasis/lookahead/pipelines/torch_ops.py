"""The pipeline in a Python thread, on plain torch ops: for selectors and head sizes that the kernels do not serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from sglang_oasis.lookahead.pipelines.base import STAGES, PipelineStatistics, PredictionStep
from sglang_oasis.lookahead.selectors.base import Selector
from sglang_oasis.ops.eviction import admit_blocks, select_blocks
from sglang_oasis.ops.smoothing import smooth_scores
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.resident_tier import ResidentTier


class TorchPipeline:
    """Runs one task after another, in one thread that leaves the cores to the forward pass.

    Args:
        tier, host: the tiers.
        selector: how blocks are scored.
        smoothing: weight of the past in their average scores, 0 for none.
    """

    threads = 1

    def __init__(self, tier: ResidentTier, host: HostPool, selector: Selector, smoothing: float = 0.0) -> None:
        self._tier, self._host = tier, host
        self._selector, self._smoothing = selector, smoothing
        self._step: PredictionStep | None = None
        self._urgent: PredictionStep | None = None
        self._thread = ThreadPoolExecutor(1, "lookahead", initializer=_one_torch_thread)
        self._pending: list[Future[int] | None] = [None] * tier.layout.num_layers
        self._counting = threading.Lock()  # `run` works in the caller's thread
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._fetched = self._deferred = self._stalls = 0
        self._stall_seconds = 0.0

    def begin_step(self, step: PredictionStep) -> None:
        self._step = step

    def begin_urgent(self, step: PredictionStep) -> None:
        self._urgent = step

    def submit(self, layer: int, query: Tensor, scale: float, cap: int) -> None:
        if self._pending[layer] is not None:
            raise RuntimeError(f"The lookahead task of layer {layer} was not waited for: call wait({layer}) first.")
        step = self._step
        assert step is not None
        self._pending[layer] = self._thread.submit(
            self._work, layer, step, query[step.entries], scale, cap, smoothed=self._smoothing > 0
        )

    def run(self, layer: int, query: Tensor, scale: float, cap: int) -> int:
        step = self._urgent
        assert step is not None
        return self._work(layer, step, query[step.entries], scale, cap, smoothed=False)

    def wait(self, layer: int) -> None:
        task, self._pending[layer] = self._pending[layer], None
        if task is None:
            return
        if not task.done():
            self._stalls += 1
            start = time.perf_counter()
            try:
                task.result()
            finally:
                self._stall_seconds += time.perf_counter() - start
        task.result()

    def drain(self) -> None:
        for layer in range(len(self._pending)):
            self.wait(layer)

    def statistics(self) -> PipelineStatistics:
        with self._counting:
            seconds = dict(self._seconds)
            return PipelineStatistics(self._fetched, self._deferred, self._stalls, self._stall_seconds, seconds)

    def close(self) -> None:
        self._thread.shutdown()

    def _work(self, layer: int, step: PredictionStep, query: Tensor, scale: float, cap: int, *, smoothed: bool) -> int:
        """Run the stages of a task; returns the number of blocks loaded."""
        resident, layout = self._tier.layers[layer], self._tier.layout
        with self._timed("predict"):
            records = resident.summaries[step.rows, :, : int(step.candidates.max())]
            scores = self._selector(query, records, self._host.formats[layer], step.candidates, scale)
            if smoothed and resident.averages is not None:
                smooth_scores(resident.averages, step.rows, scores, step.candidates, self._smoothing)
            scores[..., : layout.sink_blocks] = float("inf")
        with self._timed("select"):
            admissions = select_blocks(scores, step.candidates, step.rows, resident.maps, step.number, cap)
        with self._timed("transfer"):
            pages = step.pages[step.entries]
            admit_blocks(
                resident.blocks, resident.maps, self._host.kv[layer], pages, step.rows, admissions, step.number
            )
        with self._counting:
            self._fetched += admissions.admitted
            self._deferred += admissions.deferred
        return admissions.admitted

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        with self._counting:
            self._seconds[stage] += time.perf_counter() - start


def _one_torch_thread() -> None:
    # The forward pass owns the cores. Existing threads keep their setting; torch also applies this one to threads that
    # start later.
    torch.set_num_threads(1)

"""The background pipeline: predicts, selects and transfers what a layer's next attention will need.

One task per layer at a time; a layer waits for its own task only. `NativePipeline` runs in threads of the C++ kernels,
`TorchPipeline` in Python threads on plain torch ops, which any device and any selector can do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_oasis.kernels.cpu import native, overrides
from sglang_oasis.lookahead.selectors.bound import BoundSelector, Selector
from sglang_oasis.lookahead.stages import Stage, StagePipeline
from sglang_oasis.ops.eviction import Admissions, admit_blocks, select_blocks
from sglang_oasis.ops.smoothing import ESCAPE, smooth_scores
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.resident_tier import ResidentTier

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
    """What the controller asks of a pipeline.

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
        """Block until the layer's task is through, no other layer's; raises what the task raised."""

    def drain(self) -> None:
        """Wait for the tasks of all layers."""

    def statistics(self) -> PipelineStatistics: ...

    def close(self) -> None:
        """End the background threads; tasks under way are finished first."""


def make_pipeline(tier: ResidentTier, host: HostPool, selector: Selector, smoothing: float) -> LookaheadPipeline:
    """The fastest pipeline for this device, head size and selector."""
    if tier.device.type == "cpu" and isinstance(selector, BoundSelector) and overrides.serves(tier.layout.head_dim):
        return NativePipeline(tier, host, selector, smoothing)
    return TorchPipeline(tier, host, selector, smoothing)


class NativePipeline:
    """Runs in native threads, without Python.

    Args:
        tier, host: the tiers.
        selector: how blocks are scored.
        smoothing: weight of the past in their average scores, 0 for none.
    """

    def __init__(self, tier: ResidentTier, host: HostPool, selector: BoundSelector, smoothing: float = 0.0) -> None:
        layout = tier.layout
        self._kernels = native.kernels()
        self._num_layers = layout.num_layers
        self._memory = tier, host  # the threads hold pointers into it
        bits = layout.summary_format.bits
        self.threads = max(1, torch.get_num_threads() // 4)
        self._handle = self._kernels.pipeline_create(
            self.threads, selector.tightness, layout.sink_blocks, smoothing, ESCAPE
        )
        self._end = weakref.finalize(self, self._kernels.pipeline_destroy, self._handle)
        for layer, host_kv in zip(tier.layers, host.kv, strict=True):
            averages = layer.averages if smoothing else None
            self._kernels.pipeline_add_layer(
                self._handle, host_kv, layer.blocks, *layer.maps, layer.summaries, bits, averages
            )

    def begin_step(self, step: PredictionStep) -> None:
        self._kernels.pipeline_begin_step(self._handle, *step)

    def begin_urgent(self, step: PredictionStep) -> None:
        self._kernels.pipeline_begin_urgent(self._handle, *step)

    def throttle(self, bytes_per_second: float) -> None:
        """Make transfers as slow as over a link of that rate, per thread; 0 ends it. For tests of what adapts to it."""
        self._kernels.pipeline_throttle(self._handle, bytes_per_second)

    def submit(self, layer: int, query: Tensor, scale: float, cap: int) -> None:
        self._kernels.pipeline_submit(self._handle, layer, query, scale, cap)

    def run(self, layer: int, query: Tensor, scale: float, cap: int) -> int:
        return self._kernels.pipeline_run(self._handle, layer, query, scale, cap)

    def wait(self, layer: int) -> None:
        self._kernels.pipeline_wait(self._handle, layer)

    def drain(self) -> None:
        for layer in range(self._num_layers):
            self.wait(layer)

    def statistics(self) -> PipelineStatistics:
        fetched, deferred, stalls, stall_ns, *stage_ns = self._kernels.pipeline_counters(self._handle)
        seconds = {stage: ns / 1e9 for stage, ns in zip(STAGES, stage_ns, strict=True)}
        return PipelineStatistics(fetched, deferred, stalls, stall_ns / 1e9, seconds)

    def close(self) -> None:
        self._end()
        self._handle = 0


class _Task(NamedTuple):
    """What enters the stages of `TorchPipeline`: one layer of one step."""

    layer: int
    step: PredictionStep
    query: Tensor
    scale: float
    cap: int
    smoothed: bool


class TorchPipeline:
    """Runs in one Python thread per stage, on plain torch ops.

    On a GPU the stages run on the forward pass's stream until they have streams and events of their own.

    Args:
        tier, host: the tiers.
        selector: how blocks are scored.
        smoothing: weight of the past in their average scores, 0 for none.
    """

    threads = 1
    """That run one stage at a time."""

    def __init__(self, tier: ResidentTier, host: HostPool, selector: Selector, smoothing: float = 0.0) -> None:
        self._tier = tier
        self._host = host
        self._smoothing = smoothing
        self._selector = selector
        self._step: PredictionStep | None = None
        self._urgent: PredictionStep | None = None
        self._fetched = self._deferred = 0
        self._counting = threading.Lock()
        self._stages = StagePipeline(
            [Stage(name, getattr(self, f"_{name}")) for name in STAGES],
            tier.layout.num_layers,
            background=tier.device.type == "cpu",
        )

    def begin_step(self, step: PredictionStep) -> None:
        self._step = step

    def begin_urgent(self, step: PredictionStep) -> None:
        self._urgent = step

    def submit(self, layer: int, query: Tensor, scale: float, cap: int) -> None:
        step = self._step
        assert step is not None
        self._stages.submit(layer, _Task(layer, step, query[step.entries], scale, cap, self._smoothing > 0))

    def run(self, layer: int, query: Tensor, scale: float, cap: int) -> int:
        step = self._urgent
        assert step is not None
        _, admissions = self._stages.run(_Task(layer, step, query[step.entries], scale, cap, False))
        return admissions.admitted

    def wait(self, layer: int) -> None:
        self._stages.wait(layer)

    def drain(self) -> None:
        self._stages.drain()

    def statistics(self) -> PipelineStatistics:
        stages = self._stages
        seconds = dict(stages.seconds)
        return PipelineStatistics(self._fetched, self._deferred, stages.stalls, stages.stall_seconds, seconds)

    def close(self) -> None:
        self._stages.close()

    def _predict(self, task: _Task) -> tuple[_Task, Tensor]:
        """Stage 1: the scores [m, H, N] of the blocks, infinity for the sinks."""
        resident, layout, step = self._tier.layers[task.layer], self._tier.layout, task.step
        records = resident.summaries[step.rows, :, : int(step.candidates.max())]
        scores = self._selector(task.query, records, layout.summary_format, step.candidates, task.scale)
        if task.smoothed and resident.averages is not None:
            smooth_scores(resident.averages, step.rows, scores, step.candidates, self._smoothing)
        scores[..., : layout.sink_blocks] = float("inf")
        return task, scores

    def _select(self, predicted: tuple[_Task, Tensor]) -> tuple[_Task, Admissions]:
        """Stage 2: which of the best to load, and over what."""
        (layer, step, _, _, cap, _), scores = predicted
        maps = self._tier.layers[layer].maps
        return predicted[0], select_blocks(scores, step.candidates, step.rows, maps, step.number, cap)

    def _transfer(self, selected: tuple[_Task, Admissions]) -> tuple[_Task, Admissions]:
        """Stage 3: gather the blocks from the host and update the head map."""
        (layer, step, *_), admissions = selected
        resident = self._tier.layers[layer]
        admit_blocks(
            resident.blocks, resident.maps, self._host.kv[layer], step.pages[step.entries], step.rows, admissions,
            step.number,
        )  # fmt: skip
        with self._counting:  # `run` transfers in the caller's thread, while other layers' tasks do in the background
            self._fetched += admissions.admitted
            self._deferred += admissions.deferred
        return selected

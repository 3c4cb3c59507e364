"""The pipeline of the C++ kernels, which runs in native threads without Python."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from sglang_oasis.kernels.cpu import native
from sglang_oasis.lookahead.pipelines.base import STAGES, PipelineStatistics, PredictionStep
from sglang_oasis.lookahead.selectors import BoundSelector
from sglang_oasis.ops.smoothing import ESCAPE
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.resident_tier import ResidentTier


class NativePipeline:
    """Runs tasks in native threads, without Python.

    Args:
        tier, host: the tiers.
        selector: how blocks are scored.
        smoothing: weight of the past in their average scores, 0 for none.
    """

    def __init__(self, tier: ResidentTier, host: HostPool, selector: BoundSelector, smoothing: float = 0.0) -> None:
        layout = tier.layout
        self._kernels = native.kernels()
        self._num_layers = layout.num_layers
        self._memory = tier, host  # the threads hold pointers to it
        self.threads = max(1, torch.get_num_threads() // 4)
        self._handle = self._kernels.pipeline_create(
            self.threads, selector.tightness, layout.sink_blocks, smoothing, ESCAPE
        )
        self._end = weakref.finalize(self, self._kernels.pipeline_destroy, self._handle)
        for layer, host_kv, fmt in zip(tier.layers, host.kv, host.formats, strict=True):
            averages = layer.averages if smoothing else None
            self._kernels.pipeline_add_layer(
                self._handle, host_kv, layer.blocks, *layer.maps, layer.summaries, fmt.bits, fmt.scaling, averages
            )

    def begin_step(self, step: PredictionStep) -> None:
        self._kernels.pipeline_begin_step(self._handle, *step)

    def begin_urgent(self, step: PredictionStep) -> None:
        self._kernels.pipeline_begin_urgent(self._handle, *step)

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

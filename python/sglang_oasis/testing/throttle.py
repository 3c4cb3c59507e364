"""Simulates a link that is slower than the machine's, to test what adapts to the link."""

from __future__ import annotations

from sglang_oasis.lookahead.pipelines.base import LookaheadPipeline
from sglang_oasis.lookahead.pipelines.native import NativePipeline


def throttle(pipeline: LookaheadPipeline, bytes_per_second: float) -> None:
    """Limit the transfers of the C++ kernels' pipeline to this rate per thread; 0 removes the limit."""
    assert isinstance(pipeline, NativePipeline), "only the kernels' transfers can be slowed down"
    pipeline._kernels.pipeline_throttle(pipeline._handle, bytes_per_second)

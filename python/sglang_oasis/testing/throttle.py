"""A link that is slower than the machine's, to see what adapts to it."""

from __future__ import annotations

from sglang_oasis.lookahead.pipelines.base import LookaheadPipeline
from sglang_oasis.lookahead.pipelines.native import NativePipeline


def throttle(pipeline: LookaheadPipeline, bytes_per_second: float) -> None:
    """Make the transfers of the C++ kernels' pipeline as slow as over such a link, per thread; 0 ends it."""
    assert isinstance(pipeline, NativePipeline), "only the kernels' transfers can be slowed down"
    pipeline._kernels.pipeline_throttle(pipeline._handle, bytes_per_second)

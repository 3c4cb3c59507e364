"""Chooses the fastest pipeline that the kernels and the selector allow."""

from __future__ import annotations

from sglang_oasis.kernels.cpu import overrides
from sglang_oasis.lookahead.pipelines.base import LookaheadPipeline
from sglang_oasis.lookahead.pipelines.native import NativePipeline
from sglang_oasis.lookahead.pipelines.torch_ops import TorchPipeline
from sglang_oasis.lookahead.selectors.base import Selector
from sglang_oasis.lookahead.selectors.bound import BoundSelector
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.resident_tier import ResidentTier


def make_pipeline(tier: ResidentTier, host: HostPool, selector: Selector, smoothing: float) -> LookaheadPipeline:
    """Return the C++ kernels' pipeline if they serve the head size and the selector is a bound, else plain torch's."""
    if isinstance(selector, BoundSelector) and overrides.serves(tier.layout.head_dim):
        return NativePipeline(tier, host, selector, smoothing)
    return TorchPipeline(tier, host, selector, smoothing)
